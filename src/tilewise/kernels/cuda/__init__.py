"""CUDA C++ kernels, compiled at run time. Nothing here loads cuda.core or touches a device before a kernel is bound."""
