"""The forward of pooling: threads take lines of results, and every result is computed from its window at once.

Vectors lie along the width, or along the channels of an image whose channels are contiguous. Elements of a window are
taken in torch's order, so that maxima are the same elements, and sums are rounded in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.pooling.emit import (
    BYTE,
    WHOLE,
    constant,
    every,
    every_second,
    looped,
    masked_columns,
    places_of,
    store_bytes,
    told,
    variable,
)
from tilewise.kernels.cpu.pooling.told import COUNT, WORDS
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.vectors import (
    FLOAT,
    NUMBER,
    Code,
    Values,
    compiled,
    intrinsic_of,
    named,
    next_number,
    number_at,
)

__all__ = ["forward"]

LINES, SHARE, DEPTH, HEIGHT, WIDTH, CHANNELS = (
    WORDS[name] for name in ("lines", "share", "depth", "height", "width", "channels")
)  # fmt: skip
READ_ITEM, WRITE_ITEM, WRITE_DEPTH, WRITE_ROW, WRITE_COLUMN = (
    WORDS[name] for name in ("read_item", "write_item", "write_depth", "write_row", "write_column")
)  # fmt: skip
ORIGIN_DEPTH, ORIGIN_ROW, ORIGIN_COLUMN, START, LOW, HIGH = (
    WORDS[name] for name in ("origin_depth", "origin_row", "origin_column", "start", "low", "high")
)  # fmt: skip
TABLE_DEPTH, TABLE_HEIGHT, TABLE_WIDTH = (WORDS[f"table_{name}"] for name in ("depth", "height", "width"))
KERNEL = WORDS["last"]
"""Where vectors lie along the width, the forward is told the number of a window's columns here."""
BITS = 2**20
"""Numbers of first element and count that are passed together have less than this value."""


class _Window:
    """Emits a vector of results: arguments are the same for all variants.

    (numbers, x, y, kept, depths, rows, columns, place, divisor): ``x`` is the address of the first element of the
    window of lane 0, inside the input or not. Depths, rows and columns have the first element inside and, above
    ``BITS``, their number. ``place`` is the index of the first result of the line's vector, or with ``along`` the
    number of channels.
    """

    def __init__(self, op: str, keep: bool, step: int, along: bool, masked: bool) -> None:
        self.op, self.keep, self.step, self.along, self.masked = op, keep, step, along, masked

    def __call__(self, code: Code, arguments: Values) -> None:
        numbers, x, y, kept, depths, rows, columns, place, divisor = arguments
        b = code.builder
        (d0, dn), (h0, hn), (w0, wn) = (
            (b.and_(packed, constant(BITS - 1)), b.sdiv(packed, constant(BITS))) for packed in (depths, rows, columns)
        )
        steps = [told(code, numbers, f"step_{name}") for name in ("depth", "row", "column")]
        elements = [told(code, numbers, f"element_{name}") for name in ("depth", "row", "column")]
        fewer = b.sub(told(code, numbers, "width"), place)
        valid = masks.below(code, place if self.along else fewer) if self.masked else None
        total = variable(code, code.splat(-math.inf if self.op == "max" else 0.0))
        first = b.add(b.add(b.mul(d0, elements[0]), b.mul(h0, elements[1])), b.mul(w0, elements[2]))
        unset = self.masked and not self.along
        index = variable(code, code.whole(-1) if unset else every(code, b.trunc(first, WHOLE)))
        with looped(code, dn) as d, looped(code, hn) as h:
            kd, kh = b.add(d, d0), b.add(h, h0)
            row = b.add(b.mul(kd, steps[0]), b.mul(kh, steps[1]))
            of_row = b.add(b.mul(kd, elements[0]), b.mul(kh, elements[1]))
            with looped(code, wn) as w:
                kw = b.add(w, w0)
                address = places_of(code, x, b.add(row, b.mul(kw, steps[2])))
                value, mask = self._loaded(code, numbers, address, kw, place, valid)
                if self.op == "avg":
                    b.store(b.fadd(b.load(total), value), total)
                else:
                    element = b.add(of_row, b.mul(kw, elements[2]))
                    self._compare(code, value, mask, total, index, element)
        result = b.load(total)
        if self.op == "avg":
            result = b.fdiv(result, self._divisors(code, numbers, place, divisor, valid))
        masks.write(code, result, y, valid)
        if self.keep:
            store_bytes(code, b.trunc(b.load(index), ir.VectorType(BYTE, code.lanes)), kept, valid)

    def _loaded(
        self, code: Code, numbers: ir.Value, address: ir.Value, kw: ir.Value, place: ir.Value, valid: ir.Value | None
    ) -> tuple[ir.Value, ir.Value | None]:
        """One element of each lane's window, and the mask of lanes where it is inside; others are zero."""
        b = code.builder
        if self.along:
            return masks.read(code, address, valid), None
        behind = code.at(address, NUMBER * (code.lanes - 1))
        stride = told(code, numbers, "stride")
        if not self.masked:
            if self.step == 1:
                return code.load(address), None
            if self.step == 2:
                return every_second(code, code.load(address), code.load(behind)), None
            mask = ir.Constant(ir.VectorType(ir.IntType(1), code.lanes), [1] * code.lanes)
            return masks.gather(code, address, b.mul(stride, constant(NUMBER)), mask), None
        width = told(code, numbers, "columns")
        column = b.add(
            b.sub(b.mul(place, stride), told(code, numbers, "padding")), b.mul(kw, told(code, numbers, "dilation"))
        )
        mask = masked_columns(code, column, stride, width)
        if self.step == 1:
            return masks.load(code, address, mask), mask
        if self.step == 2:
            one = constant(1)
            low = masks.load(code, address, masked_columns(code, column, one, width))
            after = b.add(column, constant(code.lanes - 1))
            return every_second(code, low, masks.load(code, behind, masked_columns(code, after, one, width))), mask
        return masks.gather(code, address, b.mul(stride, constant(NUMBER)), mask), mask

    def _compare(
        self, code: Code, value: ir.Value, mask: ir.Value | None, total: ir.Value, index: ir.Value, element: ir.Value
    ) -> None:
        """Take ``value`` where it is larger than the maximum so far, or NaN, or the first of its window."""
        b = code.builder
        best = b.load(total)
        better = b.or_(b.fcmp_ordered(">", value, best), b.fcmp_unordered("uno", value, value))
        known = b.load(index)
        if mask is not None:
            better = b.and_(mask, b.or_(better, b.icmp_signed("<", known, code.whole(0))))
        b.store(b.select(better, value, best), total)
        if self.keep or mask is not None:
            b.store(b.select(better, every(code, b.trunc(element, WHOLE)), known), index)

    def _divisors(
        self, code: Code, numbers: ir.Value, place: ir.Value, divisor: ir.Value, valid: ir.Value | None
    ) -> ir.Value:
        """What the sums are divided by."""
        b = code.builder
        same = every(code, b.sitofp(divisor, FLOAT))
        if self.along:
            return same
        address = places_of(code, told(code, numbers, "factor_width"), place)
        own = masks.read(code, address, valid)
        return b.fmul(same, own)


@functools.cache
def _line(lanes: int, op: str, keep: bool, step: int) -> Callable[..., None]:
    """Makes ``(x, y, kept, numbers, v, d, h)``, a row of results with vectors along it."""
    inside, edge = (intrinsic_of(lanes, _Window(op, keep, step, False, masked)) for masked in (False, True))
    at = number_at()

    @compiled(lanes, op, keep, step)
    def run(x, y, kept, numbers, v, d, h):
        depths = at(v[TABLE_DEPTH], 3 * d) + BITS * at(v[TABLE_DEPTH], 3 * d + 1)
        rows = at(v[TABLE_HEIGHT], 3 * h) + BITS * at(v[TABLE_HEIGHT], 3 * h + 1)
        divisor = at(v[TABLE_DEPTH], 3 * d + 2) * at(v[TABLE_HEIGHT], 3 * h + 2)
        columns = BITS * v[KERNEL]
        place = 0
        while place < v[WIDTH]:
            source = x + place * v[ORIGIN_COLUMN] * NUMBER
            target, byte = y + place * NUMBER, kept + place
            if place >= v[LOW] and place + lanes <= v[HIGH]:
                inside(numbers, source, target, byte, depths, rows, columns, place, divisor)
            else:
                edge(numbers, source, target, byte, depths, rows, columns, place, divisor)
            place += lanes

    return run


@functools.cache
def _pixels(lanes: int, op: str, keep: bool) -> Callable[..., None]:
    """Makes ``(x, y, kept, numbers, v, d, h)``, a row of results with vectors along the channels of each."""
    inside, edge = (intrinsic_of(lanes, _Window(op, keep, 1, True, masked)) for masked in (False, True))
    at = number_at()

    @compiled(lanes, op, keep)
    def run(x, y, kept, numbers, v, d, h):
        depths = at(v[TABLE_DEPTH], 3 * d) + BITS * at(v[TABLE_DEPTH], 3 * d + 1)
        rows = at(v[TABLE_HEIGHT], 3 * h) + BITS * at(v[TABLE_HEIGHT], 3 * h + 1)
        of_row = at(v[TABLE_DEPTH], 3 * d + 2) * at(v[TABLE_HEIGHT], 3 * h + 2)
        for w in range(v[WIDTH]):
            columns = at(v[TABLE_WIDTH], 3 * w) + BITS * at(v[TABLE_WIDTH], 3 * w + 1)
            divisor = of_row * at(v[TABLE_WIDTH], 3 * w + 2)
            source = x + w * v[ORIGIN_COLUMN] * NUMBER
            target, byte = y + w * v[WRITE_COLUMN] * NUMBER, kept + w * v[WRITE_COLUMN]
            left = v[CHANNELS]
            while left >= lanes:
                inside(numbers, source, target, byte, depths, rows, columns, left, divisor)
                source, target, byte, left = (
                    source + NUMBER * lanes,
                    target + NUMBER * lanes,
                    byte + lanes,
                    left - lanes,
                )
            if left > 0:
                edge(numbers, source, target, byte, depths, rows, columns, left, divisor)

    return run


def forward(lanes: int, op: str, keep: bool, step: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``step`` is the distance between neighbouring windows along the width: 1, 2, or 3 for any; 0 means vectors along
    channels. ``data`` is as :func:`~tilewise.kernels.cpu.gemm.thin.thin_outer` says, with addresses of x, y and, with
    ``keep``, of bytes that say which element of its window each maximum is. Then come the numbers of ``Told``.
    """
    line, count = (_line(lanes, op, keep, step) if step else _pixels(lanes, op, keep)), next_number()

    def run(address):
        data = carray(address, HEADER)
        v = carray(address, HEADER + COUNT)[HEADER:]
        thread = count(address, 0)
        if thread < data[1]:
            unit = count(address, 2)
            while unit < data[3]:
                for number in range(unit * v[SHARE], min(v[LINES], (unit + 1) * v[SHARE])):
                    h, rest = number % v[HEIGHT], number // v[HEIGHT]
                    d, item = rest % v[DEPTH], rest // v[DEPTH]
                    source = item * v[READ_ITEM] + d * v[ORIGIN_DEPTH] + h * v[ORIGIN_ROW] - v[START]
                    target = item * v[WRITE_ITEM] + d * v[WRITE_DEPTH] + h * v[WRITE_ROW]
                    line(data[6] + source * NUMBER, data[7] + target * NUMBER, data[8] + target, data[9], v, d, h)
                unit = count(address, 2)

    return named(run, lanes, op, keep, step)
