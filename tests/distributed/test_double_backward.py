"""Gradients of gradients on 2 to 4 ranks against one device in float64."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import drawn, models
from tests.distributed.ranks import close, parallel, run
from tests.sampling import EVERY, some
from torch import nn
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

from tilewise.distributed import Shard, sum_gradient_over, sum_over

Tensor = torch.Tensor


def whole(value: Tensor) -> Tensor:
    return value.gather() if isinstance(value, Shard) else value


def twice(
    model: Any, x: Tensor, upstream: Tensor, other: Tensor, parameters: list[Tensor], bent: bool
) -> list[Tensor | None]:
    """Gradients of a function of the model's gradients, those of its parameters included.

    Where it is not ``bent`` behind the layer, gradients depend on the layer's input by the layer alone.
    """
    y = whole(model(x).tanh() if bent else model(x))
    first = torch.autograd.grad(y, [x, *parameters], upstream, create_graph=True, allow_unused=True)
    terms = [(first[0] * other).sum(), *(g.square().sum() for g in first[1:] if g is not None)]
    if bent:
        terms.append(y.sum())
    return list(torch.autograd.grad(sum(terms), [x, upstream, *parameters], allow_unused=True))


def compare(case: models.Case, what: str, bent: bool) -> None:
    torch.manual_seed(0)
    plain, layer = case.layer.train(), copy.deepcopy(case.layer)
    what = f"{what} {plain} {case.shape} {case.cuts}"
    full = torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
    own = full.detach().clone().requires_grad_()
    other = torch.randn_like(full)
    with torch.no_grad():
        upstream = torch.randn_like(copy.deepcopy(plain)(full))
    expected = twice(plain, full, upstream.clone().requires_grad_(), other, list(plain.parameters()), bent)
    p = parallel(layer, *case.mesh)
    model = lambda x: p(p.scatter(x, case.cuts))  # noqa: E731
    found = twice(model, own, upstream.clone().requires_grad_(), other, list(layer.parameters()), bent)
    inputs = [full, upstream, *plain.parameters()]
    for i, (t, a, b) in enumerate(zip(inputs, found, expected, strict=True)):
        # Of what nothing depends on, torch has zeros or nothing.
        close(*(torch.zeros_like(t) if g is None else g for g in (a, b)), f"{i} of {what}")


def every_kind(ranks: int) -> None:
    draw = random.Random(f"twice {ranks}")
    for number in range(some(30)):
        torch.manual_seed(number)
        compare(models.convolution(draw, ranks, number % 3 == 0), f"convolution {number}", number % 2 == 0)
    for kind, count in (
        (drawn.norm, 16),
        (drawn.padding, 10),
        (drawn.interpolation, 6),
        (models.pooling, 10),
        (drawn.patches, 8),
    ):
        for number in range(some(count)):
            torch.manual_seed(number)
            compare(kind(draw, ranks), f"{kind.__name__} {number}", number % 2 == 0)


def empty_parts(ranks: int) -> None:
    """Adaptive pooling behind other layers, where all but one rank have nothing of the image."""
    conv = nn.Conv2d(2, 3, 3, padding=1)
    for number, layers in enumerate(
        (
            (nn.GroupNorm(1, 2), nn.AdaptiveAvgPool2d((5, 3))),
            (conv, nn.SiLU(), nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d((1, None))),
            (conv, nn.AdaptiveAvgPool2d(1)),
            (conv, nn.AdaptiveMaxPool2d((1, 2))),
            (nn.GroupNorm(1, 2), nn.AdaptiveMaxPool2d((2, 3))),
        )
    ):
        model = nn.Sequential(*layers).double()
        case = models.Case(model, (2, 2, 7, 6), {"h": (*(0,) * ranks, 7)}, ((ranks,), ("h",)))
        compare(case, "empty parts", number % 2 == 0)
        compare(case, "empty parts", number % 2 != 0)


def penalty(critic: Any, x: Tensor, parts: Tensor, first: Any) -> Tensor:
    """A gradient penalty beside a loss; ``parts`` is what the critic sees of ``x``."""
    score = critic(parts)
    (gradient,) = torch.autograd.grad(score.sum(), first, create_graph=True)
    return score.mean() + 10 * (gradient.square().sum((1, 2, 3)).sqrt() - 1).square().mean()


class Critic(nn.Module):
    """Without anything smooth behind its last layer: the penalty reaches that by its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 4, 3, 2, 1), nn.GroupNorm(2, 4)
        self.conv2, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.conv1(x)))
        y = F.avg_pool2d(F.silu(self.conv2(y)), 2)
        return self.last(y)


def penalties(ranks: int) -> None:
    """By whole images and by parts, as trainings with a penalty go: one backward of all."""
    for by_parts in (False, True):
        torch.manual_seed(1)
        plain = Critic().double()
        layer = copy.deepcopy(plain)
        full = torch.randn(2, 2, 12, 9, dtype=torch.float64, requires_grad=True)
        expected = penalty(plain, full, full, full)
        expected.backward()
        p = parallel(layer, (ranks,), ("h",))
        own = full.detach().clone().requires_grad_()
        parts = p.scatter(own)
        found = penalty(p, own, parts, parts if by_parts else own)
        close(found, expected, f"penalty by parts: {by_parts}")
        found.backward()
        close(own.grad, full.grad, "dx of the penalty")
        for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
            if b.grad is not None:
                close(a.grad, b.grad, f"d {name} of the penalty")


def slices_and_tensors(ranks: int) -> None:
    """Sums over ranks that share out channels; a DTensor's part says that it has no such gradients."""
    x = torch.tensor(3.0, requires_grad=True)
    y = sum_over((dist.get_rank() + 1) * sum_gradient_over(x, dist.group.WORLD) ** 3, dist.group.WORLD)
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    gradient.backward()
    close(x.grad, torch.tensor(18.0) * sum(range(1, ranks + 1)), "slices")
    p = parallel(nn.Conv2d(1, 1, 3), (ranks,), ("h",))
    tensor = distribute_tensor(torch.ones(1, 1, 9, 4), p.space.mesh, [Cut(2)]).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"create_graph=True\): scatter\(\) of the whole"):
        torch.autograd.grad(p(p.from_dtensor(tensor)).square().sum(), tensor, create_graph=True)


def everything(ranks: int) -> None:
    every_kind(ranks)
    empty_parts(ranks)
    penalties(ranks)
    slices_and_tensors(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4] if EVERY else [2, 4])
def test_double_backward(ranks: int) -> None:
    run(ranks, everything, ranks)
