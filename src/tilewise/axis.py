"""One spatial axis of a convolution, as users import it."""

from __future__ import annotations

from tilewise.problems.conv.axis import Axis

__all__ = ["Axis"]
