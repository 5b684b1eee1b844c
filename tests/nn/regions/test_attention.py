"""Blocks of transformers: attention without dropout is a step, and queries, keys and values are views of one result."""

from __future__ import annotations

import pytest
import torch
from tests.nn.regions.kept import Net, assert_by_program, keep
from torch import nn

from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import Untraceable, trace

aten = torch.ops.aten


class Attention(nn.Module):
    """Self-attention over patches of an image, with a residual and a layer behind it."""

    def __init__(self, how: str = "unbind", dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.norm, self.mixed, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.how, self.dropout = how, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Net.ran += 1
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        n, count, width = tokens.shape
        mixed = self.mixed(self.norm(tokens))
        if self.how == "unbind":
            q, k, v = mixed.view(n, count, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = mixed.chunk(3, dim=-1) if self.how == "chunk" else mixed.split(width, dim=-1)
            q, k, v = (part.view(n, count, 2, width // 2).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        result: torch.Tensor = tokens + self.out(y.transpose(1, 2).reshape(n, count, width))
        return result


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 12, 16, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("how", ["unbind", "chunk", "split"])
def test_a_block_with_attention_is_one_region(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = keep(monkeypatch, Attention(how).eval(), images())
    for count in range(3):
        assert_by_program(model, images() * (1 + count))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_an_unbind_becomes_what_it_selects(dim: int) -> None:
    class Unbound(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second, *_ = x.unbind(dim)
            return first - 2.0 * second

    x = torch.randn(3, 4, 5, dtype=torch.float64, device="cpu")
    traced = trace(Unbound().eval(), (x,), {})
    (want,) = traced.module(x)
    rewrite(traced.graph)
    traced.module.recompile()
    assert torch.equal(traced.module(x)[0], want)
    assert not [node for node in traced.graph.nodes if node.target is aten.unbind.int]


def test_attention_with_dropout_draws_random_numbers() -> None:
    with pytest.raises(Untraceable, match="draws random numbers"):
        trace(Attention(dropout=0.1).eval(), (images(),), {})
