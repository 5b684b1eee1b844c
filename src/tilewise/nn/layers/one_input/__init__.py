"""Layers without weights whose call is one problem: local response normalization and pooling."""

from tilewise.nn.layers.kinds import register
from tilewise.nn.layers.one_input.local_response_norm import LocalResponseNorms
from tilewise.nn.layers.one_input.pooling import Poolings

register(LocalResponseNorms())
register(Poolings())
