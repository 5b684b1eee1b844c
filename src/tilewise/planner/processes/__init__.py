"""Planning in several processes at once."""
