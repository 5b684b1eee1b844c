"""Planning of one model by several ranks together."""
