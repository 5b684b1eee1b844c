"""Parts of a batch computed at once on a CPU give what torch gives for the whole batch, in float64."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.shared.nets import F64, Several, assert_alike, convolutional, images, loss_of, twins
from torch import nn
from torch.utils._pytree import tree_map

import tilewise


@given(
    st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans(), st.booleans(), st.booleans()
)
@settings(max_examples=12, deadline=None)
def test_results_and_gradients_are_those_of_the_whole_batch(
    parts: int, batches: list[int], keep: bool, transposed: bool, needed: bool
) -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=parts)
    for batch in batches:
        x = images(batch).transpose(2, 3) if transposed else images(batch)
        mine, its = (x.clone().requires_grad_(needed) for _ in range(2))
        got, wanted = shared(mine), twin(its)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        for each in (got, wanted):
            loss_of(each).backward()
        assert_alike(shared, twin)
        if needed:
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-10)
        for each in (shared, twin):
            if not keep:
                each.zero_grad(set_to_none=batch % 2 == 0)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any), st.integers(1, 40))
@settings(max_examples=12, deadline=None)
def test_given_shares_are_kept_and_a_share_of_nothing_is_left_out(shares: list[int], batch: int) -> None:
    model, twin = twins(nn.Linear(4, 3, dtype=F64))
    shared = tilewise.shared(model, parts=len(shares), shares=shares)
    x = torch.randn(batch, 4, dtype=F64, device="cpu")
    for each in (shared, twin):
        each(x).square().mean().backward()
    assert_alike(shared, twin)
    sizes = shared.report().sizes
    assert sum(sizes) == batch
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - batch * share / sum(shares)) < 1
        assert share or not size


def test_dicts_tuples_constants_and_shared_weights() -> None:
    model, twin = twins(Several())
    shared = tilewise.shared(model, devices=("cpu", "cpu", "cpu"))
    x, y = (torch.randn(7, 6, dtype=F64, device="cpu") for _ in range(2))
    got, wanted = (each(x, more={"y": y}, power=3) for each in (shared, twin))
    assert got["power"] == 3
    tree_map(lambda a, b: torch.testing.assert_close(a, b) if isinstance(a, torch.Tensor) else None, got, wanted)
    for value in (got, wanted):
        loss_of(value).backward()
    assert_alike(shared, twin)
    assert model.second.weight.grad is model.first.weight.grad
    assert model.unused.weight.grad is None


def test_a_gradient_of_one_result_alone() -> None:
    model, twin = twins(Several())
    shared = tilewise.shared(model, parts=2)
    x = torch.randn(5, 6, dtype=F64, device="cpu")
    for each in (shared, twin):
        each(x, more={"y": x})["both"][0][:1].sum().backward()  # the second part gets a gradient of zeros
    assert_alike(shared, twin)


class Added(nn.Module):
    """Two parameters whose gradients torch gives as one tensor, the one of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.zeros(4, dtype=F64, device="cpu")) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(0, keepdim=True).expand(len(x), 4) + (self.one + self.two)


def test_gradients_in_one_memory_are_not_added_twice() -> None:
    model, twin = twins(Added())
    shared = tilewise.shared(model, parts=4, shares=(1, 1, 1, 1))
    x = torch.randn(4, 4, dtype=F64, device="cpu")
    upstream = torch.randn(4, 4, dtype=F64, device="cpu")
    before = upstream.clone()
    for each in (shared, twin):
        each(x).backward(upstream)
    assert_alike(shared, twin)
    assert torch.equal(upstream, before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_trains_it_alike(optimizer: Any) -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    given = [images(n) for n in (6, 6, 5, 1)]
    for each in (shared, twin):
        steps = optimizer(each.parameters(), lr=1e-2)
        for x in given:
            for part in x.split(3):  # gradients of two calls are added up
                loss_of(each(part)).backward()
            steps.step()
            steps.zero_grad()
    assert_alike(shared, twin)


def test_frozen_parameters_may_change_between_calls() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    for frozen in (False, True, False):
        for each in (shared, twin):
            next(each.parameters()).requires_grad_(not frozen)
            each.zero_grad()
        x = images(4)
        for each in (shared, twin):
            loss_of(each(x)).backward()
        assert_alike(shared, twin)
    for each in (shared, twin):
        each.requires_grad_(False)
    assert not shared(images(3)).requires_grad
    assert not shared.report().rebuilt


def test_two_calls_before_a_backward_and_one_backward_for_two() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    x, y = images(4), images(3)
    for each in (shared, twin):
        first, second = each(x), each(y)
        loss_of(second).backward()
        (loss_of(first) + loss_of(each(y))).backward()
    assert_alike(shared, twin)


def test_a_backward_may_be_repeated_only_where_torch_was_told_to_keep_it() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    x = images(4)
    for each in (shared, twin):
        loss = loss_of(each(x))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_alike(shared, twin)
    loss = loss_of(shared(x))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_an_error() -> None:
    shared = tilewise.shared(convolutional(), parts=2)
    x = images(4).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(shared(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(mode: Any) -> None:
    model, twin = twins(nn.Sequential(convolutional(), nn.Dropout(0.5)))
    shared = tilewise.shared(model, parts=2)
    shared.eval()
    twin.eval()
    assert not any(part.training for part in model.modules())
    x = images(5)
    with mode():
        got = shared(x)
        torch.testing.assert_close(got, twin(x))
    assert not got.requires_grad
    shared.train()
    assert all(part.training for part in model.modules())
    assert (shared(x) == 0).any()


def test_parts_draw_random_numbers_of_their_own() -> None:
    shared = tilewise.shared(nn.Sequential(nn.Linear(1, 512, dtype=F64), nn.Dropout(0.5)), parts=2, shares=(1, 1))
    with torch.no_grad():
        dropped = shared(torch.ones(4, 1, dtype=F64, device="cpu")) == 0
    assert 0.4 < float(dropped.double().mean()) < 0.6
    assert len({tuple(row.tolist()) for row in dropped}) == 4


def test_autocast_holds_in_every_part_and_not_in_its_backward() -> None:
    model, twin = twins(convolutional(dtype=torch.float32))
    shared = tilewise.shared(model, parts=2, shares=(1, 1))
    x = images(4, dtype=torch.float32)
    for each in (shared, twin):
        with torch.autocast("cpu", torch.bfloat16):
            y = each(x)
        assert y.dtype is torch.bfloat16
        y.float().square().mean().backward()
    assert_alike(shared, twin, tolerance=2e-2)


def test_hooks_on_parameters_and_on_the_module_run_once_a_step() -> None:
    shared = tilewise.shared(convolutional(), parts=3)
    seen: list[str] = []
    weight = shared.module[0].weight
    weight.register_hook(lambda g: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    shared.register_forward_hook(lambda *_: seen.append("forward"))
    loss_of(shared(images(6))).backward()
    assert seen == ["forward", "gradient", "accumulated"]


def test_it_is_called_from_several_threads() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    x = images(6)
    wanted = twin(x)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(shared(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for got in found:
        torch.testing.assert_close(got, wanted)


def test_a_copy_is_shared_too_and_has_weights_of_its_own() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    loss_of(shared(images(3))).backward()
    other = copy.deepcopy(shared)
    other.zero_grad()
    x = images(4)
    for each in (other, twin):
        loss_of(each(x)).backward()
    assert_alike(other, twin)
    assert other.report().steps == 1
    with torch.no_grad():
        other.module[0].weight.zero_()
    assert model[0].weight.any()  # type: ignore[index]
