"""Triton's interpreter, which runs kernels on CPU tensors. Import this before any module that defines kernels."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

__all__ = ["interpreted"]


def _why_not() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available():
        return "kernels are compiled here: the GPU tests run them"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _repair()
    from tests.quick_interpreter import hasten

    hasten()
    return ""


def _repair() -> None:
    """Let loops run to a bound known at run time: Triton 3.6 reads it in a way that NumPy 2.4 no longer allows."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch


interpreted = pytest.mark.skipif(bool(reason := _why_not()), reason=reason or "runs")
"""Skips a test, with the reason, where kernels cannot be interpreted."""
