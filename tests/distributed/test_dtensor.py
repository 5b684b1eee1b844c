"""Shards from and to DTensor, and channels shared beside space, against one device in float64."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import models
from tests.distributed.ranks import close, parallel, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.nn import functional as F

from tilewise.distributed import PeerError, SpatialParallel, sum_gradient_over, sum_over

DIMS = {"d": -3, "h": -2, "w": -1}


def there_and_back(ranks: int) -> None:
    """A convolution of a DTensor, and a DTensor of its result, with the gradients of one device."""
    draw = random.Random(f"dtensor {ranks}")
    for number in range(8):
        torch.manual_seed(number)
        plain = nn.Conv2d(2, 3, 3, padding=1)
        case = models.placed(
            draw,
            ranks,
            plain,
            2,
            (draw.randint(1, 9), draw.randint(1, 9)),
            models.MESHES[ranks][number % len(models.MESHES[ranks])],
        )
        layer = copy.deepcopy(plain)
        full = torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
        expected = plain(full)
        upstream = torch.randn_like(expected)
        expected.backward(upstream)
        p = parallel(layer, *case.mesh)
        mesh = p.space.mesh
        assert mesh.mesh_dim_names == case.mesh[1]
        placements = [draw.choice((Cut(4 + DIMS[name]), Replicate())) for name in case.mesh[1]]
        own = distribute_tensor(full.detach(), mesh, placements).requires_grad_()
        what = f"{case} {placements}"
        x = p.from_dtensor(own)
        assert x.shape == full.shape, what
        close(x.gather(), full, what)
        found = p(x).to_dtensor()
        assert found.placements == tuple(Cut(4 + DIMS[name]) for name in case.mesh[1]), what
        assert found.shape == expected.shape, what
        assert found.stride() == expected.stride(), what
        close(found.full_tensor(), expected, what)
        found.backward(distribute_tensor(upstream, mesh, found.placements))
        assert own.grad.placements == own.placements, f"{own.grad.placements} {own.grad.to_local().stride()} of {what}"
        close(own.grad.full_tensor(), full.grad, f"dx of {what}")
        close(layer.weight.grad, plain.weight.grad, f"dw of {what}")
        scattered = full.detach().clone().requires_grad_()
        uneven = p.scatter(scattered, case.cuts)
        close((uneven * 2).transpose(0, 1).to_dtensor().full_tensor(), 2 * full.transpose(0, 1), what)
        placed = uneven.to_dtensor()
        placed.backward(distribute_tensor(full.detach(), mesh, placed.placements))
        close(scattered.grad, full, f"back of {what}")


def refused(mesh: DeviceMesh) -> None:
    p = SpatialParallel(nn.Identity(), mesh, dims=("h",), timeout=20)
    whole = torch.ones(1, 2, 4, 6)
    other = init_device_mesh(torch.get_default_device().type, (4,), mesh_dim_names=("h",))
    for tensor, words in (
        (whole, "type Tensor: a DTensor would do"),
        (distribute_tensor(whole, mesh["h"], [Cut(3)]), r"\(dim=3\) on mesh dimension 'h': Shard\(2\) or Replicate"),
        (DTensor.from_local(whole, mesh["h"], [Partial()]), "Partial.* on mesh"),
        (distribute_tensor(whole, mesh, [Cut(1), Cut(2)]), r"\(dim=1\) on mesh dimension 'c', which cuts no image"),
        (distribute_tensor(whole, mesh["c"], [Replicate()]), r"not h"),
        (distribute_tensor(whole, other, [Cut(2)]), r"ranks \[0, 1, 2, 3\]"),
        (distribute_tensor(torch.ones(3), mesh["h"], [Replicate()]), "no dimension 'h'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            p.from_dtensor(tensor)
    both = p.from_dtensor(distribute_tensor(whole, mesh, [Replicate(), Cut(2)]))
    assert both.to_dtensor().device_mesh == mesh["h"]
    with pytest.raises(ValueError, match="2 dimensions"):
        sum_over(both, mesh)
    with pytest.raises(RuntimeError, match="type"):
        sum_over(both.to(torch.int16), mesh["c"])  # which no backend adds up
    with pytest.raises(PeerError, match="failed in sum_over: RuntimeError"):
        both.gather()


class Shared(nn.Module):
    """Two blocks; where there is a mesh, each rank of it computes with its slice of the channels between."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.wide = nn.ModuleList(nn.Conv2d(4, 8, 3, stride=2, padding=1) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.rand(2, 4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for wide, narrow, bias in zip(self.wide, self.narrow, self.bias, strict=True):
            inner = x if self.mesh is None else sum_gradient_over(x, self.mesh)
            inner = narrow(F.relu(wide(inner)))
            x = (inner if self.mesh is None else sum_over(inner, self.mesh.get_group())) + bias
        return x


def sliced(model: Shared, mesh: DeviceMesh) -> Shared:
    """This rank's slices of the weights of ``model``."""
    mine = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    made = Shared(mesh).double()
    made.first, made.bias = copy.deepcopy(model.first), nn.Parameter(model.bias.detach().clone())
    for wide, narrow, a, b in zip(made.wide, made.narrow, model.wide, model.narrow, strict=True):
        wide.weight, wide.bias = (
            nn.Parameter(a.weight.detach()[mine].clone()),
            nn.Parameter(a.bias.detach()[mine].clone()),
        )
        narrow.weight = nn.Parameter(b.weight.detach()[:, mine].clone())
    return made


def channels_beside_space(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Shared(None).double()
    layer = sliced(plain, mesh["c"])
    full = torch.randn(2, 2, 13, 10, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 4, (2, 4, 3))
    expected = F.cross_entropy(plain(full), target)
    expected.backward()
    own = full.detach().clone().requires_grad_()
    p = SpatialParallel(layer, mesh, dims=("h",), timeout=20)
    for cuts in (None, {"h": (0, 3, 13)}, {"h": (0, 13, 13)}):
        own.grad = None
        layer.zero_grad()
        found = F.cross_entropy(p(p.scatter(own, cuts)), target)
        found.backward()
        close(found, expected, "loss")
        close(own.grad, full.grad, "dx")
        mine = slice(4 * mesh["c"].get_local_rank(), 4 * mesh["c"].get_local_rank() + 4)
        for name, parameter in plain.named_parameters():
            gradient = parameter.grad
            gradient = (
                gradient[mine]
                if name.startswith("wide")
                else gradient[:, mine]
                if name.startswith("narrow")
                else gradient
            )
            close(layer.get_parameter(name).grad, gradient, f"d {name}")
    unsplit = plain(full)
    close(sliced(plain, mesh["c"])(full), unsplit, "on tensors that are not cut")
    shard = p.scatter(full, {"h": (0, 3, 13)})
    shard = shard.like(dist.nn.functional.all_reduce(shard.local, group=mesh.get_group("c")))
    close(shard.gather(), 2 * full, "a collective of one's own")


def everything(ranks: int) -> Any:
    there_and_back(ranks)
    if ranks == 4:
        mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("c", "h"))
        refused(mesh)
        channels_beside_space(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_dtensor_and_channels(ranks: int) -> None:
    run(ranks, everything, ranks)
