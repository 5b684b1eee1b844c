"""Pooling by Triton's kernels against float64: every option, layout and type, between NaN, in 32 and 64 bits."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.between_nan import Between
from tests.interpreter import interpreted
from tests.pooling import poolings

from tilewise.plan import Config
from tilewise.problems.base import dense_strides
from tilewise.problems.pooling.checks import errors_of, operands_of_kind
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.pooling.window_tiles import Kernels, Tiles, backward_launch, forward_launch

with contextlib.suppress(ImportError):  # without Triton
    from tilewise.kernels.triton.launch import Program

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
PLACES = [pytest.param("cpu", marks=interpreted), GPU]
LARGE = [pytest.param("cpu", marks=[interpreted, pytest.mark.slow]), GPU]
"""Where problems run that take seconds in the interpreter."""
BOUND = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}
SOLVER: Any = get("window_tiles")


def worst(p: PoolingProblem, place: str, tile: int, back: int, **constants: Any) -> float:
    """The L2 error over all kinds of data; tensors lie between NaN, and results begin as NaN."""
    device = torch.device(place)
    p = replace(p, device=place)
    launches = [forward_launch(Tiles(p, tile)), backward_launch(Tiles(p, back, back=True))]
    aligned = [p.alignment_of("x")] * 3
    forward, backward = (Program([replace(n, constants=n.constants | constants)], aligned, device) for n in launches)

    def compute(*tensors: Any) -> Any:
        memory = Between(place)
        x, *dy = (memory.like(t) for t in tensors[: len(p.operands)])
        y, *dx = (
            memory.made(p.shape(role), dense_strides(p.shape(role), p.layout(role)), x.dtype) for role in p.results
        )
        keeps = p.op == "max" and p.task == "training"
        kept = memory.made((y.numel(),), (1,), torch.uint8) if keeps else None
        forward((x, y, y if kept is None else kept))
        if dy:
            backward((dy[0], dy[0] if kept is None else kept, dx[0]))
        assert memory.untouched()
        return (y, dx[0]) if dy else y

    return errors_of(p, compute).l2


@interpreted
@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
@given(p=poolings())
def test_kernels_are_right(p: PoolingProblem) -> None:
    assert worst(p, "cpu", 128, 256) < BOUND[p.dtype], p.key


@interpreted
@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
@given(p=poolings())
def test_kernels_are_right_in_tiles_of_every_size(p: PoolingProblem) -> None:
    tile, back = ((128, 2048), (512, 512), (2048, 256))[p.batch - 1]
    assert worst(p, "cpu", tile, back, LONG=p.batch == 2) < BOUND[p.dtype], p.key


CASES = [
    PoolingProblem("max", 3, 19, (37, 41), (3, 3), (2, 2), (1, 1), task="training"),
    PoolingProblem("max", 2, 32, (16, 48), (2, 3), (2, 1), (0, 1), (1, 2), ceil_mode=True, task="training"),
    PoolingProblem("avg", 2, 33, (29, 31), (3, 5), (2, 3), (1, 2), count_include_pad=False, task="training"),
    PoolingProblem("avg", 2, 16, (5, 16, 32), (2, 3, 3), (2, 1, 2), (1, 0, 1), ceil_mode=True, task="training"),
    PoolingProblem("avg", 5, 7, (7, 7), (7, 7), (7, 7), divisor=11, task="training"),
    PoolingProblem("max", 2, 5, (301,), (9,), (4,), (4,), task="training"),
]


@pytest.mark.parametrize("place", LARGE)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_option_in_every_type(place: str, layout: str, case: int) -> None:
    """Types take turns, so that each meets both operations and both layouts in few compilations."""
    last = layout == "channels_last"
    dtype = ("fp32", "bf16", "fp16")[(case + last) % 3]
    p = replace(CASES[case], layout_name=layout, dtype=dtype)
    if place == "cpu":  # the interpreter takes seconds for more
        p = replace(p, batch=1, channels=3)
    assert worst(p, place, 512, 2048) < BOUND[dtype], p.key


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_places_counted_in_64_bits(place: str, layout: str) -> None:
    p = replace(CASES[0], layout_name=layout, batch=2, channels=3, space=(9, 11))
    assert worst(p, place, 128, 256, LONG=True) < BOUND["fp32"]


@pytest.mark.parametrize("place", LARGE)
def test_the_last_element_of_the_largest_window(place: str) -> None:
    p = PoolingProblem("max", 1, 1, (18, 19), (16, 16), (3, 3), task="training", device=place)
    x, dy = operands_of_kind(p, "normal", 1)
    x[0, 0, 15, 15] = 1e3  # number 255 of the first window, and number 252 of the second
    kernels = Kernels(p, 128, 128, device=torch.device(place))
    y, (numbers,) = kernels.forward(x, keep=True)
    assert numbers.tolist() == [255, 252]
    assert y.flatten().tolist() == [1e3, 1e3]
    dx = kernels.backward((numbers,), dy)
    assert dx[0, 0, 15, 15] == dy[0, 0, 0, 0] + dy[0, 0, 0, 1]
    assert int((dx != 0).sum()) == 1
    kept = "keeps a byte for each result: for windows of up to 256 elements, not 272"
    assert kept in SOLVER.unsupported(replace(p, kernel=(16, 17)))
    assert kept not in SOLVER.unsupported(replace(p, kernel=(16, 17), task="inference"))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_tensor_of_more_than_2_to_the_31_numbers(layout: str) -> None:
    """The last images, whose places need 64 bits, and the first one."""
    p = PoolingProblem("max", 34, 64, (1000, 1000), (3, 3), (2, 2), (1, 1), task="training", layout_name=layout)
    p = replace(p, dtype="bf16", device="cuda")
    assert p.nbytes("x") // 2 > 2**31
    one = replace(p, batch=1)
    c = next(iter(SOLVER.configs(p)))
    x, dy = (
        torch.empty_strided(p.shape(r), dense_strides(p.shape(r), layout), dtype=torch.bfloat16, device="cuda")
        for r in ("x", "dy")
    )
    parts = [operands_of_kind(one, "equal", seed) for seed in (1, 2)]
    for i in range(p.batch):
        x[i : i + 1], dy[i : i + 1] = parts[i % 2]
    kernels = SOLVER.pooler(p, c, torch.device("cuda"))
    y, saved = kernels.forward(x, keep=True)
    dx = kernels.backward(saved, dy)
    want = [one.reference(*part) for part in parts]
    for i in (0, 32, 33):
        torch.testing.assert_close(y[i : i + 1].double(), want[i % 2][0], rtol=0, atol=0)
        torch.testing.assert_close(dx[i : i + 1].double(), want[i % 2][1], rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_the_solver_runs_and_gives_the_same_bits_every_time() -> None:
    p = replace(CASES[0], device="cuda", layout_name="channels_last")
    operands = operands_of_kind(p, "normal", 1)
    for c in list(SOLVER.configs(p))[::3]:
        run = SOLVER.bind_checked(p, c, *operands, None, None)
        first, again = (run(*operands, None, None, None) for _ in range(2))
        for a, b, want in zip(first, again, p.reference(*operands), strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a.double(), want, rtol=1e-5, atol=1e-5)


def test_tiles_cover_all_results() -> None:
    for case in CASES:
        for layout in ("contiguous", "channels_last"):
            p = replace(case, layout_name=layout)
            for back in (False, True):
                for size in (128, 2048):
                    tiles = Tiles(p, size, back)
                    assert tiles.wide * tiles.high == size
                    assert tiles.blocks * tiles.wide >= tiles.columns > (tiles.blocks - 1) * tiles.wide
                    shape = p.shape("x" if back else "y")
                    assert tiles.lines * tiles.columns == torch.Size(shape).numel()


def test_what_is_not_taken_is_said() -> None:
    p = replace(CASES[0], device="cuda:Some GPU")
    assert SOLVER.undeclared(replace(p, device="cpu")) == ["runs on cuda, not cpu"]
    large = PoolingProblem("avg", 1, 1, (300, 300), (300, 300), (1, 1), device="cuda:Some GPU")
    assert any("for windows of up to 65536 elements, not 90000" in reason for reason in SOLVER.unsupported(large))
    many = PoolingProblem("avg", 2**16, 2**15, (2, 2), (1, 1), (1, 1), device="cuda:Some GPU")
    assert any("counts lines to" in reason for reason in SOLVER.unsupported(many))
    wide = PoolingProblem("max", 1, 1, (2**30,), (1,), (1,), device="cuda:Some GPU")
    assert any("is for sizes below" in reason for reason in SOLVER.unsupported(wide))


@pytest.mark.parametrize(
    "c", [Config(), Config(tile=512), Config(tile=512, back=100), Config(tile=1, back=512, more=1)]
)
def test_what_is_no_config_is_refused(c: Config) -> None:
    with pytest.raises(SolverUnavailable, match="is no config of pool max"):
        SOLVER.pooler(CASES[0], c, torch.device("cpu"))


@interpreted
def test_an_average_keeps_nothing() -> None:
    p = PoolingProblem("avg", 1, 2, (4, 4), (2, 2), (2, 2), task="training")
    kernels = Kernels(p, 128, 128, device=torch.device("cpu"))
    x, dy = operands_of_kind(p, "normal", 1)
    y, saved = kernels.forward(x, keep=True)
    assert saved == ()
    want = p.reference(x, dy)
    torch.testing.assert_close([y.double(), kernels.backward(saved, dy).double()], list(want))
