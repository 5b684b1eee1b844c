"""Activations that kernels for a CPU apply as they write: against float64, and NaN stays NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from numba import njit

from tilewise.kernels.cpu.channels_last.finishing import activation_of
from tilewise.kernels.cpu.channels_last.loops import advanced, looped, variable
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, intrinsic_of
from tilewise.problems.activations import CONV_ACTIVATIONS, activated

PARAMETERS = {"leaky_relu": ":0.1", "clamp": ":-0.25:0.5"}
EVERY = [name + PARAMETERS.get(name, "") for name in CONV_ACTIVATIONS]
EXACT = {"gelu": 5e-7, "gelu_tanh": 2e-6, "silu": 5e-7, "tanh": 5e-7, "sigmoid": 5e-7}
"""Errors that are allowed, relative to the result or, below -1, to 1."""


@functools.cache
def kernel(activation: str, lanes: int) -> Callable[..., Any]:
    """``run(source, target, count)`` on addresses of ``count`` vectors."""
    function = activation_of(activation)

    def emit(code: Code, arguments: Values) -> None:
        source, target, count = arguments
        read, written = variable(code, source), variable(code, target)
        with looped(code, count):
            code.store(function(code, code.load(code.builder.load(read))), code.builder.load(written))
            advanced(code, read, NUMBER * lanes)
            advanced(code, written, NUMBER * lanes)

    block = intrinsic_of(lanes, emit)

    @njit
    def run(source: int, target: int, count: int) -> None:
        block(source, target, count)

    return run


def applied(activation: str, x: np.ndarray[Any, Any], lanes: int) -> np.ndarray[Any, Any]:
    padded = np.zeros(-(-len(x) // lanes) * lanes, np.float32)
    padded[: len(x)] = x
    out = np.full_like(padded, np.nan)
    kernel(activation, lanes)(padded.ctypes.data, out.ctypes.data, len(padded) // lanes)
    return out[: len(x)]


@pytest.mark.parametrize("activation", EVERY)
def test_values(activation: str) -> None:
    near = np.linspace(-12, 12, 200_001, dtype=np.float32)
    small = np.float32(10.0) ** np.linspace(-30, 0, 5001, dtype=np.float32)
    x = np.concatenate([near, small, -small, np.array([-1e30, -1e4, 1e4, 1e30, 0.0, -0.0], np.float32)])
    want = activated(torch.from_numpy(x).double(), activation).numpy()
    scale = np.where(x < -1, 1.0, np.maximum(np.abs(want), 1e-30))
    for lanes in (4, 16):
        error = np.abs(applied(activation, x, lanes) - want) / scale
        assert error.max() <= EXACT.get(activation, 2e-7), x[error.argmax()]


@pytest.mark.parametrize("activation", EVERY)
def test_nan_stays(activation: str) -> None:
    got = applied(activation, np.array([np.nan, 1.0, -np.nan], np.float32), 8)
    assert np.isnan(got).tolist() == [True, False, True]
