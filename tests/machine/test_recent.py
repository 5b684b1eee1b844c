"""Tables that do not grow for ever, and what is kept in them: memory levels off whatever comes."""

from __future__ import annotations

import ast
import gc
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.sampling import EVERY

from tilewise.machine.recent import Recent, trim
from tilewise.nn import functional
from tilewise.nn.layers import compiled, layer, plan_table
from tilewise.nn.layers.geometry import Geometry
from tilewise.nn.layers.runner import Runner
from tilewise.planner import Options, Planner
from tilewise.planner.caches import measurements, plans
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass


@example(4, [("s", 0), ("s", 2), ("s", 0), ("s", 1), ("d", 0), ("d", 1)])
@given(st.integers(2, 9), st.lists(st.tuples(st.sampled_from("sgdp"), st.integers(0, 12)), max_size=60))
def test_what_was_used_last_is_there(most: int, steps: list[tuple[str, int]]) -> None:
    """Against a list in order of use: nothing wrong, nothing too much, and the last half of them always.

    What was taken out counts among the last, as it had its place in the table.
    """
    gone: list[int] = []
    table: Recent[int, int] = Recent(most, gone.extend)
    everything: dict[int, int] = {}
    used: list[int] = []
    for number, (step, key) in enumerate(steps):
        known = key in table
        if step == "s":
            table[key] = everything[key] = number
        elif step == "g":
            assert table.get(key, -1) in (-1, everything.get(key))
        elif step == "d" and key in table:
            del table[key]
        elif step == "p":
            table.pop(key, None)
        if known or key in table:
            used = [*(k for k in used if k != key), key]
        assert len(table) <= most
        assert dict(table.items()) == {k: everything[k] for k in table}
        if step in "dp":
            everything.pop(key, None)
        last = used[-(max(1, most // 2) - 1) :] if most > 3 else []
        assert {k for k in last if k in everything} <= set(table)
        for k in gone:
            assert k not in table or everything[k] == dict(table.items())[k]  # to look is no use
    with pytest.raises(KeyError):
        table[99]
    table.clear()
    assert not table


def test_threads_share_a_table() -> None:
    table: Recent[int, int] = Recent(64)
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for i in range(5000):
                key = (i * seed) % 97
                found = table.get(key)
                if found not in (None, key):
                    wrong.append(found)
                table[key] = key
                list(table)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(table) <= 64


def test_a_plain_table_is_trimmed() -> None:
    table: dict[int, int] = {}
    for i in range(50):
        trim(table, 8)
        table[i] = i
    assert list(table) == list(range(42, 50))


@pytest.mark.slow
@pytest.mark.parametrize("unplanned", ["torch", "plan"] if EVERY else ["plan"])
def test_new_sizes_for_ever(unplanned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small bounds: an hour of new sizes fills the tables, and after many what the library holds is the same."""
    monkeypatch.setattr(layer, "MOST_CALLS", 16)
    monkeypatch.setattr(plan_table, "MOST_ON_SIGHT", 64)
    monkeypatch.setattr(plans, "MOST_PLANS", 64)
    monkeypatch.setattr(measurements, "MOST_KNOWN", 16)
    geometry = Geometry.of(1, 1, 0, 1, 1, (3,), False, 0)
    assert geometry is not None
    kept = plan_table.PlanTable(Options(rigor="wisdom_only"), unplanned)
    one = layer.Layer(geometry, kept)
    w, b = torch.ones(1, 1, 3), torch.ones(1)

    def call(size: int) -> None:
        with torch.no_grad():
            assert one(torch.zeros(1, 1, size), w, b) is NotImplemented

    ahead = list(one.problems(next(one.visit(torch.zeros(1, 1, 64), w, b))[1]).values())
    kept.plan(ahead, False)
    hour, hours = (600, 8) if EVERY else (100, 4)
    sizes = iter(range(65, 10**6))
    held: list[int] = []
    own = str(Path(layer.__file__).parents[1])
    tracemalloc.start()
    try:
        for _ in range(hours):
            for _ in range(hour):
                call(next(sizes))
            gc.collect()
            found = tracemalloc.take_snapshot().statistics("filename")
            held.append(sum(one.size for one in found if one.traceback[0].filename.startswith(own)))
    finally:
        tracemalloc.stop()
    # What lru_caches of algorithms hold, 1,024 to 4,096 entries each, is bounded as well, and here not yet full.
    assert not EVERY or held[-1] - held[1] < (hours - 2) * hour * 1024, held
    assert max(len(one._entries), len(one.runners), len(one.known)) <= 16
    assert len(kept._on_sight) <= 64
    tables = (kept._plans, kept.reasons, kept._bound, kept.times, kept.notes)
    assert max(map(len, tables)) <= 64 + len(ahead)
    assert all((p, False) in kept._plans for p in ahead)  # planned ahead: never let go
    call(64)
    call(65)


def test_plans_let_go_are_found_again() -> None:
    """By wisdom: nothing is measured a second time."""
    problem = ConvProblem(Pass.FPROP, 1, 1, 1, (Axis(9, 3, 1, 1, 0, 0),))
    kept = plan_table.PlanTable(Options(rigor="estimate"), "plan")
    assert kept.ready([problem], False, torch.device("cpu"))
    plan = kept.chosen(problem, False)
    assert plan is not None
    kept._let_go([(problem, False)])
    assert kept.missing([problem], False) == [problem]
    assert kept.bound(problem, False, torch.device("cpu")) is None
    assert kept.ready([problem], False, torch.device("cpu"))
    assert kept.chosen(problem, False) == plan


def test_measurements_let_go_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "MOST_KNOWN", 0)
    found = Planner()
    problem = ConvProblem(Pass.FPROP, 1, 1, 1, (Axis(9, 3, 1, 1, 0, 0),))
    first = found.explain(problem, Options(rigor="estimate"))
    assert not [store for store in found.measurements._stores.values() if store.known]
    assert not found.measurements._saved
    again = found.explain(problem, Options(rigor="estimate"))
    assert {(m.solver, m.config) for m in again} == {(m.solver, m.config) for m in first}


def test_no_more_plans_are_published_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that compiled graphs may name are never dropped; others are torch's."""
    monkeypatch.setattr(compiled, "MOST_PUBLISHED", 0)
    monkeypatch.setattr(compiled, "_published", {})
    geometry = Geometry.of(1, 1, 0, 1, 1, (3,), False, 0)
    assert geometry is not None
    one = layer.Layer(geometry, plan_table.PlanTable(Options(), "torch"))
    _, call = next(one.visit(torch.zeros(1, 1, 9), torch.zeros(1, 1, 3), None))
    device = torch.device("cpu")
    runner = Runner(
        geometry, None, None, None, needs_grad=False, direct=True, device=device, strides=None, operand_strides=((), ())
    )
    assert compiled.publish(runner, call, (1, 1, 7), 0) is None
    monkeypatch.setattr(compiled, "MOST_PUBLISHED", 1)
    first, second = (compiled.publish(runner, call, (1, 1, 7), 0) for _ in range(2))
    assert first == second


def test_a_table_of_functional_layers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "MOST_LAYERS", 8)
    table = functional.Table(plan_table.PlanTable(Options(), "torch"))
    for dilation in range(1, 40):
        found = table.layer(1, 1, 0, dilation, 1, (3,), False, 0)
        assert found is not None
        assert table.layer(1, 1, 0, dilation, 1, (3,), False, 0) is found
    assert len(table._layers) == len(table._by_arguments) == 8


SOURCES = Path(layer.__file__).parents[1].rglob("*.py")
FEW = {
    "_precision_flag", "on_end",
    "_gpu_name", "_cpu_environment", "_gpu_environment", "last_level_bytes", "_cache_bytes", "transforms", "_constants",
    "_stream", "read_source", "_asset", "_flops", "_fields_of",
}  # fmt: skip
"""Cached for ever by what there are few of: devices, threads, tiles of Winograd's, files of this package, streams,
classes of what plans keep."""


def test_no_cache_is_without_bound() -> None:
    """``functools.cache`` stands on functions of nothing, of kernels' own parameters, and of what there are few of."""
    for path in SOURCES:
        if "kernels/cpu" in path.as_posix():
            continue  # functions that Numba compiles, by lanes and other parameters of kernels
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            forever = [d for d in map(ast.unparse, node.decorator_list) if d in FOREVER]
            assert not forever or not node.args.args or node.name in FEW, f"{path}: {node.name}"


FOREVER = {"functools.cache", "cache", "functools.lru_cache(maxsize=None)", "lru_cache(maxsize=None)"}
