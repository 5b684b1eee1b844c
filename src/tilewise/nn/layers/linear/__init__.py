"""Linear layers by planned matrix products, and ``nn.Linear`` as a kind of modules."""

from tilewise.nn.layers.kinds import register
from tilewise.nn.layers.linear.module import Linears

register(Linears())
