"""Running one kind of call of a recurrent layer by its plan, with autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tilewise.nn.layers.bound_pass import Slot
from tilewise.nn.layers.call import disturbed, is_plain
from tilewise.nn.layers.recurrent.by_torch import ByTorch, Dropped, Gradients
from tilewise.nn.layers.recurrent.call import Given
from tilewise.nn.layers.recurrent.native import NEVER, recurrent_native
from tilewise.nn.layers.recurrent.saved import apart, together
from tilewise.nn.ranges import shown, watched
from tilewise.plan import Config
from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.recurrent._layers import Layer, StackedLayers
from tilewise.solvers.recurrent._recurrent import RecurrentSolver

__all__ = ["RecurrentRun"]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRun:
    """The plan that runs one kind of call, of ``problem``. ``layer`` is ``None`` where torch computes it.

    ``slots`` say how the plan expects x, first states and weights. ``several`` says that there is more than one GPU:
    then that of ``device`` is made current. ``solver`` and ``config`` made the layer, and may make others like it.
    ``ranges`` are the names under which a profiler shows forward and backward.
    """

    problem: RecurrentProblem
    device: torch.device
    layer: Layer | None
    slots: tuple[Slot, ...]
    several: bool
    solver: RecurrentSolver | None = None
    config: Config | None = None
    ranges: tuple[str, str] = ("", "")
    _native: list[Any] = field(default_factory=list, init=False)
    """The call in native code, once it is known whether there is one."""

    @property
    def planned(self) -> bool:
        """Whether a plan runs it."""
        return self.layer is not None

    def __call__(self, given: Given) -> Any:
        """What the module returns, with autograd where that is needed."""
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self._result(given.cast())
        return self._result(given)

    def _result(self, given: Given) -> Any:
        """As a call of it, for tensors of the problem's type without autocast."""
        x = given.x
        h0, c0 = given.h0, given.c0
        results = None if given.dropout or given.packing is not None else self._by_native(x, h0, c0, given.weights)
        if results is not None:
            return self._as_returned(given, results[0], list(results[1:]))
        if h0 is None and type(self.layer) is not StackedLayers:
            h0, c0 = self._zeros(x)
        if self.problem.task == "training":
            y, *last = PlannedRecurrent.apply(self, given.dropout, given.packing, x, h0, c0, *given.weights)  # type: ignore[no-untyped-call]
        else:
            y, hn, cn, _, _ = self.forward(given.dropout, x, h0, c0, given.weights, given.packing, keep=False)
            last = [hn] if cn is None else [hn, cn]
        return self._as_returned(given, y, last)

    def _by_native(self, x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: tuple[Tensor, ...]) -> Any:
        """y and the last states by native code; ``None`` where it does not compute such a call.

        While a profiler runs calls come from Python, which names ranges for it.
        """
        if watched():
            return None
        if not self._native:
            found = recurrent_native(self.problem, self.layer, self.device, self._gradients)
            if found is None:
                return None
            self._native.append(found)
        call = self._native[0]
        return None if call is NEVER else call(x, h0, c0, weights)

    def _gradients(
        self, tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Gradients:
        """As :meth:`by_torch`, of a layer without dropout."""
        return self.by_torch(tensors, gradients, needs, Dropped(0.0, self.device, None))

    def _as_returned(self, given: Given, y: Tensor, last: list[Tensor]) -> Any:
        """y and the last states as the module returns them."""
        module = given.module
        if given.source is not None:
            return _packed_again(y, last, given.source)
        if not given.batched:
            y, last = y.squeeze(1), [state.squeeze(1) for state in last]
        elif module.batch_first:
            y = y.transpose(0, 1)
        return y, tuple(last) if self.problem.cell == "lstm" else last[0]

    def _zeros(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """First states of zeros."""
        p = self.problem
        h0 = torch.zeros(p.shape("h0"), dtype=x.dtype, device=x.device)
        return h0, torch.zeros(p.shape("c0"), dtype=x.dtype, device=x.device) if p.cell == "lstm" else None

    def forward(
        self,
        dropout: float,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        packing: Packing | None = None,
        *,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Any, list[Tensor]]:
        """y, hn and cn without autograd; where ``keep``, also what backward takes, and the weights for it."""
        layer: Any = self.layer  # layers that do not start at zeros by themselves are given first states
        x, h0, c0, *taken = self.taken(x, h0, c0, weights)
        with self._on_device(), shown(self.ranges[0]):
            y, hn, cn, saved = layer.forward(x, h0, c0, taken, dropout=dropout, packing=packing, keep=keep)
        return y, hn, cn, saved, taken

    def taken(self, x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Sequence[Tensor]) -> list[Any]:
        """The operands as the plan expects them: x, h0, c0 and the weights. Those that are ``None`` stay it."""
        states = [h0, c0] if self.problem.cell == "lstm" else [h0]
        own = [None if t is None else slot.take(t) for slot, t in zip(self.slots, (x, *states, *weights), strict=False)]
        return own if len(states) == 2 else [*own[:2], None, *own[2:]]

    def backward(
        self, saved: Any, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Gradients:
        """The gradients that are needed of x, h0, c0 and the weights, by the plan.

        ``gradients`` are those of y, hn and cn, ``None`` for zero.
        """
        assert self.layer is not None
        dense = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        dy, dhn, dcn = (*dense, None)[:3]
        with torch._C._DisableAutocast(), self._on_device(), shown(self.ranges[1]):
            return self.layer.backward(saved, weights, dy, dhn, dcn, needs)

    def by_torch(
        self,
        tensors: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        needs: Sequence[bool],
        dropped: Dropped,
        packing: Packing | None = None,
    ) -> Gradients:
        """As :meth:`backward`, by torch's operators, whose gradients have gradients themselves.

        The forward is computed again, from ``tensors``: x, h0, c0 and the weights.
        """
        p = self.problem
        if tensors[1] is None:  # first states that nobody gave
            assert tensors[0] is not None
            tensors = [tensors[0], *self._zeros(tensors[0]), *tensors[3:]]
        layer = ByTorch(p.cell, p.biases, p.layers, p.directions, None if packing is None else packing.sizes)
        with torch._C._DisableAutocast(), self._on_device():
            return layer.gradients(tensors, gradients, needs, dropped)

    def _on_device(self) -> Any:
        """A context in which the call's GPU is the current one."""
        return torch.cuda.device(self.device) if self.several else nullcontext()


def _packed_again(y: Tensor, last: list[Tensor], source: PackedSequence) -> Any:
    """Results of a packed batch as a module returns them: y packed as ``source``, and states in the caller's order."""
    order = source.unsorted_indices
    states = last if order is None else [state.index_select(1, order) for state in last]
    packed = PackedSequence(y, source.batch_sizes, source.sorted_indices, order)
    return packed, tuple(states) if len(states) > 1 else states[0]


class PlannedRecurrent(torch.autograd.Function):
    """A recurrent layer whose forward and backward run by one plan."""

    @staticmethod
    def forward(
        ctx: Any,
        run: RecurrentRun,
        dropout: float,
        packing: Packing | None,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recurrent_run, ctx.packing, ctx.dropped = run, packing, Dropped.now(dropout, run.device)
        y, hn, cn, saved, taken = run.forward(dropout, x, h0, c0, weights, packing, keep=True)
        tensors: list[Tensor | None] = [x, h0, c0, *weights]
        ctx.kept = apart((saved, taken), tensors)
        ctx.save_for_backward(*tensors)
        # The backward reads y. As torch's own results, that of a CPU may be changed in place, and that of a GPU not:
        # the same memory tells.
        y = y.clone() if run.device.type == "cpu" else y.detach()
        return (y, hn) if cn is None else (y, hn, cn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        run: RecurrentRun = ctx.recurrent_run
        tensors, needs, nothing = ctx.saved_tensors, ctx.needs_input_grad[3:], (None, None, None)
        plain = all(d is None or (is_plain(d) and d.dtype is tensors[0].dtype) for d in gradients)
        if torch.is_grad_enabled() or not plain or disturbed():
            return *nothing, *run.by_torch(tensors[: len(needs)], gradients, needs, ctx.dropped, ctx.packing)
        saved, weights = together(ctx.kept, tensors)
        return *nothing, *run.backward(saved, weights, gradients, needs)
