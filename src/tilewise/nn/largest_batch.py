"""The largest batch with which a model's step stays within a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, Unpack

from torch import nn

from tilewise.nn.arguments import check_function, check_model, in_line, settings_of, takes, unwrapped
from tilewise.nn.example_errors import explained
from tilewise.nn.layers.kinds import kind_of
from tilewise.nn.layers.swaps import swap_back
from tilewise.nn.layers.weights import Weights
from tilewise.nn.memory.moments import swaps_kept
from tilewise.nn.memory.step_planner import StepTooLarge, memory_bytes, profile
from tilewise.nn.optimize import optimize
from tilewise.nn.report import report
from tilewise.nn.step.step import Step
from tilewise.planner import NoPlanError, Planner, Progress
from tilewise.planner.measuring.times import interleaved
from tilewise.settings import LargestBatchOptions, Settings

__all__ = ["LargestBatch", "largest_batch"]

Model = TypeVar("Model", bound=nn.Module)
FIRST = (2, 4)
"""Batches that are profiled first: a normalisation over one value has no meaning."""
PROFILES, PLANNED = 12, 6
"""The most batches that are profiled on the way to the largest, and the most that are planned."""


@dataclass(frozen=True)
class LargestBatch:
    """The result of :func:`largest_batch`: ``batch`` is the number of examples that fit.

    ``step`` has the limit, the peak and the memory at each kernel (``step`` in ``docs/json.md``). ``step_ms`` is the
    median time of a step in milliseconds.

    >>> found = tilewise.nn.LargestBatch(batch=64, step={"peak": 2**30}, step_ms=128.0)
    >>> found.image_ms
    2.0
    """

    batch: int
    step: Mapping[str, Any]
    step_ms: float

    @property
    def image_ms(self) -> float:
        """Milliseconds of a step per example."""
        return self.step_ms / self.batch


@takes(LargestBatchOptions)
def largest_batch(
    model: Model,
    make_inputs: Callable[[int], object],
    memory_limit: int | str,
    *,
    memory_step: Callable[[Model, object], object] | None = None,
    settings: Settings | None = None,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    progress: Progress | None = None,
    planner: Planner | None = None,
    **options: Unpack[LargestBatchOptions],
) -> LargestBatch:
    """The largest batch whose step keeps ``memory_limit``, with the model left planned for it.

    What is alive grows by about as much with every example: two small batches tell where to look, and steps are run
    there.

    - ``make_inputs(n)``: gives example inputs of batch ``n`` as :func:`tilewise.optimize` takes them.
    - ``memory_limit``: what a step may take on its device, in bytes, as text (``"16GiB"``) or a share (``"80%"``).
    - ``memory_step(model, inputs)``: the caller's own step, else the one that ``optimize`` runs.
    {arguments}

    Options, each by keyword:

    {options}

    Raises ``NoPlanError`` where not even a batch of one fits, ``ValueError`` for a limit that is none, and what
    ``optimize`` and the model raise.

    On a GPU:

    >>> def images(batch):
    ...     return torch.randn(batch, 3, 224, 224, device="cuda")
    >>> found = tilewise.largest_batch(model, images, "16GiB")  # doctest: +SKIP
    >>> found.batch, found.step["peak"], found.image_ms  # doctest: +SKIP
    """
    check_model(model)
    check_function("memory_step", memory_step, "model, inputs")
    if not callable(make_inputs):
        raise ValueError(f"make_inputs={in_line(make_inputs)}: a function of a batch's size would do")
    merged = settings_of("largest_batch", LargestBatchOptions, settings, options)
    batches = Batches(model, make_inputs, memory_step, merged)
    limit = memory_bytes(memory_limit, batches.step(1).device)
    plan = partial(
        optimize,
        model,
        settings=replace(merged, memory_limit=limit),
        filter_fn=filter_fn,
        progress=progress,
        planner=planner,
    )
    first, per_example = _largest(batches.floor, limit)
    good = _narrowed(partial(batches.excess, limit, plan), first, per_example)
    if not good:
        raise NoPlanError(f"memory_limit={memory_limit!r}: no batch was found in {PLANNED} that were planned")
    return LargestBatch(good, batches.facts, batches.time_ms(good))


class Batches:
    """Steps of ``model`` with batches of any size.

    Only the inputs of one batch are alive at a time, so that no other counts as memory. ``facts`` describes the step
    that was planned last and kept its limit (``step`` in ``docs/json.md``).
    """

    def __init__(
        self,
        model: nn.Module,
        make_inputs: Callable[[int], object],
        memory_step: Callable[[Any, object], object] | None,
        asked: Settings,
    ) -> None:
        self._model, self._make_inputs, self._memory_step = model, make_inputs, memory_step
        self._training = asked.training
        self._weights = Weights.of(training=asked.training, frozen=asked.frozen)
        named_modules = unwrapped(model).named_modules()
        self._modules = {
            name: module
            for name, module in named_modules
            if (kind := kind_of(module)) is not None and not kind.obstacle(module)
        }
        self._inputs: object = None
        self.facts: dict[str, Any] = {}

    def step(self, batch: int) -> Step:
        """The step of ``batch`` examples, with newly made inputs."""
        self._inputs = None
        self._inputs = inputs = self._make_inputs(batch)
        examples = inputs if isinstance(inputs, list) else [inputs]
        return Step(self._model, examples, self._own_step(), training=self._training)

    def floor(self, batch: int) -> float:
        """Bytes that a step takes with no workspace for any kernel; infinity where the device has too little memory."""
        with swaps_kept(self._modules.values()):
            for module in self._modules.values():
                swap_back(module)
            try:
                step = self.step(batch)
                inputs = self._inputs if isinstance(self._inputs, list) else [self._inputs]
                with explained(self._model, inputs, 0, argument=f"make_inputs({batch})"):
                    return profile(step, self._modules, self._weights).floor
            except NoPlanError:
                return math.inf

    def excess(self, limit: int, plan: Callable[..., object], batch: int) -> int:
        """Plan a step of ``batch`` examples and return its bytes above ``limit``; 0 or fewer where it fits.

        ``plan`` is :func:`optimize` with its arguments. Where the step exceeds the limit, the model stays planned for
        the last batch that fitted. Raises ``StepTooLarge`` where not even one example fits.
        """
        self.step(batch)
        try:
            plan(self._inputs, memory_step=self._own_step())
        except StepTooLarge as error:
            if batch == 1:
                raise
            return max(1, error.least - limit)
        self.facts = dict(report(self._model).facts["step_memory"])
        return min(0, int(self.facts["least"]) - limit)

    def time_ms(self, batch: int) -> float:
        """The median milliseconds of a step, as the model is planned now."""
        step = self.step(batch)
        with step.repeatable():
            (time_ms,) = interleaved([step], step.device, budget_ms=2000.0, least=3, most=21)
        return time_ms

    def _own_step(self) -> Callable[[Any], object] | None:
        """The caller's step applied to the inputs made last; ``None`` where the caller gave none."""
        return None if self._memory_step is None else partial(_run_step, self._memory_step, self._inputs)


def _largest(floor: Callable[[int], float], limit: int) -> tuple[int, float]:
    """The largest batch whose floor is within ``limit`` (at least 1), and the bytes that each further example adds.

    ``floor(batch)`` must not decrease; it is close to a straight line, by which the next batch to try is guessed.
    """
    floors = {batch: floor(batch) for batch in FIRST}
    slope = max(1.0, (floors[FIRST[1]] - floors[FIRST[0]]) / (FIRST[1] - FIRST[0]))
    if not math.isfinite(slope):
        return 1, 1.0
    for turn in range(PROFILES):
        fits = max((b for b, size in floors.items() if size <= limit), default=0)
        exceeds = min((b for b, size in floors.items() if size > limit), default=None)
        if exceeds is not None and exceeds - fits <= 1:
            break
        start = fits or FIRST[0]
        guess = start + math.floor((limit - floors[start]) / slope)
        if exceeds is not None:  # by the line and by halving in turns: allocators round
            guess = min(exceeds - 1, guess) if turn % 2 == 0 else (fits + exceeds) // 2
        guess = max(fits + 1, guess)
        floors[guess] = floor(guess)
        if fits and math.isfinite(floors[guess]) and floors[guess] > floors[fits]:
            slope = max(1.0, (floors[guess] - floors[fits]) / (guess - fits))
    return max([1, *(b for b, size in floors.items() if size <= limit)]), slope


def _narrowed(excess: Callable[[int], int], first: int, per_example: float) -> int:
    """The largest batch of those tried, from ``first`` on, whose step keeps its limit; 0 where none does.

    ``excess(batch)`` is the bytes by which a step exceeds its limit, 0 or fewer where it fits. An excess is accurate to
    a few percent only, because it is the memory that the allocator had to be granted. So where it points outside the
    interval between a batch that fits and one that does not, the interval is halved.
    """
    fits, exceeds, batch = 0, None, first
    for _ in range(PLANNED):
        over = excess(batch)
        fits, exceeds = (fits, batch) if over > 0 else (batch, exceeds)
        batch -= math.ceil(over / per_example)
        if exceeds is None and batch <= fits:
            break
        if exceeds is not None:
            if exceeds - fits <= 1:
                break
            if not fits < batch < exceeds:
                batch = (fits + exceeds) // 2
    return fits


def _run_step(memory_step: Callable[[Any, object], object], inputs: object, model: nn.Module) -> object:
    """Call the caller's step; ``functools.partial`` binds the first two arguments and leaves ``model``."""
    return memory_step(model, inputs)
