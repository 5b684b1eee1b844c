"""fp16 as fp32 and back, by the processor's instructions and by integers alone, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from tilewise.kernels.cpu import halves

LANES = 4
EVERY = np.arange(2**16, dtype=np.uint16)
NUMBERS = ~np.isnan(EVERY.view(np.float16))


def converted(source: np.ndarray[Any, Any], dtype: type, function: Any) -> np.ndarray[Any, Any]:
    """What ``function`` of :mod:`halves` makes of numbers, as ``dtype``."""
    kinds = {2: ir.VectorType(ir.IntType(16), LANES), 4: ir.VectorType(ir.FloatType(), LANES)}
    target = np.empty(source.size, dtype)

    @intrinsic  # type: ignore[untyped-decorator]
    def step(context: Any, first: Any, second: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            ways = (source.itemsize, arguments[0]), (target.itemsize, arguments[1])
            read, write = (builder.inttoptr(address, kinds[size].as_pointer()) for size, address in ways)
            builder.store(function(builder, builder.load(read, align=1), LANES), write, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), code

    def run(first, second, count, size, other):  # type: ignore[no-untyped-def]
        for i in range(0, count, LANES):
            step(first + i * size, second + i * other)

    made: Any = CFunc(run, ((types.int64,) * 5, types.void), {}, {})
    made.compile()
    made.ctypes(source.ctypes.data, target.ctypes.data, source.size, source.itemsize, target.itemsize)
    return target


@pytest.mark.parametrize("instructions", [True, False])
def test_every_half_and_what_lies_between(instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 65536 either way; numbers in the middle between two of them and next to it; beyond the largest; NaN."""
    if instructions and not halves.has_instructions():
        pytest.skip("this processor has none")
    monkeypatch.setattr(halves, "has_instructions", lambda: instructions)
    wide = converted(EVERY, np.float32, halves.widened)
    with np.errstate(over="ignore", invalid="ignore"):
        want = EVERY.view(np.float16).astype(np.float32)
        assert np.array_equal(wide[NUMBERS].view(np.uint32), want[NUMBERS].view(np.uint32))
        assert np.isnan(wide[~NUMBERS]).all()
        middle = np.sort(want[np.isfinite(want)])
        middle = (middle[1:] + middle[:-1]) / 2
        large = np.float32([65504, 65519.99, 65520, 65536, 1e30, np.inf, 1e-45, 6e-8, 2.9e-8])
        some = np.concatenate(
            [want, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), large, -large]
        )
        some = np.resize(some, -(-some.size // LANES) * LANES).astype(np.float32)
        narrow, best = converted(some, np.uint16, halves.narrowed), some.astype(np.float16)
    known = ~np.isnan(some)
    assert np.array_equal(narrow[known], best[known].view(np.uint16))
    assert np.isnan(narrow[~known].view(np.float16)).all()
