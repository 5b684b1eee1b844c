"""The tests of solvers, tested: a toy solver that is wrong in one way, in one pass and dimension, must not pass them.

What counts is what ``make test`` runs: the sample of a solver's cases that :mod:`tests.sampling` takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase
from tests import toys
from tests.conftest import named
from tests.sampling import sample
from tests.solvers.test_solvers import cases, exercise

from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import Run, Solver

PLACES = list(itertools.product(Pass, (1, 2, 3)))
NAMES = ("solver", "pass_", "dims", "dtype", "precision", "device")
FOUND = (Phase.explicit, Phase.generate)
"""A failure is all that is asked for, not the simplest one."""
Change = Callable[[Run, ConvProblem], Run]


class Toy(toys.Plain):
    """Right but where its problem is at ``place``: there ``change`` makes of its run what it wants."""

    name, version = "toy", 1
    devices = frozenset({"cpu"})
    accumulates = adds_bias = True
    scratch = 300
    place: ClassVar[tuple[Pass, int] | None] = None
    change: ClassVar[Change]

    def bind(self, p: ConvProblem, *arguments: Any) -> Run:
        run = super().bind(p, *arguments)
        return type(self).change(run, p) if (p.pass_, p.dims) == self.place else run


def kept_cases(solver: Solver) -> list[tuple[Any, ...]]:
    """The cases of ``solver`` that ``make test`` runs."""
    every = [case.values for case in cases([solver])]  # type: ignore[attr-defined]
    parameters = [named(dict(zip(NAMES, case, strict=True))) for case in every]
    return [every[i] for i in sorted(sample(parameters, 0, ("solver", "device", "pass_", "dims")))]


def scaled(run: Run, p: ConvProblem) -> Run:
    """The result of the products is 1.01 times what it should be."""

    def changed(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
        return run(_like(a).mul_(1.01), b, *others)

    return changed


def _zeroed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last element is zero."""
    copy = _like(tensor)
    copy[tuple(n - 1 for n in copy.shape)] = 0.0
    return copy


def without_the_last(run: Run, p: ConvProblem) -> Run:
    """The last element of the first operand counts as zero."""

    def changed(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
        return run(_zeroed(a), b, *others)

    return changed


def without_the_last_filter(run: Run, p: ConvProblem) -> Run:
    """The last element of the second operand counts as zero."""

    def changed(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
        return run(a, _zeroed(b), *others)

    return changed


def unwritten(run: Run, p: ConvProblem) -> Run:
    """The last element of the result stays as it was."""

    def changed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *others: Any) -> torch.Tensor:
        last = tuple(n - 1 for n in out.shape)
        before = out[last].clone()
        run(a, b, out, *others)
        out[last] = before
        return out

    return changed


def set_where_it_adds(run: Run, p: ConvProblem) -> Run:
    """What was there before is lost."""

    def changed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *others: Any) -> torch.Tensor:
        if p.accumulate:
            out.zero_()
        return run(a, b, out, *others)

    return changed


def added_twice(run: Run, p: ConvProblem) -> Run:
    """Its sum goes into the result two times."""

    def changed(*arguments: Any) -> torch.Tensor:
        if p.accumulate:
            run(*arguments)
        return run(*arguments)

    return changed


def groups_in_another_order(run: Run, p: ConvProblem) -> Run:
    """Each group's channels of the first operand are another's."""

    def changed(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
        mixed = _like(a)
        mixed.copy_(a.roll(a.shape[1] // p.groups, 1))
        return run(mixed, b, *others)

    return changed


def without_bias(run: Run, p: ConvProblem) -> Run:
    """A bias is taken and not added."""

    def changed(a: torch.Tensor, b: torch.Tensor, out: Any, workspace: Any, *bias: torch.Tensor) -> torch.Tensor:
        return run(a, b, out, workspace, *map(torch.zeros_like, bias))

    return changed


def beyond_its_workspace(run: Run, p: ConvProblem) -> Run:
    """One byte more than was asked for."""

    def changed(a: torch.Tensor, b: torch.Tensor, out: Any, workspace: torch.Tensor, *bias: Any) -> torch.Tensor:
        workspace.as_strided((1,), (1,), workspace.storage_offset() + workspace.numel()).zero_()
        return run(a, b, out, workspace, *bias)

    return changed


MUTANTS: tuple[Change, ...] = (
    scaled, without_the_last, without_the_last_filter, unwritten, set_where_it_adds, added_twice,
    groups_in_another_order, without_bias, beyond_its_workspace,
)  # fmt: skip


def _like(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, as the toy wants what it was bound to."""
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    return copy.copy_(t)


def toy(place: tuple[Pass, int] | None = None, change: Change = scaled) -> Solver:
    made: type[Solver] = type("Toy", (Toy,), {"place": place, "change": staticmethod(change)})
    return made()


def survives(solver: Solver, place: tuple[Pass, int]) -> bool:
    """Whether the cases of ``place`` that ``make test`` runs pass; the toy is right in all others."""
    try:
        for case in kept_cases(solver):
            if case[1:3] == place:
                exercise(*case, phases=FOUND)
    except Exception:  # as pytest takes it
        return False
    return True


def test_each_pass_and_dimension_has_a_case_in_the_most_exact_type() -> None:
    kept = kept_cases(toy())
    assert {case[1:3] for case in kept if case[3] == "fp32"} == set(PLACES)
    assert {case[3] for case in kept} == {"fp32", "fp16", "bf16"}
    assert len(kept) < len(cases([toy()]))


def test_the_toy_is_right_where_nothing_is_changed() -> None:
    for case in kept_cases(toy()):
        exercise(*case, phases=FOUND)


@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
def test_no_mutant_survives(change: Change) -> None:
    alive = [place for place in PLACES if not _cannot(change, place) and survives(toy(place, change), place)]
    assert alive == []


CLASSES: dict[str, Callable[[ConvProblem], bool]] = {
    "odd sizes": lambda p: any(axis.size % 2 for axis in p.axes),
    "even sizes": lambda p: all(axis.size % 2 == 0 for axis in p.axes),
    "one image": lambda p: p.batch == 1,
    "several images": lambda p: p.batch > 1,
    "strides": lambda p: any(axis.stride > 1 for axis in p.axes),
    "dilation": lambda p: any(axis.dilation > 1 for axis in p.axes),
    "even kernels": lambda p: any(axis.kernel % 2 == 0 for axis in p.axes),
    "large kernels": lambda p: any(axis.kernel > 5 for axis in p.axes),
    "uneven padding": lambda p: any(axis.before != axis.after for axis in p.axes),
    "groups": lambda p: p.groups > 1,
    "depthwise": lambda p: p.in_channels == p.out_channels == p.groups > 1,
    "results of a channel": lambda p: p.in_channels == p.groups > 1 and p.out_channels > p.groups,
    "images in channels_last": lambda p: p.layouts[0] == "channels_last",
    "filters in channels_last": lambda p: p.layouts[1] == "channels_last",
    "results in channels_last": lambda p: p.layout(p.result) == "channels_last",
    "views": lambda p: p.layouts[0] == "view",
    "adding": lambda p: p.accumulate,
}


@pytest.mark.parametrize("name", CLASSES)
def test_no_mutant_of_one_class_of_problems_survives(name: str) -> None:
    """Wrong by 1.01 in some problems alone, of one pass and dimension."""

    def change(run: Run, p: ConvProblem) -> Run:
        return scaled(run, p) if CLASSES[name](p) else run

    assert [place for place in PLACES if survives(toy(place, change), place)] == []


def _cannot(change: Change, place: tuple[Pass, int]) -> bool:
    """Whether there is nothing to be wrong: a weight's gradient has no bias."""
    return change is without_bias and place[0] is Pass.WGRAD
