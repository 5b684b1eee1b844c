"""Vectors of which only some lanes are in memory: instructions that neither read nor write the others."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu.vectors import FLOAT, INT, NUMBER, Code, Values

__all__ = ["ALIGN", "below", "between", "called", "gather", "load", "none", "places", "scatter", "store"]

ALIGN = ir.Constant(ir.IntType(32), NUMBER)


def below(code: Code, count: ir.Value) -> ir.Value:
    """The lanes below ``count``, which 32 bits hold."""
    return code.builder.icmp_signed("<", _lanes(code, range(code.lanes)), _every(code, count))


def between(code: Code, first: ir.Value, last: ir.Value, part: int = 0, step: int = 1) -> ir.Value:
    """The lanes from ``first`` on and below ``last``.

    Or of vector ``part`` of ``step`` those that hold such numbers where they are ``step`` apart.
    """
    b, numbers = code.builder, range(part * code.lanes, (part + 1) * code.lanes)
    places = _lanes(code, [number // step for number in numbers])
    found = b.and_(b.icmp_signed(">=", places, _every(code, first)), b.icmp_signed("<", places, _every(code, last)))
    if step == 1:
        return found
    held = [number % step == 0 for number in numbers]
    return b.and_(found, ir.Constant(ir.VectorType(ir.IntType(1), code.lanes), held))


def _lanes(code: Code, numbers: Sequence[int]) -> ir.Value:
    return ir.Constant(ir.VectorType(ir.IntType(32), code.lanes), list(numbers))


def _every(code: Code, number: ir.Value) -> ir.Value:
    """A number's lower half in all lanes."""
    kind = ir.VectorType(ir.IntType(32), code.lanes)
    half = code.builder.trunc(number, ir.IntType(32))
    one = code.builder.insert_element(ir.Constant(kind, ir.Undefined), half, ir.Constant(INT, 0))
    return code.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * code.lanes))


def none(code: Code) -> ir.Value:
    """No lane."""
    return ir.Constant(ir.VectorType(ir.IntType(1), code.lanes), [0] * code.lanes)


def called(code: Code, name: str, result: ir.Type, arguments: Values) -> ir.Value:
    """The result of LLVM's masked ``name``."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.masked.{name}")
    return code.builder.call(function, arguments)


def load(code: Code, address: ir.Value, mask: ir.Value) -> ir.Value:
    """The lanes of ``mask``, zeros in the others."""
    place = code.builder.inttoptr(address, code.vector.as_pointer())
    return called(code, f"load.v{code.lanes}f32.p0", code.vector, [place, ALIGN, mask, code.splat(0.0)])


def store(code: Code, value: ir.Value, address: ir.Value, mask: ir.Value) -> None:
    """Write the lanes of ``mask``."""
    place = code.builder.inttoptr(address, code.vector.as_pointer())
    called(code, f"store.v{code.lanes}f32.p0", ir.VoidType(), [value, place, ALIGN, mask])


def places(code: Code, base: ir.Value, apart: ir.Value) -> ir.Value:
    """Pointers to numbers ``apart`` bytes from each other."""
    b, kind = code.builder, ir.VectorType(INT, code.lanes)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), code.lanes), [0] * code.lanes)
    first, step = (
        b.shuffle_vector(
            b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0)),
            ir.Constant(kind, ir.Undefined), zeros,
        )
        for value in (base, apart)
    )  # fmt: skip
    found = b.add(first, b.mul(step, ir.Constant(kind, list(range(code.lanes)))))
    return b.inttoptr(found, ir.VectorType(FLOAT.as_pointer(), code.lanes))


def gather(code: Code, base: ir.Value, apart: ir.Value, mask: ir.Value) -> ir.Value:
    """Numbers ``apart`` bytes from each other."""
    name = f"gather.v{code.lanes}f32.v{code.lanes}p0"
    return called(code, name, code.vector, [places(code, base, apart), ALIGN, mask, code.splat(0.0)])


def scatter(code: Code, value: ir.Value, base: ir.Value, apart: ir.Value, mask: ir.Value) -> None:
    """The way back."""
    name = f"scatter.v{code.lanes}f32.v{code.lanes}p0"
    called(code, name, ir.VoidType(), [value, places(code, base, apart), ALIGN, mask])
