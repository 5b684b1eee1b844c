"""The backward of pooling: threads take lines of the input's gradient, and gather for each number what belongs to it.

So every number is written once, and none has to be set to zero first. Of maxima a byte of each result says which
element of its window it was: the result's gradient goes to the input that is this element. Results are taken in
rising order, as torch adds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.pooling.emit import (
    BYTE,
    WHOLE,
    constant,
    every,
    load_bytes,
    looped,
    masked_columns,
    number,
    places_of,
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

__all__ = ["backward"]

LINES, SHARE, DEPTH, HEIGHT, WIDTH, CHANNELS = (
    WORDS[name] for name in ("lines", "share", "depth", "height", "width", "channels")
)  # fmt: skip
READ_ITEM, WRITE_ITEM, WRITE_DEPTH, WRITE_ROW, WRITE_COLUMN = (
    WORDS[name] for name in ("read_item", "write_item", "write_depth", "write_row", "write_column")
)  # fmt: skip
ORIGIN_DEPTH, ORIGIN_ROW, ORIGIN_COLUMN = (WORDS[f"origin_{name}"] for name in ("depth", "row", "column"))
FIRST, LAST, LOW, HIGH, STRIDE = (WORDS[name] for name in ("first", "last", "low", "high", "stride"))
ELEMENTS = tuple(WORDS[f"element_{name}"] for name in ("depth", "row", "column"))
TABLE_DEPTH, TABLE_HEIGHT, TABLE_WIDTH = (WORDS[f"table_{name}"] for name in ("depth", "height", "width"))
BITS = 2**20
"""Numbers of results and their first index that are passed together have less than this value."""


class _Gradient:
    """Emits a vector of gradients, or two that are interleaved where results are two inputs apart.

    (numbers, dy, dx, kept, depths, rows, element, place, columns): ``dy`` and ``kept`` are the addresses of the first
    result that takes the line. Depths and rows have the index of that result and, above ``BITS``, how many take it.
    ``element`` is the number of the element that the line is for it. ``place`` is the vector's first place along the
    width. ``columns`` is the class of inputs whose distance to each other is the stride; with ``along`` it is as depths
    and rows are, and ``place`` is the number of channels.
    """

    def __init__(self, op: str, step: int, along: bool, masked: bool) -> None:
        self.op, self.step, self.along, self.masked = op, step, along, masked

    def __call__(self, code: Code, arguments: Values) -> None:
        numbers, dy, dx, kept, depths, rows, element, place, columns = arguments
        b = code.builder
        if self.along:
            first, count = b.and_(columns, constant(BITS - 1)), b.sdiv(columns, constant(BITS))
            valid = masks.below(code, place) if self.masked else None
            value = self._sum(code, numbers, dy, kept, (depths, rows), element, (first, count), valid)
            masks.write(code, value, dx, valid)
            return
        stride, padding = told(code, numbers, "stride"), told(code, numbers, "padding")
        width = told(code, numbers, "width")
        classes = [constant(0), constant(1)] if self.step == 2 else [columns]
        sums = [self._of_class(code, arguments, each) for each in classes]
        if self.step == 2:
            column = b.sub(b.mul(place, constant(2)), padding)
            n, kind = code.lanes, ir.VectorType(WHOLE, code.lanes)
            for half in range(2):
                order = [half * n // 2 + i // 2 + n * (i % 2) for i in range(n)]
                pairs = b.shuffle_vector(sums[0], sums[1], ir.Constant(kind, order))
                start = b.add(column, constant(half * n))
                mask = masked_columns(code, start, constant(1), width) if self.masked else None
                masks.write(code, pairs, places_of(code, dx, start), mask)
            return
        column = b.sub(b.add(b.mul(place, stride), columns), padding)
        address = places_of(code, dx, column)
        mask = masked_columns(code, column, stride, width) if self.masked or self.step > 2 else None
        if self.step == 1:
            masks.write(code, sums[0], address, mask)
        else:
            masks.scatter(code, sums[0], address, b.mul(stride, constant(NUMBER)), mask)

    def _of_class(self, code: Code, arguments: Values, which: ir.Value) -> ir.Value:
        """The gradients of the inputs of one class."""
        numbers, dy, _, kept, depths, rows, element, place, _ = arguments
        b = code.builder
        table = told(code, numbers, "table_width")
        entry = [number(code, table, b.add(b.mul(which, constant(3)), constant(i))) for i in range(3)]
        own = b.add(element, b.mul(entry[0], told(code, numbers, "element_column")))
        first = b.sub(place, entry[1])
        dy, kept = places_of(code, dy, first), b.add(kept, first)
        return self._sum(code, numbers, dy, kept, (depths, rows), own, (first, entry[2]), None)

    def _sum(
        self,
        code: Code,
        numbers: ir.Value,
        dy: ir.Value,
        kept: ir.Value,
        lines: tuple[ir.Value, ir.Value],
        element: ir.Value,
        columns: tuple[ir.Value, ir.Value],
        valid: ir.Value | None,
    ) -> ir.Value:
        """The sum over all results that take these inputs."""
        b = code.builder
        names = ("depth", "row", "column")
        steps, elements = ([told(code, numbers, f"{word}_{name}") for name in names] for word in ("step", "each"))
        taken = [told(code, numbers, name) for name in ("taken_depth", "taken_row", "taken")]
        firsts = [b.and_(packed, constant(BITS - 1)) for packed in lines]
        counts = [b.sdiv(packed, constant(BITS)) for packed in lines]
        total = variable(code, code.splat(0.0))
        with looped(code, counts[0]) as d, looped(code, counts[1]) as h:
            row = b.add(b.mul(d, steps[0]), b.mul(h, steps[1]))
            of_row = b.sub(element, b.add(b.mul(d, elements[0]), b.mul(h, elements[1])))
            factor = None
            if self.op == "avg":
                factor = b.fmul(
                    self._factor(code, numbers, "depth", b.add(firsts[0], b.mul(d, taken[0]))),
                    self._factor(code, numbers, "height", b.add(firsts[1], b.mul(h, taken[1]))),
                )
            with looped(code, columns[1]) as w:
                offset = b.add(row, b.mul(w, steps[2]))
                column = b.add(columns[0], b.mul(w, taken[2]))
                mask = valid
                if self.masked and not self.along:
                    mask = masked_columns(code, column, constant(1), told(code, numbers, "columns"))
                address = places_of(code, dy, offset)
                value = masks.read(code, address, mask)
                if factor is None:
                    bits = load_bytes(code, b.add(kept, offset), mask)
                    wanted = every(code, b.trunc(b.sub(of_row, b.mul(w, elements[2])), BYTE))
                    equal = b.icmp_unsigned("==", bits, wanted)
                    value = b.select(equal if mask is None else b.and_(equal, mask), value, code.splat(0.0))
                else:
                    value = b.fmul(value, self._shares(code, numbers, factor, column, mask))
                b.store(b.fadd(b.load(total), value), total)
        return b.load(total)

    def _shares(
        self, code: Code, numbers: ir.Value, factor: ir.Value, column: ir.Value, mask: ir.Value | None
    ) -> ir.Value:
        """What a result's gradient is multiplied by for each element of its window."""
        if self.along:
            return every(code, code.builder.fmul(factor, self._factor(code, numbers, "width", column)))
        address = places_of(code, told(code, numbers, "factor_width"), column)
        own = masks.read(code, address, mask)
        return code.builder.fmul(every(code, factor), own)

    def _factor(self, code: Code, numbers: ir.Value, axis: str, index: ir.Value) -> ir.Value:
        """The fp32 factor ``index`` along an axis."""
        address = places_of(code, told(code, numbers, f"factor_{axis}"), index)
        return code.builder.load(code.builder.inttoptr(address, FLOAT.as_pointer()), align=NUMBER)


@functools.cache
def _line(lanes: int, op: str, step: int) -> Callable[..., None]:
    """Makes ``(dy, dx, kept, numbers, v, depths, rows, element)``, a row of gradients with vectors along it."""
    inside, edge = (intrinsic_of(lanes, _Gradient(op, step, False, masked)) for masked in (False, True))

    @compiled(lanes, op, step)
    def run(dy, dx, kept, numbers, v, depths, rows, element):
        classes = v[STRIDE] if step == 3 else 1
        place = v[FIRST]
        while place <= v[LAST]:
            whole = place >= v[LOW] and place + lanes <= v[HIGH]
            for each in range(classes):
                if whole:
                    inside(numbers, dy, dx, kept, depths, rows, element, place, each)
                else:
                    edge(numbers, dy, dx, kept, depths, rows, element, place, each)
            place += lanes

    return run


@functools.cache
def _pixels(lanes: int, op: str) -> Callable[..., None]:
    """Makes ``(dy, dx, kept, numbers, v, depths, rows, element)``, a row with vectors along the channels of each."""
    inside, edge = (intrinsic_of(lanes, _Gradient(op, 1, True, masked)) for masked in (False, True))
    at, of_column = number_at(), ELEMENTS[2]

    @compiled(lanes, op)
    def run(dy, dx, kept, numbers, v, depths, rows, element):
        for w in range(v[WIDTH]):
            first = at(v[TABLE_WIDTH], 3 * w + 1)
            columns = first + BITS * at(v[TABLE_WIDTH], 3 * w + 2)
            own = element + at(v[TABLE_WIDTH], 3 * w) * v[of_column]
            source = dy + first * v[ORIGIN_COLUMN] * NUMBER
            byte = kept + first * v[ORIGIN_COLUMN]
            target, left = dx + w * v[WRITE_COLUMN] * NUMBER, v[CHANNELS]
            while left >= lanes:
                inside(numbers, source, target, byte, depths, rows, own, left, columns)
                source, target, byte, left = (
                    source + NUMBER * lanes,
                    target + NUMBER * lanes,
                    byte + lanes,
                    left - lanes,
                )
            if left > 0:
                edge(numbers, source, target, byte, depths, rows, own, left, columns)

    return run


def backward(lanes: int, op: str, step: int) -> Callable[..., None]:
    """Makes ``(data)``, as :func:`~tilewise.kernels.cpu.pooling.forward.forward`, for dy, dx and bytes."""
    line, count, at = (_line(lanes, op, step) if step else _pixels(lanes, op)), next_number(), number_at()
    of_depth, of_row = ELEMENTS[:2]

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
                    first_d, first_h = at(v[TABLE_DEPTH], 3 * d + 1), at(v[TABLE_HEIGHT], 3 * h + 1)
                    depths = first_d + BITS * at(v[TABLE_DEPTH], 3 * d + 2)
                    rows = first_h + BITS * at(v[TABLE_HEIGHT], 3 * h + 2)
                    element = at(v[TABLE_DEPTH], 3 * d) * v[of_depth] + at(v[TABLE_HEIGHT], 3 * h) * v[of_row]
                    source = item * v[READ_ITEM] + first_d * v[ORIGIN_DEPTH] + first_h * v[ORIGIN_ROW]
                    target = item * v[WRITE_ITEM] + d * v[WRITE_DEPTH] + h * v[WRITE_ROW]
                    line(
                        data[6] + source * NUMBER, data[7] + target * NUMBER, data[8] + source, data[9], v, depths,
                        rows, element,
                    )  # fmt: skip
                unit = count(address, 2)

    return named(run, lanes, op, step)
