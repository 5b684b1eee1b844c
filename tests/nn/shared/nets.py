"""Models whose parts of a batch are computed apart, and the whole batch by torch to compare with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

F64 = torch.float64


class Several(nn.Module):
    """Takes tensors and constants by name, returns a dict of a tuple and more; one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=F64)
        self.second = nn.Linear(6, 6, dtype=F64)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2, dtype=F64)
        self.register_buffer("scale", torch.tensor(0.5, dtype=F64, device="cpu"))

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor], power: int = 2) -> dict[str, Any]:
        y = torch.tanh(self.first(x)) * self.scale
        z = self.second(y) + more["y"] ** power
        return {"both": (y, z), "power": power, "largest": z.argmax(1)}


def images(batch: int, device: str = "cpu", dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=dtype, device=device)


def convolutional(device: str = "cpu", dtype: torch.dtype = F64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, dtype=dtype, device=device),
        nn.GroupNorm(2, 8, dtype=dtype, device=device),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 5, dtype=dtype, device=device),
    )


def normed(device: str = "cpu", dtype: torch.dtype = F64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, dtype=dtype, device=device),
        nn.BatchNorm2d(4, dtype=dtype, device=device),
        nn.Flatten(),
        nn.Linear(4 * 36, 3, dtype=dtype, device=device),
    )


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def loss_of(value: Any) -> torch.Tensor:
    """The mean square of everything that has a gradient, so that parts of uneven sizes must not count alike."""
    found = [t.square().mean() for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack(found).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_alike(mine: nn.Module, its: nn.Module, tolerance: float = 1e-10) -> None:
    """Gradients and states are the same, under the same names."""
    for found, wanted in ((gradients(mine), gradients(its)), (mine.state_dict(), its.state_dict())):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            got = found[name]
            assert (got is None) == (value is None), name
            if value is not None:
                torch.testing.assert_close(
                    got, value, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
                )
