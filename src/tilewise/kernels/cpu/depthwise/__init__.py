"""Direct convolutions whose groups have few channels, such as depthwise ones."""
