"""Which plans must be exact so that a region as a whole is exact enough."""
