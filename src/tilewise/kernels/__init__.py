"""Device code with no policy."""
