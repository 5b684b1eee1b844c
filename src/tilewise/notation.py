"""The notation of layers and of matrix products, as users import it."""

from __future__ import annotations

from tilewise.problems.conv.notation import format_layer, layer_name, looks_like_layer, parse_layer
from tilewise.problems.gemm.notation import format_product, looks_like_product, parse_product, product_name

__all__ = [
    "format_layer",
    "format_product",
    "layer_name",
    "looks_like_layer",
    "looks_like_product",
    "parse_layer",
    "parse_product",
    "product_name",
]
