"""Gathered products in Triton's interpreter, in small tiles: the GPU tests see only those it offers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.solvers.test_solvers import Memory, check
from tests.strategies import allocate, with_memory

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.products import _patch as _patch_gemm
from tilewise.solvers.products._patch import Digits, Matrix, adds, digits, matrices, sizes
from tilewise.solvers.products.patch_gemm import TILES, PatchGemm

SOLVER = PatchGemm()
MOST_SHARED = 227 * 1024
DENSE = (("contiguous", 0),) * 3


@st.composite
def patches(draw: st.DrawFn, pass_: Pass | None = None, dtype: str = "fp32", dims: int | None = None) -> ConvProblem:
    """Windows that tile the image, with sizes that do and do not divide a tile."""
    axes = []
    for _ in range(dims or draw(st.sampled_from((1, 2, 3)))):
        kernel = draw(st.sampled_from((1, 1, 2, 3, 4, 8, 16)))
        axes.append(Axis(kernel * draw(st.integers(1, 4)), kernel, kernel))
    assume(math.prod(axis.size for axis in axes) <= 600)
    channels = st.sampled_from((1, 3, 8, 16, 20, 33))
    return ConvProblem(
        pass_ or draw(st.sampled_from(list(Pass))), draw(st.integers(1, 5)), draw(channels), draw(channels),
        tuple(axes), dtype=dtype, precision="tf32", accumulate=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    edges = st.sampled_from((16, 32, 64))
    found = Config(tile=(draw(edges), draw(edges), draw(edges)), warps=4, stages=2)
    return Config(**found, splits=draw(st.integers(1, min(4, sizes(p)[2])))) if p.pass_ is Pass.WGRAD else found


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@settings(max_examples=7, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_tile(pass_: Pass, dtype: str, data: st.DataObject) -> None:
    # Not bf16: the interpreter multiplies its bit patterns.
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(patches(pass_, dtype), lambda p: not SOLVER.unsupported(p)), "problem"
    )
    p, forms = found
    if dtype == "fp16" and data.draw(st.booleans(), "fp32 result"):
        p = replace(p, out_dtype="fp32")
    check(SOLVER, p, data.draw(configs(p), "config"), forms, p.accumulate)


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_it_binds_and_runs(pass_: Pass, layout: str) -> None:
    """A config that could not be bound would pass the drawn tests."""
    p = ConvProblem(pass_, 3, 3, 20, (Axis(32, 16, 16), Axis(48, 16, 16)), dtype="fp16", layouts=(layout,) * 3)
    a, b = make_operands(p)
    c = Config(tile=(32, 16, 64), warps=4, stages=2)
    c = Config(**c, splits=2) if pass_ is Pass.WGRAD else c
    out = make_result(p)
    space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
    SOLVER.bind(p, c, a, b, out)(a, b, out, space)
    want = p.reference(a, b)
    assert (out.double() - want).norm() <= 2.0**-9 * want.norm()


@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
def test_places_beyond_32_bits(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in 64 bits; tensors that need them do not fit a test."""
    monkeypatch.setattr(_patch_gemm, "_span", lambda tensor: 2**31)
    p = ConvProblem(pass_, 2, 3, 18, (Axis(8, 4, 4), Axis(12, 4, 4)), dtype="fp16")
    c = Config(tile=(16, 16, 16), warps=4, stages=2)
    check(SOLVER, p, Config(**c, splits=2) if pass_ is Pass.WGRAD else c, DENSE, False)


@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(found=with_memory(patches()), block=st.sampled_from((16, 32, 64)))
def test_what_is_promised_of_places_holds(found: tuple[ConvProblem, Memory], block: int) -> None:
    """The interpreter does not use the promises; compiled kernels read wrong elements where one is broken."""
    p, forms = found
    strided = {
        role: allocate(p.shape(role), torch.float32, torch.device("meta"), *form)[0]
        for role, form in zip(ROLES, forms, strict=True)
    }
    rows, columns, depth = sizes(p)
    tensors = [strided[role] for role in (*p.operands, p.result)]
    roles = (p.operands[1], p.operands[0], p.result)
    for role, matrix, shape in zip(
        roles, matrices(p, *tensors), ((rows, depth), (columns, depth), (rows, columns)), strict=True
    ):
        across = [place(matrix.across, i) for i in range(shape[0])]
        along = [place(matrix.along, i) for i in range(shape[1])]
        inner, outer = (along, across) if matrix.inner else (across, along)
        assert len(inner) % matrix.run == 0
        for start in range(0, len(inner), matrix.run):
            assert inner[start] % matrix.run == 0
            assert inner[start : start + matrix.run] == list(range(inner[start], inner[start] + matrix.run))
        assert all(n % matrix.run == 0 for n in outer)
        everywhere = sorted(r + c for r, c in itertools.product(across, along))
        assert everywhere == sorted(offsets(strided[role]))
        if adds(matrix.along, block):
            assert all(n == along[i - i % block] + place(matrix.along, i % block) for i, n in enumerate(along))


def place(known: Digits, i: int) -> int:
    found = 0
    for stride, size in zip(known[:-1:2], known[1::2], strict=True):
        found += i % size * stride
        i //= size
    return found + i * known[-1]


def offsets(tensor: torch.Tensor) -> list[int]:
    found = [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = [n + i * stride for n in found for i in range(size)]
    return found


def test_digits_are_as_few_as_memory_allows() -> None:
    assert digits((4, 3, 14, 16), (150528, 50176, 224, 1)) == (1, 16, 224, 14, 50176)
    assert digits((2, 3, 4), (12, 4, 1)) == (1,)
    assert digits((1, 1), (7, 9)) == (0,)
    assert adds((1, 16, 224, 16, 50176), 64)
    assert not adds((1, 14, 224, 14, 50176), 64)


def vit(pass_: Pass, batch: int = 256, dtype: str = "bf16") -> ConvProblem:
    """The patch embedding of ViT-B/16."""
    axis = Axis(224, 16, 16)
    return ConvProblem(pass_, batch, 3, 768, (axis, axis), dtype=dtype, precision="tf32", device="cuda:any")


def clip(pass_: Pass, batch: int = 4096) -> ConvProblem:
    """The patch embedding of a video model whose tokens come cut out: two frames of 14 x 14."""
    axes = (Axis(2, 2, 2), Axis(14, 14, 14), Axis(14, 14, 14))
    return ConvProblem(pass_, batch, 3, 1280, axes, dtype="bf16", device="cuda:any")


@pytest.mark.parametrize("pass_", list(Pass))
def test_patch_embeddings_are_read_in_wide_runs(pass_: Pass) -> None:
    """Sixteen taps of an image's row follow one another; of 196 tokens of an output only fours do."""
    runs = {"x": 16, "w": 16, "y": 4}
    p = vit(pass_, 2)
    tensors = [torch.empty(p.shape(role), device="meta") for role in (*p.operands, p.result)]
    found: tuple[Matrix, ...] = matrices(p, *tensors)
    assert [matrix.run for matrix in found] == [runs[role] for role in (p.operands[1], p.operands[0], p.result)]


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("problem", [vit, clip])
def test_offers(problem: type[vit], pass_: Pass) -> None:
    p = problem(pass_)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    found = list(SOLVER.configs(p))
    assert 4 <= len(found) <= 8
    for c in found:
        assert Config.from_key(c.key) == c
        assert SOLVER.cost(p, c).efficiency > 0.2
        assert (SOLVER.workspace(p, c) > 0) == (c.get("splits", 1) != 1)


def test_limits_are_said() -> None:
    p = vit(Pass.FPROP)
    reasons = {
        "one group": replace(p, groups=3), "precision ieee": replace(p, dtype="fp32", precision="ieee"),
        "stride equal": replace(p, axes=(Axis(224, 16, 8),) * 2),
        "padding": replace(p, axes=(Axis(224, 16, 16, 1, 8, 8),) * 2),
        "whole windows": replace(p, axes=(Axis(225, 16, 16),) * 2),
        "tokens": replace(p, batch=2**24),
    }  # fmt: skip
    for word, wrong in reasons.items():
        assert any(word in reason for reason in SOLVER.unsupported(wrong)), word


@pytest.mark.parametrize(
    "c",
    [
        Config(tile=(128, 128, 48), warps=4, stages=3),
        Config(tile=(128, 128), warps=4, stages=3),
        Config(tile=(128, 128, 64), warps=3, stages=3),
        Config(tile=(128, 128, 64), warps=4),
        Config(tile=(128, 128, 64), warps=4, stages=3, splits=2),
        Config(tile=(128, 128, 64), warps=4, stages=3, images=2),
    ],
    ids=str,
)
def test_a_bad_config_is_unavailable(c: Config) -> None:
    p = replace(vit(Pass.FPROP, 1), device="cpu")
    a, b, out = (torch.empty(p.shape(role), dtype=torch.bfloat16) for role in ("x", "w", "y"))
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(p, c, a, b, out)


def test_tiles_fit_shared_memory() -> None:
    for itemsize, tiles in TILES.items():
        for tile, _ in tiles:
            assert (tile.rows + tile.columns) * tile.depth * itemsize * tile.stages <= MOST_SHARED


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("problem", ["vit", "clip", "vit-tf32", "vit-odd", "pointwise", "patch14"])
def test_every_offer_on_a_gpu(problem: str, pass_: Pass, layout: str) -> None:
    device = device_name("cuda")
    whole, batch = {
        "vit": (vit(pass_), 64), "clip": (clip(pass_), 64), "vit-tf32": (vit(pass_, dtype="fp32"), 2),
        "vit-odd": (replace(vit(pass_), out_channels=100), 3),
        "pointwise": (ConvProblem(pass_, 4, 16, 72, (Axis(14, 1), Axis(14, 1)), dtype="fp16"), 4),
        "patch14": (replace(vit(pass_), axes=(Axis(70, 14, 14),) * 2, out_channels=192), 2),
    }[problem]  # fmt: skip
    whole = replace(whole, layouts=(layout,) * 3, device=device)
    p = replace(whole, batch=batch)
    a, b = make_operands(p)
    want = p.reference(a, b)
    bound = SOLVER.error_bound["tf32"] if p.dtype == "fp32" else 2.0**-8 if p.dtype == "bf16" else 2.0**-10
    most = None if problem in ("vit", "clip") else 2  # each is compiled, which takes a second
    for c in itertools.islice(SOLVER.configs(whole), most):  # a smaller batch would be offered other tiles
        out = make_result(p)
        space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cuda")
        run = SOLVER.bind(p, c, a, b, out)
        run(a, b, out, space)
        error = ((out.double() - want).norm() / want.norm()).item()
        assert error < bound, c
        again = make_result(p)
        run(a, b, again, space.fill_(0xFF))
        assert torch.equal(out, again), c


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", list(Pass))
def test_adding_on_a_gpu(pass_: Pass) -> None:
    p = replace(vit(pass_, 4), accumulate=True, out_dtype="fp32", device=device_name("cuda"))
    a, b = make_operands(p)
    want = p.reference(a, b)
    for c in SOLVER.configs(p):
        out = torch.ones_like(make_result(p))
        space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cuda")
        SOLVER.bind(p, c, a, b, out)(a, b, out, space)
        assert ((out.double() - 1 - want).norm() / want.norm()).item() < 1e-4, c
