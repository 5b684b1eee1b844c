"""Branches on streams on a GPU: results, gradients, memory handed out again, graphs, and what falls back."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.frontends.networks import load_network
from tilewise.frontends.zoo.googlenet import Inception
from tilewise.machine.torch_state import DETERMINISTIC, fp32_precision, setting
from tilewise.nn import groups, report
from tilewise.nn.branches import choose as branch_times
from tilewise.nn.branches.find import find
from tilewise.nn.branches.streams import fork, in_sequence, is_forked, lanes_for

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with fp32_precision("cuda", "conv", "ieee"), setting(DETERMINISTIC, True):
        yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Dropped(Inception):
    """Draws random numbers in its branches."""

    def __init__(self, channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__(channels, widths)
        for branch in (self.branch1, self.branch3, self.branch5):
            branch.append(nn.Dropout(0.3))


def network(kind: type[Inception] = Inception) -> nn.Sequential:
    torch.manual_seed(0)
    first = kind(16, (32, 24, 48, 8, 16, 16))
    second = kind(first.out_channels, (48, 32, 64, 16, 32, 16))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), first, nn.MaxPool2d(2), second).cuda()


def forked(model: nn.Module) -> nn.Module:
    for one in find(model):
        assert one.program is not None
        fork(one.module, one.program)
    return model


def busy() -> None:
    """Work on the main stream that side streams have to wait for."""
    a = torch.randn(1024, 1024, device="cuda")
    for _ in range(4):
        a = a @ a * 1e-2


def poison(sizes: list[int]) -> None:
    """Fill what was freed with NaN, on the main stream."""
    for size in sizes:
        torch.full((size,), float("nan"), device="cuda")


def step(model: nn.Module, x: torch.Tensor, *, grad: bool = True, seed: int = 0) -> list[torch.Tensor]:
    torch.cuda.manual_seed(seed)
    xi = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        y = model(xi * 1)
    if not grad:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, (xi, *model.parameters()), torch.ones_like(y))]


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4 * max(1.0, float(its.abs().max())))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Inception, Dropped])
def test_many_sizes_in_a_tight_pool(kind: type[Inception], grad: bool) -> None:
    want, got = network(kind), forked(network(kind))
    draw = random.Random(1)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (2 << 30) / total))
    for turn in range(60):
        x = torch.randn(draw.choice((1, 3, 16, 48)), 3, draw.randint(8, 56), draw.randint(8, 56), device="cuda")
        expected = step(want, x, grad=grad, seed=turn)
        busy()
        found = step(got, x, grad=grad, seed=turn)
        poison([draw.randint(1, 1 << 22) for _ in range(8)])
        assert_close(found, expected)


def test_training_steps_are_the_same() -> None:
    want, got = network(Dropped), forked(network(Dropped))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (want, got)]
    for turn in range(20):
        x = torch.randn(8, 3, 24, 24, device="cuda")
        for model, optimizer in zip((want, got), optimizers, strict=True):
            torch.cuda.manual_seed(turn)
            optimizer.zero_grad(set_to_none=turn % 3 > 0)
            model(x).square().mean().backward()
            poison([1 << 20, 1 << 16])
            optimizer.step()
    assert_close(list(got.parameters()), list(want.parameters()))


def test_frozen_inputs_and_hooks() -> None:
    """The input of a region needs no gradient: nothing makes the main stream wait in its backward pass."""
    want, got = network(), forked(network())
    for model in (want, got):
        model[0].requires_grad_(False)
    seen: list[bool] = []
    got[1].branch3[1][0].register_forward_hook(lambda m, i, o: seen.append(bool(torch.isfinite(o).all())))
    for _ in range(10):
        x = torch.randn(16, 3, 40, 40, device="cuda")
        results = []
        for model in (want, got):
            model.zero_grad()
            model(x).sum().backward()
            poison([1 << 22, 1 << 20, 1 << 18])
            results.append([p.grad for p in model.parameters() if p.grad is not None])
        assert_close(*reversed(results))
    assert seen == [True] * 10


def test_branches_run_on_streams_of_their_own() -> None:
    model = forked(network())
    streams: list[int] = []
    for branch in model[1].children():
        branch.register_forward_hook(lambda *_: streams.append(torch.cuda.current_stream().cuda_stream))
    x = torch.randn(2, 3, 16, 16, device="cuda")
    main = torch.cuda.current_stream().cuda_stream
    model(x)
    assert len(set(streams)) == 4
    assert streams[-1] == main
    assert torch.cuda.current_stream().cuda_stream == main
    streams.clear()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        model(x)
        assert torch.cuda.current_stream() == other
    assert streams[-1] == other.cuda_stream
    streams.clear()
    with in_sequence():
        model(x)
    assert set(streams) == {main}


def test_a_branch_that_raises_leaves_the_main_stream() -> None:
    model = forked(network())
    main = torch.cuda.current_stream()
    handle = model[1].branch5.register_forward_hook(lambda *_: 1 / 0)
    x = torch.randn(2, 3, 16, 16, device="cuda")
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert torch.cuda.current_stream() == main
    handle.remove()
    assert_close(step(model, x), step(network(), x))


def test_inference_in_a_cuda_graph() -> None:
    want, got = network(), forked(network())
    static = torch.randn(4, 3, 32, 32, device="cuda")
    with torch.no_grad():
        got(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = got(static)
        for _ in range(10):
            x = torch.randn_like(static)
            static.copy_(x)
            graph.replay()
            poison([1 << 20, 1 << 16])
            assert_close([y], [want(x)])


def test_a_step_in_a_cuda_graph() -> None:
    got, want = forked(network()), network()
    graphed = torch.cuda.make_graphed_callables(got, (torch.randn(4, 3, 32, 32, device="cuda", requires_grad=True),))
    for _ in range(5):
        x = torch.randn(4, 3, 32, 32, device="cuda", requires_grad=True)
        results = []
        for model in (graphed, want):
            y = model(x)
            results.append([y, *torch.autograd.grad(y.sum(), (x, *model.parameters()))])
        assert_close(*results)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    want, got = network(Dropped), forked(network(Dropped))
    x = torch.randn(4, 3, 32, 32, device="cuda")
    for turn in range(5):
        results = []
        for model in (got, want):
            torch.cuda.manual_seed(turn)
            xi = x.clone().requires_grad_()
            model.zero_grad()
            checkpoint(model, xi * 1, use_reentrant=reentrant).sum().backward()
            results.append([xi.grad, *(p.grad for p in model.parameters())])
        assert_close(*results)


def test_autocast() -> None:
    want, got = network(), forked(network())
    for _ in range(10):
        x = torch.randn(8, 3, 32, 32, device="cuda")
        results = []
        for model in (got, want):
            with torch.autocast("cuda", torch.bfloat16):
                results.append(step(model, x))
            poison([1 << 20])
        for mine, its in zip(*results, strict=True):
            torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2 * max(1.0, float(its.abs().max())))


def test_compiled() -> None:
    model = forked(network())
    x = torch.randn(2, 3, 16, 16, device="cuda")
    assert_close([torch.compile(model, fullgraph=True, backend="aot_eager")(x)], [network()(x)])


def test_where_streams_cannot_be_used() -> None:
    x = torch.randn(2, 3, device="cuda")
    assert lanes_for(x) is not None
    assert lanes_for(x.cpu()) is None
    with torch.autograd.graph.save_on_cpu():
        assert lanes_for(x) is None
    leaf = x.clone().requires_grad_()
    assert lanes_for(leaf) is not None
    with torch.autocast("cuda"):
        assert lanes_for(leaf) is None
        assert lanes_for(leaf * 1) is not None


def test_copies_run_on_streams_too() -> None:
    twin = copy.deepcopy(forked(network()))
    assert is_forked(twin[1])
    x = torch.randn(2, 3, 16, 16, device="cuda")
    assert_close(step(twin, x), step(network(), x))


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU")
def test_data_parallel() -> None:
    model = nn.DataParallel(forked(network()))
    x = torch.randn(8, 3, 24, 24, device="cuda")
    assert_close([model(x)], [network()(x)])


@pytest.mark.parametrize("training", [True, False])
def test_optimize_measures_and_keeps_what_is_faster(training: bool) -> None:
    model = load_network("googlenet").module.cuda().train(training)
    want = copy.deepcopy(model)
    x = torch.randn(8, 3, 224, 224, device="cuda")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tilewise.optimize(model, x, planner=Dividing(passes=()), training=training, branches="measured")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    said = report(model).branches
    assert len(said) == 9
    for one in said:
        assert one.streams_ms is not None, one
        assert one.sequence_ms is not None, one
        assert one.streams_peak is not None
        if one.on_streams:
            assert one.streams_ms < one.sequence_ms
    assert len(groups(model)) == sum(one.on_streams for one in said)
    assert_close(step(model.eval(), x), step(want.eval(), x))


def test_what_measuring_compares_is_the_same_and_timed() -> None:
    model = network()
    x = torch.randn(8, 16, 24, 24, device="cuda", requires_grad=True)
    (one, _) = find(model)
    told = branch_times.measure(one, x * 1, training=True)
    assert not told.reason
    assert told.streams_ms is not None
    assert told.sequence_peak is not None
    frozen = branch_times.measure(one, x.detach(), training=False)
    assert not frozen.reason


def test_regions_in_threads() -> None:
    want, got = network(), forked(network())
    x = torch.randn(4, 3, 32, 32, device="cuda")
    expected = step(want, x)
    failures: list[Any] = []

    def work() -> None:
        try:
            for _ in range(10):
                assert_close(step(got, x), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
