"""Caffe's data layers: where a net's batches come from, in an order that only its files and a seed decide."""

from __future__ import annotations

from tilewise.frontends.caffe.data.layers import DATA_LAYERS, source
from tilewise.frontends.caffe.data.source import Held, Source

__all__ = ["DATA_LAYERS", "Held", "Source", "source"]
