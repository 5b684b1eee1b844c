"""Linear layers by planned matrix products."""
