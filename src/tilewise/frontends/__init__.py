"""Loading networks (built-in, torchvision's, timm's, from a Python factory) and finding their convolution layers."""
