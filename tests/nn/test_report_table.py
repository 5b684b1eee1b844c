"""The table that a report prints, and the lines below it that explain it."""

from __future__ import annotations

from tilewise.nn import Report
from tilewise.nn.report import BUSY, NO_TIME, CallReport, LayerReport, PassReport
from tilewise.nn.step.result import StepReport
from tilewise.notation import parse_layer
from tilewise.plan import Plan

PROBLEM = parse_layer("mb2ic3ih8oc4oh8kh3ph1")


def one_pass(solver: str, load: float = 0.0, note: str = "", *, replaced: bool = True) -> PassReport:
    plan = Plan(PROBLEM.key, solver, 1, time_ms=1.0, load=load)
    return PassReport("forward", PROBLEM, plan, 2.0 if solver != "aten" else 1.0, replaced, note=note)


def table(*passes: PassReport) -> list[str]:
    call = CallReport((2, 3, 8, 8), passes)
    return str(Report((LayerReport("conv", "Conv2d", (call,)),))).splitlines()


def test_a_plan_needs_no_explanation() -> None:
    assert table(one_pass("fft")) == [
        "layer  input    pass     runs  plan ms  torch ms",
        "conv   2x3x8x8  forward  fft   1.000    2.000",
    ]


def test_torchs_own_choice_has_one_time() -> None:
    lines = table(one_pass("fft"), one_pass("aten", replaced=False))
    assert lines[2].split() == ["conv", "2x3x8x8", "forward", "torch", "1.000"]
    assert lines[2].index("1.000") == lines[0].index("torch ms")
    assert lines[3:] == [NO_TIME]


def test_a_plan_that_was_taken_back_keeps_its_time() -> None:
    lines = table(one_pass("fft", note="taken back: the step is not faster with it", replaced=False))
    assert lines[1].split()[-2:] == ["1.000", "2.000"]
    assert len(lines) == 2


def test_times_of_a_busy_machine_are_marked_and_explained() -> None:
    lines = table(one_pass("fft", load=0.9), one_pass("aten", load=0.9, replaced=False))
    assert "1.000 (busy)  2.000" in lines[1]
    assert lines[2].endswith("1.000 (busy)")
    assert lines[3:] == [NO_TIME, BUSY]


def test_the_modelled_step_has_a_line_of_its_own() -> None:
    step = StepReport(
        torch_ms=20.0,
        planned_ms=16.0,
        speedup=1.3,
        least=1.2,
        most=1.4,
        modelled_torch_ms=21.0,
        modelled_planned_ms=15.0,
    )
    made = str(Report((LayerReport("conv", "Conv2d", (CallReport((2, 3, 8, 8), (one_pass("fft"),)),)),), step=step))
    assert made.splitlines()[-2:] == [
        "step: 20 -> 16 ms (1.30x in the median pair, 95 % between 1.20 and 1.40)",
        "      a model of host and device expects 21 -> 15 ms",
    ]


def test_nothing_is_explained_of_an_empty_model() -> None:
    assert str(Report(())) == "layer  input  pass  runs  plan ms  torch ms"
