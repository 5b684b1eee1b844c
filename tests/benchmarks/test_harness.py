"""The harness itself: ratios, bars, names of machines, finding benchmarks."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import torch
from harness import machine, picture, process, registry, result
from harness.configs import framework_result, runnable
from harness.layers import ALEXNET, FBFFT_TABLE_4, OVERFEAT_FAST
from harness.sides import Tensors, framework_call, plan_line, planned_call
from harness.steps import breakdown
from harness.transforms import Task
from harness.transforms import Tensors as Transforms
from hypothesis import given
from hypothesis import strategies as st

from tilewise.plan import Config, Plan
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import baseline

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


@pytest.mark.slow
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
    own, parts = baseline(ConvProblem), problem.split("batch", (2, 1))
    children = tuple(Plan(part.problem.key, own.name, own.version) for part in parts if part.problem is not None)
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


def test_rows_come_back_from_json() -> None:
    one = row(2.0, 1.0, replaced=False)
    assert result.Row.from_json(one.to_json()) == one


def test_overfeat_is_the_built_in_network() -> None:
    from tilewise.frontends.zoo.overfeat import build_overfeat_fast

    with torch.device("meta"):
        network = build_overfeat_fast()
    built = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    for layer, module in zip(OVERFEAT_FAST, built, strict=True):
        assert (layer.in_channels, layer.out_channels) == (module.in_channels, module.out_channels)
        assert (layer.kernel, layer.stride, layer.padding) == (
            module.kernel_size[0], module.stride[0], module.padding[0],
        )  # fmt: skip
    outs = [layer.problem(Pass.FPROP, CPU, batch=1).shape("y")[-1] for layer in OVERFEAT_FAST]
    assert outs == [56, 24, 12, 12, 12]  # 56 and 24 are then pooled to the next one's 28 and 12


def test_table_2_has_8232_configurations_in_one_order() -> None:
    import fbfft_figures
    from harness.settings import Settings

    every = list(fbfft_figures.configurations(Settings(CPU, False, False, fbfft_figures.DEFAULTS)))
    assert len(every) == len({each.name for each in every}) == 8232
    assert [each.kernel for each in every[:7]] == [3, 5, 7, 9, 11, 13, 3]
    again = list(fbfft_figures.configurations(Settings(CPU, True, False, fbfft_figures.DEFAULTS)))
    assert again == every
    assert every[0].layer.problem(Pass.FPROP, CPU).shape("y")[-1] == every[0].size


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("layout", ["plain", "frequency_major", "packed"])
@pytest.mark.parametrize("s", [(16,), (16, 24)])
def test_both_sides_of_a_transform_are_the_same(s: tuple[int, ...], layout: str, inverse: bool) -> None:
    tensors = Transforms(Task(s, 5, inverse, layout, padding=3), CPU)
    ours, library = tensors.ours(), tensors.library()
    assert ours.shape == library.shape
    torch.testing.assert_close(ours, library, rtol=1e-4, atol=1e-4)
    assert tensors.error() < 1e-6
    data, spectra = (ours, tensors.y) if inverse else (tensors.x, ours)
    assert layout == "packed" or tensors.task.bytes == data.nbytes + spectra.nbytes


@pytest.mark.parametrize("pass_", list(Pass))
def test_marked_steps_are_the_whole_call(pass_: Pass) -> None:
    from tilewise.solvers import get

    problem, solver = FBFFT_TABLE_4[3].problem(pass_, CPU, batch=3), get("fft")
    tensors = Tensors(problem)
    operands = [tensors[role] for role in problem.operands]
    for config in (Config(basis=(16, 16), product="batched"), Config(basis=(18, 16), block=1, product="looped")):
        steps, got = breakdown(solver, problem, config, operands, 1)
        assert set(steps) == {
            "clear", "transform A", "transform B", "transpose A", "transpose B", "product", "inverse C",
        }  # fmt: skip
        want = framework_result(problem, tensors)
        assert (got - want).norm() / want.norm() < 1e-5
        assert runnable(problem, solver, config, tensors).error < 1e-5


def test_speed_ups_and_failures_are_drawn() -> None:
    pytest.importorskip("matplotlib")

    def place(size: int) -> dict[str, int]:
        return {"kernel": 3, "size": size, "problem size": 1}

    document = {
        "title": "t",
        "machine": {"device": "d"},
        "date": "2026-01-01",
        "rows": [{"ratio": ratio, "details": place(size)} for ratio, size in ((4, 1), (1, 1), (8, 2))],
    }
    figure = picture.heat_maps(document, "kernel", "size", "problem size", [place(4)])
    panel = figure.axes[0]
    cells = panel.images[0].get_array()
    assert cells[0].tolist()[:2] == pytest.approx([2, 8])
    assert bool(cells.mask[0, 2])
    assert panel.collections[0].get_offsets().tolist() == [[2, 0]]


def test_own_transforms_are_held_against_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which has none, some of the library's are called by another name; a side that is wrong is no result."""
    import fft_own_vs_library
    from harness.settings import NothingToMeasure, Settings

    from tilewise.solvers.fourier.fft import FFT

    real = FFT.configs

    def configs(solver: FFT, problem: ConvProblem) -> list[Config]:
        found = list(real(solver, problem))
        return [*found, *(Config(**{**c, "transform": "alias"}) for c in found)]

    options = {**fft_own_vs_library.DEFAULTS, **fft_own_vs_library.QUICK, "sizes": "8,10", "planes": "4"}
    settings = Settings(CPU, True, False, options)
    with pytest.raises(NothingToMeasure, match="no config of solver fft has transform=own"):
        fft_own_vs_library.run(settings)
    monkeypatch.setattr(FFT, "configs", configs)
    monkeypatch.setattr(fft_own_vs_library, "OWN", "alias")
    found = fft_own_vs_library.run(settings)
    assert [row.name for row in found.rows] == ["p=4 x=8", "p=4 x=10"]
    for each in found.rows:
        assert "transform=alias" in each.ours.what
        assert "transform=alias" not in each.baseline.what
        assert max(each.details["errors"]) < 1e-5
    assert found.facts["mean"] == pytest.approx(sum(r.ratio for r in found.rows) / 2)

    def wrong(problem: ConvProblem, tensors: Tensors) -> torch.Tensor:
        return framework_result(problem, tensors) * 1.001

    monkeypatch.setattr("harness.configs.framework_result", wrong)
    with pytest.raises(NothingToMeasure, match=r"relative error 1\.0e-03"):
        fft_own_vs_library.run(settings)


@pytest.mark.parametrize("pass_", list(Pass))
def test_what_users_write_by_hand_is_right(pass_: Pass) -> None:
    import large_kernels

    problem = large_kernels.TINY[1].problem(pass_, "fp32", CPU)
    tensors = Tensors(problem)
    want = framework_result(problem, tensors)
    torch.testing.assert_close(large_kernels.by_hand(problem, tensors)(), want, rtol=1e-4, atol=1e-4)
