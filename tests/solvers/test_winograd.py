"""Winograd on a CPU: the compiled kernels over generated layers, tiles, blocks, strides and threads."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sampling import some
from tests.solvers.cpu_runs import run_poisoned
from tests.solvers.test_solvers import Memory, check
from tests.strategies import with_memory

from tilewise import execute
from tilewise.kernels.cpu.winograd.tiling import ROWS, rows_of
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.winograd._cpu import sizes, tiling
from tilewise.solvers.winograd.winograd import Winograd

pytest.importorskip("numba")
SOLVER = Winograd()
KERNELS = ((3, 3), (5, 5), (3, 1), (5,), (3, 3, 3))
"""Those that are drawn: each is compiled anew, for every size of tiles."""
LONGEST = {1: 90, 2: 40, 3: 12}
BOUND = {  # also of processors that round between multiplication and addition
    (3, 3): {2: 6e-7, 4: 2e-6, 6: 7.5e-6},
    (5, 5): {2: 2e-6, 4: 7e-6},
    (5,): {2: 8e-7, 4: 2e-6, 6: 4e-6},
    (3, 3, 3): {2: 8e-7, 4: 4e-6},
}
"""Of the L2 error, by kernel and tile, on normal data and on data with a few values a thousand times the rest."""


@st.composite
def layers(draw: st.DrawFn, pass_: Pass) -> ConvProblem:
    """Images of any size, padding and cropping, groups, and channels that fill no vector."""
    kernel = draw(st.sampled_from(KERNELS))
    axes = []
    for taps in kernel:
        size = draw(st.integers(1, LONGEST[len(kernel)]))
        before = draw(st.integers(-min(3, size - 1), taps + 1))
        after = draw(st.integers(-min(3, size - 1 + min(before, 0)), taps + 1))
        axes.append(Axis(size + max(0, taps - size - before - after), taps, 1, 1, before, after))
    groups = draw(st.sampled_from((1, 1, 1, 2, 3)))
    inputs, outputs = (groups * draw(st.integers(1, 40)) for _ in range(2))
    return ConvProblem(pass_, draw(st.integers(1, 4)), inputs, outputs, tuple(axes), groups)


def run(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """In a workspace full of NaN."""
    return run_poisoned(SOLVER, p, c, a, b, out)


def error(p: ConvProblem, got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    want = p.reference(a, b)
    return float((got.double() - want).norm() / want.norm())


def tile(p: ConvProblem, m: int) -> Config:
    """The first config with tiles of m."""
    return next(c for c in SOLVER.configs(p) if c["tile"] == m)


def padded(
    pass_: Pass, batch: int, inputs: int, outputs: int, size: int, kernel: tuple[int, ...] = (3, 3), groups: int = 1
) -> ConvProblem:
    axes = tuple(Axis(size, taps, 1, 1, taps // 2, taps // 2) for taps in kernel)
    return ConvProblem(pass_, batch, inputs, outputs, axes, groups)


@pytest.mark.parametrize("pass_", sorted(SOLVER.passes, key=str))
def test_layers_of_any_size_and_padding(pass_: Pass) -> None:
    """Also with blocks, vectors and shares of any number, and with filters that are kept."""

    @settings(max_examples=some(16), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
    @given(with_memory(layers(pass_), lambda p: not SOLVER.why_not(p)), st.data())
    def any_layer(found: tuple[ConvProblem, Memory], data: st.DataObject) -> None:
        filtered = pass_ is not Pass.WGRAD
        constant, bias = (filtered and data.draw(st.booleans(), name) for name in ("constant", "bias"))
        p = replace(found[0], constant_weight=constant, bias=bias)
        if pass_ is Pass.FPROP:
            activation = data.draw(st.sampled_from(("none", "relu", "hardswish")), "activation")
            p = replace(p, residual=data.draw(st.booleans(), "residual"), activation=activation)
        for m in sizes(p):
            c = tile(p, m)
            other = dict(c)
            other["block"] = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)), "block")
            other["vectors"] = data.draw(st.sampled_from((1, 2, 3, 4)), "vectors")
            other["shares"] = data.draw(st.integers(1, 3), "shares")
            if pass_ is Pass.WGRAD:
                blocks = tiling(p, Config(**{**other, "parts": 1})).blocks
                other["parts"] = data.draw(st.integers(1, min(3, blocks)), "parts")
            for config in (c, Config(**other)):
                check(SOLVER, p, config, found[1], accumulate=False)

    any_layer()


@pytest.mark.parametrize("kernel", BOUND)
@pytest.mark.parametrize("pass_", sorted(SOLVER.passes, key=str))
def test_error_of_many_channels(pass_: Pass, kernel: tuple[int, ...]) -> None:
    size = {1: 201, 2: 21, 3: 9}[len(kernel)]
    for p in (padded(pass_, 2, 200, 40, size, kernel), padded(pass_, 2, 24, 130, size, kernel)):
        bounds = [(m, bound) for m, bound in BOUND[kernel].items() if m in sizes(p)]
        assert bounds
        for wide, (m, bound) in itertools.product((False, True), bounds):
            a, b = make_operands(p, 3, wide=wide)
            assert error(p, run(p, tile(p, m), a, b, make_result(p)), a, b) <= bound


@pytest.mark.parametrize(
    ("kernel", "tiles", "gradients"),
    [
        ((3, 3), [4, 6, 2], [4, 2]),
        ((5, 5), [4, 2], [2]),
        ((7, 7), [2], []),
        ((7,), [4, 2], [4, 2]),
        ((3, 3, 3), [4, 2], [2]),
        ((7, 7, 7), [], []),
    ],
)
def test_tiles_that_round_little_enough(kernel: tuple[int, ...], tiles: list[int], gradients: list[int]) -> None:
    for pass_ in Pass:
        p = padded(pass_, 2, 16, 16, 20, kernel)
        expected = gradients if pass_ is Pass.WGRAD else tiles
        assert sizes(p) == expected
        said = [f"tiles of 2, 4, 6 round too much with a kernel of {'x'.join(map(str, kernel))}"]
        assert SOLVER.why_not(p) == ([] if expected else said)


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (7,), (3, 3, 3)])
def test_a_filters_gradient_where_that_of_outputs_is_one_value(kernel: tuple[int, ...]) -> None:
    """As that of a sum is: no tile that is offered may lose what large sums leave."""
    size = {1: 100, 2: 24, 3: 10}[len(kernel)]
    p = padded(Pass.WGRAD, 4, 12, 12, size, kernel)
    for m, value in itertools.product(sizes(p), (1.0, 0.7)):
        a, b = make_operands(p, 5)
        assert error(p, run(p, tile(p, m), a, b.fill_(value), make_result(p)), a, b) < 5e-6, (m, value)


def test_kernels_that_it_does_not_take() -> None:
    (said,) = SOLVER.why_not(padded(Pass.FPROP, 2, 16, 16, 20, (9, 3)))
    assert said.startswith("takes kernels of up to 7 without stride or dilation along h, not 9")
    (said,) = SOLVER.why_not(padded(Pass.FPROP, 2, 16, 16, 20, (1, 1)))
    assert said == "has no multiplications to save with a kernel of 1x1"


@pytest.mark.parametrize("pass_", sorted(SOLVER.passes, key=str))
def test_memory_of_any_order(pass_: Pass) -> None:
    """Rows, columns or channels innermost, and none of them."""
    p = ConvProblem(pass_, 2, 38, 19, (Axis(20, 3, 1, 1, 1, 2), Axis(21, 3, 1, 1, -1, 1)))
    a, b = make_operands(p)
    c = tile(p, 4)
    want = run(p, c, a, b, make_result(p)).clone()
    for order in itertools.permutations(range(4)):
        moved = [t.permute(order).contiguous().permute(np.argsort(order).tolist()) for t in (a, b, make_result(p))]
        assert torch.equal(run(p, c, *moved), want), order
    apart = [torch.zeros(*t.shape[:3], 2 * t.shape[3])[..., ::2].copy_(t) for t in (a, b, make_result(p))]
    assert torch.equal(run(p, c, *apart), want)


@pytest.mark.parametrize("pass_", sorted(SOLVER.passes, key=str))
def test_volumes_in_memory_of_any_order(pass_: Pass) -> None:
    p = ConvProblem(pass_, 2, 18, 19, (Axis(6, 3, 1, 1, 1, 2), Axis(7, 3, 1, 1, 0, 1), Axis(9, 3, 1, 1, 1, -1)))
    a, b = make_operands(p)
    c = tile(p, 2)
    want = run(p, c, a, b, make_result(p)).clone()
    for order in ((0, 2, 3, 4, 1), (4, 3, 2, 1, 0), (1, 0, 3, 4, 2)):
        moved = [t.permute(order).contiguous().permute(np.argsort(order).tolist()) for t in (a, b, make_result(p))]
        assert torch.equal(run(p, c, *moved), want), order


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_kept_filters_give_the_same_bits(pass_: Pass) -> None:
    p = padded(pass_, 3, 37, 82, 14)
    kept = replace(p, constant_weight=True)
    a, b = make_operands(p)
    for c in SOLVER.configs(p):
        assert SOLVER.constant(p, c) == 0
        assert SOLVER.workspace(p, c) - SOLVER.workspace(kept, c) == SOLVER.constant(kept, c) > 0
        want = run(p, c, a, b, make_result(p)).clone()
        assert torch.equal(run(kept, c, a, b, make_result(p)), want)


def test_plans_prepare_a_filter_anew_when_it_changes() -> None:
    p = replace(padded(Pass.FPROP, 2, 19, 19, 17), constant_weight=True)
    a, b = make_operands(p)
    bound = execute.bind(Plan(p.key, SOLVER.name, SOLVER.version, tile(p, 4)), p, a, b)
    first = bound(a, b)
    assert error(p, first, a, b) <= BOUND[3, 3][4]
    b.mul_(2)
    assert torch.equal(bound(a, b), 2 * first)


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_images_stay_apart(pass_: Pass) -> None:
    """NaN and infinities in one image leave the others' bits as they were."""
    p = padded(pass_, 3, 18, 18, 9)
    a, b = make_operands(p)
    c = tile(p, 4)
    want = run(p, c, a, b, make_result(p)).clone()
    a[1, 4].view(-1)[7] = math.nan
    a[1, 17].view(-1)[0] = math.inf
    got = run(p, c, a, b, make_result(p))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2])
    assert got[1].isnan().any()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = padded(Pass.FPROP, 4, 20, 40, 14)
    a, b = make_operands(p)
    want = run(p, tile(p, 4), a, b, make_result(p)).clone()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for c in (c for c in SOLVER.configs(p) if c["tile"] == 4):
        assert c["threads"] == threads
        assert torch.equal(run(p, c, a, b, make_result(p)), want)


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_blocks_beyond_a_cache_where_filters_stay_in_none(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-four tiles hide how filters come by; a limit that such a block breaks gets one within the cache."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    p = padded(pass_, 12, 512, 512, 7)
    large, size = next((c, n) for c, n in SOLVER.offers(p, None) if c["tile"] == 4)
    less, kept = next((c, n) for c, n in SOLVER.offers(p, size - 1) if c["tile"] == 4)
    assert 20 <= math.prod(large["block"]) <= 24  # type: ignore[arg-type]
    assert math.prod(less["block"]) < 20  # type: ignore[arg-type]
    assert kept < size
    assert [c for c, _ in SOLVER.offers(p, None, [less])] == [less]
    assert (large, size) in list(SOLVER.offers(p, kept - 1))  # said to break the limit
    a, b = make_operands(p)
    for c in (large, less):
        assert error(p, run(p, c, a, b, make_result(p)), a, b) < 3e-6


@pytest.mark.parametrize(
    "change", [{"block": (0, 3)}, {"block": 4}, {"vectors": 5}, {"tile": 3}, {"lanes": 7}, {"shares": 0}, {"parts": 2}]
)
def test_a_config_that_is_none(change: dict[str, object]) -> None:
    p = padded(Pass.FPROP, 1, 8, 8, 8)
    a, b = make_operands(p)
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.bind(p, Config(**{**tile(p, 4), **change}), a, b, make_result(p))  # type: ignore[arg-type]


@pytest.mark.parametrize(("inputs", "outputs"), [(1256, 40), (40, 1256)])
def test_all_passes_are_estimated_alike(inputs: int, outputs: int) -> None:
    """A filter's gradient has its vectors along inputs; it was estimated to take thirty times its products."""
    costs = []
    for pass_ in Pass:
        p = padded(pass_, 8, inputs, outputs, 8)
        costs.append(SOLVER.cost(p, tile(p, 4)).flops)
    assert max(costs) < 4 * min(costs)


@pytest.mark.parametrize("vectors", ROWS)
def test_blocks_of_rows_cover_any_count(vectors: int) -> None:
    for count in range(1, 100):
        rows = rows_of(vectors, count)
        assert rows in ROWS[vectors]
        assert -(-count // rows) * rows < count + max(rows, 4)
