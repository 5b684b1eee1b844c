"""What :func:`tilewise.optimize` did to each layer and pass of a model, and why."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from tilewise import solvers
from tilewise.machine.files import TRACE, TRACE_ENDINGS, checked_path
from tilewise.nn.arguments import check_function, check_model, examples_of, unwrapped
from tilewise.nn.background.later import PENDING
from tilewise.nn.background.model import work_of
from tilewise.nn.branches.choose import BranchReport
from tilewise.nn.copies import original_of, why_no_report
from tilewise.nn.explain_commands import explain_command, one_of
from tilewise.nn.layers.kinds import kind_of
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import swapped
from tilewise.nn.region_report import RegionLine, RegionReport
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.timeline import StepSource, write_timeline
from tilewise.plan import Plan
from tilewise.problems.base import Problem

__all__ = [
    "CallReport",
    "LayerReport",
    "PassReport",
    "RegionLine",
    "RegionReport",
    "Report",
    "forget",
    "keep",
    "kept",
    "passes_of",
    "report",
    "summary",
]


NO_TIME = "plan ms is empty where torch's own choice is the plan"
BUSY = "(busy): other programs used the cores; measured again next time on a quiet machine"
"""Lines below the table."""
MET = "not among the examples"
"""The remark beside a call with an input that the program met later."""


@dataclass(frozen=True)
class PassReport:
    """One pass of a layer: ``role`` is ``forward``, ``grad_input`` or ``grad_weight``.

    A recurrent layer in training has one pass, ``forward``, whose problem is forward and backward together.

    ``plan`` is the chosen plan, which may be torch's own choice, or ``None`` with a ``reason``. ``torch_ms`` is what
    torch's choice takes on the device, in milliseconds, measured beside the plan, and ``torch_host_ms`` what the host
    needs to launch it; each where it is known. ``replaced`` says whether the plan runs in the module. ``note`` says why
    a schedule's plan was not taken; it is empty where it was taken or there was no schedule.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> forward = tilewise.nn.report(model).layers[0].calls[0].passes[0]
    >>> forward.role.value, forward.problem.flops
    ('forward', 169344)
    """

    role: str
    problem: Problem
    plan: Plan | None
    torch_ms: float | None
    replaced: bool
    reason: str = ""
    note: str = ""
    torch_host_ms: float | None = None

    @property
    def planned_ms(self) -> float | None:
        """What the plan takes on the device, in milliseconds; torch's own time where torch won."""
        return None if self.plan is None else self.plan.time_ms

    @property
    def planned_host_ms(self) -> float | None:
        """What the host needs to launch the plan, in milliseconds: 0 on a CPU, ``None`` where it is not known."""
        return None if self.plan is None else self.plan.host_ms

    @property
    def by_torch(self) -> bool:
        """Whether the plan is torch's own choice, or there is none."""
        return self.plan is None or self.plan.solver == solvers.baseline(self.problem).name

    @property
    def busy(self) -> bool:
        """Whether other processes kept the host busy while the plan was timed, so that its times are doubtful."""
        return self.plan is not None and self.plan.busy


@dataclass(frozen=True)
class CallReport:
    """One call of a layer. ``shape`` is that of the input as planned, with batch axis and padding.

    It is a call in the examples, or, where ``met``, one that the program made later: with an input of another shape,
    say, or one that needs a gradient. Then ``passes`` has those that no call before it has.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> tilewise.nn.report(model).layers[0].calls[0].shape
    (2, 3, 16, 16)
    """

    shape: tuple[int, ...]
    passes: tuple[PassReport, ...]
    met: bool = False


@dataclass(frozen=True)
class LayerReport:
    """What was planned for one module, call by call.

    ``reason`` says why nothing was planned for it or why it no longer runs by plan; else it is empty.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> layer = tilewise.nn.report(model).layers[0]
    >>> layer.kind, len(layer.calls), layer.reason
    ('Conv2d', 1, '')
    """

    name: str
    kind: str
    calls: tuple[CallReport, ...]
    reason: str = ""

    @property
    def replaced(self) -> bool:
        """Whether a plan runs in place of torch's choice on any pass."""
        return any(p.replaced for p in self.passes())

    def passes(self) -> Iterator[PassReport]:
        """The passes of all calls."""
        for call in self.calls:
            yield from call.passes


@dataclass(frozen=True)
class Report:
    """The planned modules of a model and, where they were asked for, its parallel branches. Prints as a table.

    ``facts`` holds further results by name, such as the division of a budget (``docs/json.md``). ``step`` has the times
    of the whole step by torch and by plans. ``regions`` tells, for inference, which parts of the model run as regions.
    ``source`` is the step that :meth:`trace` runs.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> found = tilewise.nn.report(model)
    >>> [pass_report.role.value for layer, call, pass_report in found.passes()]
    ['forward', 'grad_weight']
    """

    layers: tuple[LayerReport, ...]
    branches: tuple[BranchReport, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    step: StepReport | None = None
    regions: tuple[RegionReport, ...] = ()
    source: StepSource | None = field(default=None, repr=False, compare=False)

    @property
    def pending(self) -> int:
        """How many passes are still to be planned in the background; 0 where all are planned."""
        return sum(pass_report.reason == PENDING for _, _, pass_report in self.passes())

    def passes(self) -> Iterator[tuple[LayerReport, CallReport, PassReport]]:
        """Every pass, together with its layer and its call."""
        for layer in self.layers:
            for call in layer.calls:
                for pass_report in call.passes:
                    yield layer, call, pass_report

    @property
    def workspace(self) -> int:
        """The largest workspace of a plan that runs, in bytes."""
        plans = (p.plan for _, _, p in self.passes() if p.replaced)
        return max((plan.workspace for plan in plans if plan is not None), default=0)

    def trace(
        self,
        file: str | os.PathLike[str] = TRACE,
        example_inputs: object = None,
        *,
        step: Callable[[Any], object] | None = None,
    ) -> Path:
        """Run one step of the model and write its time line to ``file``, which Perfetto and chrome://tracing open.

        torch's profiler records it: every operator, on a GPU every kernel, and for each pass that runs by plan a range
        such as ``tilewise: layer1.0.conv1 forward tiled_fft``. Returns the file's path.

        - ``file``: its name ends in ``.json`` or ``.json.gz``. A file that is there is replaced.
        - ``example_inputs``: as :func:`tilewise.optimize` takes them; by default those that it was given, where the
          program still has them.
        - ``step``: ``step(model)`` runs the step to be recorded. By default it is the one that ``optimize`` makes up:
          forward, the mean square of the outputs and backward, or a forward alone with ``training=False``. What a step
          changes in the model is put back.

        Raises ``ValueError`` naming the argument at fault, ``RuntimeError`` while another profiler runs, ``OSError``
        where the file cannot be written, and what the model raises.

        Example::

            tilewise.optimize(model, images)
            tilewise.summary(model).trace("step.json")
        """
        path = checked_path(file, TRACE_ENDINGS, TRACE)
        check_function("step", step, "model")
        if self.source is None:
            raise ValueError("trace: this report is of no model; tilewise.summary(model) of an optimized one would do")
        examples = None if example_inputs is None else examples_of(example_inputs)
        compared = None if self.step is None else self.step.to_json()
        facts = {"layers": self.numbers(), "step": compared}
        write_timeline(self.source.step(examples, step), path, facts)
        return path

    def explain_commands(self, layer: str) -> tuple[str, ...]:
        """The commands that explain each pass of ``layer``: what computes it, what was tried, and why it lost.

        - ``layer``: the layer's name, as the report prints it.

        They are to be typed in a shell on the same machine. Raises ``ValueError`` for a name that no layer has.

        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> model = tilewise.optimize(model, torch.randn(2, 3, 16, 16), rigor="estimate")
        >>> for command in tilewise.summary(model).explain_commands("0"):
        ...     print(command)
        tilewise explain mb2ic3ih16oc8oh14kh3ph0+bias --pass fprop --device cpu
        tilewise explain mb2ic3ih16oc8oh14kh3ph0 --pass wgrad --device cpu
        """
        name = one_of(layer, (each.name for each in self.layers))
        found = (explain_command(each.problem) for one, _, each in self.passes() if one.name == name)
        return tuple(dict.fromkeys(command for command in found if command))

    def numbers(self) -> dict[str, float]:
        """The report's numbers by name, as :meth:`to_tensorboard` writes them: times in ms, workspace in bytes.

        Of a layer with several calls in the examples the times of all are added. What is not known has no name.
        """
        found: dict[str, float] = {
            "layers": len(self.layers),
            "layers_by_plan": sum(layer.replaced for layer in self.layers),
            "workspace_bytes": self.workspace,
        }
        if self.step is not None and not self.step.reason:
            for name in ("torch_ms", "planned_ms", "speedup"):
                found[f"step/{name}"] = getattr(self.step, name)
        for layer, call, each in self.passes():
            if call.met:
                continue
            by_plan = each.planned_ms if each.replaced else each.torch_ms
            for name, value in (("torch_ms", each.torch_ms), ("runs_ms", by_plan)):
                key = f"{layer.name or 'model'}/{each.role}/{name}"
                found[key] = found.get(key, 0.0) + (math.nan if value is None else value)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def to_tensorboard(self, writer: Any, global_step: int = 0) -> None:
        """Write :meth:`numbers` as scalars ``tilewise/...``, and the report as text, by TensorBoard's own ``writer``.

        - ``writer``: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar`` and ``add_text``.
        - ``global_step``: the number of the training step at which they are shown.

        Raises ``ValueError`` for another ``writer``, and for a ``global_step`` that is no whole number from 0 on.

        Example::

            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter("runs/planned") as writer:
                tilewise.summary(model).to_tensorboard(writer)
        """
        if isinstance(writer, type) or not all(callable(getattr(writer, n, None)) for n in ("add_scalar", "add_text")):
            raise ValueError(f"writer={writer!r:.80}: a torch.utils.tensorboard.SummaryWriter would do")
        if not isinstance(global_step, int) or isinstance(global_step, bool) or global_step < 0:
            raise ValueError(f"global_step={global_step!r:.80}: a whole number from 0 on would do")
        for name, value in self.numbers().items():
            writer.add_scalar(f"tilewise/{name}", value, global_step)
        indented = "\n".join(f"    {line}" for line in str(self).splitlines())  # a table, not Markdown
        writer.add_text("tilewise/report", indented, global_step)

    def __str__(self) -> str:
        on_gpu = any(pass_report.problem.device != "cpu" for _, _, pass_report in self.passes())
        host = ("host ms",) if on_gpu else ()
        rows: list[tuple[str, ...]] = [("layer", "input", "pass", "runs", "plan ms", *host, "torch ms", *host)]
        rows += [_row(layer, call, each, on_gpu=on_gpu) for layer, call, each in self.passes()]
        nothing = [""] * (len(rows[0]) - 4)
        for layer in self.layers:
            if layer.reason:
                by = "region" if self._in_region(layer.name) else "torch"
                rows.append((layer.name, "", "", f"{by} ({layer.reason})", *nothing))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += self._legend()
        graphs = self.facts.get("graphs")
        if graphs is not None:
            lines.append(
                "CUDA graphs: " + ("the model is replayed" if graphs["kept"] else f"none ({graphs['reason']})")
            )
        if self.pending:
            lines.append(f"{self.pending} of {sum(1 for _ in self.passes())} passes are {PENDING}")
        told = self.step is not None and (not self.step.reason or not all(map(self._in_region, self._names())))
        step = [str(self.step)] if told else []  # regions have been compared whole: see their own lines
        if told and self.step is not None and self.step.detail():
            step.append(f"      {self.step.detail()}")
        return "\n".join([*lines, *map(str, self.branches), *map(str, self.regions), *step])

    def _legend(self) -> list[str]:
        """What the table does not explain by itself, where it has it."""
        passes = [pass_report for _, _, pass_report in self.passes()]
        by_torch = any(pass_report.plan is not None and pass_report.by_torch for pass_report in passes)
        return [
            *([NO_TIME] if by_torch else []),
            *([BUSY] if any(pass_report.busy for pass_report in passes) else []),
        ]

    def _names(self) -> Iterator[str]:
        """The names of all layers; of a model without any, the model's own."""
        yield from (layer.name for layer in self.layers) if self.layers else [""]

    def _in_region(self, name: str) -> bool:
        """Whether the layer runs within a region that is kept."""
        return any(
            region.kept and (not region.name or f"{name}.".startswith(f"{region.name}.")) for region in self.regions
        )


_kept: weakref.WeakKeyDictionary[nn.Module, tuple[Report, PlanTable, bool]] = weakref.WeakKeyDictionary()


def keep(model: nn.Module, made: Report, plan_table: PlanTable, deterministic: bool) -> None:
    """Remember for ``model`` its report, its plan table of plans, and whether torch's deterministic flag was on."""
    _kept[model] = made, plan_table, deterministic


def forget(model: nn.Module) -> None:
    """Drop what :func:`keep` remembered for ``model``."""
    _kept.pop(model, None)


def report(model: nn.Module) -> Report:
    """The report of the last :func:`tilewise.optimize` of this model, or of the one of which it is a planned copy.

    Beside the calls of the examples it has those with inputs of other shapes that the program made since, of layers
    that run by plan. A layer that was overridden since (by a ``forward`` set on it, say) computes by torch, and its
    report gives the reason. While planning goes on in the background, it tells how things are at this moment:
    ``pending`` is the number of passes that are still to be planned, and ``step.pending`` whether whole steps are still
    to be compared.

    Raises ``ValueError`` for what is no module, and for a model that was not optimized, was restored since, or is a
    copy of an optimized one that is gone.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> found = tilewise.nn.report(model)
    >>> [layer.kind for layer in found.layers], found.pending
    (['Conv2d'], 0)
    """
    check_model(model)
    last_report, table, _ = kept(model)
    unwrapped_model = unwrapped(model)
    original = _planned_as(model)
    work = work_of(unwrapped(original))
    if work is not None:
        last_report = replace(last_report, layers=work.report())
        if work.comparison is not None:
            last_report = replace(last_report, step=work.comparison.report)
    is_copy = original is not model
    layers = (_as_it_is(layer, unwrapped_model, is_copy=is_copy) for layer in last_report.layers)
    return replace(last_report, layers=tuple(_with_met(layer, table) if layer.replaced else layer for layer in layers))


def summary(model: nn.Module) -> Report:
    """What :func:`tilewise.optimize` did to each layer and pass of ``model``, and why, to be printed.

    The same as :func:`tilewise.nn.report`. Besides its table a :class:`~tilewise.nn.Report` has the numbers
    (:meth:`~tilewise.nn.Report.passes`, :meth:`~tilewise.nn.Report.numbers`), writes a time line of a step
    (:meth:`~tilewise.nn.Report.trace`) and scalars for TensorBoard (:meth:`~tilewise.nn.Report.to_tensorboard`).

    Raises ``ValueError`` for what is no module, and for a model that was not optimized, was restored since, or is a
    copy of an optimized one that is gone.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> found = tilewise.summary(model)
    >>> [layer.kind for layer in found.layers]
    ['Conv2d']
    """
    return report(model)


def _as_it_is(layer: LayerReport, model: nn.Module, *, is_copy: bool) -> LayerReport:
    """The report of ``layer``, changed where the module has been replaced or overridden since."""
    if not layer.replaced:
        return layer
    try:
        module = model.get_submodule(layer.name)
    except AttributeError:
        return _by_torch(layer, "is no longer in the model")
    kind = kind_of(module)
    if kind is None:
        return _by_torch(layer, f"is a {type(module).__name__} now")
    reason = kind.obstacle(module)
    if not reason and is_copy and swapped(module) is None:
        reason = "was copied before it was planned"
    return _by_torch(layer, reason) if reason else layer


def _with_met(layer: LayerReport, table: PlanTable) -> LayerReport:
    """The report of a layer that runs by plan, with the calls that it met after those of the examples."""
    known = {pass_report.problem for pass_report in layer.passes()}
    calls: list[CallReport] = []
    # Calls with most problems first: those of the same shape without gradients say nothing more.
    for met in sorted(table.new_inputs.of(layer.name), key=lambda met: -len(met.problems)):
        own_table = met.table()
        problems = {role: problem for role, problem in met.problems.items() if problem not in known}
        if own_table is not None and problems:
            known.update(problems.values())
            own_table.torch_times(problems.values())
            passes = passes_of(problems, own_table, met.deterministic, planned=True)
            calls.append(CallReport(met.shape, passes, met=True))
    return replace(layer, calls=(*layer.calls, *calls))


def passes_of(
    problems: Mapping[str, Problem], plan_table: PlanTable, deterministic: bool, *, planned: bool
) -> tuple[PassReport, ...]:
    """The reports of the passes of one call, by what ``plan_table`` knows; ``planned``: its module runs by plans."""
    return tuple(
        PassReport(
            role,
            problem,
            plan_table.chosen(problem, deterministic),
            plan_table.times.get(problem),
            planned and plan_table.replacement(problem, deterministic) is not None,
            plan_table.reasons.get(problem, ""),
            plan_table.notes.get(problem, ""),
            plan_table.host_times.get(problem),
        )
        for role, problem in problems.items()
    )


def _by_torch(layer: LayerReport, reason: str) -> LayerReport:
    """The report of a layer that no longer runs by plan, for ``reason``."""
    calls = tuple(
        replace(call, passes=tuple(replace(pass_report, replaced=False) for pass_report in call.passes))
        for call in layer.calls
    )
    return replace(layer, calls=calls, reason=reason)


def kept(model: nn.Module) -> tuple[Report, PlanTable, bool]:
    """What :func:`keep` remembered for ``model``. Raises ``ValueError`` where there is nothing."""
    remembered = _kept.get(_planned_as(model))
    if remembered is None:
        raise ValueError(f"model={type(model).__name__}: {why_no_report(model)}")
    made, plan_table, deterministic = remembered
    if model not in _kept and made.source is not None:
        made = replace(made, source=replace(made.source, model=weakref.ref(model)))
    return made, plan_table, deterministic


def _planned_as(model: nn.Module) -> nn.Module:
    """The model that was optimized: ``model``, or the one of which it is a copy."""
    return model if model in _kept else original_of(unwrapped(model), list(_kept)) or model


def _row(layer: LayerReport, call: CallReport, each: PassReport, *, on_gpu: bool) -> tuple[str, ...]:
    """The table's row of one pass. torch's own choice has one time, which is torch's."""
    solver = each.plan.solver if each.plan is not None and each.replaced else "torch"
    remark = each.reason or each.note or (MET if call.met else "")
    times = [_ms(each.torch_ms), *([_ms(each.torch_host_ms)] if on_gpu else [])]
    planned = [_ms(each.planned_ms), *([_ms(each.planned_host_ms)] if on_gpu else [])]
    if each.by_torch:
        times = [time or own for time, own in zip(times, planned, strict=True)]
        planned = [""] * len(planned)
    doubtful = times if each.by_torch else planned
    doubtful[0] += " (busy)" if each.busy else ""
    return (
        layer.name,
        "x".join(map(str, call.shape)),
        each.role,
        f"{solver} ({remark.splitlines()[0]})" if remark else solver,
        *planned,
        *times,
    )


def _ms(value: float | None) -> str:
    """Milliseconds as text; empty where they are not known."""
    return "" if value is None or math.isnan(value) else f"{value:.3f}"
