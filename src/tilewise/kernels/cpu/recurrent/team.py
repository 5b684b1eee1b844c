"""Threads that go through the steps of a recurrent layer together, each with its own share of every step.

A step takes microseconds, so that threads spin on a counter until all have done the step before it. Who spins for long
gives its core away, because on a busy machine the thread that it waits for may need it.

A thread that has not begun when the others are ready is not in the team: shares are made for those that are there. So
no call waits for a thread that another call keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tilewise.kernels.cpu.recurrent.told import COUNT, LINE
from tilewise.kernels.cpu.vectors import INT, compiled, pointer_call

__all__ = ["COME", "DONE", "PACKED", "UNIT", "counted", "in_team", "wait"]

COME, TEAM, UNIT, PACKED, DONE = (8 * (COUNT + LINE * (1 + i)) for i in range(5))
"""Where the counters lie, in bytes: threads that came, those of the team, units packed or being packed, units packed,
and steps done by a thread."""
CLOSED = 2**32
"""Added to the number of threads that came once no more can be in the team."""
SPINS = 1000
"""How often a thread looks before it gives its core away: a few tens of microseconds."""
TURNS = 50
"""How often the first thread gives its core away while others of the team have not come."""


@functools.cache
def counted() -> Callable[..., int]:
    """Makes ``(address, amount)``, which adds to the int64 at ``address`` atomically and returns what it was.

    What a thread wrote before is seen by those who read the number afterwards.
    """

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "acq_rel")

    def made(typingctx, address, amount):
        return types.int64(types.int64, types.int64), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def _seen() -> Callable[..., int]:
    """Makes ``(address)``: the int64 there. What was written before it was added to is seen after this."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT.as_pointer())
        return builder.load_atomic(place, "acquire", align=8)

    def made(typingctx, address):
        return types.int64(types.int64), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def _rest() -> Callable[..., None]:
    """Makes ``()``, which tells the processor that a thread spins."""

    def generate(context, builder, signature, arguments):
        if "x86" in builder.module.triple:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    def made(typingctx):
        return types.void(), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def wait() -> Callable[..., None]:
    """Makes ``(counter, least, yielding)``, which returns when the number at ``counter`` is at least ``least``."""
    seen, rest, call = _seen(), _rest(), pointer_call()

    @compiled()
    def run(counter, least, yielding):
        spins = 0
        while seen(counter) < least:
            if spins < SPINS:
                spins += 1
                rest()
            else:
                call(yielding)

    return run


@functools.cache
def in_team() -> Callable[..., int]:
    """Makes ``(data, thread, threads, yielding)``: the number of threads of the team, once that is decided.

    ``thread`` is how many came before. The first one decides: it waits a little for the others.
    """
    seen, rest, call, add, until = _seen(), _rest(), pointer_call(), counted(), wait()

    @compiled()
    def run(data, thread, threads, yielding):
        if thread > 0:
            until(data + TEAM, 1, yielding)
            return seen(data + TEAM)
        turn = 0
        while turn < SPINS + TURNS and seen(data + COME) < threads:
            turn += 1
            if turn < SPINS:
                rest()
            else:
                call(yielding)
        came = min(threads, add(data + COME, CLOSED))
        add(data + TEAM, came)
        return came

    return run
