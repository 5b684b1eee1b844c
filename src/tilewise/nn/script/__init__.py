"""Planning for programs that stay as they are: their convolutions are replaced from outside."""
