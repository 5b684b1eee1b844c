"""Recurrent layers by their plans, and ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as a kind of modules."""

from tilewise.nn.layers.kinds import register
from tilewise.nn.layers.recurrent.module import RecurrentLayers

register(RecurrentLayers())
