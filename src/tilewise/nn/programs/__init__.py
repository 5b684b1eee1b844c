"""Programs: lists of steps over tensors in one block of memory, which run without a module's code."""
