"""Philox 4x32-10 (Salmon et al. 2011) on vectors: one counter for each lane."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llvmlite import ir

    from tilewise.kernels.cpu.vectors import Code

__all__ = ["FACTORS", "ROUNDS", "UNIT", "WEYL", "uniform"]

FACTORS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What the key's words grow by in each round."""
ROUNDS = 10
UNIT = 2.0**-24
"""The upper 24 bits of a word times this are a number of [0, 1), which fp32 has exactly."""


def uniform(code: Code, unit: ir.Value, row: ir.Value, seed: ir.Value, group: int) -> list[ir.Value]:
    """Four vectors of numbers of [0, 1) for the units from number ``unit`` on.

    ``unit``, ``row`` and ``seed`` are integers of 64 bits, see :mod:`tilewise.rnn.noise`.
    """
    from llvmlite import ir

    b = code.builder
    word, double = ir.VectorType(ir.IntType(32), code.lanes), ir.VectorType(ir.IntType(64), code.lanes)
    half = ir.Constant(double, [32] * code.lanes)

    def every(number: ir.Value) -> ir.Value:
        """The lower 32 bits of a number in all lanes."""
        undefined = ir.Constant(word, ir.Undefined)
        first = b.insert_element(undefined, b.trunc(number, ir.IntType(32)), ir.Constant(ir.IntType(32), 0))
        return b.shuffle_vector(first, undefined, ir.Constant(word, [0] * code.lanes))

    def constant(value: int) -> ir.Value:
        return ir.Constant(word, [value] * code.lanes)

    def product(value: ir.Value, factor: int) -> tuple[ir.Value, ir.Value]:
        """The upper and the lower half of a product."""
        whole = b.mul(b.zext(value, double), ir.Constant(double, [factor] * code.lanes))
        return b.trunc(b.lshr(whole, half), word), b.trunc(whole, word)

    upper = ir.Constant(ir.IntType(64), 32)
    lanes = ir.Constant(word, list(range(code.lanes)))
    words = [b.add(every(unit), lanes), every(row), every(b.lshr(row, upper)), constant(group)]
    keys = [every(seed), every(b.lshr(seed, upper))]
    for _ in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = product(words[0], FACTORS[0]), product(words[2], FACTORS[1])
        words = [b.xor(b.xor(high_1, words[1]), keys[0]), low_1, b.xor(b.xor(high_0, words[3]), keys[1]), low_0]
        keys = [b.add(key, constant(step)) for key, step in zip(keys, WEYL, strict=True)]
    return [b.fmul(b.sitofp(b.lshr(each, constant(8)), code.vector), code.splat(UNIT)) for each in words]
