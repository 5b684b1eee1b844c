"""What one device computes of a batch whose tensors lie on another: parts one after the other, and their copies."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.execute.elsewhere import check_elsewhere, example_there, strides_there, workspace_there
from tilewise.execute.links import SHARED, Link, link_between
from tilewise.execute.node import Node
from tilewise.plan import Plan
from tilewise.problems.base import Part, Problem, Range, Tensors, Write, narrow
from tilewise.solvers import Run

__all__ = ["Bind", "Lane"]

Bind = Callable[[Plan, Problem, Tensors, Tensors], Node]
"""Binds a plan of a problem to tensors like those given: its operands, then its results."""
SLOTS = 2
"""Parts that are in memory at a time: one is computed while the other's operands come and its results go."""


class _Piece(NamedTuple):
    """One part: its call, its problem, the ranges that it uses of operands and results, and its bytes of workspace."""

    call: Run
    problem: Problem
    operands: tuple[tuple[Range, ...], ...]
    results: tuple[tuple[Range, ...], ...]
    workspace: int


class Lane:
    """The parts of a batch that the device ``there`` computes, for tensors on the device ``home``.

    Parts that are terms of a sum are summed up on the device, so that one term comes back. ``bytes_there`` are what it
    takes of the device's memory, ``bytes_pinned`` what copies take of the host's beside that. ``bias`` says whether the
    parts add a bias.
    """

    def __init__(
        self,
        home: torch.device,
        there: torch.device,
        parts: Sequence[tuple[Part[Problem], Plan]],
        bind: Bind,
        *,
        bias: bool,
        add: bool,
    ) -> None:
        self.home, self.there, self._add = home, there, add
        self.sums = parts[0][0].write is not Write.SET
        nodes: dict[tuple[Plan, Problem], Node] = {}
        self._pieces = [
            self._bound(nodes, part, plan, bind, bias=bias, adds=self.sums and index > 0)
            for index, (part, plan) in enumerate(parts)
        ]
        first = self._pieces[0]
        self._moving = [bool(ranges) for ranges in first.operands]
        self._workspace = max(piece.workspace for piece in self._pieces)
        self.bytes_there, self.bytes_pinned = self._bytes()

    def _bound(
        self, nodes: dict[tuple[Plan, Problem], Node], part: Part[Problem], plan: Plan, bind: Bind, *, bias: bool,
        adds: bool,
    ) -> _Piece:  # fmt: skip
        """A part bound to tensors of its own on the device; equal parts are bound once."""
        assert part.problem is not None
        check_elsewhere(part.problem)
        child = part.problem.changed(accumulate=adds)
        child = child.changed(bias=True) if bias else child
        node = nodes.get((plan, child))
        if node is None:
            with self._device():
                operands, results = (
                    tuple(example_there(child, role) for role in roles) for roles in (child.operands, child.results)
                )
                node = nodes[plan, child] = bind(plan, child, operands, results)
        used, written = (tuple(part.ranges(role) for role in roles) for roles in (child.operands, child.results))
        return _Piece(node.shortest(), child, used, written, node.workspace)

    def _bytes(self) -> tuple[int, int]:
        """Bytes on the device, and those of pinned buffers on the host beside them."""
        slots = min(SLOTS, len(self._pieces))
        copied = 0
        for index, role in enumerate(self._pieces[0].problem.operands):
            most = max(piece.problem.nbytes(role) for piece in self._pieces)
            copied += most * (slots if self._moving[index] else 1)
        results = sum(
            max(piece.problem.nbytes(role) for piece in self._pieces) for role in self._pieces[0].problem.results
        )
        copied += results * (1 if self.sums else slots)
        staged = self.home.type == "cpu" and self.there.type == "cuda"
        return copied + self._workspace, copied if staged else 0

    def _device(self) -> AbstractContextManager[object]:
        """A context in which the lane's device is the current one."""
        return torch.cuda.device(self.there) if self.there.type == "cuda" else contextlib.nullcontext()

    def _flags(self) -> AbstractContextManager[object]:
        """Torch's flags for a GPU as parts were measured with them; for a layer on a CPU nobody else sets them."""
        if self.home.type == "cpu" and self.there.type == "cuda":
            return self._pieces[0].problem.flags(deterministic=torch.backends.cudnn.deterministic)
        return contextlib.nullcontext()

    def run(self, operands: Tensors, results: Tensors, *bias: Tensor) -> None:
        """Compute the parts of ``results``, or where they are terms of a sum all of ``results``, which is one term."""
        with self._device(), self._flags():
            link = link_between(operands[0].device, self.there)
            try:
                self._run(link, operands, results, *bias)
            finally:
                link.close()

    def _run(self, link: Link, operands: Tensors, results: Tensors, *bias: Tensor) -> None:
        pieces, slots = self._pieces, min(SLOTS, len(self._pieces))
        inputs, outputs = self._buffers(link, slots)
        space = self._space(link)
        added = tuple(link.empty(t.numel(), t.dtype) for t in bias)
        shared = [
            (_seen(pieces[0].problem, role, buffer), operand)
            for role, buffer, operand, moves in zip(
                pieces[0].problem.operands, inputs[0], operands, self._moving, strict=True
            )
            if not moves
        ]
        link.move_in(SHARED, [*shared, *zip(added, bias, strict=True)])
        if link.ahead:
            self._move_in(link, 0, inputs, operands)
        last = 0
        for index, piece in enumerate(pieces):
            slot = last = index % slots
            coming = index + 1 if link.ahead else index
            if coming < len(pieces):
                self._move_in(link, coming, inputs, operands)
            taken = [
                _seen(piece.problem, role, t) for role, t in zip(piece.problem.operands, inputs[slot], strict=True)
            ]
            made = [_seen(piece.problem, role, t) for role, t in zip(piece.problem.results, outputs[slot], strict=True)]
            with link.computing(slot):
                piece.call(*taken, *made, space, *added)
            if not self.sums:
                into = [narrow(t, ranges) for t, ranges in zip(results, piece.results, strict=True)]
                link.move_out(slot, list(zip(into, made, strict=True)), add=self._add)
        if self.sums:
            first = pieces[0].problem
            terms = [_seen(first, role, t) for role, t in zip(first.results, outputs[0], strict=True)]
            link.move_out(last, list(zip(results, terms, strict=True)), add=False)
        for slot in range(slots):
            link.settle(slot)

    def _move_in(self, link: Link, index: int, inputs: list[list[Tensor]], operands: Tensors) -> None:
        """Begin to copy the operands of a part that no other part uses."""
        piece, buffers = self._pieces[index], inputs[index % len(inputs)]
        moves = [
            (_seen(piece.problem, role, buffer), narrow(operand, ranges))
            for role, buffer, operand, ranges, moving in zip(
                piece.problem.operands, buffers, operands, piece.operands, self._moving, strict=True
            )
            if moving
        ]
        link.move_in(index % len(inputs), moves)

    def _buffers(self, link: Link, slots: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """For each slot vectors for operands and for results, large enough for every part.

        Operands that all parts use are the same in all slots, and so are results that are summed up.
        """
        first = self._pieces[0].problem
        inputs: list[list[Tensor]] = [[] for _ in range(slots)]
        outputs: list[list[Tensor]] = [[] for _ in range(slots)]
        for role, moves in zip(first.operands, self._moving, strict=True):
            self._fill(link, inputs, role, moves)
        for role in first.results:
            self._fill(link, outputs, role, not self.sums)
        return inputs, outputs

    def _fill(self, link: Link, slots: list[list[Tensor]], role: str, each: bool) -> None:
        """Add a vector for ``role`` to every slot, for ``each`` a vector of its own."""
        count = max(math.prod(piece.problem.shape(role)) for piece in self._pieces)
        dtype = self._pieces[0].problem.torch_dtype(role)
        one = link.empty(count, dtype)
        for index, slot in enumerate(slots):
            slot.append(link.empty(count, dtype) if each and index else one)

    def _space(self, link: Link) -> Tensor | None:
        """The workspace on the device."""
        if not self._workspace:
            return None
        if self.there.type == "cuda":
            return link.empty(self._workspace, torch.uint8)
        return workspace_there(self._workspace, self.there)


def _seen(problem: Problem, role: str, buffer: Tensor) -> Tensor:
    """The tensor of ``role`` at the beginning of ``buffer``, dense as copies of a part are."""
    return buffer.as_strided(problem.shape(role), strides_there(problem, role))
