"""CUDA graphs of models: captured once, replayed while nothing that they depend on has changed, else left out."""
