"""The notation of layers, as users import it."""

from __future__ import annotations

from tilewise.problems.conv.notation import format_layer, layer_name, looks_like_layer, parse_layer

__all__ = ["format_layer", "layer_name", "looks_like_layer", "parse_layer"]
