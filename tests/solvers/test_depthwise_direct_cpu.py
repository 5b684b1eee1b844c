"""Direct depthwise convolutions on a CPU: generated layers in any memory, tiles, threads and what is read."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reference import convolve
from tests.solvers.cpu_runs import at_once
from tests.solvers.test_solvers import Memory, check
from tests.strategies import axes, with_memory

from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.depthwise.depthwise import Depthwise

pytest.importorskip("numba")
SOLVER = Depthwise()
SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
LAYERS = {
    "7x7": (Axis(29, 7, 1, 1, 3, 3), Axis(31, 7, 1, 1, 3, 3)),
    "strides": (Axis(29, 5, 2, 1, 2, 2), Axis(37, 3, 3, 1, 1, 1)),
    "strides and dilation": (Axis(29, 5, 2, 3, 2, 5), Axis(37, 4, 3, 2, -1, 1)),
    "as many as lanes and more": (Axis(40, 1), Axis(50, 19, 1, 1, 9, 9)),
    "a signal": (Axis(301, 9, 1, 2, 8, 8),),
    "a volume": (Axis(7, 3, 2, 1, 1, 1), Axis(9, 3, 1, 2, 2, 2), Axis(11, 5, 1, 1, 2, 2)),
}


def run(p: ConvProblem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, c: Config | None = None) -> torch.Tensor:
    """In a workspace full of NaN."""
    c = c or next(iter(SOLVER.configs(p)))
    space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
    return SOLVER.bind(p, c, a, b, out)(a, b, out.fill_(math.nan), space)


def error(p: ConvProblem, got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    want = convolve(p, a, b)
    return float((got.double() - want).norm() / want.norm())


@st.composite
def layers(draw: st.DrawFn, pass_: Pass, dims: int) -> ConvProblem:
    """More channels than lanes, and results of several channels to one."""
    groups, into = draw(st.sampled_from((1, 3, 4, 5, 16, 18))), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(("any", "same", "large", "patches")))
    found = tuple(draw(axes(kind, {1: 60, 2: 20, 3: 8}[dims])) for _ in range(dims))
    dtype = draw(st.sampled_from(("fp32", "fp32", "bf16", "fp16")))
    return ConvProblem(pass_, draw(st.integers(1, 3)), groups, groups * into, found, groups, dtype=dtype)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("pass_", list(Pass))
def test_layers_in_any_tiles(pass_: Pass, dims: int) -> None:
    """Down to one result to a tile, on every number of lanes; also added to what is there."""

    @settings(max_examples=25, suppress_health_check=SLOW)
    @given(with_memory(layers(pass_, dims)), st.booleans(), st.data())
    def any_layer(found: tuple[ConvProblem, Memory], accumulate: bool, data: st.DataObject) -> None:
        p, forms = replace(found[0], accumulate=accumulate), found[1]
        whole = next(iter(SOLVER.configs(p)))
        assert isinstance(whole["tile"], tuple)
        steps = [axis.stride if pass_ is Pass.DGRAD else 1 for axis in p.axes]
        most = [-(-n // step) for n, step in zip(whole["tile"], steps, strict=True)]
        tile = tuple(data.draw(st.integers(1, n), "tile") * s for n, s in zip(most, steps, strict=True))
        lanes = data.draw(st.sampled_from((4, whole["lanes"])), "lanes")
        shares = {"shares": data.draw(st.integers(1, 3), "shares")} if pass_ is Pass.WGRAD else {}
        c = Config(tile=tile, lanes=lanes, threads=1, **shares)
        check(SOLVER, p, data.draw(st.sampled_from((c, whole)), "config"), forms, accumulate)

    any_layer()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("channels", [3, 37])
@pytest.mark.parametrize("pass_", list(Pass))
def test_error(pass_: Pass, channels: int, layer: tuple[Axis, ...]) -> None:
    p = ConvProblem(pass_, 3, channels, channels, layer, channels)
    a, b = make_operands(p)
    assert error(p, run(p, a, b, make_result(p)), a, b) <= 5e-7


@pytest.mark.parametrize("pass_", list(Pass))
def test_memory_of_any_order(pass_: Pass) -> None:
    """Rows, columns or channels innermost, and none of them."""
    p = ConvProblem(pass_, 2, 19, 19, LAYERS["7x7"], 19)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    for order in itertools.permutations(range(4)):
        moved = [t.permute(order).contiguous().permute(np.argsort(order).tolist()) for t in (a, b, make_result(p))]
        assert torch.equal(run(p, *moved), want), order


@pytest.mark.parametrize("pass_", list(Pass))
def test_any_number_of_threads(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's or ours; shares of a filter's gradient go by their number, so that alone changes its rounding."""
    p = ConvProblem(pass_, 5, 40, 40, LAYERS["7x7"], 40)
    a, b = make_operands(p)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results = [run(p, a, b, make_result(p), c) for c in SOLVER.configs(p)]
        assert error(p, results[0], a, b) <= 5e-7
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("pass_", list(Pass))
def test_callers_at_once(pass_: Pass) -> None:
    p = ConvProblem(pass_, 2, 3, 3, LAYERS["7x7"], 3)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    got = at_once(lambda: run(p, a, b, make_result(p)), 4)
    assert len(got) == 80
    assert all(torch.equal(each, want) for each in got)


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_images_and_channels_stay_apart(pass_: Pass) -> None:
    """NaN and infinities in one plane leave the others' bits as they were."""
    p = ConvProblem(pass_, 3, 18, 18, LAYERS["7x7"], 18)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    a[1, 4, 7, 7], a[2, 17, 0, 0] = math.nan, math.inf
    got = run(p, a, b, make_result(p))
    hit = torch.zeros(3, 18, dtype=torch.bool)
    hit[1, 4] = hit[2, 17] = True
    assert torch.equal(got[~hit], want[~hit])
    assert not got[1, 4].isfinite().all()
    assert not got[2, 17].isfinite().all()


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.WGRAD])
@pytest.mark.parametrize(
    "axis", [Axis(90, 5, 1, 1, -3, -5), Axis(90, 3, 4, 1, -1, 0), Axis(91, 5, 3, 3, 8, -9)], ids=str
)
def test_inputs_that_no_output_reads_may_be_anything(axis: Axis, pass_: Pass) -> None:
    p = ConvProblem(pass_, 2, 5, 5, (axis,), 5)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    read = {j * axis.stride - axis.before + k * axis.dilation for j in range(axis.out) for k in range(axis.kernel)}
    a[..., [i for i in range(axis.size) if i not in read]] = math.nan
    c = next(iter(SOLVER.configs(p)))
    for tile in (c["tile"], (4,)):
        got = run(p, a, b, make_result(p), Config(**{**c, "tile": tile}))
        assert (got - want).abs().max() <= 2e-6 * max(1.0, float(want.abs().max()))  # tiles sum in other orders


def test_configs_of_other_problems_are_refused() -> None:
    p = ConvProblem(Pass.DGRAD, 2, 16, 16, LAYERS["strides"], 16)
    a, b = make_operands(p)
    c = next(iter(SOLVER.configs(p)))
    for wrong in ({"tile": (8,)}, {"tile": (7, 9)}, {"tile": 8}, {"lanes": 5}, {"threads": 0}):
        with pytest.raises(SolverUnavailable, match="is no config of"):
            SOLVER.bind(p, Config(**{**c, **wrong}), a, b, make_result(p))


def test_what_lies_in_no_cache_is_refused() -> None:
    p = ConvProblem(Pass.FPROP, 1, 64, 64, (Axis(3000, 700),) * 2, 64)
    assert any("bytes in each thread" in reason for reason in SOLVER.why_not(p))
