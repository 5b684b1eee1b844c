"""Losses, metrics and extremes of cut images against one device in float64, with gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import models
from tests.distributed.ranks import close, parallel, run
from torch import nn
from torch.nn import functional as F

from tilewise.distributed import Shard

CLASSES = 4
Tensor = torch.Tensor
Make = Callable[[tuple[int, ...]], Tensor]


def classes(shape: tuple[int, ...]) -> Tensor:
    target = torch.randint(0, CLASSES, (shape[0], *shape[2:]))
    return target.masked_fill_(torch.rand(target.shape) < 0.2, 3)


def half_ignored(shape: tuple[int, ...]) -> Tensor:
    """Rows of the image that do not count: all that some ranks hold."""
    target = classes(shape)
    target[:, : shape[2] // 2] = -100
    return target


def likely(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64).softmax(1)


def image(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def weights() -> Tensor:
    return torch.tensor([0.5, 2.0, 0.1, 1.5], dtype=torch.float64)


def by_channel(x: Tensor) -> Tensor:
    return weights().view(-1, *(1,) * (x.dim() - 2))


LOSSES: dict[str, tuple[Make, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross_entropy": (classes, F.cross_entropy),
    "ignored": (half_ignored, F.cross_entropy),
    "ignored class": (classes, lambda x, t: F.cross_entropy(x, t, ignore_index=3)),
    "weighted": (half_ignored, lambda x, t: F.cross_entropy(x, t, weights()) + nn.CrossEntropyLoss(weights())(x, t)),
    "smooth": (classes, lambda x, t: F.cross_entropy(x, t, weights(), ignore_index=3, label_smoothing=0.2)),
    "likely": (likely, lambda x, t: F.cross_entropy(x, t, weights(), label_smoothing=0.1)),
    "ce sum": (half_ignored, lambda x, t: F.cross_entropy(x, t, weights(), reduction="sum")),
    "ce none": (half_ignored, lambda x, t: F.cross_entropy(x, t, weights(), reduction="none").square().sum()),
    "nll": (half_ignored, lambda x, t: F.nll_loss(F.log_softmax(x, 1), t, weights())),
    "legacy": (image, lambda x, t: F.mse_loss(x, t, size_average=False)),
    "bce": (likely, lambda x, t: F.binary_cross_entropy(x.sigmoid(), t, by_channel(x))),
    "logits": (likely, lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=by_channel(x))),
    "weights": (image, lambda x, t: F.mse_loss(x, x.detach() * 0.5, weight=t.square()) + F.l1_loss(x, t, weight=t.abs())
                + F.huber_loss(x, t, weight=t)),
    "mse": (image, lambda x, t: F.mse_loss(x, t) + nn.MSELoss(reduction="sum")(x, t)),
    "l1": (image, lambda x, t: F.l1_loss(x, t) + F.l1_loss(x, t, reduction="none").sum(1).mean()),
    "smooth l1": (image, lambda x, t: F.smooth_l1_loss(x, t, beta=0.3)),
    "huber": (image, lambda x, t: F.huber_loss(x, t, delta=0.4)),
    "kl": (likely, lambda x, t: F.kl_div(F.log_softmax(x, 1), t, reduction="batchmean") + F.kl_div(
        F.log_softmax(x, 1), t.log(), reduction="mean", log_target=True)),
    "poisson": (likely, lambda x, t: F.poisson_nll_loss(x, t) + F.soft_margin_loss(x, t)),
    "accuracy": (classes, lambda x, t: (x.argmax(1) == t).sum() + 0 * x.sum()),
    "max": (image, lambda x, t: x.max() * 2 + x.amin() + (x * t).clamp(-0.5, 0.5).amax()),
    "max of planes": (image, lambda x, t: (x.amax((*range(2, x.dim()),)) * x.amin((*range(2, x.dim()),))).sum()),
    "max of channels": (image, lambda x, t: (x.max(1)[0] * x.amin(1, keepdim=True).squeeze(1)).sum()
                        + (torch.max(x, t) * torch.min(t, x)).sum() + x.min(0, keepdim=True).values.mean()),
    "variance": (image, lambda x, t: x.std() + x.var((0, *range(2, x.dim())), keepdim=True).sum()
                 + x.var(1, unbiased=False).sum() + torch.std(x, False) + x.var(1, keepdim=True, correction=0).mean()),
    "counts": (image, lambda x, t: (x > 0).sum() + (x > t).count_nonzero() + 0 * x.sum()
               + (x > 9).any() + (x < 9).all() + (x > 1.5).any(1).sum()),
    "last": (image, lambda x, t: (x.movedim(1, -1).sum(-1) * x.movedim(1, -1).argmax(-1)).sum()),
}  # fmt: skip


def losses(ranks: int) -> None:
    draw = random.Random(f"losses {ranks}")
    for number, (name, (make, loss)) in enumerate(LOSSES.items()):
        for dims in (2, 3):
            torch.manual_seed(number)
            sizes = tuple(draw.randint(2, 7) for _ in range(dims))
            case = models.placed(draw, ranks, nn.Identity(), CLASSES, sizes)
            full = torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
            own = full.detach().clone().requires_grad_()
            target = make(case.shape)
            p = parallel(case.layer, *case.mesh)
            what = f"{name} {case.shape} {case.cuts}"
            expected = loss(full, target)
            expected.backward()
            elsewhere = {dim: models.cuts_of(draw, cuts[-1], len(cuts) - 1) for dim, cuts in case.cuts.items()}
            for aim in (target, p.scatter(target, case.cuts), p.scatter(target, elsewhere)):
                own.grad = None
                found = loss(p(p.scatter(own, case.cuts)), aim)
                assert not isinstance(found, Shard), what
                found.backward()
                close(found, expected, what)
                close(own.grad, full.grad, f"gradient of {what}")


def half() -> None:
    """Sums that do not fit 16 bits, of which the mean does."""
    p = parallel(nn.Identity(), (dist.get_world_size(),), ("h",))
    x = torch.full((1, 2, 512, 300), 3.0, dtype=torch.float16)
    found = F.mse_loss(p.scatter(x), torch.zeros_like(x))
    assert found.dtype is torch.float16
    assert found.item() == 9.0
    target = torch.zeros(1, 512, 300, dtype=torch.int64)
    assert abs(F.cross_entropy(p.scatter(x), target).item() - 0.6931) < 1e-3


def whole_input() -> None:
    """An input that every rank holds, and a target that is cut."""
    p = parallel(nn.Identity(), (dist.get_world_size(),), ("h",))
    torch.manual_seed(0)
    x = torch.randn(2, CLASSES, 6, 5, dtype=torch.float64, requires_grad=True)
    target = classes(tuple(x.shape))
    (F.cross_entropy(x, target) + F.mse_loss(x, x.detach() + 1)).backward()
    expected, x.grad = x.grad, None
    (F.cross_entropy(x, p.scatter(target)) + F.mse_loss(x, p.scatter(x.detach() + 1))).backward()
    close(x.grad, expected, "a whole input")


def special() -> None:
    """Ties share a gradient; NaN on one rank is NaN on all; empty images and wrong arguments say so."""
    ranks = dist.get_world_size()
    p = parallel(nn.Identity(), (ranks,), ("h",))
    full = torch.ones(1, 1, 8, 2, requires_grad=True)
    p.scatter(full).max().backward()
    close(full.grad, torch.full_like(full, 1 / 16), "ties")
    spoiled = torch.zeros(1, 1, 8, 2)
    spoiled[..., -1, 0] = float("nan")
    assert p.scatter(spoiled).max().isnan()
    assert p.scatter(spoiled).isnan().any()
    assert p.scatter(torch.arange(8).view(1, 1, 8, 1), {"h": (0,) * ranks + (8,)}).amin() == 0
    x = p.scatter(torch.ones(2, 3, 8, 2))
    for call, words in (
        (lambda: F.cross_entropy(x, torch.ones(2, 7, 2).long()), r"target of \(2, 7, 2\): \(2, 8, 2\)"),
        (lambda: F.cross_entropy(x, x[:, 0].long(), reduction="median"), "reduction='median': one of none, mean, sum"),
        (lambda: F.mse_loss(x, torch.ones(3, 8, 2)), "target of"),
        (lambda: F.cross_entropy(x[:, 0], x[:, 0]), "cut behind the classes"),
        (lambda: x.argmax(), "dim=None"),
        (lambda: x.argmax(2), "dim=2 is cut"),
        (lambda: x[..., :0, :].max(), "no elements"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()


def everything(ranks: int) -> Any:
    losses(ranks)
    half()
    whole_input()
    special()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses(ranks: int) -> None:
    run(ranks, everything, ranks)
