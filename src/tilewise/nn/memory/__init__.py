"""Planning a whole training step under a memory limit."""
