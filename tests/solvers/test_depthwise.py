"""Depthwise convolutions in Triton's interpreter, in small tiles: the GPU tests see only those it offers.

What follows their sums (bias, residual, activation) is tested in ``test_depthwise_epilogue.py``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.sampling import some
from tests.solvers.test_solvers import Memory, check, named
from tests.strategies import allocate, axes, fill, with_memory

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.depthwise._gpu import HIGH, LOW, UNUSED, Tile, kernel_rows, promised, strides_of, vectors, window
from tilewise.solvers.depthwise.depthwise import PEAK, Depthwise, _tile


class Interpreted(Depthwise):
    """The GPU's kernels, whatever the device."""

    def on_cpu(self, p: ConvProblem) -> bool:
        return False


SOLVER = Interpreted()
SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow]


@st.composite
def depthwise(draw: st.DrawFn, pass_: Pass, dtype: str) -> ConvProblem:
    """One input channel to a group, with one or more outputs."""
    dims = draw(st.sampled_from((1, 2, 2, 3)))
    groups = draw(st.sampled_from((1, 2, 3, 5, 8)))
    space = tuple(draw(axes(draw(st.sampled_from(("any", "same"))), {1: 40, 2: 12, 3: 5}[dims])) for _ in range(dims))
    if dims < 3 and draw(st.booleans()):
        last = Axis(8 * draw(st.integers(1, 2)), draw(st.integers(2, 7)), 1, 1, 3, draw(st.integers(0, 3)))
        space = (*space[:-1], last)
    return ConvProblem(
        pass_, draw(st.integers(1, 4)), groups, groups * draw(st.sampled_from((1, 1, 2, 3))), space, groups,
        dtype=dtype, accumulate=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    steps = [axis.stride if p.pass_ is Pass.DGRAD else 1 for axis in ([Axis(1, 1), *p.axes])[-2:]]
    tile = tuple(step * draw(st.integers(1, 4)) for step in steps)
    channels = draw(st.sampled_from((1, 1, 2, 4, 8, 32)))
    found = Config(tile=tile, lanes=(64 // channels, channels), warps=draw(st.sampled_from((1, 2))))
    return Config(**found, splits=draw(st.integers(1, 3))) if p.pass_ is Pass.WGRAD else found


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@settings(max_examples=4, suppress_health_check=SLOW)
@given(data=st.data())
def test_any_tile(pass_: Pass, dtype: str, data: st.DataObject) -> None:
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(depthwise(pass_, dtype), lambda p: not SOLVER.unsupported(p)), "problem"
    )
    p, forms = found
    if dtype != "fp32" and data.draw(st.booleans(), "fp32 result"):
        p = replace(p, out_dtype="fp32")
    if pass_ is not Pass.WGRAD:
        p = replace(p, bias=data.draw(st.booleans(), "bias"), constant_weight=data.draw(st.booleans(), "constant"))
    if pass_ is Pass.FPROP and not p.accumulate:
        p = replace(p, residual=data.draw(st.booleans(), "residual"),
                    activation=data.draw(st.sampled_from(named(SOLVER.activations)), "activation"))  # fmt: skip
    check(SOLVER, p, data.draw(configs(p), "config"), forms, p.accumulate)


def layer(pass_: Pass, layout: str = "contiguous", dtype: str = "fp32", device: str = "cpu", batch: int = 2,
          channels: int = 6, size: int = 16, kernel: int = 7) -> ConvProblem:  # fmt: skip
    """A layer of a ConvNeXt, with as many outputs as inputs."""
    axis = Axis(size, kernel, 1, 1, kernel // 2, (kernel - 1) // 2)
    return ConvProblem(pass_, batch, channels, channels, (axis, axis), channels, dtype=dtype, layouts=(layout,) * 3,
                       device=device)  # fmt: skip


def run(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    size = SOLVER.workspace(p, c)
    space = torch.full((size,), 0xFF, dtype=torch.uint8, device=a.device) if size else None
    return SOLVER.bind(p, c, a, b, out)(a, b, out, space)


def error(p: ConvProblem, got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


BOUND = {"fp32": 2e-6, "bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_what_is_offered_runs(pass_: Pass, layout: str) -> None:
    """A config that could not be bound would pass the drawn tests."""
    p = layer(pass_, layout, "bf16", batch=1, channels=2, size=9)
    a, b = make_operands(p)
    want = p.reference(a, b)
    for c in itertools.islice(SOLVER.configs(p), 1):
        out = make_result(p)
        run(p, c, a, b, out)
        assert error(p, out, want) < BOUND["bf16"], c


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
def test_long_kernels_are_summed_in_parts(pass_: Pass) -> None:
    p = layer(pass_, "channels_last", kernel=15, channels=3)
    tile = Config(tile=(1, 2), lanes=(32, 4), warps=1)
    assert kernel_rows(p, _tile(tile)) < 15
    a, b = make_operands(p)
    out = make_result(p)
    run(p, Config(**tile, splits=2) if pass_ is Pass.WGRAD else tile, a, b, out)
    assert error(p, out, p.reference(a, b)) < BOUND["fp32"]


def distant(p: ConvProblem, role: str) -> torch.Tensor:
    """Images 2^31 elements apart."""
    shape = p.shape(role)
    inside = math.prod(shape[1:])
    strides = (2**31, *dense_strides(shape, "contiguous")[1:])
    return torch.empty(2**31 + inside, dtype=p.torch_dtype(role), device=p.device_type).as_strided(shape, strides)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("pass_", list(Pass))
def test_places_beyond_32_bits(pass_: Pass, channels: int, device: str) -> None:
    p = replace(layer(pass_, "view", "bf16", size=6, kernel=3, device=device_name(device)),
                layouts=("view", "contiguous", "view"))  # fmt: skip
    c = Config(tile=(2, 2), lanes=(64 // channels, channels), warps=2)
    c = Config(**c, splits=2) if pass_ is Pass.WGRAD else c
    a, b = (distant(p, role) if role != "w" else torch.empty(p.shape("w"), dtype=torch.bfloat16, device=device)
            for role in p.operands)  # fmt: skip
    fill(a, 1)
    fill(b, 2)
    out = make_result(p) if p.result == "w" else distant(p, p.result)
    out.fill_(math.nan)
    run(p, c, a, b, out)
    assert error(p, out, p.reference(a, b)) < BOUND["bf16"]


@settings(max_examples=300)
@given(axis=axes(), edge=st.integers(1, 5), backward=st.booleans(), vector=st.sampled_from((1, 2, 4)))
def test_windows_say_what_is_read(axis: Axis, edge: int, backward: bool, vector: int) -> None:
    edge *= axis.stride if backward else 1
    result, source = (axis.size, axis.out) if backward else (axis.out, axis.size)
    vector = math.gcd(vector, source, window(axis, edge, backward).step)
    found = window(axis, edge, backward, vector)
    assert found.tiles == -(-result // edge)
    assert len(found.checks) % vector == found.first % vector == 0
    for t, o, k in itertools.product(range(found.tiles), range(edge), range(axis.kernel)):
        place = t * edge + o
        tap = found.taps[o * axis.kernel + k]
        numerator = place + axis.before - k * axis.dilation if backward else place * axis.stride - axis.before
        read, rest = divmod(numerator, axis.stride) if backward else (numerator + k * axis.dilation, 0)
        if tap < 0:
            assert rest or not 0 <= read < source
            continue
        assert rest == 0
        assert found.first + t * found.step + tap == read
        check = found.checks[tap]
        assert check != UNUSED
        assert check & LOW or read // vector * vector >= 0
        assert check & HIGH or read // vector * vector + vector <= source


@settings(max_examples=some(300), suppress_health_check=SLOW)
@given(data=st.data(), pass_=st.sampled_from(list(Pass)))
def test_what_is_promised_of_places_holds(pass_: Pass, data: st.DataObject) -> None:
    """The interpreter does not use the promises; compiled kernels read wrong elements where one is broken."""
    p, forms = data.draw(with_memory(depthwise(pass_, "fp16"), lambda p: not SOLVER.unsupported(p)), "problem")
    tile = _tile(data.draw(configs(p), "config"))
    for role, form in zip(ROLES, forms, strict=True):
        if role == "w":
            continue
        t, _ = allocate(p.shape(role), torch.float16, torch.device("meta"), *form)
        run, vector = promised(p, tile, role, strides_of(t)), vectors(p, tile, role, strides_of(t))
        if run == 1:
            continue
        along = -1 if tile.channels == 1 else 1
        assert t.stride(along) == 1
        assert t.storage_offset() * 2 % 16 == 0 or p.alignment[ROLES.index(role)] < 16
        axis = p.axes[-1]
        tiled = role == ("x" if pass_ is Pass.DGRAD else "y")
        if tile.channels == 1:
            assert run == vector
            found = window(axis, tile.columns, pass_ is Pass.DGRAD, vector)
            starts = (0, tile.columns) if tiled else (found.first, found.step)
            assert all(n % run == 0 for n in (*starts, t.shape[-1]))
        assert all(stride % run == 0 for dim, stride in enumerate(t.stride()) if dim != along % t.dim() and
                   (dim > 1 or t.shape[dim] > 1))  # fmt: skip
        assert along == -1 or t.shape[1] % run == tile.channels % run == 0


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "view"])
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offers(pass_: Pass, layout: str, dtype: str) -> None:
    for sizes in ({"channels": 96, "size": 56}, {"channels": 384, "size": 14}):
        p = layer(pass_, layout, dtype, "cuda:any", batch=64, **sizes)
        if SOLVER.why_not(p):
            pytest.skip(SOLVER.why_not(p)[0])
        found = list(SOLVER.configs(p))
        assert 2 <= len(found) <= 4
        along = {c["lanes"][1] > 1 for c in found}
        assert along == {"contiguous": {False}, "channels_last": {True}, "view": {False, True}}[layout]
        for c in found:
            assert Config.from_key(c.key) == c
            assert 0.3 * PEAK["ieee" if dtype == "fp32" else "16-bit"] < SOLVER.cost(p, c).efficiency <= 1
            assert (SOLVER.workspace(p, c) > 0) == (pass_ is Pass.WGRAD or c["lanes"][1] > 1)


def test_wide_rows_are_read_sixteen_bytes_at_once() -> None:
    for dtype, widest in (("fp32", 4), ("bf16", 8)):
        p = layer(Pass.FPROP, dtype=dtype, size=56)
        t = torch.empty(p.shape("x"), device="meta")
        tile = Tile(4, 8, 32, 1, 1)
        assert vectors(p, tile, "x", strides_of(t)) == vectors(p, tile, "y", strides_of(t)) == widest
        assert vectors(replace(p, alignment=(8, 16, 16)), tile, "x", strides_of(t)) == 1


def test_limits_are_said() -> None:
    p = layer(Pass.DGRAD, device="cuda:any")
    reasons = {
        "one input channel": replace(p, groups=3),
        "at most 15 along w": replace(p, axes=(Axis(16, 3), Axis(40, 16))),
        "at most 4 along h": replace(p, axes=(Axis(16, 3, 5), Axis(40, 3))),
        "counts to": replace(p, batch=2**24),
    }
    for word, wrong in reasons.items():
        assert any(word in reason for reason in SOLVER.unsupported(wrong)), word
    assert not SOLVER.unsupported(replace(p, pass_=Pass.FPROP, axes=(Axis(16, 3, 5), Axis(40, 3))))


@pytest.mark.parametrize(
    "c",
    [
        Config(tile=(2, 2), lanes=(24, 4), warps=1),
        Config(tile=(2, 2), lanes=(16, 4), warps=4),
        Config(tile=(2,), lanes=(16, 4), warps=1),
        Config(tile=(3, 2), lanes=(16, 4), warps=1),
        Config(tile=(2, 2), lanes=(16, 4)),
        Config(tile=(2, 2), lanes=(16, 4), warps=1, splits=2),
    ],
    ids=str,
)
def test_a_bad_config_is_unavailable(c: Config) -> None:
    p = replace(layer(Pass.DGRAD), axes=(Axis(16, 3, 2), Axis(16, 3, 2)))
    a, b, out = (torch.empty(p.shape(role)) for role in ("y", "w", "x"))
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(p, c, a, b, out)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("sizes", [(96, 56, 7), (384, 14, 7), (40, 27, 5), (24, 20, 13)], ids=str)
def test_every_offer_on_a_gpu(sizes: tuple[int, int, int], pass_: Pass, dtype: str, layout: str) -> None:
    channels, size, kernel = sizes
    whole = layer(pass_, layout, dtype, device_name("cuda"), 64, channels, size, kernel)
    p = replace(whole, batch=3)
    a, b = make_operands(p)
    want = p.reference(a, b)
    most = None if channels == 96 and dtype == "bf16" else 2  # each is compiled, which takes seconds
    for c in itertools.islice(SOLVER.configs(whole), most):  # a smaller batch would be offered other tiles
        out, again = make_result(p), make_result(p)
        run(p, c, a, b, out)
        assert error(p, out, want) < BOUND[dtype], c
        run(p, c, a, b, again)
        assert torch.equal(out, again), c


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", list(Pass))
def test_adding_on_a_gpu(pass_: Pass) -> None:
    p = replace(layer(pass_, dtype="bf16", device=device_name("cuda")), accumulate=True, out_dtype="fp32")
    a, b = make_operands(p)
    for c in itertools.islice(SOLVER.configs(p), 2):
        out = torch.ones_like(make_result(p))
        run(p, c, a, b, out)
        assert error(p, out - 1, p.reference(a, b)) < 1e-5, c
