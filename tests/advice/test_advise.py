"""Advice on small layers that are really measured: what is said holds together and is remembered."""

from __future__ import annotations

import pytest

from tilewise import Options, Planner
from tilewise.advice import Advice, NoAdviceError, Point, Sweep, advise, convolution, gauge, product, recurrent_layer
from tilewise.advice.points import Part
from tilewise.advice.reasons import reasons
from tilewise.notation import parse_layer, parse_product, parse_recurrent
from tilewise.plan import Config, Measurement
from tilewise.problems.conv.problem import Pass
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import all_solvers
from tilewise.wisdom import Wisdom

SWEEPS = {
    "rnn": lambda: recurrent_layer(parse_recurrent("gru:t2n4i8h8", task="training"), size_share=0.13),
    "gemm": lambda: product([parse_product("4x16:16x8", op=op) for op in ("NN", "TN")], size_share=0.06),
    "conv": lambda: convolution(
        [parse_layer("mb4ic8ih6oc8kh3ph1", pass_=p) for p in (Pass.FPROP, Pass.WGRAD)], size_share=0.0
    ),
}
"""Each has few points, so that all of them are measured long before the time is over."""


OPTIONS = {
    "rnn": Options(exclude=("resident_rnn", "stepped")),
    "gemm": Options(),
    "conv": Options(exclude=tuple(each.name for each in all_solvers() if each.name not in ("aten", "gemm"))),
}
"""What would be compiled for long is left out."""


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """One for all tests, as it measures the device's rates first."""
    return Planner(Wisdom(tmp_path_factory.mktemp("advice") / "wisdom.sqlite"))


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "IN_TURNS_MS", 50.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SWEEPS)
def test_it_holds_together(kind: str, planner: Planner) -> None:
    told: list[str] = []
    sweep = SWEEPS[kind]()
    found = advise(sweep, planner, OPTIONS[kind], seconds=100, tell=told.append)
    assert found.asked.sizes == sweep.asked
    assert found.asked.ms is not None
    assert found.is_done
    assert found.level == "plans"
    counted = found.finals or found.points
    assert found.best.samples_per_second == max(point.samples_per_second for point in counted)
    assert found.fastest.rate == max(point.rate for point in counted)
    for point in counted:
        assert point.samples == sweep.named(point.sizes)[sweep.batch]
        assert point.flops == sum(problem.flops for problem in sweep.problems(point.sizes))
        assert point.samples_per_second == pytest.approx(point.samples / point.ms * 1e3)
    roles = [role for named in found.named() for role in named.roles]
    assert len(set(roles)) == len(roles) >= 5
    assert found.named()[0].point == found.asked
    assert sweep.text(sweep.asked) in told
    assert found.why
    assert all(point.ms for curve in found.curves() for point in curve)
    # What was measured is known to the planner, and not measured again.
    again = advise(sweep, planner, OPTIONS[kind], seconds=100)
    known = {point.sizes: point for point in again.points}
    assert all(known[each.sizes] == each for each in found.points if each.sizes in known)


@pytest.mark.slow
def test_what_is_excluded_is_in_no_plan(planner: Planner) -> None:
    found = advise(SWEEPS["gemm"](), planner, Options(exclude=("aten_gemm",)), seconds=100)
    assert all(part.solver != "aten_gemm" for point in found.points for part in point.parts)
    assert found.asked.parts[0].torch_ms is not None


def test_ctrl_c_hands_over_what_was_measured(planner: Planner) -> None:
    kept: list[Advice] = []
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if len(told) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        advise(SWEEPS["gemm"](), planner, seconds=100, tell=tell, keep=kept.append)
    (found,) = kept
    assert found.points
    assert not found.is_done
    assert found.asked.ms is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": "30"}, "seconds='30'"),
        ({"options": Options(rigor="estimate")}, "rigor"),
    ],
)
def test_what_makes_no_sense_is_named(words, says) -> None:
    with pytest.raises(ValueError, match=says):
        advise(SWEEPS["gemm"](), **words)


def test_without_time_it_says_so(planner: Planner) -> None:
    with pytest.raises(NoAdviceError, match="nothing was measured within seconds=1e-09"):
        advise(SWEEPS["gemm"](), planner, seconds=1e-9)


def test_sizes_of_a_layer_change_together() -> None:
    (square,) = recurrent_layer(parse_recurrent("gru:t2n4i80h80")).problems((84, 5))
    assert (square.hidden, square.inputs, square.batch) == (84, 84, 5)
    (narrow,) = recurrent_layer(parse_recurrent("lstm:t2n4i30h80r20")).problems((84, 5))
    assert (narrow.hidden, narrow.projection) == (84, 21)  # type: ignore[attr-defined]
    (least,) = recurrent_layer(parse_recurrent("lstm:t2n4i30h80r1")).problems((40, 5))
    assert least.projection == 1  # type: ignore[attr-defined]
    (wide,) = recurrent_layer(parse_recurrent("gru:t2n4i30h80")).problems((84, 5))
    assert (wide.hidden, wide.inputs) == (84, 30)
    depthwise = convolution([parse_layer("g32mb4ic32ih12iw24oc32kh3kw3ph1pw1")])
    assert [axis.name for axis in depthwise.axes] == ["channels", "image", "batch"]
    (problem,) = depthwise.problems((34, 11, 3))
    assert (problem.groups, problem.in_channels, problem.out_channels, problem.batch) == (34, 34, 34, 3)
    assert [axis.size for axis in problem.axes] == [11, 22]
    grouped = convolution([parse_layer("g4mb4ic40ih12oc80kh3")])
    assert all(size % 4 == 0 for axis in grouped.axes[:2] for size in axis.values)


def test_sizes_that_make_no_layer_are_left_out() -> None:
    sweep = convolution([parse_layer("mb4ic8ih10oc8kh10")], size_share=0.2)
    assert sweep.flops((8, 8, 9, 4)) == 0
    assert sweep.flops((8, 8, 11, 4)) > 0


def point(sweep: Sweep, sizes: tuple[int, ...], rate: float, solver: str = "aten_gemm") -> Point:
    parts = [Part(p, p.flops / rate / 1e9, solver, solver, checked=True) for p in sweep.problems(sizes)]
    return Point(sizes, sweep.samples(sizes), tuple(parts))


def test_reasons_are_work_rate_solvers_and_cliffs() -> None:
    sweep = product([GemmProblem(60, 100, 100)])
    asked, best = point(sweep, (100, 100, 60), 1.0), point(sweep, (96, 96, 64), 1.25, "thin_gemm")
    before, after = point(sweep, (100, 100, 64), 1.2, "thin_gemm"), point(sweep, (100, 100, 65), 0.6)

    def tried(problem: GemmProblem) -> list[Measurement]:
        return [Measurement("thin_gemm", 1, Config(), reason=f"has {problem.m} rows, takes 64")]

    said = reasons(sweep, asked, best, best, [("rows", [before, after])], tried)
    assert said[0].startswith("columns 96, depth 96, rows 64: 1.36x the samples a second, as a sample is 8% less work")
    assert "the rate is 25% higher (1.25 in place of 1 TFLOP/s)" in said[0]
    assert "columns 96 is a multiple of 32, 100 of 4" in said[0]
    assert "thin_gemm says: has 60 rows, takes 64" in said[1]
    assert said[2].startswith("cliff at rows 64 to 65: the rate falls by 50%, from 1.2 to 0.6 TFLOP/s; nn: thin_gemm")
    assert said[2].endswith("aten_gemm, as thin_gemm says: has 65 rows, takes 64")
    assert reasons(sweep, asked, asked, asked, [], tried) == [
        "nothing that was measured gives more samples a second than what was asked"
    ]
