"""Recurrent modules by plans on a GPU: results, gradients, what is saved, dropout, and streams."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.nn.recurrent_plans import CLASSES, flat, forced, with_gradients
from torch import nn

from tilewise.kernels.native import autograd
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn.layers.recurrent.native import NEVER

pytestmark = [
    pytest.mark.gpu,
    # A copy's weights are not in one piece, of which torch warns where it computes.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]
SOLVERS = ("persistent_grid", "persistent_cluster", "stepped")


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with fp32_precision("cuda", "rnn", "ieee"), fp32_precision("cuda", "matmul", "ieee"):
        yield


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}])
def test_results_and_gradients_are_torchs(kind: Any, options: dict[str, Any], solver: str) -> None:
    module = kind(24, 48, **options).cuda()
    twin, table = forced(module, solver)
    x = torch.randn(5, 7, 24, device="cuda", requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            close(with_gradients(twin, x), with_gradients(module, x))
        with torch.no_grad():
            close(flat(twin(x)), flat(module(x)))
    assert [p.task for p in table.asked] == ["training", "inference"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_graph_is_gone_back_twice_and_through_hooks(solver: str) -> None:
    twin, _ = forced(nn.LSTM(24, 48, 2).cuda(), solver)
    x = torch.randn(5, 7, 24, device="cuda", requires_grad=True)
    needed = [x, *twin.parameters()]
    y = twin(x)[0].square().sum()
    first = torch.autograd.grad(y, needed, retain_graph=True)
    close(torch.autograd.grad(y, needed), first)
    with torch.autograd.graph.save_on_cpu():
        y = twin(x)[0].square().sum()
    close(torch.autograd.grad(y, needed), first)
    close(torch.autograd.grad(twin(x)[0].square().sum(), needed, create_graph=True), first)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_result_that_is_changed_before_the_backward_is_noticed(solver: str) -> None:
    module = nn.GRU(24, 48).cuda()
    for each in (module, forced(module, solver)[0]):
        y, _ = each(torch.randn(5, 7, 24, device="cuda"))
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_is_dropped_is_dropped_in_the_backward_too() -> None:
    module = nn.RNN(24, 48, 2, dropout=0.5).cuda()
    twin, _ = forced(module, "stepped")
    x = torch.randn(5, 7, 24, device="cuda", requires_grad=True)

    def gradients(create_graph: bool) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(5)
        y = twin(x)[0].square().sum()
        torch.rand(3, device="cuda")
        return torch.autograd.grad(y, [x, *twin.parameters()], create_graph=create_graph)

    close(gradients(True), gradients(False))


def test_another_stream_computes_the_same() -> None:
    twin, _ = forced(nn.LSTM(24, 48).cuda(), "persistent_grid")
    x = torch.randn(5, 7, 24, device="cuda", requires_grad=True)
    want = with_gradients(twin, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = with_gradients(twin, x)
    torch.cuda.synchronize()
    close(got, want)


def test_a_copy_has_weights_of_its_own() -> None:
    twin, _ = forced(nn.LSTM(24, 48).cuda(), "persistent_grid")
    x = torch.randn(5, 7, 24, device="cuda")
    other = copy.deepcopy(twin)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    assert not torch.allclose(other(x)[0], twin(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}])
def test_calls_from_cpp_have_the_bits_of_those_from_python(kind: Any, options: dict[str, Any], dtype: Any) -> None:
    if reason := autograd.why_not():
        pytest.skip(reason)
    module = kind(24, 48, **options).to("cuda", dtype)
    x = torch.randn(5, 7, 24, device="cuda", dtype=dtype, requires_grad=True)
    states = module.num_layers * (2 if module.bidirectional else 1)
    h0 = torch.randn(states, 7, 48, device="cuda", dtype=dtype, requires_grad=True)
    for hx in (None, (h0, h0.detach().clone().requires_grad_()) if kind is nn.LSTM else h0):
        twin, _ = forced(module, "persistent_grid")
        assert not hasattr(twin(x, hx)[0].grad_fn, "saved_tensors")  # which nodes of Python have
        got = with_gradients(twin, x, hx)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilewise.nn.layers.recurrent.run.recurrent_native", lambda *_: NEVER)
            other, _ = forced(module, "persistent_grid")
            assert hasattr(other(x, hx)[0].grad_fn, "saved_tensors")
            want = with_gradients(other, x, hx)
        for mine, its in zip(got, want, strict=True):
            assert (mine is None) == (its is None)
            assert mine is None or torch.equal(mine, its)
        with torch.no_grad():
            for mine, its in zip(flat(twin(x, hx)), flat(other(x, hx)), strict=True):
                assert torch.equal(mine, its)


def test_calls_from_cpp_are_captured_and_replayed() -> None:
    if reason := autograd.why_not():
        pytest.skip(reason)
    twin, _ = forced(nn.LSTM(24, 48).cuda(), "persistent_grid")
    x = torch.randn(5, 7, 24, device="cuda", requires_grad=True)
    want = with_gradients(twin, x)
    twin.zero_grad()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradients(twin, x)  # makes what a library keeps for good
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        got = with_gradients(twin, x)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    close(got, want)
