"""Problems: what is to be computed, of any kind."""
