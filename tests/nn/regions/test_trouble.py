"""Networks that folding and fusing must not break: the rewritten graph computes the same, or what is wrong is said."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.nn.regions.kept import keep
from torch import Tensor, nn
from torch.nn import functional

from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import Traced, Untraceable, trace


class Pair(nn.Module):
    """Two convolutions with norms and an activation; ``way`` says what is unusual about their forward."""

    def __init__(self, way: str, norm: nn.Module | None = None, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4) if norm is None else norm
        self.activation = nn.ReLU() if activation is None else activation

    def forward(self, x: Tensor) -> object:
        y = self.norm(self.first(x))
        if self.way == "shared norm":
            y = self.norm(self.second(y))
        elif self.way == "read twice":
            y = self.second(functional.relu(y)) + functional.relu(self.first(y)) + y
        elif self.way == "view changed":
            y[:, 1:3] += 1.0
            y[:, 0].mul_(y[:, 3])
        elif self.way == "view before":
            part = y[:, :2]
            y.add_(x)
            y = self.second(y) + part.sum(1, keepdim=True)
        elif self.way == "added in place":
            y += self.second(x)
            y.relu_()
        elif self.way == "added to itself":
            y += y
        elif self.way == "raw is read":
            raw = self.first(x)
            y = self.norm(raw) + raw
        return (self.activation(y), y) if self.way == "two results" else self.activation(y)


WAYS = ("plain", "shared norm", "read twice", "view changed", "view before", "added in place", "added to itself",
        "raw is read", "two results")  # fmt: skip


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")


def ready(module: nn.Module) -> nn.Module:
    """The module in float64 and eval mode, with statistics as if it had been trained."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
            part.running_mean.copy_(numbers(4, seed=1))
            part.running_var.copy_(numbers(4, seed=2).abs() + 0.5)
    return module.double().eval()


def rewritten(module: nn.Module, *args: object, **kwargs: object) -> tuple[Traced, int]:
    """The rewritten trace, and how many operators vanished."""
    traced = trace(module, args, kwargs)
    fused = rewrite(traced.graph)
    traced.module.recompile()
    return traced, fused


def check(module: nn.Module, x: Tensor) -> int:
    """The rewritten graph computes what the module does; gives how many operators vanished."""
    given = x.clone()
    traced, fused = rewritten(module, x)
    with torch.no_grad():
        torch.testing.assert_close(traced.returned(traced.module(x)), module(given), equal_nan=True)
    assert torch.equal(x, given), "the graph changed its input"
    return fused


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 4, 7, 5), (1, 4, 1, 3)])
def test_what_is_read_twice_shared_or_changed_in_place_is_computed_the_same(way: str, shape: tuple[int, ...]) -> None:
    check(ready(Pair(way)), numbers(*shape, seed=3))


def test_a_norm_is_folded_where_nothing_else_reads_the_convolution() -> None:
    x = numbers(2, 4, 7, 5, seed=3)
    assert check(ready(Pair("plain")), x) > check(ready(Pair("raw is read")), x)


@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_with_statistics_of_the_batch_is_not_folded(affine: bool) -> None:
    norm = nn.BatchNorm2d(4, affine=affine, track_running_stats=False)
    module, x = ready(Pair("plain", norm)), numbers(2, 4, 7, 5, seed=3)
    check(module, x)
    traced, _ = rewritten(module, x)
    assert any("batch_norm" in str(node.target) for node in traced.graph.nodes)


def test_a_norm_in_training_mode_is_named() -> None:
    module = ready(Pair("plain"))
    module.norm.train()
    with pytest.raises(Untraceable, match="norm is in training mode"):
        trace(module, (numbers(2, 4, 7, 5, seed=3),), {})


@pytest.mark.parametrize("activation", [nn.PReLU(4), nn.PReLU(), nn.Softplus(), nn.Softmax(1)], ids=str)
def test_an_activation_that_problems_do_not_know_stays_and_computes_the_same(activation: nn.Module) -> None:
    check(ready(Pair("plain", activation=activation)), numbers(2, 4, 7, 5, seed=3))


class Counting(nn.Module):
    """An activation that keeps how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return functional.relu(x) * self.calls


def test_an_activation_with_state_is_refused_and_its_state_left_as_it_was() -> None:
    module = ready(Pair("plain", activation=Counting()))
    with pytest.raises(Untraceable, match="its forward"):
        trace(module, (numbers(2, 4, 7, 5, seed=3),), {})
    assert float(module.activation.calls) == 0


def test_nan_in_statistics_and_filters_of_zeros_give_what_torch_does() -> None:
    module, x = ready(Pair("plain")), numbers(2, 4, 7, 5, seed=3)
    module.norm.running_mean[1] = math.nan
    with torch.no_grad():
        module.first.weight[2].zero_()
        module.norm.running_var[3] = 0.0
    check(module, x)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_a_hook_of_a_part_is_named(kind: str) -> None:
    module, x = ready(Pair("plain")), numbers(2, 4, 7, 5, seed=3)
    getattr(module.norm, f"register_{kind}")(lambda *_: None)
    with pytest.raises(Untraceable, match="norm has a hook"):
        trace(module, (x,), {})


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_a_hook_of_all_modules_is_named(kind: str) -> None:
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        with pytest.raises(Untraceable, match="every module has a hook"):
            trace(ready(Pair("plain")), (numbers(2, 4, 7, 5, seed=3),), {})
    finally:
        handle.remove()


class Keywords(nn.Module):
    """Takes its inputs by name, and returns what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, *, image: Tensor, offset: Tensor, words: bool) -> object:
        y = functional.relu(self.layer(image) + offset)
        return {"y": y, "nested": [y.sum(), (3, None)]} if words else (y, y.mean())


@pytest.mark.parametrize("words", [False, True])
def test_arguments_by_name_and_nested_results(words: bool) -> None:
    module = Keywords().double().eval()
    given = {"image": numbers(2, 4, 7, 5, seed=3), "offset": numbers(4, 1, 1, seed=4), "words": words}
    traced, _ = rewritten(module, **given)
    with torch.no_grad():
        found, want = traced.returned(traced.module(given["image"], given["offset"])), module(**given)
    assert type(found) is type(want)
    if words:
        assert found["nested"][1] == (3, None)
        found, want = (found["y"], found["nested"][0]), (want["y"], want["nested"][0])
    torch.testing.assert_close(found, want)


class Grouped(nn.Module):
    """A group norm, which on a CPU refuses inputs that lie in neither layout, of a tensor seen through views."""

    def __init__(self, seen: str) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1)
        self.inner, self.seen = nn.Linear(8, 8), seen

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.seen == "rows":
            return self.inner(self.norm(y.flatten(2)).transpose(1, 2))
        if self.seen == "permuted":
            return self.last(self.norm(self.inner(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))
        return self.last(self.norm(y.transpose(2, 3) if self.seen == "transposed" else y[:, :, ::2, ::2]))


@pytest.mark.parametrize("seen", ["rows", "permuted", "transposed", "sliced"])
def test_an_operator_that_refuses_a_format_is_run_in_another(monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    torch.manual_seed(0)
    model, x = Grouped(seen).eval(), torch.randn(2, 4, 8, 6, dtype=torch.float32, device="cpu")
    want = copy.deepcopy(model)
    keep(monkeypatch, model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), want(x), rtol=1e-4, atol=1e-5)
