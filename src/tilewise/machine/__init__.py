"""The machine and its process: devices, threads, memory, the folders of caches, torch's and Python's own states."""
