"""Cells of one's own by Triton's kernels: in its interpreter on a CPU, and on a GPU, against torch in float64."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.rnn.test_scan import CELLS, NOISE, SEED, peephole, tensors_of, with_gradients
from torch import Tensor

from tilewise.machine.torch_state import fp32_precision
from tilewise.rnn import gpu_scan, scan
from tilewise.rnn.gpu_scan import GpuScan
from tilewise.rnn.noise import uniform
from tilewise.rnn.tracing import trace
from tilewise.solvers import SolverUnavailable

BOUND = {torch.float32: 2e-4, torch.float16: 0.03, torch.bfloat16: 0.2}


def runner_of(name: str, batch: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> GpuScan:
    cell, from_x, from_h, states, parts = CELLS[name]
    traced = trace(cell, from_x, from_h, states, parts, (batch, hidden), NOISE.get(name, 0))
    return GpuScan(traced, batch, hidden, dtype, torch.device(device))


def by_kernels(runner: GpuScan, tensors: Sequence[Tensor], states: int, resets: Any, reverse: bool) -> list[Tensor]:
    """y, last states and all gradients, by sums with the factors of ``with_gradients``."""
    x, *rest = (t.contiguous() for t in tensors)
    first, u, parameters = rest[:states], rest[states], rest[states + 1 :]
    options: dict[str, Any] = {"reverse": reverse, "seed": SEED}
    y, last, saved = runner.run(x, u, first, parameters, resets, **options, keep=True)
    plain, _, nothing = runner.run(x, u, first, parameters, resets, **options, keep=False)
    assert torch.equal(plain, y)
    assert nothing == ()
    factors = [torch.arange(t.numel(), dtype=torch.float64).view_as(t).sin().to(t.dtype) for t in (y, *last)]
    found = runner.gradients(
        saved, x, u, first, parameters, resets, factors[0], factors[1:], **options, of_weights=True
    )  # fmt: skip
    dx, du, of_firsts, of_parameters = found
    assert du is not None
    return [y, *last, dx, *of_firsts, du, *of_parameters]


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype", "fused", "batch", "hidden", "resets", "reverse"),
    [  # the interpreter has no products of bf16
        ("peephole", torch.float32, True, 17, 33, True, False),
        pytest.param("peephole", torch.float16, True, 1, 1, False, True, marks=pytest.mark.slow),
        pytest.param("peephole", torch.bfloat16, False, 3, 7, True, True, marks=pytest.mark.slow),
        pytest.param("minimal", torch.float32, True, 3, 7, False, False, marks=pytest.mark.slow),
        ("three", torch.float16, False, 3, 33, True, False),
        pytest.param("normalized", torch.float32, False, 2, 7, True, False, marks=pytest.mark.slow),
        ("means", torch.bfloat16, False, 2, 33, True, True),
        ("zoneout", torch.float32, True, 3, 33, True, False),
        pytest.param("noisy_means", torch.float32, False, 2, 7, False, True, marks=pytest.mark.slow),
    ],
)
def test_kernels_compute_what_torch_computes_in_float64(
    name: str, dtype: torch.dtype, fused: bool, batch: int, hidden: int, resets: bool, reverse: bool
) -> None:
    cell, x, state, u, parameters = tensors_of(name, 2, batch, hidden, 5)
    generator = torch.Generator().manual_seed(5)
    anew = torch.rand(2, batch, dtype=torch.float32, generator=generator) < 0.3 if resets else None
    narrow = [t.to(dtype) for t in (x, *state, u, *parameters)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_scan, "MOST_FUSED", 1024 if fused else 0)
        got = by_kernels(runner_of(name, batch, hidden, dtype), narrow, len(state), anew, reverse)
    wide = [t.double() for t in narrow]
    options: dict[str, Any] = {"resets": anew, "reverse": reverse, "noise": NOISE.get(name, 0), "seed": SEED}
    states = tuple(wide[1 : 1 + len(state)])
    want = with_gradients(cell, wide[0], states, wide[1 + len(state)], wide[2 + len(state) :], **options)
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert a.dtype is dtype
        error = float((a.double() - b.detach()).abs().max()) / max(1.0, float(b.detach().abs().max()))
        assert error <= BOUND[dtype], f"{place}: {error}"


@interpreted
@pytest.mark.parametrize("reverse", [False, True])
def test_kernels_draw_the_numbers_of_torch(reverse: bool) -> None:
    def shown(x: Tensor, h: Tensor, state: Tensor, noise: Tensor) -> Tensor:
        return noise.chunk(6, -1)[5]

    traced = trace(shown, 1, 1, 1, [], (3, 20), 6)
    runner = GpuScan(traced, 3, 20, torch.float32, torch.device("cpu"))
    x, h0, u = torch.zeros(2, 3, 20), torch.zeros(3, 20), torch.zeros(20, 20)
    for seed in (0, SEED, 2**63 - 1):
        y, _, _ = runner.run(x, u, [h0], [], None, reverse=reverse, seed=seed, keep=False)
        assert torch.equal(y.flatten(0, 1), uniform(seed, 0, y.flatten(0, 1), 6)[:, 100:])


@pytest.mark.slow
@interpreted
def test_tanh_is_exact_near_zero() -> None:
    def cell(x: Tensor, h: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(x)

    runner = GpuScan(trace(cell, 1, 1, 1, [], (1, 400)), 1, 400, torch.float32, torch.device("cpu"))
    x = torch.cat((torch.logspace(-9, 1.5, 200), -torch.logspace(-9, 1.5, 200))).view(1, 1, 400)
    y, _, _ = runner.run(x, torch.zeros(400, 400), [x[0] * 0], [], None, reverse=False, seed=0, keep=False)
    torch.testing.assert_close(y.double(), x.double().tanh(), rtol=1e-6, atol=0)


def test_means_over_too_many_units_are_refused() -> None:
    with pytest.raises(SolverUnavailable, match="means over 8193 units; at most 8192 would do"):
        runner_of("means", 1, 8193, torch.float32)


@pytest.mark.gpu
@pytest.mark.timeout(300)  # each draw compiles kernels of its own
@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(tuple(CELLS)), time=st.integers(1, 7), batch=st.integers(1, 40),
    hidden=st.sampled_from((1, 7, 16, 33, 300)), dtype=st.sampled_from(tuple(BOUND)), resets=st.booleans(),
    reverse=st.booleans(), fused=st.booleans(),
)  # fmt: skip
def test_on_a_gpu_cells_are_those_of_float64(
    name: str, time: int, batch: int, hidden: int, dtype: torch.dtype, resets: bool, reverse: bool, fused: bool
) -> None:
    cell, x, state, u, parameters = tensors_of(name, time, batch, hidden, 5)
    if name in NOISE or name == "three":  # rounded numbers may fall on the other side of a threshold, or of a ReLU's
        dtype = torch.float32
    anew = torch.rand(time, batch, generator=torch.Generator().manual_seed(5)) < 0.3 if resets else None
    narrow = [t.to("cuda", dtype) for t in (x, *state, u, *parameters)]
    anew = None if anew is None else anew.cuda()
    options: dict[str, Any] = {"resets": anew, "reverse": reverse, "noise": NOISE.get(name, 0), "seed": SEED}
    count = len(state)

    def run(tensors: list[Tensor], **more: Any) -> list[Tensor]:
        states = tuple(tensors[1 : 1 + count])
        return with_gradients(cell, tensors[0], states, tensors[1 + count], tensors[2 + count :], **options, **more)

    with fp32_precision("cuda", "matmul", "ieee"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_scan, "MOST_FUSED", 1024 if fused else 0)
        importlib.import_module("tilewise.rnn.scan")._runners.clear()  # which may have been made for the other way
        results = [run(narrow, compiled=True) for _ in range(3)]  # singly, recorded, and replayed
    want = run([t.double() for t in narrow])
    for got in results:
        for place, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a.dtype is dtype
            error = float((a.double() - b.detach()).abs().max()) / max(1.0, float(b.detach().abs().max()))
            assert error <= BOUND[dtype], f"{place}: {error}"
    for got in results[1:]:
        assert all(map(torch.equal, got, results[0]))


@pytest.mark.gpu
def test_on_a_gpu_a_scan_within_a_capture_is_part_of_it() -> None:
    cell, x, state, u, parameters = tensors_of("peephole", 5, 3, 16, 1)
    x, *rest = (t.contiguous().cuda() for t in (x, *state, u, *parameters))

    def run() -> Tensor:
        with torch.no_grad():
            return scan(cell, x, (rest[0], rest[1]), rest[2], rest[3], compiled=True)[0]

    want = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(got, want)
    assert torch.equal(got, run())


@pytest.mark.gpu
def test_on_a_gpu_gradients_of_gradients_and_changed_results() -> None:
    cell, x, state, u, parameters = tensors_of("peephole", 3, 2, 4, 1)
    tensors = [t.contiguous().cuda() for t in (x, *state, u, *parameters)]
    found = []
    for compiled in (True, False):
        leaves = [t.detach().requires_grad_() for t in tensors]
        y, _ = scan(cell, leaves[0], (leaves[1], leaves[2]), leaves[3], leaves[4], compiled=compiled)
        y.mul_(2)  # may be changed in place, as torch's
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert peephole is cell
