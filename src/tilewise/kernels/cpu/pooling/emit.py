"""Instructions of pooling that forward and backward share: loops, numbers that are told, strided and masked loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.pooling.told import WORDS
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values

__all__ = [
    "BYTE", "Emit", "constant", "every", "every_second", "load_bytes", "looped", "masked_columns",
    "number", "store_bytes", "told", "variable",
]  # fmt: skip

BYTE = ir.IntType(8)
WHOLE = ir.IntType(32)
Emit = Callable[[Code, Values], None]


def constant(value: int) -> ir.Value:
    """A 64-bit integer."""
    return ir.Constant(INT, value)


def told(code: Code, numbers: ir.Value, name: str) -> ir.Value:
    """The number ``name`` of what the kernel is told at the address ``numbers``."""
    place = code.builder.inttoptr(code.at(numbers, 8 * WORDS[name]), INT.as_pointer())
    return code.builder.load(place)


def number(code: Code, address: ir.Value, index: ir.Value) -> ir.Value:
    """The int64 number ``index`` at ``address``."""
    b = code.builder
    return b.load(b.inttoptr(b.add(address, b.mul(index, constant(8))), INT.as_pointer()))


@contextmanager
def looped(code: Code, count: ir.Value) -> Iterator[ir.Value]:
    """A loop over 0 to ``count`` - 1."""
    b = code.builder
    before = b.block
    test, body, after = (b.append_basic_block(name) for name in ("test", "body", "after"))
    b.branch(test)
    b.position_at_end(test)
    index = b.phi(INT)
    index.add_incoming(constant(0), before)
    b.cbranch(b.icmp_signed("<", index, count), body, after)
    b.position_at_end(body)
    yield index
    index.add_incoming(b.add(index, constant(1)), b.block)
    b.branch(test)
    b.position_at_end(after)


def variable(code: Code, start: ir.Value) -> ir.Value:
    """A variable that LLVM keeps in a register."""
    with code.builder.goto_entry_block():
        place = code.builder.alloca(start.type)
    code.builder.store(start, place)
    return place


def every(code: Code, value: ir.Value) -> ir.Value:
    """``value``, an integer of 32 or 8 bits or an fp32 number, in all lanes."""
    b, kind = code.builder, ir.VectorType(value.type, code.lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
    zeros = ir.Constant(ir.VectorType(WHOLE, code.lanes), [0] * code.lanes)
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def masked_columns(code: Code, first: ir.Value, apart: ir.Value, columns: ir.Value) -> ir.Value:
    """The mask of the lanes whose columns, ``apart`` from each other from ``first`` on, are from 0 to ``columns``."""
    b, kind = code.builder, ir.VectorType(WHOLE, code.lanes)
    start, step, end = (every(code, b.trunc(value, WHOLE)) for value in (first, apart, columns))
    places = b.add(start, b.mul(step, ir.Constant(kind, list(range(code.lanes)))))
    return b.icmp_unsigned("<", places, end)


def every_second(code: Code, low: ir.Value, high: ir.Value) -> ir.Value:
    """Every second one of 2 * lanes neighbours: ``low`` has the first ones, ``high`` the last but one lane on."""
    lanes = code.lanes
    picked = [2 * i if 2 * i < lanes else lanes + 2 * i - (lanes - 1) for i in range(lanes)]
    return code.builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(WHOLE, lanes), picked))


def load_bytes(code: Code, address: ir.Value, mask: ir.Value | None) -> ir.Value:
    """The vector of bytes at ``address``, of which those outside the mask are not read."""
    b, kind = code.builder, ir.VectorType(BYTE, code.lanes)
    place = b.inttoptr(address, kind.as_pointer())
    if mask is None:
        return b.load(place, align=1)
    nothing = ir.Constant(kind, [0] * code.lanes)
    return masks.called(code, f"load.v{code.lanes}i8.p0", kind, [place, ir.Constant(WHOLE, 1), mask, nothing])


def store_bytes(code: Code, value: ir.Value, address: ir.Value, mask: ir.Value | None) -> None:
    """Store a vector of bytes at ``address``, where the mask is."""
    b = code.builder
    place = b.inttoptr(address, value.type.as_pointer())
    if mask is None:
        b.store(value, place, align=1)
    else:
        masks.called(code, f"store.v{code.lanes}i8.p0", ir.VoidType(), [value, place, ir.Constant(WHOLE, 1), mask])


def places_of(code: Code, base: ir.Value, offset: ir.Value) -> ir.Value:
    """The address of fp32 number ``offset`` behind ``base``."""
    return code.builder.add(base, code.builder.mul(offset, constant(NUMBER)))
