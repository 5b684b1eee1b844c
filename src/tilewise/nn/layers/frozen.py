"""Which planned layers stay in a graph that Inductor compiles with frozen weights on a CPU.

With freezing, Inductor packs each filter for oneDNN, folds the norm behind it into it, and has oneDNN add the bias and
apply the activation as it writes. A planned layer stands in the way of that: its norm and activation become a pass over
memory of their own, and between a layer of ours and one of Inductor's the tensor may change its layout. So a plan that
beats torch's own convolution may lose here. When the first such graph is traced, all planned layers are timed beside
what Inductor would run, and those stay that the network gains from. Where that is none, the graph is Inductor's alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.compiled import Published, published_as
from tilewise.nn.layers.inductor.frozen_pass import install
from tilewise.nn.layers.plan_table import PlanTable, planning, table_of
from tilewise.planner.measuring.times import interleaved
from tilewise.problems.operands import make_bias, make_operands

__all__ = ["Compared", "chosen", "compiler_of_trace", "is_frozen_by_inductor", "is_kept"]

MARGIN = 0.97
"""Our layers stay where the network's convolutions take less than this share of what they would take in Inductor's."""
BUDGET_MS, LEAST, MOST = 60.0, 3, 9
"""Milliseconds for timing one layer, and the least and most rounds."""
FACT = "frozen"
"""The name under which the report tells what was decided."""

_decided: weakref.WeakKeyDictionary[PlanTable, tuple[frozenset[str], frozenset[str]]] = weakref.WeakKeyDictionary()
"""For each plan table the names that were compared, and those of them that stay."""


@dataclass(frozen=True)
class Compared:
    """Milliseconds of one planned layer and of what Inductor would run in its place.

    ``planned_ms`` is the plan, ``apart_ms`` a norm or activation as a pass of its own, ``converting_ms`` the change of
    layout on both sides of it (0 where both have the same), ``fused_ms`` oneDNN's convolution with a packed filter.
    """

    planned_ms: float
    apart_ms: float
    converting_ms: float
    fused_ms: float


def is_kept(plans: str, number: int) -> bool:
    """Whether the layer that runs ``plans`` of the table ``number`` stays in the graph that is traced at this moment.

    Dynamo calls this while it traces, with constants, and keeps the answer.
    """
    table, published = table_of(number), published_as(plans)
    if table is None or published is None or published.call.device.type != "cpu" or not is_frozen_by_inductor():
        return True
    kept = plans in _kept_of(table)
    if not kept:
        install(compiler_of_trace(), number)
    return kept


def is_frozen_by_inductor() -> bool:
    """Whether the graph being traced is for Inductor, with frozen weights. Dynamo keeps the answer.

    What decides is the setting of the process: Dynamo makes weights inputs of the graph where it is off, and then
    nothing is frozen, whatever the options of ``torch.compile`` say.
    """
    import torch._dynamo.config
    import torch._inductor.config

    compiler = compiler_of_trace()
    if getattr(compiler, "_compiler_name", None) != "inductor":
        return False
    options: dict[str, Any] = getattr(compiler, "get_compiler_config", dict)() or {}
    process = bool(torch._inductor.config.freezing)
    kept = process or bool(getattr(torch._dynamo.config, "prepare_freezing", False))
    return kept and bool(options.get("freezing", process))


def compiler_of_trace() -> Any:
    """What compiles the graph that is being traced."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return getattr(InstructionTranslator.current_tx().output, "compiler_fn", None)


def lead_training() -> None:
    """Have Inductor, where it compiles the graph being traced, compute norms and gates of ReLU with fewer passes."""
    from tilewise.nn.layers.inductor.training_pass import install as install_training_pass

    install_training_pass(compiler_of_trace())


# What ``torch.compiler.assume_constant_result`` sets: calling that would import Dynamo here, which takes seconds.
is_kept._dynamo_marked_constant = True  # type: ignore[attr-defined]
lead_training._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_frozen_by_inductor._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _kept_of(table: PlanTable) -> frozenset[str]:
    """The names of the layers of ``table`` that stay; decided anew where there are other layers than before."""
    names = frozenset(table.published)
    known = _decided.get(table)
    if known is None or known[0] != names:
        compared, uses = {}, {}
        with planning(), undisturbed(), torch.no_grad():
            for name in sorted(names):
                published = published_as(name)
                if published is not None and published.runner.forward is not None:
                    compared[name] = compare(published)
                    uses[name] = table.uses.get(published.runner.forward.problem, 1)
        kept = chosen(compared, uses, sum(table.left_to_torch().values()))
        table.facts[FACT] = {"compared": len(compared), "kept": len(kept)}
        known = _decided[table] = names, kept
    return known[1]


def chosen(
    compared: Mapping[str, Compared | None], uses: Mapping[str, int] | None = None, alone: int = 0
) -> frozenset[str]:
    """The layers that stay: all, those that win by themselves with their conversions, or none, whichever is fastest.

    A step has each layer so often as ``uses`` says, once by default. Where all stay, tensors change their layout only
    beside the ``alone`` convolutions that are torch's in any case. A layer that could not be compared (``None``) stays.

    >>> even = Compared(planned_ms=1.0, apart_ms=0.2, converting_ms=0.3, fused_ms=1.4)
    >>> sorted(chosen({"a": even, "b": even}))
    ['a', 'b']
    >>> sorted(chosen({"a": even, "b": Compared(1.0, 0.2, 0.3, 0.5)}))
    []
    """
    measured = {name: found for name, found in compared.items() if found is not None}
    count = {name: 1 if uses is None else uses.get(name, 1) for name in compared}
    beside = min(1.0, alone / max(sum(count.values()), 1))

    def took(kept: Collection[str], changing: float) -> float:
        """Milliseconds of all layers, of which those that are ``kept`` change layouts at so many of their ends."""
        return sum(
            count[name] * (c.planned_ms + c.apart_ms + changing * c.converting_ms if name in kept else c.fused_ms)
            for name, c in measured.items()
        )

    every = frozenset(measured)
    winning = frozenset(
        name for name, c in measured.items() if c.planned_ms + c.apart_ms + c.converting_ms < MARGIN * c.fused_ms
    )
    best_ms, best = min(((took(every, beside), every), (took(winning, 1.0), winning)), key=lambda option: option[0])
    kept = best if best_ms < MARGIN * took((), 0.0) else frozenset[str]()
    return kept | (frozenset(compared) - every)


def compare(published: Published) -> Compared | None:
    """Time a layer by plan and by oneDNN as Inductor runs it; ``None`` where Inductor does nothing of its own."""
    call, runner = published.call, published.runner
    if runner.forward is None or runner.geometry.transposed or not runner.geometry.symmetric:
        return None
    x, w = make_operands(runner.forward.problem)
    b = make_bias(runner.forward.problem)
    fused = packed(published, x, w, b)
    if fused is None:
        return None
    y = runner.converted(x, w, b)
    other_y = fused()
    calls: list[Callable[[], object]] = [
        lambda: runner.converted(x, w, b),
        functools.partial(torch.relu_, y),
        fused,
    ]
    if other_y.stride() != y.stride():
        dense = torch.empty_like(x, memory_format=_last(x))
        calls += [lambda: dense.copy_(x), lambda: other_y.copy_(y)]
    times = interleaved(calls, call.device, budget_ms=BUDGET_MS, least=LEAST, most=MOST)
    return Compared(times[0], times[1], sum(times[3:]), times[2])


def packed(
    published: Published, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> Callable[[], torch.Tensor] | None:
    """The layer by oneDNN with its filter packed ahead, in Inductor's layout; ``None`` where torch has no such call."""
    geometry = published.runner.geometry
    if geometry.dims not in (2, 3) or not torch.backends.mkldnn.is_available():
        return None
    padding = [before for before, _ in geometry.padding]  # it is the same on both sides
    sizes = [padding, list(geometry.stride), list(geometry.dilation)]
    inputs = x.contiguous(memory_format=_last(x))
    try:
        filters = torch.ops.mkldnn._reorder_convolution_weight(w, *sizes, geometry.groups, list(x.shape))
        run = functools.partial(
            torch.ops.mkldnn._convolution_pointwise, inputs, filters, b, *sizes, geometry.groups, "none", [], ""
        )
        run()
    except (AttributeError, RuntimeError):  # a build without oneDNN, or a dtype that this processor does not have
        return None
    return run


def _last(t: torch.Tensor) -> torch.memory_format:
    """The layout with channels last for so many axes."""
    return torch.channels_last if t.dim() == 4 else torch.channels_last_3d
