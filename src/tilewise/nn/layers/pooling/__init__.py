"""Pooling by plans, and torch's six modules of it as a kind of modules."""

from tilewise.nn.layers.kinds import register
from tilewise.nn.layers.pooling.module import Poolings

register(Poolings())
