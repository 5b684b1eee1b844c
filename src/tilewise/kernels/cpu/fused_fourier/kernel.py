"""The kernel of fused Fourier convolution: all passes, dimensions, sizes and types, so that it is compiled once."""

from __future__ import annotations

from collections.abc import Callable

from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu.fused_fourier import planes, signals
from tilewise.kernels.cpu.sizes import HEADER, KEPT, NUMBERS
from tilewise.kernels.cpu.vectors import named, next_number

__all__ = ["convolve"]


def convolve(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes, of the convolution ``data`` describes.

    ``data`` is the address of int64: the next thread's number, the number of threads, the next unit, the number of
    units, the size of ``data``, the size of a thread's scratch, and the addresses of all scratch, of the operands and
    of the result. At index :data:`HEADER` begin the numbers that ``planes`` and ``signals`` call ``v``, and
    :data:`NUMBERS` later those that they call ``places``. The first number of ``v`` is 0 for :func:`planes.image`, 1
    for :func:`planes.gradient`, 2 and 3 for these two of ``signals``, 4 for :func:`planes.filters`, and 5 for
    :func:`signals.filters`.
    """
    planes_image, planes_gradient = planes.image(lanes), planes.gradient(lanes)
    signals_image, signals_gradient = signals.image(lanes), signals.gradient(lanes)
    planes_filters, signals_filters = planes.filters(lanes), signals.filters(lanes)
    count = next_number()

    def run(address):
        data = carray(address, HEADER)
        whole = carray(address, data[4])
        v, places = whole[HEADER : HEADER + NUMBERS], whole[HEADER + NUMBERS :]
        thread = count(address, 0)
        scratch = data[6] + thread * data[5]
        if thread < data[1]:
            unit = count(address, 2)
            while unit < data[3]:
                if v[0] == 0:
                    planes_image(data[7], data[8], data[9], scratch, places, v, unit)
                elif v[0] == 1:
                    planes_gradient(data[7], data[8], data[9], scratch, places, v, unit)
                elif v[0] == 2:
                    signals_image(data[7], data[8], data[9], scratch, v, unit)
                elif v[0] == 3:
                    signals_gradient(data[7], data[8], data[9], scratch, v, unit)
                elif v[0] == 4:
                    planes_filters(data[8], data[9] + unit * v[KEPT], scratch, places, v, unit)
                else:
                    signals_filters(data[8], data[9] + unit * v[KEPT], v, unit)
                unit = count(address, 2)

    return named(run, lanes)
