"""What workers of several kernels have in common: threads that take units of work in turns."""

from __future__ import annotations

from collections.abc import Callable

from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.vectors import named, next_number

__all__ = ["over_units"]


def over_units(block: Callable[..., None], name: str, *parameters: object) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes, by ``block(x, w, y, v, scratch, unit)``.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`, with the addresses of the image,
    the filters and the result. Then follow the kernel's numbers, ``v``. ``name`` and the ``parameters`` of the maker
    of ``block`` tell the worker from others.
    """
    count = next_number()

    def run(address):
        data = carray(address, HEADER)
        v = carray(address, data[4])[HEADER:]
        thread = count(address, 0)
        scratch = data[6] + thread * data[5]
        if thread < data[1]:
            unit = count(address, 2)
            while unit < data[3]:
                block(data[7], data[8], data[9], v, scratch, unit)
                unit = count(address, 2)

    run.__qualname__ = name
    return named(run, *parameters)
