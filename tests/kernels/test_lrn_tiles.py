"""Local response normalization by Triton's kernels against float64: every layout and type, between NaN."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.between_nan import Between
from tests.interpreter import interpreted
from tests.lrn import norms

from tilewise.plan import Config
from tilewise.problems.lrn.checks import errors_of
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.problems.operands import make_operands, make_results
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.lrn.channel_tiles import Tiles, backward_launch, forward_launch, tiles_of

with contextlib.suppress(ImportError):  # without Triton
    from tilewise.kernels.triton.launch import Program

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
LARGE = [pytest.param("cpu", marks=[interpreted, pytest.mark.slow]), GPU]
"""Where problems run that take seconds in the interpreter."""
BOUND = {"fp32": 3e-6, "fp16": 5e-3, "bf16": 0.05}
SOLVER: Any = get("channel_tiles")
PLAIN = LrnProblem(3, 33, (7, 9), 5, task="training")


def worst(forward: Tiles, backward: Tiles | None, place: str, **constants: Any) -> float:
    """The L2 error over all kinds of data; tensors lie between NaN, and results begin as NaN."""
    p = replace(forward.p, device=place)
    launches = [forward_launch(forward), *([] if backward is None else [backward_launch(backward)])]
    programs = [
        Program([replace(n, constants=n.constants | constants)], [p.alignment_of("x")] * 3, torch.device(place))
        for n in launches
    ]

    def compute(*tensors: Any) -> Any:
        memory = Between(place)
        x, *dy = (memory.like(t) for t in tensors[: len(p.operands)])
        results = [memory.made(x.shape, x.stride(), x.dtype) for _ in p.results]
        programs[0]((x, results[0]))
        if dy:
            programs[1]((x, dy[0], results[1]))
        assert memory.untouched()
        return tuple(results)

    return errors_of(p, compute).l2


@interpreted
@settings(max_examples=4, suppress_health_check=list(HealthCheck), deadline=None)
@given(p=norms())
def test_kernels_are_right(p: LrnProblem) -> None:
    if not SOLVER.unsupported(p):
        assert worst(*tiles_of(p, next(iter(SOLVER.configs(p)))), "cpu") < BOUND[p.dtype], p.key


@interpreted
@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
@given(p=norms(task="training"))
def test_every_config_is_right(p: LrnProblem) -> None:
    for c in SOLVER.configs(p):
        assert worst(*tiles_of(p, c), "cpu", LONG=p.batch == 2) < BOUND[p.dtype], (p.key, c)


@pytest.mark.parametrize("place", LARGE)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_every_type_and_layout(place: str, dtype: str, layout: str) -> None:
    """Windows, powers and numbers of channels differ, so that each is met in few compilations."""
    number = ("fp32", "bf16", "fp16").index(dtype)
    size, beta, channels = ((5, 0.75, 96), (4, 0.6, 70), (9, 1.0, 33))[number]
    p = replace(PLAIN, size=size, beta=beta, channels=channels, dtype=dtype, layout_name=layout)
    configs = list(SOLVER.configs(p))
    assert worst(*tiles_of(p, configs[number % len(configs)]), place) < BOUND[dtype], p.key


@pytest.mark.parametrize("place", LARGE)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_sizes_of_which_whole_vectors_are_read(place: str, layout: str) -> None:
    p = LrnProblem(2, 64, (8, 16), 3, task="training", layout_name=layout)
    assert worst(*tiles_of(p, next(iter(SOLVER.configs(p)))), place) < BOUND["fp32"]


@pytest.mark.parametrize("place", LARGE)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_large_window_and_places_counted_in_64_bits(place: str, layout: str) -> None:
    p = LrnProblem(1, 100, (3, 5), 21, alpha=0.02, task="training", layout_name=layout)
    back = Tiles(p, 64, 16, "rows")
    assert back.lead == 10
    assert back.rows == 44
    assert worst(Tiles(p, 16, 16), back, place, LONG=True) < BOUND["fp32"]


@pytest.mark.parametrize("place", LARGE)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_nan_and_infinity_reach_the_channels_whose_windows_they_are_in_and_no_others(place: str, layout: str) -> None:
    p = replace(PLAIN, layout_name=layout, device=place)
    forward, backward = tiles_of(p, next(iter(SOLVER.configs(p))))
    assert backward is not None
    launches = ((forward_launch(forward), 2), (backward_launch(backward), 3))
    programs = [Program([one], [16] * count, torch.device(place)) for one, count in launches]
    for value in (float("nan"), float("inf"), 1e30):
        (x, dy), (y, dx) = make_operands(p, 1), make_results(p)
        x[1, 17, 3, 4] = value
        programs[0]((x, y))
        programs[1]((x, dy, dx))
        leaf = x.double().requires_grad_()
        want = torch.nn.functional.local_response_norm(leaf, p.size, p.alpha, p.beta, p.k)
        rows = [
            15,
            16,
            17,
            18,
            19,
        ]  # where fp32 ends before float64, or torch's steps have NaN and the formula has none
        others = [c for c in range(p.channels) if c not in rows]
        torch.testing.assert_close(y.double()[:, others], want.detach()[:, others], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(y[1, rows, 3, 4].isnan().cpu(), want[1, rows, 3, 4].isnan().cpu())
        far = [c for c in range(p.channels) if c not in range(13, 22)]
        (gradient,) = torch.autograd.grad(want, leaf, dy.double())
        torch.testing.assert_close(dx.double()[:, far], gradient[:, far], rtol=1e-5, atol=1e-6)
        assert bool(dx[1, 17, 3, 4].isnan()) == (value != 1e30)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_tensor_of_more_than_2_to_the_31_numbers(layout: str) -> None:
    """The last images, whose places need 64 bits, and the first one."""
    p = LrnProblem(34, 64, (1000, 1000), 5, alpha=0.1, task="training", layout_name=layout, dtype="bf16", device="cuda")
    assert p.nbytes("x") // 2 > 2**31
    one = replace(p, batch=1)
    kernels = SOLVER.passes(p, next(iter(SOLVER.configs(p))), torch.device("cuda"))
    parts = [make_operands(one, seed) for seed in (1, 2)]
    x, dy, y, dx = (t for pair in zip(make_results(p), make_results(p), strict=True) for t in pair)
    for i in range(p.batch):
        x[i : i + 1], dy[i : i + 1] = parts[i % 2]
    kernels.forward(x, y)
    kernels.backward(x, dy, dx)
    for i in (0, 32, 33):
        for got, want in zip((y, dx), one.reference(*parts[i % 2]), strict=True):
            torch.testing.assert_close(got[i : i + 1].double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_the_solver_runs_every_config() -> None:
    p = replace(PLAIN, device="cuda", layout_name="channels_last", channels=70)
    operands, results = make_operands(p), make_results(p)
    for c in list(SOLVER.configs(p))[::2]:
        run = SOLVER.bind_checked(p, c, *operands, *results)
        for got, want in zip(run(*operands, *results, None), p.reference(*operands), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [1, 5, 33, 96, 1000])
def test_tiles_cover_all_channels(layout: str, channels: int) -> None:
    p = replace(PLAIN, channels=channels, layout_name=layout, device="cuda:Some GPU")
    found = list(SOLVER.configs(p))
    assert found
    for c in found:
        for tiles in tiles_of(p, c):
            assert tiles is not None
            assert tiles.rows >= 1
            assert (tiles.blocks - 1) * tiles.rows < channels <= tiles.blocks * tiles.rows
            if tiles.terms == "rows" and tiles.blocks > 1:
                assert tiles.lead + tiles.rows + p.before <= tiles.channels


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": 0.0}, "takes k from"),
        ({"alpha": -1.0}, "takes alpha from 0"),
        ({"beta": 5.0}, "takes beta from 0 to 4.0, not 5.0"),
        ({"size": 65, "channels": 100}, "is for windows of at most 64 channels, not 65"),
        ({"batch": 2**20, "space": (2**12,)}, "counts pixels to"),
        ({"device": "cpu"}, "runs on cuda, not cpu"),
    ],
)
def test_what_is_not_taken_is_said(changes: dict[str, Any], says: str) -> None:
    reasons = SOLVER.why_not(replace(PLAIN, **({"device": "cuda:Some GPU"} | changes)))
    assert any(says in reason for reason in reasons)


@pytest.mark.parametrize(
    "c",
    [
        Config(),
        Config(tile=(16, 32), back=(16, 32), terms="none"),
        Config(tile=(16, 3), back=(16, 32), terms="rows"),
        Config(tile=(16, 32), back=(4, 32), terms="rows"),
    ],
)
def test_a_config_of_others_is_refused(c: Config) -> None:
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.passes(PLAIN, c, torch.device("cpu"))
