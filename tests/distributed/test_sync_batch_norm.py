"""``nn.SyncBatchNorm`` on 4 ranks, data by space and others, against one device with the whole batch in float64."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import cuts_of
from tests.distributed.ranks import close, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from tilewise.distributed import PeerError, SpatialParallel, sum_gradient_over, sum_over

TIMEOUT = 20.0


class Pooled(nn.Module):
    """Batch norms of an image and of what every rank has whole behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.line, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.conv(x)))
        return self.head(self.line(y.square().mean((2, 3))))


def norms(draw: random.Random) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Models and the shapes of their inputs, but for the batch."""
    found: list[tuple[nn.Module, tuple[int, ...]]] = [
        (nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)), (3, 9, 6)),
        (Pooled(), (3, 8, 5)),
        (nn.BatchNorm3d(2), (2, 3, 6, 4)),
        (nn.BatchNorm2d(3, momentum=None), (3, 5, 7)),
        (nn.BatchNorm2d(3, affine=False, eps=0.1), (3, 7, 4)),
        (nn.BatchNorm2d(3, track_running_stats=False), (3, 6, 4)),
    ]  # fmt: skip
    for model, _ in found:
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    return [(model.double(), shape) for model, shape in found]


def synchronized(plain: nn.Module, group: Any = None) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), group)


def compare(
    plain: nn.Module, p: SpatialParallel, batches: Any, among: Any, x: torch.Tensor, cuts: Any, what: str
) -> None:
    """Two steps and an evaluation; ``batches`` says which images are here, ``among`` who has the others."""
    for step in range(2):
        full = (x * (step + 1) + step * 30).requires_grad_()
        own = full.detach()[batches].clone().requires_grad_()
        plain.zero_grad()
        p.module.zero_grad()
        expected = plain(full)
        upstream = torch.randn_like(expected)
        expected.backward(upstream)
        found = p(p.scatter(own, cuts))
        found = found.gather() if hasattr(found, "gather") and hasattr(found, "spatial") else found
        close(found, expected[batches], f"{what} step {step}")
        found.backward(upstream[batches])
        close(own.grad, full.grad[batches], f"dx of {what} step {step}")
        for (name, a), (_, b) in zip(p.named_parameters(), plain.named_parameters(), strict=True):
            if among is not None:
                dist.all_reduce(a.grad, group=among)
            close(a.grad, b.grad, f"d {name} of {what}")
    assert list(p.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        close(p.state_dict()[name], value, f"{name} of {what}")
    plain.eval(), p.eval()
    found = p(p.scatter(x[batches], cuts))
    if p.module.__class__ is not nn.SyncBatchNorm or p.module.track_running_stats:
        close(found.gather() if hasattr(found, "spatial") else found, plain(x)[batches], f"eval of {what}")


def data_and_space() -> None:
    """Equal batches, others, and none; groups by default and by name."""
    draw = random.Random(3)
    for dims, group in ((("data", "h"), None), (("w", "data"), dist.new_group([3, 1, 2, 0]))):
        mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=dims)
        which = mesh["data"].get_local_rank()
        name = next(dim for dim in dims if dim != "data")
        first = SpatialParallel(nn.Identity(), mesh, (name,), timeout=TIMEOUT)
        for number, (plain, shape) in enumerate(norms(draw)):
            count = 3 + number % 2
            split = draw.choice((0, 1)) if len(list(plain.children())) == 0 else count - 1 - number
            split = max(split, 0 if len(list(plain.children())) == 0 else 1)
            batches = slice(0, split) if which == 0 else slice(split, count)
            torch.manual_seed(number)
            x = torch.randn(count, *shape, dtype=torch.float64)
            size = shape[{"h": -2, "w": -1}[name]]
            p = SpatialParallel(synchronized(plain, group), mesh, (name,), timeout=TIMEOUT)
            p.space.link, p.space.wider = first.space.link, first.space.wider
            compare(
                plain, p, batches, mesh.get_group("data"), x, {name: cuts_of(draw, size, 2)}, f"{number} {dims} {plain}"
            )


def one_image(sizes: tuple[int, ...], dims: tuple[str, ...]) -> None:
    """All ranks share one image."""
    plain, shape = norms(random.Random(4))[0]
    mesh = init_device_mesh(torch.get_default_device().type, sizes, mesh_dim_names=dims)
    p = SpatialParallel(synchronized(plain), mesh, dims, timeout=TIMEOUT)
    compare(plain, p, slice(None), None, torch.randn(2, *shape, dtype=torch.float64), None, f"{dims}")
    assert list(p.space.wider.values()) == [p.space.link]


def two_ranks() -> None:
    """One image in two parts, and two images of one part each."""
    one_image((2,), ("h",))
    plain, shape = norms(random.Random(4))[0]
    mesh = init_device_mesh(torch.get_default_device().type, (2, 1), mesh_dim_names=("data", "h"))
    mine = slice(0, 1) if mesh["data"].get_local_rank() == 0 else slice(1, 3)
    p = SpatialParallel(synchronized(plain), mesh, ("h",), timeout=TIMEOUT)
    x = torch.randn(3, *shape, dtype=torch.float64)
    compare(plain, p, mine, mesh.get_group("data"), x, None, "two images")


def space_alone() -> None:
    """All ranks share one image; and a group of each image's ranks, which is what ``nn.BatchNorm`` does."""
    one_image((4,), ("h",))
    one_image((2, 2), ("w", "h"))
    plain, shape = norms(random.Random(4))[0]
    x = torch.randn(2, *shape, dtype=torch.float64)
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("data", "h"))
    mine = slice(0, 1) if mesh["data"].get_local_rank() == 0 else slice(1, 2)
    p = SpatialParallel(synchronized(plain, mesh.get_group("h")), mesh, ("h",), timeout=TIMEOUT)
    compare(copy.deepcopy(plain), p, slice(None), None, x[mine], None, "a group of one image's ranks")


class Slices(nn.Module):
    """Ranks of ``c`` share out channels between two convolutions, and have all of them outside."""

    def __init__(self, mesh: DeviceMesh | None, which: slice) -> None:
        super().__init__()
        self.mesh, self.which = mesh, which
        self.first, self.before = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)
        self.conv1, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 2, 3, padding=1, bias=False)

    def sliced(self) -> Slices:
        s, made = self.which, copy.deepcopy(self)
        made.conv1.weight, made.conv1.bias = nn.Parameter(self.conv1.weight[s]), nn.Parameter(self.conv1.bias[s])
        made.conv2.weight = nn.Parameter(self.conv2.weight[:, s])
        made.norm = nn.BatchNorm2d(2).double()
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(self.first(x))
        x = x if self.mesh is None else sum_gradient_over(x, self.mesh)
        x = self.conv2(F.silu(self.norm(self.conv1(x))))
        return x if self.mesh is None else sum_over(x, self.mesh)


def copies() -> None:
    """What ranks hold twice counts once: an unbiased variance tells, and so do channels that one alone has."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("c", "h"))
    here = mesh["c"].get_local_rank()
    torch.manual_seed(7)
    plain = Slices(None, slice(2 * here, 2 * here + 2)).double()
    own = synchronized(plain.sliced())
    own.mesh = mesh["c"]
    p = SpatialParallel(own, mesh, ("h",), replicated=("c",), timeout=TIMEOUT)
    full = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    part = full.detach().clone().requires_grad_()
    plain(full).square().sum().backward()
    p(p.scatter(part)).square().sum().backward()
    close(part.grad, full.grad, "dx by slices")
    close(own.conv1.weight.grad, plain.conv1.weight.grad[plain.which], "d conv1")
    close(own.first.weight.grad, plain.first.weight.grad, "d first")
    close(own.before.running_var, plain.before.running_var, "running variance of copies")
    close(own.norm.running_var, plain.norm.running_var[plain.which], "running variance of slices")
    with pytest.raises(
        ValueError, match=r"replicated=\('h',\): names of mesh dimensions that cut no image, of \['c'\]"
    ):
        SpatialParallel(nn.Identity(), mesh, ("h",), replicated=("h",))


def refusals() -> None:
    """Every rank hears what is wrong, also those that lack nothing."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("data", "h"))
    p, alone = (
        SpatialParallel(nn.Sequential(nn.SyncBatchNorm(2)), given, ("h",), timeout=seconds)
        for given, seconds in ((mesh, TIMEOUT), (mesh["h"], 1))
    )
    # Last, as torch numbers groups by how many a rank is in.
    p.module[0].process_group = dist.new_group([0, 1, 2])
    words = {
        0: "'0' .SyncBatchNorm.: process_group has rank 2 and not rank 3 with which it shares images: all of",
        3: "'0' .SyncBatchNorm.: process_group: rank 3 is not in it",
    }
    with pytest.raises((ValueError, PeerError), match=words[3 if dist.get_rank() == 3 else 0]):
        p(p.scatter(torch.ones(1, 2, 4, 4)))
    if mesh["data"].get_local_rank() == 0:
        with pytest.raises(PeerError, match="rank 2 and rank 3 did not come to it within 1 s: a process_group"):
            alone(alone.scatter(torch.ones(1, 2, 4, 4)))
    dist.barrier()


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and dist.get_rank() == 3 and x.shape[0] == 2:
            raise ArithmeticError("too much")
        return x


def failures() -> None:
    """A failure on one image's ranks is heard by those of another that wait for the statistics."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("data", "h"))
    p = SpatialParallel(
        nn.Sequential(nn.Conv2d(2, 2, 3), Failing(), nn.SyncBatchNorm(2)), mesh, ("h",), timeout=TIMEOUT
    )
    p(p.scatter(torch.randn(1, 2, 8, 8)))
    with pytest.raises((PeerError, ArithmeticError), match="too much"):
        p(p.scatter(torch.randn(2, 2, 8, 8)))


def everything() -> None:
    data_and_space()
    space_alone()
    copies()
    failures()
    refusals()


@pytest.mark.slow
def test_sync_batch_norm() -> None:
    run(4, everything)


def on_gpus() -> None:
    data_and_space()
    space_alone()
    copies()


def test_two_ranks() -> None:
    run(2, two_ranks)


@pytest.mark.gpu
def test_on_gpus() -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    run(4, on_gpus, device="cuda", timeout=300)


@pytest.mark.gpu
def test_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    run(2, two_ranks, device="cuda", timeout=300)
