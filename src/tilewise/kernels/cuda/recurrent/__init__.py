"""All steps of a recurrent layer in one launch, in CUDA C++."""
