"""Totals of results and how plans, times and sizes read."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from tilewise.plan import Config, Error, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.report import tables, words
from tilewise.report.values import Layer, LayerResult, NetworkTime, PassResult, StepTime, describe, summarize

PROBLEM = parse_layer("mb8ic3ih12oc8oh12kh3ph1")


def plan_of(solver: str, **config: int) -> Plan:
    return Plan(PROBLEM.key, solver, 1, Config(**config), time_ms=2.0, workspace=3 * 2**20, error=Error(2e-7, 1e-7))


LEFT = plan_of("aten")
FAST = plan_of("fft", basis=16)
DIVIDED = Plan(
    PROBLEM.key, "micro_batch", 1, Config(sizes=(3, 3, 2)), (plan_of("fft", basis=16), plan_of("gemm")), (2, 1),
    time_ms=5.0, workspace=2**20,
)  # fmt: skip


def result(plan: Plan | None, framework: float | None = None, planned: float | None = None, names: int = 1):
    layer = Layer(tuple(f"conv{i}" for i in range(names)), (PROBLEM,))
    return LayerResult(layer, (PassResult(PROBLEM, plan, "" if plan else "why", framework, planned),))


def text_of(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()


def test_left_to_torch_counts_one():
    found = summarize([result(LEFT, framework=4.0), result(FAST, framework=8.0, planned=2.0)])
    assert (found.passes, found.replaced, found.divided, found.unplanned, found.compared) == (2, 1, 0, 0, 2)
    assert found.share_replaced == 0.5
    assert found.geometric_mean == pytest.approx(2.0)
    assert found.worst == 1.0
    assert (found.framework_ms, found.planned_ms) == (12.0, 6.0)


def test_equal_layers_count_as_often_as_they_occur():
    found = summarize([result(DIVIDED, framework=4.0, planned=8.0, names=3), result(LEFT, framework=1.0)])
    assert (found.passes, found.replaced, found.divided) == (4, 3, 3)
    assert found.geometric_mean == pytest.approx(0.5**0.75)
    assert found.worst == 0.5
    assert (found.framework_ms, found.planned_ms) == (13.0, 25.0)


def test_what_was_not_timed_is_not_compared():
    found = summarize([result(FAST), result(None, framework=4.0)])
    assert (found.passes, found.unplanned, found.compared) == (2, 1, 0)
    assert (found.geometric_mean, found.worst, found.framework_ms, found.planned_ms) == (None, None, None, None)
    assert summarize([]).share_replaced == 0.0


def test_times_have_four_digits():
    shown = [words.format_ms(value) for value in (0.01234, 1.234, 12.34, 123.4, 1234.5, None, math.nan)]
    assert shown == ["0.012", "1.234", "12.34", "123.4", "1234", "-", "-"]
    assert [words.format_ratio(value) for value in (1.634, None)] == ["1.63x", "-"]


def test_a_divided_plan_prints_as_a_tree():
    lines = text_of(tables.plan_table([result(DIVIDED), result(LEFT), result(None)])).splitlines()
    tree = [" ".join(line.split()) for line in lines]
    assert "fprop micro_batch 8 = 2x3 + 2 5.000 1.0 MiB -" in tree
    assert "2 x fft: basis 16 2.000 3.0 MiB 2e-07" in tree
    assert "gemm 2.000 3.0 MiB 2e-07" in tree
    assert "fprop left to torch 2.000 3.0 MiB 2e-07" in tree
    assert "fprop no plan: why" in tree


def test_of_many_reasons_the_first_ones_stand_in_a_table():
    reasons = [f"  fft basis={n}: needs {n} KiB" for n in range(10, 18)]
    told = ["no plan for this under 64 B of workspace:", *reasons, "text such as '64MiB' would do"]
    missing = replace(result(None).passes[0], reason="\n".join(told))
    wanted = [*map(str.strip, reasons[:5]), "and 3 others, which 'tilewise explain' lists", told[-1]]
    assert tables.no_plan(missing).endswith("\n".join(wanted))
    assert "no plan for this" not in tables.no_plan(missing)


def test_both_sides_stand_side_by_side():
    results = [result(DIVIDED, 8.0, 4.0, names=2), result(LEFT, 3.0), result(None, 3.0)]
    lines = [" ".join(line.split()) for line in text_of(tables.time_table(results)).splitlines()]
    assert "conv0 x2 mb8ic3ih12oc8oh12kh3ph1" in lines
    assert "fprop 8.000 4.000 2.00x 1.0 MiB micro_batch 8 = 2x3 + 2: fft, gemm" in lines
    assert "fprop 3.000 same 1.00x 3.0 MiB left to torch" in lines
    assert "fprop 3.000 - - - no plan: why" in lines
    total = tables.summary_text(summarize(results))
    assert "2 of 4 layer-passes replaced (50%), 2 divided" in total
    assert "1 without a plan" in total
    assert "geometric mean 1.59x, worst 1.00x" in total


def test_a_layer_left_unplanned_says_why():
    left = LayerResult(Layer(("odd",), (), left="computes in torch.float64"), ())
    for table in (tables.plan_table([left]), tables.time_table([left])):
        assert "left to torch: computes in torch.float64" in text_of(table)


def test_text_is_never_markup():
    odd = LayerResult(Layer(("[bold]conv[/]",), (PROBLEM,)), (PassResult(PROBLEM, reason="[red]why[/]"),))
    for table in (tables.plan_table([odd]), tables.time_table([odd])):
        assert "[bold]conv[/]" in text_of(table)
        assert "[red]why[/]" in text_of(table)


def test_training_steps():
    time = NetworkTime(StepTime(4.0, 8.0, 2**30, 0.5), StepTime(2.0, 4.0, None, 0.5), 7)
    assert time.ratio == 2.0
    text = text_of(tables.step_table(time))
    for word in ("12.00", "6.000", "1.0 GiB", "2.00x", "medians of 7"):
        assert word in text


def test_a_problem_without_text_is_described_by_its_key():
    cropped = ConvProblem(Pass.FPROP, 2, 3, 4, (Axis(8, 3, 1, 1, -1, 0),))
    assert describe(cropped) == cropped.key
    assert describe(PROBLEM) == "mb8ic3ih12oc8oh12kh3ph1"
