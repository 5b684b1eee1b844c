"""Recurrent modules whose calls differ in length and batch: few plans, used for all of them, and results as torch's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.recurrent_plans import CLASSES, close, flat, forced, with_gradients
from tests.nn.test_recurrent_modules import optimized
from tests.sampling import some
from torch import nn

import tilewise
from tilewise.nn.layers.kinds import run_by_plans
from tilewise.nn.layers.recurrent.call import describe, given_of
from tilewise.nn.layers.recurrent.layer import MOST_CALLS, WIDTH, RecurrentLayer, _step
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import get

NUMBA = not get("resident_rnn").why_not(RecurrentProblem("lstm", 1, 1, 1, 1))


def layer_of(module: nn.Module) -> RecurrentLayer:
    layer: RecurrentLayer = module.forward.__func__._tilewise_planned  # type: ignore[attr-defined]
    return layer


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_sizes_of_a_range_differ_by_less_than_its_width(one: int, other: int) -> None:
    if _step(one) == _step(other):
        assert max(one, other) < max(2, min(one, other) * WIDTH + 1e-6)
    else:
        assert (_step(one) < _step(other)) == (one < other)


@settings(max_examples=some(20), deadline=None)
@given(data=st.data())
def test_results_are_torchs_at_any_length(data: st.DataObject) -> None:
    kind, both = data.draw(st.sampled_from(CLASSES)), data.draw(st.booleans())
    module = kind(3, 5, 2, bidirectional=both)
    twin, table = forced(module)
    for time, batch in data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=2, max_size=6)):
        x = torch.randn(time, batch, 3, requires_grad=True)
        close(with_gradients(twin, x), with_gradients(module, x))
    ranges = {(_step(p.time), _step(p.batch)) for p in table.asked if isinstance(p, RecurrentProblem)}
    assert len(ranges) == len(table.asked)


@pytest.mark.skipif(not NUMBA, reason="the solver needs Numba")
def test_a_compiled_kernel_runs_at_any_length() -> None:
    module = nn.LSTM(3, 9)
    twin, table = forced(module, "resident_rnn")
    for time in (20, 23, 21):
        x = torch.randn(time, 2, 3, requires_grad=True)
        close(with_gradients(twin, x), with_gradients(module, x))
    assert [getattr(p, "time", 0) for p in table.asked] == [20]


def test_plans_and_what_runs_them_stay_bounded() -> None:
    module = nn.GRU(2, 3)
    twin, table = forced(module)
    kinds = [(time, batch) for time in range(1, 14) for batch in range(1, 14)]
    assert len(kinds) > MOST_CALLS
    with torch.no_grad():
        for time, batch in kinds:
            x = torch.randn(time, batch, 2)
            close(flat(twin(x)), flat(module(x)))
    assert len(table.asked) == len({(_step(time), _step(batch)) for time, batch in kinds}) < len(kinds) / 2
    layer = layer_of(twin)
    assert len(layer._runs) <= MOST_CALLS
    assert len(layer.known) == len(table.asked)


def test_modules_of_one_table_share_ranges() -> None:
    module = nn.LSTM(3, 5)
    twin, table = forced(module)
    other = copy.deepcopy(module)
    run_by_plans(other, RecurrentLayer(table))
    twin(torch.randn(20, 2, 3))
    other(torch.randn(21, 2, 3))
    assert len(table.asked) == 1


def test_a_length_that_was_planned_has_its_own_plan() -> None:
    module = nn.LSTM(3, 5)
    twin, table = forced(module)
    layer = layer_of(twin)
    calls = [describe(given_of(twin, torch.randn(time, 2, 3), None)) for time in (20, 21)]  # type: ignore[arg-type]
    table.plan([problem for call in calls for problem in layer.problems(call).values()], False)
    runs = [layer.resolve(call) for call in calls]
    assert [run.problem.time for run in runs if run is not None] == [20, 21]
    assert len(layer.known) == 2


def test_what_torch_wins_it_wins_at_all_lengths_of_the_range(tmp_path: Path) -> None:
    net = nn.LSTM(6, 8)
    twin, table = forced(net)
    twin(torch.randn(20, 2, 6))
    (problem,) = table.asked
    table.withhold([(problem, False)], "taken back")
    layer_of(twin).forget()
    x = torch.randn(21, 2, 6)
    assert torch.equal(twin(x)[0], net(x)[0])
    assert table.asked == [problem]


def test_a_solver_that_does_not_take_a_length_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.LSTM(3, 5)
    twin, table = forced(module)
    twin(torch.randn(20, 2, 3))
    solver = get("stepped")
    monkeypatch.setattr(solver, "unsupported", lambda p: ["too long"] if p.time == 21 else [], raising=False)
    x = torch.randn(21, 2, 3, requires_grad=True)
    close(with_gradients(twin, x), with_gradients(module, x))
    assert [getattr(p, "time", 0) for p in table.asked] == [20, 21]


def test_lengths_are_torchs_where_nothing_is_planned_later(tmp_path: Path) -> None:
    net = nn.LSTM(6, 8)
    optimized(net, torch.randn(20, 2, 6), tmp_path, unplanned="torch")
    plain = tilewise.restore(copy.deepcopy(net))
    x: Any = torch.randn(21, 2, 6)
    assert torch.equal(net(x)[0], plain(x)[0])
