"""Masked instructions: they read and write only some lanes of a vector, and leave the others alone in memory."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu.vectors import FLOAT, INT, NUMBER, Code, Values

__all__ = [
    "ALIGN", "below", "between", "called", "gather", "load", "none", "of_vectors", "places", "read", "scatter", "store",
    "write",
]  # fmt: skip

ALIGN = ir.Constant(ir.IntType(32), NUMBER)


def below(code: Code, count: ir.Value) -> ir.Value:
    """The mask of the lanes below ``count``, which fits in 32 bits."""
    return code.builder.icmp_signed("<", _lanes(code, range(code.lanes)), _every(code, count))


def between(code: Code, first: ir.Value, last: ir.Value, part: int = 0, step: int = 1) -> ir.Value:
    """The mask of the lanes from ``first`` on and below ``last``.

    With a ``step`` above 1 the numbers of a row lie ``step`` lanes apart, in ``step`` vectors that follow each other.
    The mask is then that of vector ``part`` of these, for the numbers from ``first`` on and below ``last``.
    """
    b, lanes = code.builder, range(part * code.lanes, (part + 1) * code.lanes)
    numbers = _lanes(code, [lane // step for lane in lanes])
    mask = b.and_(b.icmp_signed(">=", numbers, _every(code, first)), b.icmp_signed("<", numbers, _every(code, last)))
    if step == 1:
        return mask
    has_number = [lane % step == 0 for lane in lanes]
    return b.and_(mask, ir.Constant(ir.VectorType(ir.IntType(1), code.lanes), has_number))


def _lanes(code: Code, numbers: Sequence[int]) -> ir.Value:
    """A constant vector of 32-bit integers."""
    return ir.Constant(ir.VectorType(ir.IntType(32), code.lanes), list(numbers))


def _every(code: Code, number: ir.Value) -> ir.Value:
    """The lower 32 bits of ``number`` in all lanes."""
    kind = ir.VectorType(ir.IntType(32), code.lanes)
    half = code.builder.trunc(number, ir.IntType(32))
    first_lane = code.builder.insert_element(ir.Constant(kind, ir.Undefined), half, ir.Constant(INT, 0))
    return code.builder.shuffle_vector(first_lane, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * code.lanes))


def none(code: Code) -> ir.Value:
    """The mask of no lane."""
    return ir.Constant(ir.VectorType(ir.IntType(1), code.lanes), [0] * code.lanes)


def called(code: Code, name: str, result: ir.Type, arguments: Values) -> ir.Value:
    """The result of LLVM's intrinsic ``llvm.masked.<name>``."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.masked.{name}")
    return code.builder.call(function, arguments)


def load(code: Code, address: ir.Value, mask: ir.Value) -> ir.Value:
    """Load the lanes of ``mask``; the others become zero."""
    place = code.builder.inttoptr(address, code.vector.as_pointer())
    return called(code, f"load.v{code.lanes}f32.p0", code.vector, [place, ALIGN, mask, code.splat(0.0)])


def store(code: Code, value: ir.Value, address: ir.Value, mask: ir.Value) -> None:
    """Store the lanes of ``mask``."""
    place = code.builder.inttoptr(address, code.vector.as_pointer())
    called(code, f"store.v{code.lanes}f32.p0", ir.VoidType(), [value, place, ALIGN, mask])


def of_vectors(code: Code, count: ir.Value, vectors: int) -> list[ir.Value]:
    """The masks of neighbouring vectors, of which the first ``count`` lanes together are meant."""
    return [below(code, code.builder.sub(count, ir.Constant(INT, j * code.lanes))) for j in range(vectors)]


def read(code: Code, address: ir.Value, mask: ir.Value | None) -> ir.Value:
    """A whole vector where there is no mask, else :func:`load`. Unmasked instructions are several times as fast on
    some processors without AVX-512."""
    return code.load(address) if mask is None else load(code, address, mask)


def write(code: Code, value: ir.Value, address: ir.Value, mask: ir.Value | None) -> None:
    """Store a whole vector where there is no mask, else :func:`store`."""
    if mask is None:
        code.store(value, address)
    else:
        store(code, value, address, mask)


def places(code: Code, base: ir.Value, apart: ir.Value) -> ir.Value:
    """A vector of pointers to numbers, the first at ``base``, ``apart`` bytes from each other."""
    b, kind = code.builder, ir.VectorType(INT, code.lanes)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), code.lanes), [0] * code.lanes)
    first, step = (
        b.shuffle_vector(
            b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0)),
            ir.Constant(kind, ir.Undefined), zeros,
        )
        for value in (base, apart)
    )  # fmt: skip
    addresses = b.add(first, b.mul(step, ir.Constant(kind, list(range(code.lanes)))))
    return b.inttoptr(addresses, ir.VectorType(FLOAT.as_pointer(), code.lanes))


def gather(code: Code, base: ir.Value, apart: ir.Value, mask: ir.Value) -> ir.Value:
    """Load the lanes of ``mask`` from numbers ``apart`` bytes from each other; the others become zero."""
    name = f"gather.v{code.lanes}f32.v{code.lanes}p0"
    return called(code, name, code.vector, [places(code, base, apart), ALIGN, mask, code.splat(0.0)])


def scatter(code: Code, value: ir.Value, base: ir.Value, apart: ir.Value, mask: ir.Value) -> None:
    """Store the lanes of ``mask`` to numbers ``apart`` bytes from each other."""
    name = f"scatter.v{code.lanes}f32.v{code.lanes}p0"
    called(code, name, ir.VoidType(), [value, places(code, base, apart), ALIGN, mask])
