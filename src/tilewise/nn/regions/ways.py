"""The ways in which each part of a region can run, with what each takes: found and timed when the region is planned.

An operator of torch is run on tensors in each format that its inputs may have. Its result's format is what torch gives
then. A view takes no time, but not every format of its source has one. Equal operators are timed once.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilewise import execute
from tilewise.machine.turns import pause
from tilewise.nn.programs.pixels import KernelCall, Pixels
from tilewise.nn.programs.rows import RowNorm
from tilewise.nn.programs.slots import Operator, Place, planned
from tilewise.nn.regions.constants import Gathered
from tilewise.nn.regions.fused import Call
from tilewise.nn.regions.gates import join_ways, norm_ways, pixel_ways, pooling_products
from tilewise.nn.regions.layouts import Way
from tilewise.nn.regions.products import Product, products_of
from tilewise.nn.regions.trace import ATTENTION, Untraceable
from tilewise.nn.regions.units import JOINED, PRODUCT, VIEW, Strides, Unit, formats, normal, value_of
from tilewise.plan import Plan
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kind_of

__all__ = ["Deferred", "OnFilter", "Planned", "Times", "View", "ways_of"]

SAMPLE_S, MOST_RUNS, LEAST_RUNS = 0.02, 50, 3
"""An operator is run until so many seconds have passed, so often at the most and at the least."""
QUEUED_RUNS = 20
"""So often it is run on a GPU, whose queue hides what a call takes the host."""
BY_STRIDES = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default})
"""Views that name strides, and so hold for one format alone."""
MOST_COMBINATIONS = 6
"""Combinations of formats of an operator's inputs that are tried."""


@dataclass(frozen=True)
class View:
    """A view of another tensor: strides and offset in elements from where that one begins."""

    strides: Strides
    offset: int


@dataclass(frozen=True)
class Planned:
    """A plan of one of the problems of a fused layer.

    ``weight`` is what the plan's filters are, where that is not the layer's weight: the layer and others before it,
    which are :class:`Deferred`, are then computed as one. With ``scaled`` the filter is what the gate before the layer
    gives, which then is :class:`OnFilter`.
    """

    product: Product
    plan: Plan
    weight: Gathered | None = None
    scaled: bool = False


@dataclass(frozen=True)
class Deferred:
    """A fused layer that is computed together with a later one, called ``reader``."""

    reader: str


@dataclass(frozen=True)
class OnFilter:
    """A gate whose factors multiply the filter ``weight`` of the layer behind it, called ``reader``, by ``call``.

    ``image`` is the place of the image among the gate's two inputs. The layer then reads that image.
    """

    call: Pixels
    weight: fx.Node
    reader: str
    image: int


SOME = 1 << 16
"""Different numbers of a tensor that is measured with."""


class Times:
    """What operators take in milliseconds on ``device``, each measured once; conversions between formats as well."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[Any, float] = {}

    def of(self, key: Any, run: Callable[[], object]) -> float:
        """The time of ``run()``, which ``key`` stands for."""
        if key not in self._known:
            self._known[key] = _measured(run) if self.device.type == "cpu" else _measured_queued(run, self.device)
        return self._known[key]

    def example(self, shape: Sequence[int], strides: Strides, dtype: torch.dtype) -> Tensor:
        """A tensor to measure with: normal numbers, or zeros where the dtype has no fractions.

        Its memory is filled, not the tensor: one that is expanded cannot be written to.
        """
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        numbers = torch.zeros(count, dtype=dtype, device=self.device)
        if dtype.is_floating_point:
            some = numbers[:SOME].normal_(generator=torch.Generator(self.device).manual_seed(0))
            # The same numbers over and over: to draw millions takes longer than to measure.
            for start in range(SOME, count, SOME):
                numbers[start : start + SOME].copy_(some[: count - start])
        return numbers.as_strided(tuple(shape), strides)

    def conversion(self, value: Tensor) -> float:
        """What it takes to copy a tensor into another format."""
        shape, dtype = tuple(value.shape), value.dtype
        key = "conversion", shape, dtype
        if key in self._known:
            return self._known[key]
        source, target = (self.example(shape, formats(shape)[i], dtype) for i in (-1, 0))
        return self.of(key, lambda: target.copy_(source))


def ways_of(
    unit: Unit,
    known: Mapping[fx.Node, set[Strides]],
    times: Times,
    plans: Mapping[Problem, Sequence[Plan]],
) -> tuple[Way, ...]:
    """The ways of one part. ``known`` are the formats in which tensors may come, ``plans`` those of the products,
    the best first.

    Raises :class:`Untraceable` where there is none.
    """
    if unit.kind == PRODUCT:
        found = list(_products(unit, known, plans)) or [_by_torch(unit, known, times)]
    elif unit.kind == VIEW:
        found = list(_views(unit, known))
    elif unit.kind == JOINED:
        found = list(_joined(unit, times))
    else:
        kernels = _by_kernels((*pixel_ways(unit), *norm_ways(unit)), times, unit.value.dtype)
        found = [*kernels, *_poolings(unit, times, plans), *_operators(unit, known, times)]
    if not found:
        raise Untraceable(f"{unit.overload or unit.name} cannot be run by itself")
    return tuple(found)


def _products(
    unit: Unit, known: Mapping[fx.Node, set[Strides]], plans: Mapping[Problem, Sequence[Plan]]
) -> Iterator[Way]:
    """A way for each plan of each problem."""
    for product in products_of(unit):
        reads = [product.reads, *[next(iter(known[node])) for node in unit.inputs[1:]]]
        if unit.node.args[3] is not None:
            reads[-1] = product.gives
        for plan in plans.get(product.problem, ()):
            if math.isfinite(plan.time_ms):
                error = 0.0 if plan.error is None else plan.error.l2  # of one that was not checked yet: if it is chosen
                yield Way(tuple(reads), product.gives, plan.time_ms, Planned(product, plan), error)


def _by_torch(unit: Unit, known: Mapping[fx.Node, set[Strides]], times: Times) -> Way:
    """The way of a fused layer that has no plan: torch's operators one after the other."""
    places = {node: Place(index) for index, node in enumerate(unit.inputs)}
    arguments = tuple(places[a] if isinstance(a, fx.Node) else a for a in unit.node.args)
    run = Call(unit.node.target.__name__, arguments)  # type: ignore[union-attr]
    reads = tuple(
        formats(value_of(node).shape)[0] if len(known[node]) > 1 else next(iter(known[node])) for node in unit.inputs
    )
    x = value_of(unit.inputs[0])
    formats_of = zip(unit.inputs, reads, strict=True)
    tensors = [times.example(value_of(node).shape, format_, x.dtype) for node, format_ in formats_of]
    with torch.no_grad():
        result = run(*tensors)
    key = run.function, repr(arguments[4:]), tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
    return Way(reads, normal(result.shape, result.stride()), times.of(key, lambda: run(*tensors)), run)


def _views(unit: Unit, known: Mapping[fx.Node, set[Strides]]) -> Iterator[Way]:
    """A way for each format of the source that has such a view."""
    (source,) = unit.inputs[:1]
    value = value_of(source)
    possible = list(known[source])
    if unit.overload in BY_STRIDES:
        possible = [f for f in possible if f == normal(value.shape, value.stride())]
    for format_ in possible:
        tensor = torch.empty_strided(tuple(value.shape), format_, dtype=value.dtype, device="meta")
        try:
            view = _call(unit, [tensor, *unit.inputs[1:]])
        except (RuntimeError, ValueError):
            continue  # this format has no such view, another one or a conversion does
        strides = normal(view.shape, view.stride())
        yield Way((format_,), strides, 0.0, View(strides, int(view.storage_offset())))


def _operators(unit: Unit, known: Mapping[fx.Node, set[Strides]], times: Times) -> Iterator[Way]:
    """A way for each combination of formats of the inputs."""
    for combination in _combinations(unit, known):
        if unit.overload is ATTENTION and any(strides[-1] != 1 for strides in combination):
            continue  # it takes for granted what torch's function asks before it calls it
        tensors = [
            times.example(value_of(node).shape, strides, value_of(node).dtype)
            for node, strides in zip(unit.inputs, combination, strict=True)
        ]
        try:
            result = _call(unit, tensors)
        except (RuntimeError, ValueError):
            continue  # as a group norm refuses inputs that lie in neither layout: others may do
        if tuple(result.shape) != tuple(unit.value.shape) or result.dtype is not unit.value.dtype:
            raise Untraceable(f"{unit.overload} gives another shape when it is run than when it was traced")
        gives = normal(result.shape, result.stride())
        operator, out = _written(unit, times.device), None
        if operator.out:
            out = torch.empty_strided(tuple(result.shape), gives, dtype=result.dtype, device=times.device)
        arguments = tensors if out is None else [*tensors, out]
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        key = str(operator.overload), repr(operator.arguments), repr(operator.keywords), shapes

        def run(operator: Operator = operator, arguments: list[Tensor] = arguments) -> None:
            operator.run(*arguments)

        yield Way(combination, gives, times.of(key, run), operator)


def _by_kernels(
    found: Iterable[tuple[KernelCall | RowNorm, tuple[Strides, ...], Strides]], times: Times, dtype: torch.dtype
) -> Iterator[Way]:
    """The ways of a part by kernels of ours: each call with the formats that it reads and the one it gives."""
    for call, reads, gives in found:
        given = zip(call.shapes, (*reads, gives), strict=True)
        tensors = [times.example(shape, strides, dtype) for shape, strides in given]
        yield Way(reads, gives, times.of(call, functools.partial(call, *tensors)), call)


def _poolings(unit: Unit, times: Times, plans: Mapping[Problem, Sequence[Plan]]) -> Iterator[Way]:
    """The ways of a pooling by the best plan of ours in each layout, timed as torch's operator is."""
    for product in pooling_products(unit):
        problem = product.problem
        own = [plan for plan in plans.get(problem, ()) if plan.solver != kind_of(problem).baseline]
        for plan in own[:1]:
            x, out = (times.example(*product.described(role), unit.value.dtype) for role in ("x", "y"))
            run = functools.partial(planned(execute.bind(plan, problem, x, out)), x, out)
            yield Way((product.reads,), product.gives, times.of((problem, plan), run), Planned(product, plan))


def _joined(unit: Unit, times: Times) -> Iterator[Way]:
    """The ways of images that are joined, scaled and shifted: by torch in each format, and by a kernel of ours."""
    *parts, scale, _ = unit.inputs
    numbers = tuple(value_of(scale).shape)
    activation = unit.node.args[3]
    for layout in range(len(formats(unit.value.shape))):
        possible = [formats(value_of(node).shape) for node in parts]
        reads = [each[min(layout, len(each) - 1)] for each in possible]
        dtype = unit.value.dtype
        tensors = [times.example(value_of(node).shape, f, dtype) for node, f in zip(parts, reads, strict=True)]
        tensors += [times.example(numbers, (1,), dtype) for _ in range(2)]
        places = tuple(map(Place, range(len(tensors))))
        run = Call("joined", (places[:-2], *places[-2:], activation))
        with torch.no_grad():
            result = run(*tensors)
        key = run.function, activation, tuple((tuple(t.shape), t.stride()) for t in tensors)
        gives = normal(result.shape, result.stride())
        yield Way((*reads, (1,), (1,)), gives, times.of(key, functools.partial(run, *tensors)), run)
    yield from _by_kernels(join_ways(unit), times, unit.value.dtype)


def _combinations(unit: Unit, known: Mapping[fx.Node, set[Strides]]) -> list[tuple[Strides, ...]]:
    """Formats of the inputs that are worth a try: the same layout for all, and each as it may come."""
    options: list[list[Strides]] = []
    for node in unit.inputs:
        possible = sorted(known[node])
        options.append(possible)
    combinations: list[tuple[Strides, ...]] = []
    for layout in range(2):
        alike = []
        for node, possible in zip(unit.inputs, options, strict=True):
            wanted = formats(value_of(node).shape)[-1 if layout else 0]
            alike.append(wanted if wanted in possible else possible[0])
        combinations.append(tuple(alike))
    combinations += itertools.islice(itertools.product(*options), MOST_COMBINATIONS)
    return list(dict.fromkeys(combinations))[:MOST_COMBINATIONS]


def _call(unit: Unit, tensors: Sequence[Any]) -> Tensor:
    """The result of a part on ``tensors``."""
    operator = Operator(unit.overload, unit.arguments, unit.keywords or {}, result=unit.result)
    with torch.no_grad():
        return operator.run(*tensors)


def _written(unit: Unit, device: torch.device) -> Operator:
    """The operator of a part: one that writes into a given result where torch has a kernel for that."""
    plain = Operator(unit.overload, unit.arguments, unit.keywords or {}, result=unit.result)
    schema = unit.overload._schema
    packet = unit.overload.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs = [a for a in overload._schema.arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        if len(outs) != 1 or others != [(a.name, str(a.type)) for a in schema.arguments]:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), device.type.upper()):
            return Operator(overload, unit.arguments, unit.keywords or {}, out=outs[0].name)
    return plain


def _measured(run: Callable[[], object]) -> float:
    """The least time of ``run()`` in milliseconds, of runs for :data:`SAMPLE_S` seconds."""
    pause()
    with torch.no_grad():
        run()
        taken: list[float] = []
        start = time.perf_counter()
        while len(taken) < LEAST_RUNS or (len(taken) < MOST_RUNS and time.perf_counter() - start < SAMPLE_S):
            begin = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begin)
    return min(taken) * 1e3


def _measured_queued(run: Callable[[], object], device: torch.device) -> float:
    """The time of ``run()`` on a GPU in milliseconds: of many that are queued one after the other."""
    pause()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad(), torch.cuda.device(device):
        for _ in range(LEAST_RUNS):
            run()
        first.record()
        for _ in range(QUEUED_RUNS):
            run()
        last.record()
        last.synchronize()
    return float(first.elapsed_time(last)) / QUEUED_RUNS
