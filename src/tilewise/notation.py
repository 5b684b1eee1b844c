"""The notation of layers, matrix products, recurrent layers, poolings and normalizations, as users import it."""

from __future__ import annotations

from tilewise.problems.conv.notation import format_layer, layer_name, looks_like_layer, parse_layer
from tilewise.problems.gemm.notation import format_product, looks_like_product, parse_product, product_name
from tilewise.problems.lrn.notation import format_lrn, looks_like_lrn, parse_lrn
from tilewise.problems.pooling.notation import format_pooling, looks_like_pooling, parse_pooling
from tilewise.problems.recurrent.notation import format_recurrent, looks_like_recurrent, parse_recurrent

__all__ = [
    "format_layer",
    "format_lrn",
    "format_pooling",
    "format_product",
    "format_recurrent",
    "layer_name",
    "looks_like_layer",
    "looks_like_lrn",
    "looks_like_pooling",
    "looks_like_product",
    "looks_like_recurrent",
    "parse_layer",
    "parse_lrn",
    "parse_pooling",
    "parse_product",
    "parse_recurrent",
    "product_name",
]
