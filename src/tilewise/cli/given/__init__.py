"""What is given on the command line: checked and read before torch is imported."""
