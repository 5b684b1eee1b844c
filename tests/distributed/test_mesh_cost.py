"""The cost model against counting by hand, and how it moves with links, sizes and meshes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tilewise.distributed.mesh.cost import (
    Cluster,
    LinkSpeed,
    MeshShape,
    StepCost,
    Timed,
    all_reduce_ms,
    meshes,
    step_cost,
)
from tilewise.distributed.mesh.events import StepTrace
from tilewise.distributed.mesh.trace import trace_step
from tilewise.distributed.parts.ghosts import shares
from tilewise.problems.conv.problem import ConvProblem

RATES = (1e9, 1e7)
"""Operations and bytes a ms of the GPU below."""


class Roofline:
    """A GPU whose kernels take what their arithmetic and traffic take."""

    launch_ms = 0.001

    def problem(self, problem: ConvProblem, whole: ConvProblem) -> Timed:
        return Timed(max(problem.flops / RATES[0], problem.bytes / RATES[1]) + self.launch_ms)

    def other_ms(self, nbytes: float, flops: float, dtype: str) -> float:
        return max(flops / RATES[0], nbytes / RATES[1]) + self.launch_ms


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return trace_step(network(), torch.empty(2, 3, 64, 48, device="meta"), device="cpu")


def cost_of(trace: StepTrace, parts: tuple[int, int], cluster: Cluster | None = None) -> StepCost:
    mesh = MeshShape(1, (("h", parts[0]), ("w", parts[1])))
    return step_cost(trace, mesh, cluster or Cluster(), Roofline(), trace.batch)


def halo_by_hand(parts: tuple[int, int]) -> int:
    """Bytes of one step's halos, by sets of indices: windows (channels, kernel, stride, padding, dilation) in turn."""
    sizes, total = (64, 48), 0
    windows = [(3, 7, 2, 3, 1, 1), (8, 3, 2, 1, 1, 2), (8, 3, 1, 2, 2, 2)]  # last: forward alone, or backward too
    for channels, kernel, stride, padding, dilation, times in windows:
        outs = tuple((n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in sizes)
        most = 0
        for ranks in itertools.product(range(parts[0]), range(parts[1])):
            reads, holds = [], []
            for n, m, p, rank in zip(sizes, outs, parts, ranks, strict=True):
                c, d = shares(m, p)[rank]
                first, last = c * stride - padding, (d - 1) * stride - padding + dilation * (kernel - 1)
                reads.append(range(max(first, 0), min(last + 1, n)))
                holds.append(range(*shares(n, p)[rank]))
            most = max(most, len(set(itertools.product(*reads)) - set(itertools.product(*holds))))
        total += times * most * channels * 2 * 4  # two images in fp32
        sizes = outs
    return total


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (4, 3)])
def test_halo_bytes_are_those_of_the_indices(trace: StepTrace, parts: tuple[int, int]) -> None:
    cost = cost_of(trace, parts)
    assert cost.halo_bytes == halo_by_hand(parts)
    axes = sum(n > 1 for n in parts)
    assert cost.messages == 5 * axes


@given(st.integers(1, 64), st.integers(0, 1 << 30), st.floats(1e8, 1e12), st.floats(0, 1e-3))
def test_an_all_reduce_is_no_slower_than_a_ring_or_a_tree(
    n: int, nbytes: int, bandwidth: float, latency: float
) -> None:
    link = LinkSpeed(bandwidth, latency)
    found = all_reduce_ms(nbytes, n, link)
    ring = tree = 0.0
    for _ in range(2 * (n - 1)):  # scatter, then gather: each step moves one piece to the next rank
        ring += link.ms(nbytes / n)
    reached = 1
    while reached < n:
        reached, tree = 2 * reached, tree + 2 * link.ms(nbytes)
    assert found == pytest.approx(min(ring, tree) if nbytes else 0.0)


@given(st.sampled_from([(2, 1), (4, 1), (2, 2)]), st.floats(1e8, 1e12), st.floats(0, 1e-3), st.floats(1, 100))
def test_a_better_link_is_never_slower(
    trace: StepTrace, parts: tuple[int, int], bandwidth: float, latency: float, factor: float
) -> None:
    slow, wide, quick = (
        cost_of(trace, parts, Cluster(link, 64))
        for link in (
            LinkSpeed(bandwidth, latency),
            LinkSpeed(bandwidth * factor, latency),
            LinkSpeed(bandwidth, latency / factor),
        )
    )
    assert wide.step_ms <= slow.step_ms * (1 + 1e-9)
    assert quick.step_ms <= slow.step_ms * (1 + 1e-9)
    assert wide.memory == slow.memory


def test_a_perfect_link_shows_nothing(trace: StepTrace) -> None:
    perfect = cost_of(trace, (4, 1), Cluster(LinkSpeed(1e30, 0.0), 64))
    assert perfect.exchange_ms == pytest.approx(0, abs=1e-9)
    assert perfect.reduce_ms + perfect.sum_ms == pytest.approx(0, abs=1e-9)
    real = cost_of(trace, (4, 1), Cluster(LinkSpeed(1e9, 1e-5), 64))
    shown = real.exchange_ms + real.sum_ms + real.reduce_ms
    assert real.step_ms == pytest.approx(perfect.step_ms + shown)
    assert shown > 0


def test_across_nodes_is_slower(trace: StepTrace) -> None:
    inside, across = Cluster(node=4), Cluster(node=2)
    assert cost_of(trace, (4, 1), inside).step_ms < cost_of(trace, (4, 1), across).step_ms
    assert cost_of(trace, (2, 1), inside).step_ms == cost_of(trace, (2, 1), across).step_ms


@given(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]))
def test_memory_is_shared_out_and_no_more(trace: StepTrace, parts: tuple[int, int]) -> None:
    whole, part = cost_of(trace, (1, 1)).memory, cost_of(trace, parts).memory
    ranks = math.prod(parts)
    assert part.parameters == whole.parameters
    assert part.gradients == whole.gradients
    assert part.activations >= whole.activations / ranks
    assert part.activations <= whole.activations / ranks * 1.6  # the ghost zones of so small an image
    assert (part.activations > whole.activations / ranks) == (ranks > 1)


def test_more_ranks_compute_less_each(trace: StepTrace) -> None:
    perfect = Cluster(LinkSpeed(1e30, 0.0), 64)
    times = [cost_of(trace, (n, 1), perfect).step_ms for n in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] / 4 < times[2]


def test_gradients_hide_behind_backward_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
    trace = trace_step(model, torch.empty(2, 3, 64, 64, device="meta"), device="cpu")
    mesh = MeshShape(4, (("h", 1), ("w", 1)))
    slow = step_cost(trace, mesh, Cluster(LinkSpeed(1e6, 0.0), 8), Roofline(), 8)
    alone = step_cost(trace, replace(mesh, data=1), Cluster(), Roofline(), 2)
    assert slow.reduce_ms == pytest.approx(1.5 * trace.gradients / 1e6 * 1e3)
    assert slow.step_ms == pytest.approx(alone.step_ms + slow.reduce_ms)
    assert slow.image_ms == slow.step_ms / 8


@pytest.mark.parametrize(("data", "h"), [(4, 1), (2, 2), (1, 4), (1, 1)])
def test_synchronized_norms_sum_over_all_images(data: int, h: int) -> None:
    """Of a plain batch norm over an image's ranks, as the loss; forward and backward each, a mean and a variance."""

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1))

    both = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    mesh = MeshShape(data, (("h", h), ("w", 1)))
    for model, ranks in ((network(), h), (both, data * h)):
        trace = trace_step(model, torch.empty(2, 3, 32, 32, device="meta"), device="cpu")
        cost = step_cost(trace, mesh, Cluster(), Roofline(), 2 * data)
        loss = all_reduce_ms(4, h, Cluster().link(h))
        assert cost.sum_ms - loss == pytest.approx(2 * all_reduce_ms(2 * 16 * 4, ranks, Cluster().link(ranks)))
        assert (cost.sum_ms > loss) == (ranks > 1)


@given(st.integers(1, 64), st.integers(1, 3))
def test_meshes_are_all_factorisations(gpus: int, space: int) -> None:
    found = meshes(gpus, space)
    assert len(set(found)) == len(found)
    assert {(m.data, *m.parts) for m in found} == {
        numbers
        for numbers in itertools.product([n for n in range(1, gpus + 1) if gpus % n == 0], repeat=space + 1)
        if math.prod(numbers) == gpus
    }
    assert found[0].dims == ()


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: LinkSpeed(0, 1e-6), "bandwidth=0"),
        (lambda: LinkSpeed(1e9, -1), "latency=-1"),
        (lambda: Cluster(node=0), "node=0"),
        (lambda: meshes(0, 2), "gpus=0"),
    ],
)
def test_what_is_no_link_is_said(make, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()


def test_a_mesh_of_other_space_is_refused(trace: StepTrace) -> None:
    with pytest.raises(ValueError, match="space is h, w"):
        step_cost(trace, MeshShape(1, (("w", 2),)), Cluster(), Roofline(), 2)


def test_names_of_meshes() -> None:
    assert str(MeshShape(2, (("h", 2), ("w", 1)))) == "data=2 h=2"
    assert str(MeshShape(1, (("h", 1),))) == "data=1"
    assert MeshShape(1, (("d", 2), ("h", 1), ("w", 2))).dims == ("d", "w")
