"""Convolutions of images whose channels lie innermost, with the layer's bias, residual and activation."""
