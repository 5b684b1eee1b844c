"""Networks traced, folded and fused: the rewritten graph computes the same, and what cannot be traced is said why."""

from __future__ import annotations

import pytest
import torch
from tests.nn.regions.kept import keep
from torch import nn
from torch.nn import functional

from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import Untraceable, trace


class Block(nn.Module):
    """A residual block with norms before and after the sum."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6, affine=affine)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        for name, statistic in self.norm.named_buffers():
            if name != "num_batches_tracked":
                statistic.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(x)), inplace=True)
        y = self.norm(self.second(x))
        y += x
        return functional.hardswish(y)


@pytest.mark.parametrize("affine", [False, True])
def test_a_rewritten_block_computes_the_same(affine: bool) -> None:
    block, x = Block(affine).eval().double(), torch.randn(2, 3, 7, 5, dtype=torch.float64, device="cpu")
    traced = trace(block, (x,), {})
    assert rewrite(traced.graph) >= 4
    traced.module.recompile()
    with torch.no_grad():
        torch.testing.assert_close(traced.returned(traced.module(x)), block(x))
    assert not any("batch_norm" in str(node.target) for node in traced.graph.nodes)


class Strange(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls, self.layer = what, 0, nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> object:
        if self.what == "branches":
            return self.layer(x) if x.sum() > 0 else x
        if self.what == "counts":
            self.calls += 1
        if self.what == "writes":
            x.add_(1)
        return (x.view(-1), self.layer(x)) if self.what == "aliases" else self.layer(x)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("branches", "cannot trace"), ("counts", "state"), ("writes", "input"), ("aliases", "returns its input")],
)
def test_what_a_list_of_steps_cannot_repeat_is_refused(what: str, reason: str) -> None:
    module = Strange(what).eval()
    with pytest.raises(Untraceable, match=reason):
        trace(module, (torch.randn(1, 3, 4, 4, dtype=torch.float32, device="cpu"),), {})
    assert module.calls == 0


def test_a_hook_or_training_mode_is_named() -> None:
    block, x = Block(True).eval(), torch.randn(1, 3, 4, 4, dtype=torch.float32, device="cpu")
    handle = block.first.register_forward_hook(lambda *_: None)
    with pytest.raises(Untraceable, match="first has a hook"):
        trace(block, (x,), {})
    handle.remove()
    block.norm.train()
    with pytest.raises(Untraceable, match="norm is in training mode"):
        trace(block, (x,), {})


class Embedding(nn.Module):
    """Patches of an image with an embedding of their places, which is as large as the patches are."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.patches, self.last, self.flat = nn.Conv2d(3, 8, 2, stride=2), nn.Conv2d(8, 4, 1), flat
        self.places = nn.Parameter(torch.randn(1, 20, 8) if flat else torch.randn(1, 8, 4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x)
        if self.flat:
            y = (y.flatten(2).transpose(1, 2) + self.places).transpose(1, 2).unflatten(2, y.shape[2:])
        else:
            y = y + self.places
        return self.last(functional.relu(y))


@pytest.mark.parametrize("flat", [False, True])
def test_a_constant_may_be_added_to_a_layer(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 3, 8, 10, dtype=torch.float32, device="cpu")
    model = keep(monkeypatch, Embedding(flat).eval(), x)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), Embedding.forward(model, x))
            model.places.mul_(2.0)


def test_a_weight_that_its_norm_scales_is_computed_from_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``weight_norm`` computes the weight by an operator with two results, once for all calls."""
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    x = torch.randn(2, 3, 6, 7, dtype=torch.float32, device="cpu")
    model = keep(monkeypatch, nn.Sequential(layer, nn.ReLU()).eval(), x)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), nn.Sequential.forward(model, x))
            layer.parametrizations.weight.original0.mul_(3.0)


RESULTS = {
    "input": lambda y, x: (y, x.clone()),
    "part of the input": lambda y, x: (x[:, 1:].clone(), y),
    "twice": lambda y, x: (y, y.clone(), y.contiguous(memory_format=torch.channels_last)),
    "whole and part": lambda y, x: (y[:, :2].clone(), y),
    "parts": lambda y, x: tuple(part.clone() for part in y.split([3, 5], 1)),
    "part": lambda y, x: y[:, 2:5, 1:].clone(),
}


class Copying(nn.Module):
    """Returns copies, in one of the ways of :data:`RESULTS`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Conv2d(3, 8, 3, padding=1), way

    def forward(self, x: torch.Tensor) -> object:
        return RESULTS[self.way](functional.relu(self.layer(x)), x)


@pytest.mark.parametrize("way", RESULTS)
def test_results_that_are_copies_share_no_memory(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 5, 6, dtype=torch.float32, device="cpu")
    model = keep(monkeypatch, Copying(way).eval(), x)
    with torch.no_grad():
        found, wanted = model(x), Copying.forward(model, x)
    torch.testing.assert_close(found, wanted)
    tensors = found if isinstance(found, tuple) else (found,)
    expected = wanted if isinstance(wanted, tuple) else (wanted,)
    assert [t.stride() for t in tensors] == [t.stride() for t in expected]
    places = {t.untyped_storage().data_ptr() for t in (*tensors, x)}
    assert len(places) == len(tensors) + 1
