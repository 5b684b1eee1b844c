"""Sums of norms by kernels on a GPU, alone and in a compiled training step that CUDA graphs replay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing
from tests.nn.fresh_dynamo import fresh_dynamo as fresh_dynamo
from torch import Tensor, nn

import tilewise
from tilewise.nn.layers.inductor import channel_sums
from tilewise.nn.layers.inductor.channel_sums import GRADIENT_TILE, MOMENTS_TILE, Division

pytestmark = pytest.mark.gpu
LAST = torch.channels_last


def images(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
    far = torch.randn((1, shape[1], 1, 1), generator=generator, device="cuda", dtype=torch.float32)
    return (made + 30 * far).to(dtype).contiguous(memory_format=LAST)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(32, 256, 56, 56), (5, 64, 113, 7), (3, 100, 17, 9), (64, 2048, 7, 7), (1, 3, 1, 1)])
def test_kernels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, dy = images(1, shape, dtype), images(2, shape, dtype)
    division = Division.of(x, MOMENTS_TILE)
    parts = torch.full((division.splits, 2, shape[1]), float("nan"), device="cuda", dtype=torch.float32)
    channel_sums.run("moments", division, [x], parts)
    less = x.double() - x[:1, :, :1, :1].double()
    want = torch.stack([less.sum((0, 2, 3)), (less * less).sum((0, 2, 3))])
    scale = torch.stack([less.abs().sum((0, 2, 3)), want[1]])
    assert ((parts.double().sum(0) - want).abs() <= 1e-5 * scale).all()
    rows = [torch.randn(shape[1], device="cuda", dtype=torch.float32) for _ in range(5)]
    division = Division.of(x, GRADIENT_TILE)
    for gate in ([], rows[1:]):
        parts = torch.full((division.splits, 2, shape[1]), float("nan"), device="cuda", dtype=torch.float32)
        tensors = [dy, x, rows[0], *(gate or [rows[0]] * 4)]
        channel_sums.run("gradient_sums", division, tensors, parts, GATED=bool(gate))
        value = x.double() - rows[0].double().view(1, -1, 1, 1)
        upstream = dy.double()
        if gate:
            centre, factor, weight, bias = (t.double().view(1, -1, 1, 1) for t in gate)
            upstream = torch.where((x.double() - centre) * factor * weight + bias <= 0, 0.0, upstream)
        want = torch.stack([upstream.sum((0, 2, 3)), (upstream * value).sum((0, 2, 3))])
        scale = torch.stack([dy.double().abs().sum((0, 2, 3)), (dy.double() * value).abs().sum((0, 2, 3))])
        assert ((parts.double().sum(0) - want).abs() <= 1e-5 * scale).all()


class Block(nn.Module):
    """Convolutions, norms and gates of a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 1, bias=False), nn.Conv2d(64, 128, 3, padding=1, bias=False)
        self.beside = nn.Conv2d(64, 128, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(n) for n in (64, 128, 128)])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.norms[2](self.beside(x)))


def gradients(module: nn.Module, call: Any, x: Tensor, *, autocast: bool) -> list[Tensor]:
    for _ in range(3):  # the first steps are recorded, the last is replayed
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = call(x)
        y.square().mean().backward()
    return [p.grad.double() for p in module.parameters() if p.grad is not None]


def test_a_step_in_cuda_graphs() -> None:
    import torch._inductor.config as inductor

    torch.manual_seed(0)
    module = Block().cuda().to(memory_format=LAST)
    x = torch.randn(32, 64, 56, 56, device="cuda", dtype=torch.float32).contiguous(memory_format=LAST)
    exact, plain = copy.deepcopy(module).double(), copy.deepcopy(module)
    found: list[str] = []

    def note(graph: Any) -> None:
        found.extend(str(node.target) for node in graph.nodes if "channel_" in str(node.target))

    with inductor.patch(post_grad_custom_post_pass=note, force_disable_caches=True):
        theirs = gradients(plain, torch.compile(plain, mode="reduce-overhead"), x, autocast=True)
        assert not found
        compiled = torch.compile(module, mode="reduce-overhead")
        with torch.autocast("cuda", torch.bfloat16):
            tilewise.optimize(compiled, x, planner=Dividing())
        mine = gradients(module, compiled, x, autocast=True)
    want = gradients(exact, exact, x.double(), autocast=False)
    assert {each.split(".")[1] for each in found} == {"channel_moments", "channel_gradient_sums"}
    for ours, its, true in zip(mine, theirs, want, strict=True):
        assert (ours - true).norm() <= 1.5 * (its - true).norm() + 1e-3 * true.norm()
