"""Plan a model's convolutions for its example inputs and swap those that gain; undo it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from tilewise.comm.agreement import several_ranks
from tilewise.nn import branch_times
from tilewise.nn.book import Book, make_options
from tilewise.nn.branches import find as branches_in
from tilewise.nn.budget import GroupsOf, make_budget
from tilewise.nn.geometry import Geometry, Role, Weights
from tilewise.nn.layer import Layer
from tilewise.nn.modules import is_convolution, is_planned, obstacle, planned_forward, unwrapped
from tilewise.nn.record import Recorded, record
from tilewise.nn.report import CallReport, LayerReport, PassReport, Report, forget, keep
from tilewise.nn.scheduled import Source, read_schedule
from tilewise.nn.share import plan_together
from tilewise.nn.step import Step
from tilewise.nn.swaps import swap, swap_back
from tilewise.nn.within import Choices, Within, memory_bytes
from tilewise.planner import Planner, Progress, Schedule
from tilewise.problem import ConvProblem

__all__ = ["optimize", "restore", "unwrapped"]

Model = TypeVar("Model", bound=nn.Module)
NO_GRADIENTS = (False, False, False)


def optimize(
    model: Model,
    example_inputs: object,
    *,
    workspace: int | str | None = None,
    total_workspace: int | str | None = None,
    policy: str = "arena",
    batch_sizes: str = "powers_of_two",
    rigor: str = "measure",
    training: bool = True,
    frozen: bool = False,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    deterministic: bool = False,
    error_limit: float | None = None,
    strict: bool = False,
    cuda_graphs: bool = False,
    exclude: Sequence[str] = (),
    unplanned: str = "plan",
    branches: str = "sequence",
    progress: Progress | None = None,
    planner: Planner | None = None,
    schedule: Schedule | str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    memory_step: Callable[[Model], object] | None = None,
) -> Model:
    """Plan the convolutions of ``model`` for the shapes that ``example_inputs`` give them, and run what gains by plan.

    The model is run once on each example to see its layers' calls; it is returned, changed in place. Only the
    computation of ``nn.Conv1d`` to ``nn.Conv3d`` and ``nn.ConvTranspose1d`` to ``nn.ConvTranspose3d`` is swapped; where
    torch's own choice wins every pass, the module is left exactly as it was. :func:`restore` undoes it, :func:`report`
    tells what was done. Under ``torch.distributed`` with several ranks every rank calls it; rank 0 plans for all.

    - ``example_inputs``: what ``model`` is called with: a tuple of positional arguments, a mapping of named ones, a
      single value, or a list of such examples.
    - ``workspace``: bytes that each kernel may use beyond operands and result, as a number or text (``"64MiB"``);
      ``None`` for no limit.
    - ``total_workspace``: bytes for all kernels of a step together, divided so that the step is fastest; a
      ``workspace`` holds beside it. ``policy`` says what adds up: ``"arena"``: what may run at once, since a workspace
      lives only during its call; ``"paper_wd"``: everything, a segment for each layer and pass (Oyama et al. 2018,
      III-C). Kernels that no example shows have the whole as a limit of their own.
    - ``batch_sizes``: the micro-batches to try: ``"undivided"``, ``"powers_of_two"`` or ``"all"``.
    - ``rigor``: ``"estimate"``, ``"measure"``, ``"patient"`` or ``"wisdom_only"``.
    - ``training``: plan the gradients that the calls need, too. If ``False``, what is computed from a weight alone (its
      spectrum, say) is kept on a CPU, and every call compares the weight with a copy first.
    - ``frozen``: with ``training=False``, you promise that weights stay. What is computed from them is then kept on a
      GPU, too, and nothing is compared: only another memory or version counter of a weight is seen, no writes through
      ``weight.data`` or a NumPy view.
    - ``filter_fn(name, module)``: which modules may be swapped; all by default.
    - ``deterministic``: only plans that give the same bits every time. torch's own flag, when on, asks for them too.
    - ``error_limit``, ``strict``: the relative L2 error allowed, and whether an outlier's spread is held to it.
    - ``cuda_graphs``: the model will be replayed from a CUDA graph, where launches cost nothing: plans are chosen by
      what they take on the GPU alone.
    - ``exclude``: names of solvers that no plan may use, as ``tilewise info`` lists them: ``("fft",)``. With
      ``("aten",)``, torch's own choice, a plan is used whether it is faster or not. What no other solver can compute
      stays torch's then, and the report says why.
    - ``unplanned``: what a shape seen later does: ``"plan"`` on sight, or ``"torch"``. Nothing is planned on sight
      while a CUDA graph is captured, under ``torch.compile``, or in one of several ranks.
    - ``branches``: parallel branches, such as an Inception module's, run in ``"sequence"``, or on streams at once where
      that is ``"measured"`` faster with the plans in place: the region by itself, and the model's whole step.
    - ``progress(done, total, text)``: called as problems are planned; by default a bar on stderr where that takes more
      than two seconds.
    - ``planner``: the planner, with its wisdom and its own progress; a new one by default.
    - ``schedule``: a :class:`Schedule`, or a file that holds one, to run by under its own options. Its plans are
      checked, not timed. What it does not have, or what was planned for another device, other versions or turns out
      wrong or too large here, is planned anew; one warning tells how many and why, the report which. With several ranks
      rank 0 reads it.
    - ``memory_limit``: bytes that a whole step may take on the device, parameters, activations and gradients included,
      as a number, text (``"16GiB"``) or a share of the device's memory (``"80%"``). A step is run to see what is alive
      when each kernel runs; each gets the rest, and the schedule is run and its peak measured.
    - ``memory_step(model)``: one step as the program does it, with its own loss and optimizer, for ``memory_limit``.
      What it does to parameters, buffers, gradients and random states is undone; other objects' state, an optimizer's
      say, is its own. By default: forward, the mean square of the outputs, and backward, for each example in turn.

    Raises ``ValueError`` naming the argument at fault or a schedule that fits no layer, ``ScheduleError`` for a file
    that holds none, ``NoPlanError`` when no solver keeps the limit for a layer, or no schedule ``memory_limit`` or
    ``total_workspace`` (it says what is needed at least), ``RankMismatch`` when ranks see different layers, and what
    the model raises on its example.
    """
    if planner is not None and progress is not None:
        raise ValueError("progress: the planner given has its own; give one or the other")
    branch_times.check(branches)
    if memory_limit is not None and schedule is not None:
        raise ValueError(f"memory_limit={memory_limit!r}: a schedule has limits of its own; give one or the other")
    if memory_step is not None and memory_limit is None:
        raise ValueError("memory_step: it is the step that memory_limit is of; give both")
    if memory_limit is not None and several_ranks():
        raise ValueError(f"memory_limit={memory_limit!r}: one process only; workspace would do for several ranks")
    weights = Weights.of(training=training, frozen=frozen)
    if planner is None and progress is not None:
        planner = Planner(progress=progress)
    options = make_options(workspace, batch_sizes, rigor, deterministic, error_limit, strict, cuda_graphs, exclude)
    read = read_schedule(schedule)
    source = None if read is None else Source(read, schedule)
    budget = make_budget(total_workspace, policy, options.workspace)
    if budget is not None and schedule is not None:
        raise ValueError(
            f"total_workspace={total_workspace!r}: a schedule has limits of its own; give one or the other"
        )
    if budget is not None:
        options = replace(options, workspace=budget.limit)
    book = Book(options if source is None else source.options(options), unplanned, planner)
    book.supply = None if source is None else source.supply
    inner = unwrapped(model)
    modules = {name: module for name, module in inner.named_modules() if is_convolution(module)}
    reasons = {name: _reason(name, module, filter_fn) for name, module in modules.items()}
    candidates = {name: module for name, module in modules.items() if not reasons[name]}
    books = {name: book if memory_limit is None else Book(options, unplanned, book.planner) for name in candidates}
    layers = {name: Layers(books[name], weights) for name in candidates}
    examples = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    step, limit = None, 0
    if memory_limit is not None:
        step = Step(model, examples, memory_step, training=training)
        limit = memory_bytes(memory_limit, step.device)

    left: dict[str, str] = {}

    def recorded() -> list[Recorded]:
        found = [record(inner, candidates, example, layers, training=training, left=left) for example in examples]
        calls = list(dict.fromkeys(one for calls in found for one in calls))
        if source is not None:
            source.require_any(problems_of(calls), inner)
        return calls

    def problems_of(calls: list[Recorded]) -> list[ConvProblem]:
        return [problem for one in calls for problem in _problems(one, training).values()]

    def divide(calls: list[Recorded]) -> None:
        if budget is not None:
            names = _names(calls, training)
            book.divide(names, budget, now, _groups_of(inner, names) if branches == "measured" else None)

    now = torch.are_deterministic_algorithms_enabled()
    if several_ranks():
        calls = plan_together(book, recorded, problems_of, now, divide, f"{budget}")
    else:
        calls = recorded()
        divide(calls)
        book.plan(problems_of(calls), now)
    book.torch_times(problems_of(calls))
    if source is not None:
        source.conclude(book, problems_of(calls))

    def install(schedule: Choices) -> None:
        for name, module in candidates.items():
            if books[name] is not book:
                books[name].follow(book, {key[1:]: plan for key, plan in schedule.items() if key[0] == name})
                layers[name].forget()
            swap_back(module)
            if _gains([one for one in calls if one.name == name], books[name], training):
                swap(module, planned_forward(module, layers[name]))

    if step is None:
        install({})
    else:
        within = Within(step, candidates, book, books, install, limit, weights)
        book.facts["step"] = within.fit()
    told = tuple(
        _layer_report(n, m, reasons[n], left.get(n, ""), calls, books.get(n, book), training)
        for n, m in modules.items()
    )
    total = None if budget is None else budget.total
    forks = branch_times.settle(
        inner, examples, branches, training=training, workspaces=_workspaces(told), budget=total
    )
    made = Report(told, forks, book.facts)
    keep(model, made, book, now)
    keep(inner, made, book, now)
    return model


def restore(model: Model) -> Model:
    """Give every module of ``model`` torch's own computation back and return the model."""
    inner = unwrapped(model)
    for module in inner.modules():
        swap_back(module)
    branch_times.unfork(inner)
    forget(model)
    forget(inner)
    return model


class Layers:
    """One module's layers by geometry: a transposed one's varies with the output size it is asked for."""

    def __init__(self, book: Book, weights: Weights) -> None:
        self._book, self._weights = book, weights
        self._layers: dict[Geometry, Layer] = {}

    def __call__(self, geometry: Geometry) -> Layer:
        """The layer of ``geometry``."""
        layer = self._layers.get(geometry)
        if layer is None:
            layer = self._layers[geometry] = Layer(geometry, self._book, weights=self._weights)
        return layer

    def forget(self) -> None:
        """Resolve every call anew."""
        for layer in self._layers.values():
            layer.forget()


def _reason(name: str, module: nn.Module, filter_fn: Callable[[str, nn.Module], bool] | None) -> str:
    if filter_fn is not None and not filter_fn(name, module):
        return "left out by filter_fn"
    return obstacle(module)


def _problems(one: Recorded, training: bool) -> dict[Role, ConvProblem]:
    try:
        return one.layer.problems(one.call if training else replace(one.call, needs=NO_GRADIENTS))
    except ValueError:  # torch computed it, so it is an empty result or the like: nothing to plan
        return {}


def _names(calls: list[Recorded], training: bool) -> dict[ConvProblem, list[str]]:
    """The layers that pose each problem, a name for every call."""
    names: dict[ConvProblem, list[str]] = {}
    for one in calls:
        every = [one.name, *(f"{one.name} (call {n})" for n in range(2, one.times + 1))]
        for problem in _problems(one, training).values():
            names.setdefault(problem, []).extend(every)
    return names


def _groups_of(model: nn.Module, names: Mapping[ConvProblem, Sequence[str]]) -> GroupsOf:
    """What may run at once where branches may run on streams: the kernels of each branch are in sequence."""
    regions = [group for one in branches_in(model) for group in one.groups]

    def groups_of(problems: Sequence[ConvProblem]) -> list[list[list[int]]]:
        def posed(branch: Sequence[str]) -> list[int]:
            return [
                i for i, p in enumerate(problems) if any(name.partition(" (call")[0] in branch for name in names[p])
            ]

        return [[posed(branch) for branch in region] for region in regions]

    return groups_of


def _gains(calls: list[Recorded], book: Book, training: bool) -> bool:
    """Whether a plan beats torch on any pass of these calls; everything is then bound, ready for its first use."""
    runners = []
    for one in calls:
        problems = _problems(one, training).values()
        if any(book.replacement(problem, one.call.deterministic) for problem in problems):
            kinds = {one.call.needs if training else NO_GRADIENTS, NO_GRADIENTS}
            runners += [one.layer.resolve(replace(one.call, needs=needs)) for needs in kinds]
    return any(runner is not None and runner.planned for runner in runners)


def _workspaces(layers: Iterable[LayerReport]) -> dict[str, int]:
    """Bytes that each layer's plans take at most."""
    plans = ((layer.name, one.plan) for layer in layers for one in layer.passes())
    found: dict[str, int] = {}
    for name, plan in plans:
        found[name] = max(found.get(name, 0), 0 if plan is None else plan.workspace)
    return found


def _layer_report(
    name: str, module: nn.Module, reason: str, left: str, calls: list[Recorded], book: Book, training: bool
) -> LayerReport:
    times = book.torch_times(())
    made = []
    for one in calls:
        if one.name != name:
            continue
        passes = []
        for role, problem in _problems(one, training).items():
            plan = book.chosen(problem, one.call.deterministic)
            replaced = is_planned(module) and book.replacement(problem, one.call.deterministic) is not None
            why = book.reasons.get(problem, "")
            note = book.notes.get(problem, "")
            passes.append(PassReport(role.value, problem, plan, times.get(problem), replaced, why, note))
        made.append(CallReport(one.call.x.shape, tuple(passes)))
    if not reason and not any(call.passes for call in made):
        reason = "not a call that can be planned" if made else left or "not called with tensors that can be planned"
    return LayerReport(name, type(module).__name__, tuple(made), reason)
