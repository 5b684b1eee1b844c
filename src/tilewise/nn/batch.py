"""The largest batch with which a model's step stays within a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from tilewise.nn.geometry import Weights
from tilewise.nn.modules import is_convolution, obstacle
from tilewise.nn.optimize import optimize, unwrapped
from tilewise.nn.report import report
from tilewise.nn.step import Step
from tilewise.nn.swaps import swap_back
from tilewise.nn.watch import swaps_kept
from tilewise.nn.within import StepTooLarge, memory_bytes, profile
from tilewise.planner import NoPlanError
from tilewise.planner.measure import interleaved

__all__ = ["LargestBatch", "largest_batch"]

Model = TypeVar("Model", bound=nn.Module)
FIRST = (2, 4)
"""Batches that are profiled first: a normalisation over one value has no meaning."""
PROFILES, PLANNED = 12, 6
"""Batches that are profiled on the way to the largest, and planned, at most."""


@dataclass(frozen=True)
class LargestBatch:
    """``batch`` examples fit. ``step``: its limit, peak and moments (``step`` in ``docs/json.md``).

    ``step_ms``: median time of a step, in ms.
    """

    batch: int
    step: Mapping[str, Any]
    step_ms: float

    @property
    def image_ms(self) -> float:
        """Time of a step by its examples."""
        return self.step_ms / self.batch


def largest_batch(
    model: Model,
    make_inputs: Callable[[int], object],
    memory_limit: int | str,
    *,
    memory_step: Callable[[Model, object], object] | None = None,
    training: bool = True,
    frozen: bool = False,
    **options: Any,
) -> LargestBatch:
    """The largest batch whose step keeps ``memory_limit``, with the model left planned for it.

    ``make_inputs(n)`` gives example inputs of batch ``n`` as :func:`tilewise.optimize` takes them; ``memory_step(model,
    inputs)`` is the caller's own step, else the one that ``optimize`` runs. ``options`` are ``optimize``'s others. What
    is alive grows by about as much with every example: two small batches tell where to look, and steps are run there.

    Raises ``NoPlanError`` where not even a batch of one fits, ``ValueError`` for a limit that is none, and what
    ``optimize`` and the model raise.
    """
    weights = Weights.of(training=training, frozen=frozen)
    inputs: dict[int, object] = {}

    def step_of(batch: int) -> Step:
        inputs.clear()  # those of another batch are not to count
        inputs[batch] = made = make_inputs(batch)
        own = None if memory_step is None else _with(memory_step, made)
        return Step(model, made if isinstance(made, list) else [made], own, training=training)

    limit = memory_bytes(memory_limit, step_of(1).device)
    inner = unwrapped(model)
    modules = {name: m for name, m in inner.named_modules() if is_convolution(m) and not obstacle(m)}

    def floor(batch: int) -> float:
        with swaps_kept(modules.values()):
            for module in modules.values():
                swap_back(module)
            try:
                return profile(step_of(batch), modules, weights).floor
            except NoPlanError:  # not in the device's memory
                return math.inf

    facts: dict[str, Any] = {}

    def excess(batch: int) -> int:
        step_of(batch)
        own = None if memory_step is None else _with(memory_step, inputs[batch])
        try:
            asked = options | {"training": training, "frozen": frozen}
            optimize(model, inputs[batch], memory_limit=limit, memory_step=own, **asked)
        except StepTooLarge as error:  # the model is left as the last batch that fitted was planned
            if batch == 1:
                raise
            return max(1, error.least - limit)
        facts.clear()
        facts.update(report(model).facts["step"])
        return min(0, int(facts["least"]) - limit)

    good = _narrowed(excess, *_largest(floor, limit))
    if not good:
        raise NoPlanError(f"memory_limit={memory_limit!r}: no batch was found in {PLANNED} that were planned")
    step = step_of(good)
    with step.repeatable():
        (step_ms,) = interleaved([step], step.device, budget_ms=2000.0, least=3, most=21)
    return LargestBatch(good, facts, step_ms)


def _largest(floor: Callable[[int], float], limit: int) -> tuple[int, float]:
    """The largest batch whose floor is within ``limit``, 1 where none is, and bytes that an example adds.

    ``floor`` must not fall; it is about a straight line.
    """
    known = {batch: floor(batch) for batch in FIRST}
    slope = max(1.0, (known[FIRST[1]] - known[FIRST[0]]) / (FIRST[1] - FIRST[0]))
    if not math.isfinite(slope):
        return 1, 1.0
    for turn in range(PROFILES):
        good = max((b for b, size in known.items() if size <= limit), default=0)
        bad = min((b for b, size in known.items() if size > limit), default=None)
        if bad is not None and bad - good <= 1:
            break
        start = good or FIRST[0]
        guess = start + math.floor((limit - known[start]) / slope)
        if bad is not None:  # by the line and by halving in turns: allocators round
            guess = min(bad - 1, guess) if turn % 2 == 0 else (good + bad) // 2
        guess = max(good + 1, guess)
        known[guess] = floor(guess)
        if good and math.isfinite(known[guess]) and known[guess] > known[good]:
            slope = max(1.0, (known[guess] - known[good]) / (guess - good))
    return max([1, *(b for b, size in known.items() if size <= limit)]), slope


def _narrowed(excess: Callable[[int], int], first: int, per_example: float) -> int:
    """The largest batch of those tried, from ``first`` on, whose step is not above its limit; 0 where each is.

    ``excess``: bytes by which a step is above it, none or fewer where it is not. Above it they are known to a few
    percent only, as they are what an allocator had to be let have: between a batch that fits and one that does not is
    halved where they point outside.
    """
    good, bad, batch = 0, None, first
    for _ in range(PLANNED):
        over = excess(batch)
        good, bad = (good, batch) if over > 0 else (batch, bad)
        batch -= math.ceil(over / per_example)
        if bad is None and batch <= good:
            break
        if bad is not None:
            if bad - good <= 1:
                break
            if not good < batch < bad:
                batch = (good + bad) // 2
    return good


def _with(memory_step: Callable[[Any, object], object], inputs: object) -> Callable[[Any], object]:
    return lambda model: memory_step(model, inputs)
