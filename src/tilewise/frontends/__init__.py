"""Networks in: built-in, from torchvision or timm, or from a Python factory; and their convolution layers."""
