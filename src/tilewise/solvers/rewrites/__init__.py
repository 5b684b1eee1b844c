"""Solvers that rewrite a problem as another one and leave that to another solver."""
