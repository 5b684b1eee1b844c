"""Times, memory and errors of candidates, measured."""
