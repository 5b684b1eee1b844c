"""Recurrent cells of one's own: a function of what the input and what the state give, run over all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.cpu.recurrent.expressions import Cell
from tilewise.machine.recent import Recent
from tilewise.nn.layers.call import disturbed, is_plain
from tilewise.nn.layers.recurrent.by_torch import gradients_in
from tilewise.rnn.cpu_scan import CpuScan
from tilewise.rnn.gpu_scan import DTYPES, GpuScan, gpu_missing
from tilewise.rnn.noise import uniform
from tilewise.rnn.tracing import NotTraceable, trace
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.cpu_run import numba_missing

__all__ = ["scan"]

MOST_GATES = 8
"""Parts of H numbers that the state may give a cell that is compiled."""
MOST_NOISE = 16
"""Random numbers of each unit in a step."""
MOST_RUNNERS = 64
"""Cells, by their expressions and sizes, that are kept compiled."""
_runners: Recent[tuple[object, ...], CpuScan | GpuScan] = Recent(MOST_RUNNERS)

CellFunction = Callable[..., Any]
States = Tensor | tuple[Tensor, ...]


def scan(
    cell: CellFunction,
    x: Tensor,
    state: States,
    u: Tensor,
    *parameters: Tensor,
    resets: Tensor | None = None,
    reverse: bool = False,
    noise: int = 0,
    seed: int | None = None,
    compiled: bool | None = None,
) -> tuple[Tensor, States]:
    """Run a recurrent cell over all steps of a batch of sequences.

    At each step ``state = cell(x_t, h_t, state, *parameters)``. ``x_t`` (N, X * H) is the step of ``x`` (T, N, X * H),
    what the input gives the gates: usually a linear layer's result for all steps at once. ``h_t`` (N, G * H) is what
    the state gives them, the product of the first state and ``u`` (G * H, H) transposed. ``state`` is a tensor (N, H),
    or a tuple of them, of which the first is h. ``parameters`` are tensors of H numbers or a multiple, as of peepholes,
    biases and gains. All need gradients where they require them.

    ``resets`` (T, N) of bool says where a sequence begins anew: there all states are 0 before the step. With
    ``reverse`` steps run from the last to the first.

    With ``noise`` the cell has another argument at the end: (N, noise * H) random numbers of [0, 1), for zoneout or
    dropout within the recurrence. They depend on ``seed`` and the place of step, sequence and unit alone, so that they
    are the same forward and backward, by kernels and by torch. Without a ``seed`` torch's generator of the CPU gives
    one.

    Returns y (T, N, H), h after every step, and the last state in the form of ``state``.

    On a CPU in fp32 the cell is compiled with its derivative, and all steps run in one call, in which threads keep
    their share of ``u`` in their caches (as :doc:`recurrent` layers do). On a GPU in fp32, bf16 or fp16 each step is
    one Triton kernel with ``compiled=True``, and all steps are replayed as a CUDA graph where calls of a size come
    again. For this the cell is called once with placeholders: it may use arithmetic, torch's elementwise functions,
    comparisons with ``torch.where``, and means, variances and norms over units, and must not depend on values.
    ``compiled=True`` raises ``ValueError`` with the reason where it cannot be compiled. ``None`` compiles on a CPU
    where it can, and runs step by step by torch on a GPU, where these kernels were not measured yet. ``False`` always
    does. Gradients of gradients are torch's.

    Raises ``ValueError`` for tensors that do not fit, also for states that the cell returns, and for a ``noise`` or
    ``seed`` out of range.

    Example, an LSTM of 2 units whose forget gate looks at c (Gers and Schmidhuber 2000):

    >>> def peephole(x, h, state, looks):
    ...     i, f, g, o = (x + h).chunk(4, -1)
    ...     c = torch.sigmoid(f + looks * state[1]) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    ...     return torch.sigmoid(o) * torch.tanh(c), c
    >>> x, u, looks, zero = torch.randn(5, 3, 8), torch.randn(8, 2), torch.randn(2), torch.zeros(3, 2)
    >>> scan(peephole, x, (zero, zero), u, looks, compiled=False)[0].shape
    torch.Size([5, 3, 2])
    """
    states = state if isinstance(state, tuple) else (state,)
    _check(x, states, u, parameters, resets)
    way = _Way(cell, len(states), resets, reverse, noise, _seed(noise, seed))
    y, *last = _scanned(way, (x, u, *states, *parameters), compiled)
    return y, tuple(last) if isinstance(state, tuple) else last[0]


@dataclass(frozen=True)
class _Way:
    """What a scan is told beside its tensors; ``states`` is their number."""

    cell: CellFunction
    states: int
    resets: Tensor | None
    reverse: bool
    noise: int
    seed: int


def _seed(noise: int, seed: int | None) -> int:
    """The seed of random numbers, if there are any. Raises ``ValueError`` for one that is out of range."""
    if not 0 <= noise <= MOST_NOISE:
        raise ValueError(f"noise={noise}: 0 to {MOST_NOISE} numbers for each unit would do")
    if seed is None:
        if not noise:
            return 0
        return int(torch.randint(2**63 - 1, (), generator=torch.default_generator, dtype=torch.int64, device="cpu"))
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: 0 to 2^63 - 1 would do")
    return seed


def _check(x: Tensor, states: Sequence[Tensor], u: Tensor, parameters: Sequence[Tensor], resets: Tensor | None) -> None:
    """Raise ``ValueError`` naming the tensor that does not fit."""
    if not states or any(s.dim() != 2 or s.shape != states[0].shape for s in states):
        raise ValueError(f"state: shapes {[tuple(s.shape) for s in states]}; (batch, hidden) for each would do")
    batch, hidden = states[0].shape
    if not hidden:
        raise ValueError("state: has no numbers; at least one hidden unit would do")
    if x.dim() != 3 or not len(x) or x.shape[1] != batch or x.shape[2] % hidden or not x.shape[2]:
        raise ValueError(
            f"x: shape {tuple(x.shape)}; (steps, {batch}, a multiple of {hidden}) with at least one step would do"
        )
    if u.dim() != 2 or u.shape[1] != hidden or u.shape[0] % hidden or not u.shape[0]:
        raise ValueError(f"u: shape {tuple(u.shape)}; (a multiple of {hidden}, {hidden}) would do")
    for number, parameter in enumerate(parameters):
        if parameter.dim() != 1 or parameter.numel() % hidden or not parameter.numel():
            raise ValueError(f"parameters[{number}]: shape {tuple(parameter.shape)}; a multiple of {hidden} would do")
    if resets is not None and (resets.shape != x.shape[:2] or resets.dtype is not torch.bool):
        raise ValueError(f"resets: {resets.dtype} {tuple(resets.shape)}; torch.bool {tuple(x.shape[:2])} would do")


def _scanned(way: _Way, tensors: Sequence[Tensor], compiled: bool | None) -> tuple[Tensor, ...]:
    """y and the last states, by kernels where they can. Raises ``ValueError`` where they cannot and must."""
    wanted = not tensors[0].is_cuda if compiled is None else compiled
    found: Cell | str = _traced(way, tensors) if wanted else "it was not asked for"
    if isinstance(found, Cell):
        try:
            return _by_kernel(found, way, tensors)
        except SolverUnavailable as error:
            found = str(error)
    if compiled:
        raise ValueError(f"compiled=True: the cell is not compiled: {found}")
    return _by_torch(way, tensors)


def _traced(way: _Way, tensors: Sequence[Tensor]) -> Cell | str:
    """What a cell computes, or why it is not compiled."""
    x, u, first, *_ = tensors
    if torch.compiler.is_compiling() or disturbed() or not all(map(is_plain, tensors)):
        return "something watches torch's operators, or a tensor is of a class of its own"
    if reason := _why_no_kernel(way, tensors):
        return reason
    hidden = first.shape[1]
    if len(u) // hidden > MOST_GATES:
        return f"u gives {len(u) // hidden} parts of {hidden} numbers; at most {MOST_GATES} would do"
    if not first.numel():
        return "the batch is empty"
    parts = [parameter.numel() // hidden for parameter in tensors[2 + way.states :]]
    try:
        sizes = len(first), hidden
        return trace(way.cell, x.shape[2] // hidden, len(u) // hidden, way.states, parts, sizes, way.noise)
    except NotTraceable as error:
        return f"it {error}"


def _why_no_kernel(way: _Way, tensors: Sequence[Tensor]) -> str:
    """Why no kernels are for such tensors here; empty where there are some."""
    x, given = tensors[0], (*tensors, *(() if way.resets is None else (way.resets,)))
    if any(t.device != x.device for t in given):
        return "its tensors are on several devices"
    types = (torch.float32,) if x.device.type == "cpu" else DTYPES if x.device.type == "cuda" else ()
    if x.dtype not in types or any(t.dtype is not x.dtype for t in tensors):
        return "kernels for cells are for fp32 on a CPU, and for fp32, bf16 or fp16 on a GPU"
    return "; ".join(numba_missing()) if x.device.type == "cpu" else gpu_missing()


def _by_kernel(found: Cell, way: _Way, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """y and the last states by compiled kernels."""
    runner = _runner(found, tensors)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        results: tuple[Tensor, ...] = _Scan.apply(runner, way, *tensors)  # type: ignore[no-untyped-call]
        return results
    x, u, *rest = (t.detach().contiguous() for t in tensors)
    states, parameters = rest[: way.states], rest[way.states :]
    with torch.no_grad():
        y, last, _ = runner.run(
            x, u, states, parameters, way.resets, reverse=way.reverse, seed=way.seed, keep=False
        )  # fmt: skip
    return y, *last


def _runner(found: Cell, tensors: Sequence[Tensor]) -> CpuScan | GpuScan:
    """The compiled cell for such tensors."""
    first = tensors[2]
    sizes = len(first), first.shape[1]
    key = found, sizes, first.dtype, first.device, torch.get_num_threads() if first.device.type == "cpu" else 0
    runner = _runners.get(key)
    if runner is None:
        made = CpuScan(found, *sizes) if _on_cpu(first) else GpuScan(found, *sizes, first.dtype, first.device)
        runner = _runners[key] = made
    return runner


def _on_cpu(tensor: Tensor) -> bool:
    """Whether kernels for a CPU compute such tensors; else those for a GPU do."""
    return tensor.device.type == "cpu"


class _Scan(torch.autograd.Function):
    """A compiled cell over all steps, with its gradients."""

    @staticmethod
    def forward(ctx: Any, runner: CpuScan | GpuScan, way: _Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, u, *rest = (t.contiguous() for t in tensors)
        states, parameters = rest[: way.states], rest[way.states :]
        y, last, saved = runner.run(
            x, u, states, parameters, way.resets, reverse=way.reverse, seed=way.seed, keep=True
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.scan = runner, way, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        # What is returned may be changed in place, what the backward reads may not.
        return y.clone(), *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        runner, way, count = ctx.scan
        tensors, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_gradients_by_torch(way, tensors, gradients, needs)
        x, u, *rest = (t.contiguous() for t in tensors)
        dx, du, firsts, of_parameters = runner.gradients(
            saved, x, u, rest[: way.states], rest[way.states :], way.resets, gradients[0], gradients[1:],
            reverse=way.reverse, seed=way.seed, of_weights=needs[1],
        )  # fmt: skip
        found = (dx, du, *firsts, *of_parameters)
        return None, None, *(each if needed else None for each, needed in zip(found, needs, strict=True))


def _by_torch(way: _Way, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """y and the last states, step by step."""
    x, u, *rest = tensors
    state, parameters = tuple(rest[: way.states]), rest[way.states :]
    outputs: list[Tensor] = [x] * len(x)
    for t in range(len(x) - 1, -1, -1) if way.reverse else range(len(x)):
        if way.resets is not None:
            state = tuple(each.masked_fill(way.resets[t, :, None], 0.0) for each in state)
        from_h = torch.nn.functional.linear(state[0], u)
        noise = [uniform(way.seed, t * x.shape[1], state[0], way.noise)] if way.noise else []
        new = way.cell(x[t], from_h, state[0] if way.states == 1 else state, *parameters, *noise)
        state = tuple(_state(each, state[0]) for each in ((new,) if way.states == 1 else new))
        outputs[t] = state[0]
    return torch.stack(outputs), *state


def _state(found: Tensor, like: Tensor) -> Tensor:
    """A state that a cell returns, for every sequence where it is made of parameters alone.

    Raises ``ValueError`` for one of another shape.
    """
    if found.shape == like.shape:
        return found
    try:
        return found.expand_as(like)
    except RuntimeError as error:
        shape, wanted = tuple(found.shape), tuple(like.shape)
        raise ValueError(f"cell: returns a state of shape {shape}; {wanted} would do") from error


def _gradients_by_torch(
    way: _Way, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves, from steps that torch computes again."""
    views = [t.view_as(t) for t in tensors]
    return gradients_in(views, _by_torch(way, views), gradients, needs, create_graph=True)
