"""The harness itself: ratios, bars, names of machines, finding benchmarks."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import torch
from harness import machine, process, registry, result
from harness.layers import ALEXNET, FBFFT_TABLE_4
from harness.sides import Tensors, framework_call, plan_line, planned_call
from hypothesis import given
from hypothesis import strategies as st

from tilewise.plan import Config, Plan
from tilewise.problem import Pass

CPU = torch.device("cpu")


def row(baseline: float, ours: float, *, replaced: bool = True, group: str = "g") -> result.Row:
    return result.Row("r", group, result.Side("torch", baseline), result.Side("plan", ours), replaced=replaced)


def test_a_layer_left_to_the_framework_counts_one() -> None:
    assert row(2.0, 1.0).ratio == 2.0
    assert row(2.0, 1.0, replaced=False).ratio == 1.0


def test_summary_is_by_group() -> None:
    summary = result.Result([row(4, 1), row(1, 1), row(9, 3, group="h"), row(5, 1, replaced=False)]).summary()
    assert summary["groups"]["h"] == {"geometric_mean": pytest.approx(3), "min": 3, "max": 3, "rows": 1, "replaced": 1}
    assert summary["groups"]["g"]["geometric_mean"] == pytest.approx(4 ** (1 / 3))
    assert summary["groups"]["g"]["replaced"] == 2


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_geometric_mean_lies_between_least_and_greatest(values: list[float]) -> None:
    mean = result.geometric_mean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)


def test_least_replaced_ignores_what_was_left_alone() -> None:
    assert result.least_replaced([row(0.9, 1.0, replaced=False), row(2, 1), row(3, 1)]) == 2
    assert math.isnan(result.least_replaced([row(1, 1, replaced=False)]))


@pytest.mark.parametrize(
    ("bar", "met"),
    [
        (result.Bar("", 1.4, least=1.4), True),
        (result.Bar("", 1.39, least=1.4), False),
        (result.Bar("", 1.2, most=1.2), True),
        (result.Bar("", 1.21, most=1.2), False),
        (result.Bar("", math.nan, least=1), None),
        (result.Bar("", 5.0, least=1, applies=False), None),
    ],
)
def test_bars(bar: result.Bar, met: bool | None) -> None:
    assert bar.met is met
    assert bar.to_json()["met"] is met


def test_cpu_folder_has_model_and_cores() -> None:
    assert re.fullmatch(r"cpu(-[a-z0-9]+)*-\d+c", machine.slug(CPU))


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA H200", "h200"), ("Tesla V100-SXM2-16GB", "tesla-v100-16gb")],
)
def test_gpu_folders(name: str, slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert machine.slug(torch.device("cuda", 0)) == slug


def test_commit_can_be_given_where_there_is_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_COMMIT", "abc123")
    assert machine.commit() == "abc123"


def test_every_listed_benchmark_declares_quick_options_among_its_own() -> None:
    for entry in registry.entries():
        benchmark = registry.load(entry.name)
        assert benchmark.title.endswith((".", ":")) or benchmark.title
        assert set(benchmark.quick) <= set(benchmark.defaults), entry.name


def test_files_without_run_of_settings_are_no_benchmarks() -> None:
    assert "run" not in {entry.name for entry in registry.entries()}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's tunables")
def test_the_process_is_born_with_memory_that_stays() -> None:
    script = (
        f"import os, sys; sys.path.insert(0, {str(registry.FOLDER)!r}); from harness import process;"
        "process.ensure_malloc_keeps_memory(); print(all(n in os.environ for n in process.MALLOC), sys.argv[1])"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", script, "kept"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "kept"]
    assert set(process.MALLOC) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}


def test_published_layers_have_the_papers_output_sizes() -> None:
    outs = {layer.name: layer.problem(Pass.FPROP, CPU, batch=1).shape("y")[-1] for layer in (*FBFFT_TABLE_4, *ALEXNET)}
    assert outs == {
        "L1": 118, "L2": 56, "L3": 24, "L4": 10, "L5": 11,
        "conv1": 55, "conv2": 27, "conv3": 13, "conv4": 13, "conv5": 13,
    }  # fmt: skip


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_framework_side_computes_the_problem(pass_: Pass, layout: str) -> None:
    problem = ALEXNET[1].problem(pass_, CPU, batch=1)
    tensors = Tensors(problem, layout)
    got = framework_call(problem, tensors)()
    got = next(t for t in got if t is not None) if isinstance(got, (list, tuple)) else got
    a, b = (tensors[role] for role in problem.operands)
    want = problem.reference(a, b)
    assert isinstance(got, torch.Tensor)
    assert (got.double() - want).norm() / want.norm() < 1e-5


def test_planned_side_computes_the_problem() -> None:
    problem = FBFFT_TABLE_4[3].problem(Pass.FPROP, CPU, batch=3)
    tensors = Tensors(problem)
    children = tuple(
        Plan(part.problem.key, "aten", 1) for part in problem.split("batch", (2, 1)) if part.problem is not None
    )
    plan = Plan(problem.key, "micro_batch", 1, Config(sizes=(2, 1)), children, (1, 1))
    a, b = (tensors[role] for role in problem.operands)
    got, want = planned_call(problem, plan, tensors)(), problem.reference(a, b)
    assert isinstance(got, torch.Tensor)
    assert (got.double() - want).norm() / want.norm() < 1e-5


def test_a_plan_on_one_line() -> None:
    leaf = Plan("p", "fft", 1, Config(basis=(32, 32)))
    assert plan_line(leaf) == "fft basis=32x32"
    whole = Plan("p", "micro_batch", 1, Config(sizes=(2, 2, 1)), (leaf, leaf), (2, 1), label="5 = 2x2 + 1")
    assert plan_line(whole) == "micro_batch 5 = 2x2 + 1 (fft basis=32x32)"
