"""Depthwise transforms on a CPU: the compiled kernel over generated layers, strides, threads and files."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sampling import some
from tests.solvers.cpu_runs import at_once, run_poisoned
from tests.solvers.test_depthwise_fft import depthwise
from tests.solvers.test_solvers import Memory, check
from tests.strategies import with_memory

from tilewise import execute
from tilewise.kernels.cpu import sizes
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.conv.reference import convolve_by_transform
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.common.bases import meets
from tilewise.solvers.fused_fourier.depthwise_fft import DepthwiseFFT

pytest.importorskip("numba")
SOLVER = DepthwiseFFT()
SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
LAYERS = {
    "planes": (Axis(56, 31, 1, 1, 15, 15),) * 2,
    "odd planes": (Axis(29, 14, 1, 1, 9, 2), Axis(41, 17, 1, 1, -3, 8)),
    "strides": (Axis(57, 31, 2, 1, 15, 15), Axis(56, 11, 3, 2, 4, 9)),
    "signal": (Axis(3001, 257, 1, 1, 128, 128),),
    "as long as the signal": (Axis(700, 700, 1, 1, 699, 0),),
    "strided signal": (Axis(3001, 257, 2, 1, 128, 128),),
    "strided and dilated signal": (Axis(2999, 131, 3, 5, 321, 300),),
}


def run(p: ConvProblem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, number: int = 0) -> torch.Tensor:
    """In a workspace full of NaN."""
    return run_poisoned(SOLVER, p, list(SOLVER.configs(p))[number], a, b, out)


def error(p: ConvProblem, got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    want = convolve_by_transform(p, a, b)
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("dims", "longest", "spread"), [(1, 200, False), (1, 200, True), (2, 20, False), (2, 40, True)]
)
@pytest.mark.parametrize("pass_", list(Pass))
def test_layers_of_any_kernel_and_padding(pass_: Pass, dims: int, longest: int, spread: bool) -> None:
    """Also with strides and dilation (``spread``), and with filters that are kept."""
    layers = st.sampled_from(("fp32", "bf16", "fp16")).flatmap(
        lambda dtype: with_memory(depthwise(pass_, dims, longest, dtype, spread), lambda p: not SOLVER.why_not(p))
    )
    keeps = st.booleans() if pass_ is not Pass.WGRAD else st.just(False)

    @settings(max_examples=some(20), suppress_health_check=SLOW)
    @given(layers, keeps)
    def any_layer(found: tuple[ConvProblem, Memory], constant: bool) -> None:
        p, forms = replace(found[0], constant_weight=constant), found[1]
        for c in SOLVER.configs(p):
            check(SOLVER, p, c, forms, accumulate=False)

    any_layer()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("channels", [3, 37])
@pytest.mark.parametrize("pass_", list(Pass))
def test_error_of_large_kernels(pass_: Pass, channels: int, layer: tuple[Axis, ...]) -> None:
    p = ConvProblem(pass_, 3, channels, channels, layer, channels)
    if SOLVER.why_not(p):
        pytest.skip("; ".join(SOLVER.why_not(p)))
    a, b = make_operands(p)
    for number in range(len(list(SOLVER.configs(p)))):
        assert error(p, run(p, a, b, make_result(p), number), a, b) <= 5e-7


@pytest.mark.parametrize("pass_", list(Pass))
def test_memory_of_any_order(pass_: Pass) -> None:
    """Rows, columns or channels innermost, and none of them."""
    p = ConvProblem(pass_, 2, 19, 19, (Axis(20, 7, 1, 1, 3, 3), Axis(21, 18, 1, 1, 9, 9)), 19)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    for order in itertools.permutations(range(4)):
        moved = [t.permute(order).contiguous().permute(np.argsort(order).tolist()) for t in (a, b, make_result(p))]
        assert torch.equal(run(p, *moved), want), order
    apart = [torch.zeros(*t.shape[:3], 2 * t.shape[3])[..., ::2].copy_(t) for t in (a, b, make_result(p))]
    assert torch.equal(run(p, *apart), want)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_kept_filters_give_the_same_bits(pass_: Pass, layer: tuple[Axis, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads prepare them, in channels that fill no vector, of which shares read the same."""
    p = ConvProblem(pass_, 5, 37, 37, layer, 37)
    kept = replace(p, constant_weight=True)
    a, b = make_operands(p)
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        c = next(iter(SOLVER.configs(p)))
        assert c == next(iter(SOLVER.configs(kept)))
        assert ("shares" in c) == (threads > 1)
        assert SOLVER.constant(p, c) == 0
        each = SOLVER.constant(kept, c) // -(-37 // c["lanes"])
        assert abs(SOLVER.workspace(p, c) - SOLVER.workspace(kept, c) - c["threads"] * each) < c["threads"] * 4096
        want = run(p, a, b, make_result(p)).clone()
        for weight in (b, torch.stack([b, b], -1)[..., 0]):
            assert torch.equal(run(kept, a, weight, make_result(kept)), want)


@pytest.mark.parametrize("layer", ["planes", "signal"])
def test_plans_prepare_a_filter_anew_when_it_changes(layer: str) -> None:
    p = ConvProblem(Pass.FPROP, 2, 19, 19, LAYERS[layer], 19, constant_weight=True)
    a, b = make_operands(p)
    config = next(iter(SOLVER.configs(p)))
    bound = execute.bind(Plan(p.key, SOLVER.name, SOLVER.version, config), p, a, b)
    first = bound(a, b)
    assert error(p, first, a, b) <= 5e-7
    b.mul_(2)
    assert torch.equal(bound(a, b), 2 * first)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_images_and_channels_stay_apart(pass_: Pass, dims: int) -> None:
    """NaN and infinities in one plane leave the others' bits as they were."""
    p = ConvProblem(pass_, 3, 18, 18, LAYERS["planes" if dims > 1 else "signal"], 18)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    a[1, 4].view(-1)[7] = math.nan
    a[2, 17].view(-1)[0] = math.inf
    got = run(p, a, b, make_result(p))
    hit = torch.zeros(3, 18, dtype=torch.bool)
    hit[1, 4] = hit[2, 17] = True
    assert torch.equal(got[~hit], want[~hit])
    assert not got[1, 4].isfinite().all()
    assert not got[2, 17].isfinite().all()


@pytest.mark.parametrize("pass_", list(Pass))
def test_any_number_of_threads_gives_the_same_bits(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    p = ConvProblem(pass_, 5, 40, 40, LAYERS["odd planes"], 40)
    a, b = make_operands(p)
    want = None
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        config = next(iter(SOLVER.configs(p)))
        assert 1 <= config["threads"] <= threads
        got = run(p, a, b, make_result(p)).clone()
        assert want is None or torch.equal(got, want)
        want = got


def test_callers_at_once() -> None:
    p = ConvProblem(Pass.FPROP, 2, 40, 40, LAYERS["odd planes"], 40)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    got = at_once(lambda: run(p, a, b, make_result(p)), 6)
    assert len(got) == 120
    assert all(torch.equal(each, want) for each in got)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    p = ConvProblem(Pass.FPROP, 2, 40, 40, LAYERS["odd planes"], 40)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # torch's own are gone, and its operators would wait for them
        got = run(p, a, b, make_result(p))
        os._exit(0 if got.numpy().tobytes() == want.numpy().tobytes() else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("pass_", list(Pass))
def test_threads_of_torch_and_of_ours(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.cpu.threads import has_openmp

    p = ConvProblem(pass_, 2, 80, 80, LAYERS["odd planes"], 80)
    a, b = make_operands(p)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    teams = [c["team"] for c in SOLVER.configs(p)]
    assert set(teams) == ({"openmp", "own"} if has_openmp() else {"own"})
    results = [run(p, a, b, make_result(p), teams.index(team)).clone() for team in sorted(set(teams))]
    monkeypatch.setattr("tilewise.kernels.cpu.threads._parallel", lambda: None)  # as a plan from elsewhere may find
    results.append(run(p, a, b, make_result(p)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_configs_of_other_problems_are_refused() -> None:
    planes = ConvProblem(Pass.FPROP, 2, 16, 16, LAYERS["planes"], 16)
    signal = ConvProblem(Pass.FPROP, 2, 16, 16, LAYERS["signal"], 16)
    for p, other in itertools.permutations((planes, signal)):
        a, b = make_operands(p)
        with pytest.raises(SolverUnavailable, match="is no config of"):
            SOLVER.bind(p, next(iter(SOLVER.configs(other))), a, b, make_result(p))
    a, b = make_operands(planes)
    c = next(iter(SOLVER.configs(planes)))
    for wrong in ({"basis": (64, 72)}, {"basis": (77, 72)}, {"lanes": 5}, {"threads": 0}):
        with pytest.raises(SolverUnavailable, match="is no config of"):
            SOLVER.bind(planes, type(c)(**{**c, **wrong}), a, b, make_result(planes))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 9, 16, 18, 27, 72, 81, 96, 192, 243, 256, 576, 3072])
def test_radices_and_the_order_they_leave(n: int) -> None:
    radices = sizes.factors(n)
    assert math.prod(radices) == n
    assert set(radices) <= set(sizes.RADICES)
    assert sorted(sizes.order(n)) == list(range(n))
    # Passes by hand: each leaves its blocks to the next.
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n) + 1j * rng.standard_normal(n)
    want = np.fft.fft(x)[np.argsort(sizes.order(n))]
    length, factors = n, sizes.twiddles(n).astype(np.float64) @ np.array([1, 1j])
    for radix in radices:
        apart = length // radix
        turns = np.concatenate([np.ones((apart, 1)), factors[: apart * (radix - 1)].reshape(apart, radix - 1)], 1).T
        factors = factors[apart * (radix - 1) :]
        x = (np.fft.fft(x.reshape(-1, radix, apart), axis=1) * turns).reshape(-1)
        length = apart
    assert np.abs(x - want).max() <= 1e-6 * np.abs(want).max()


def test_sizes_that_are_no_product_of_twos_and_threes() -> None:
    with pytest.raises(ValueError, match="n=10: 2"):
        sizes.factors(10)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("pass_", list(Pass))
def test_signals_in_tiles_of_any_basis(pass_: Pass, spread: bool) -> None:
    """Down to one result to a tile, also where so little is left to compute that they are not offered."""

    def possible(p: ConvProblem) -> bool:
        (axis,) = p.axes
        return meets(axis) and (pass_ is not Pass.DGRAD or axis.before >= 0)

    keeps = st.booleans() if pass_ is not Pass.WGRAD else st.just(False)

    @settings(max_examples=40, suppress_health_check=SLOW)
    @given(with_memory(depthwise(pass_, 1, 150, spread=spread), possible), keeps, st.data())
    def any_tiles(found: tuple[ConvProblem, Memory], constant: bool, data: st.DataObject) -> None:
        p, forms = replace(found[0], constant_weight=constant), found[1]
        (axis,) = p.axes
        bases = [n for n in range(max(2, axis.reach), 2 * axis.reach + 200) if sizes.smooth(n)]
        c = Config(basis=(data.draw(st.sampled_from(bases), "basis"),), lanes=4, threads=1, shares=1 + constant)
        check(SOLVER, p, c, forms, accumulate=False)

    any_tiles()


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.WGRAD])
@pytest.mark.parametrize(
    "axis", [Axis(900, 101, 1, 1, -3, -5), Axis(900, 101, 4, 1, -1, 0), Axis(911, 31, 3, 3, 8, -9)], ids=str
)
def test_inputs_that_no_output_reads_may_be_anything(axis: Axis, pass_: Pass) -> None:
    p = ConvProblem(pass_, 2, 5, 5, (axis,), 5)
    a, b = make_operands(p)
    want = run(p, a, b, make_result(p)).clone()
    last = (axis.out - 1) * axis.stride + axis.reach - axis.before
    assert last < axis.size
    a[..., last:] = math.nan
    a[..., : max(0, -axis.before)] = math.nan
    for number in range(len(list(SOLVER.configs(p)))):
        assert error(p, run(p, a, b, make_result(p), number), a.nan_to_num(), b) <= 5e-7
    assert torch.equal(run(p, a, b, make_result(p)), want)


@pytest.mark.parametrize("dims", [1, 2])
def test_strides_that_leave_little_are_refused(dims: int) -> None:
    p = ConvProblem(Pass.FPROP, 2, 8, 8, (Axis(700, 7, 6, 1, 3, 3),) * dims, 8)
    assert any("takes strides and dilation that leave" in reason for reason in SOLVER.why_not(p))
    p = ConvProblem(Pass.FPROP, 2, 8, 8, (Axis(4, 2, 1, 9, 3, 3),) * dims, 8)
    assert any("no output reads an input" in reason for reason in SOLVER.why_not(p))
