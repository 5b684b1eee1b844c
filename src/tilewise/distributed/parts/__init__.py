"""The parts of an image that ranks hold, and what neighbouring ranks exchange."""
