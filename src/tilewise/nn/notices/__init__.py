"""What tilewise tells a person without being asked: by which channel, and what is missing on this machine."""
