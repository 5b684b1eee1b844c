"""What holds for every exchange and model: adjoints, state, checkpointing, data beside space."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests import strategies
from tests.distributed import models
from tests.distributed.ranks import close, parallel, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tilewise.distributed import Grid, Layout, Shard, SpatialParallel
from tilewise.distributed.parts.exchange import redistribute
from tilewise.distributed.parts.layout import even_cuts, input_cuts, meet, output_cuts, transfer
from tilewise.distributed.shards.halo import windows
from tilewise.problems.conv.axis import Axis


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 9))
def test_even_cuts(size: int, ranks: int, multiple: int) -> None:
    cuts = even_cuts(size, ranks, multiple)
    assert len(cuts) == ranks + 1
    assert cuts[0] == 0
    assert cuts[-1] == size
    lengths = [b - a for a, b in itertools.pairwise(cuts)]
    assert all(n >= 0 for n in lengths)
    assert all(cut % multiple == 0 or cut == size for cut in cuts)
    assert multiple > 1 or max(lengths) - min(lengths) <= 1


@given(strategies.axes(), st.data())
def test_outputs_lie_over_their_inputs(axis: Axis, data: st.DataObject) -> None:
    """Every output belongs to one rank, whose shard holds its centre where that is in the image."""
    inner = sorted(data.draw(st.lists(st.integers(0, axis.size), max_size=4)))
    cuts = (0, *inner, axis.size)
    found = output_cuts(cuts, axis)
    assert list(found) == sorted(found)
    assert found[0] == 0
    assert found[-1] == axis.out
    for out in range(axis.out):
        rank = next(r for r in range(len(cuts) - 1) if found[r] <= out < found[r + 1])
        centre = out * axis.stride - axis.before + (axis.reach - 1) // 2
        if 0 <= centre < axis.size:
            assert cuts[rank] <= centre < cuts[rank + 1]
    back = input_cuts(found, axis)
    assert list(back) == sorted(back)
    assert output_cuts(back, axis) == found


@given(strategies.axes())
def test_trimmed_taps_are_all_that_meet_inputs(axis: Axis) -> None:
    met = {
        r for r in range(axis.kernel) for out in range(axis.out)
        if 0 <= out * axis.stride - axis.before + r * axis.dilation < axis.size
    }  # fmt: skip
    found = axis.trimmed()
    if found is None:
        assert not met
        return
    r0, r1, smaller = found
    assert met <= set(range(r0, r1))
    assert smaller.out == axis.out
    assert smaller.before == axis.before - r0 * axis.dilation


@given(st.data())
def test_what_one_sends_another_receives(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2,), (5,), (2, 2), (2, 3), (1, 4)]))
    cuts, needs = [], []
    for ranks in shape:
        size = data.draw(st.integers(1, 20))
        points = st.integers(0, size)
        cuts.append((0, *sorted(data.draw(st.lists(points, min_size=ranks - 1, max_size=ranks - 1))), size))
        needs.append(tuple(tuple(sorted((data.draw(points), data.draw(points)))) for _ in range(ranks)))
    grids = [Grid((-2, -1)[: len(shape)], shape, coords) for coords in Grid((), shape, ()).all_coords()]
    moves = [transfer(Layout(grid, tuple(cuts)), tuple(needs)) for grid in grids]
    for grid, mine in zip(grids, moves, strict=True):
        assert all((grid.index, box) in moves[other].sends for other, box in mine.receives)
        assert all((grid.index, box) in moves[other].receives for other, box in mine.sends)
        held = [box for _, box in mine.receives] + ([] if mine.own is None else [mine.own])
        volume = [(b[0][1] - b[0][0]) * (b[-1][1] - b[-1][0] if len(b) > 1 else 1) for b in (*held, mine.need)]
        assert sum(volume[:-1]) == volume[-1]
        assert all(meet(a, b) is None for i, a in enumerate(held) for b in held[:i])


def total(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value)


def adjoint(layer: Any, x: Shard, what: str) -> None:
    part = x.local.detach().requires_grad_()
    y = layer(x.like(part))
    other = torch.randn(y.shape, dtype=torch.float64)
    y.backward(other)
    forward, backward = total((y * other).sum()), total((part.grad * part).sum())
    assert abs(forward - backward) < 1e-10 * (1 + abs(forward)), what


def exchanges() -> None:
    ranks = dist.get_world_size()
    draw = random.Random(ranks)
    for number in range(24):
        torch.manual_seed(100 * number + dist.get_rank())
        case = models.placed(draw, ranks, nn.Identity(), 2, (draw.randint(1, 12), draw.randint(1, 12)))
        p = parallel(case.layer, *case.mesh)
        layout = p.layout(case.shape, case.cuts)
        x = Shard.of(torch.randn(layout.part(case.shape), dtype=torch.float64), layout, p.space)
        dims = layout.grid.dims
        kernel, stride = draw.randint(1, 5), draw.randint(1, 3)
        axes = {d: Axis(n, kernel, stride, 1, kernel // 2, kernel - 1) for d, n in zip(dims, layout.sizes, strict=True)}
        adjoint(lambda s, axes=axes: windows(s, axes, "windows")[0], x, f"windows {case} {axes}")
        other = Layout(layout.grid, tuple(models.cuts_of(draw, c[-1], len(c) - 1) for c in layout.cuts))
        adjoint(
            lambda s, other=other: redistribute(s.space.link, "move", s.spatial, other, s.local), x, f"{case} {other}"
        )


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.inner(y[:, :2])


def recomputation() -> None:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    norm_last = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2))
    for reentrant, inner in itertools.product((False, True), (models.Net(), norm_last)):
        torch.manual_seed(0)
        plain = Recomputed(copy.deepcopy(inner).double(), reentrant)
        layer = copy.deepcopy(plain)
        full = torch.randn(2, 2, 12, 8, dtype=torch.float64, requires_grad=True)
        own = full.detach().clone().requires_grad_()
        plain(full).square().mean().backward()
        p = parallel(layer, (ranks,), ("h",))
        p(p.scatter(own)).square().mean().backward()
        close(own.grad, full.grad, "dx")
        for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
            close(a.grad, b.grad, name)
        for (name, a), (_, b) in zip(layer.named_buffers(), plain.named_buffers(), strict=True):
            close(a, b, name)


def state() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Sequential(nn.Conv2d(3, 1, 1)))
    p = parallel(copy.deepcopy(plain), (dist.get_world_size(),), ("h",))
    assert list(p.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in p.named_parameters()] == [name for name, _ in plain.named_parameters()]
    changed = {name: tensor + 1 for name, tensor in plain.state_dict().items()}
    p.load_state_dict(changed)
    nn.Sequential(p).load_state_dict({f"0.{name}": tensor for name, tensor in changed.items()})
    plain.load_state_dict(p.state_dict())
    torch.testing.assert_close(plain[0].weight, changed["0.weight"])
    p.eval()
    assert not p.module.training
    assert not p.module[1].training
    assert p.double().module[0].weight.dtype is torch.float64


def data_and_space() -> None:
    """Two images on two ranks each: the mean of their gradients, by DDP over data and sums over space."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "w"))
    torch.manual_seed(0)
    plain = models.Net().double()
    layer = copy.deepcopy(plain)
    images = torch.randn(2, 2, 8, 9 + 1, dtype=torch.float64)
    plain(images).square().mean().backward()
    p = SpatialParallel(layer, mesh, dims=("w",), timeout=20)
    both = nn.parallel.DistributedDataParallel(p, process_group=mesh.get_group("data"))
    which = mesh.get_coordinate()[0]
    both(p.scatter(images[which : which + 1])).square().mean().backward()
    for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        close(a.grad, b.grad, name)


def everything() -> None:
    exchanges()
    if dist.get_world_size() in (2, 3):
        recomputation()
        state()
    if dist.get_world_size() == 4:
        data_and_space()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_parallel(ranks: int) -> None:
    run(ranks, everything)
