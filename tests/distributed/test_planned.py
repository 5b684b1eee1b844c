"""Plans inside: what each rank's own convolutions run by, found by all ranks together."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import parallel, run
from tests.nn.dividing import Dividing
from torch import nn

from tilewise.distributed import RankMismatch, optimize
from tilewise.distributed.norms.choice import NormChoice
from tilewise.distributed.planned import PlannedPasses


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(4, 2, 5, stride=2, padding=2),
    )  # fmt: skip


def check_against_float64(
    plain: nn.Module, layer: nn.Module, x: torch.Tensor, y: torch.Tensor, own: torch.Tensor
) -> nn.Module:
    """Compare ``y`` and the gradients of ``own`` and ``layer`` with ``plain`` in float64, which is returned."""
    exact = copy.deepcopy(plain).double()
    full = x.double().requires_grad_()
    expected = exact(full)
    expected.square().sum().backward()
    pairs = [(y, expected), (own.grad, full.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
    for got, want in pairs:
        assert got is not None
        assert want is not None
        assert (got.double() - want).norm() <= 1e-5 * want.norm()
    return exact


def same_as_one_device(shape: tuple[int, ...], dims: tuple[str, ...]) -> None:
    plain = network()
    layer = copy.deepcopy(plain)
    x = torch.randn(4, 3, 10, 13)
    own = x.clone().requires_grad_()
    p = parallel(layer, shape, dims)
    planner = Dividing()
    shard = p.scatter(own)
    state = torch.get_rng_state()
    assert optimize(p, shard, planner=planner) is p
    assert torch.equal(torch.get_rng_state(), state)
    assert own.grad is None
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert bool(planner.planned) == (dist.get_rank() == 0), "one decides"
    passes = p.space.passes
    assert isinstance(passes, PlannedPasses)
    assert passes.norms == NormChoice("torch", ("no norm is over ranks",))
    bound = list(passes.plan_table._bound.values())
    assert {one.problem.pass_.value for one in bound} == {"fprop", "dgrad", "wgrad"}
    assert all(one.plan.solver == "micro_batch" for one in bound)
    ran: list[str] = []
    for one in bound:
        inner = one.call
        one.call = lambda *given, inner=inner, one=one: (ran.append(one.problem.key), inner(*given))[1]
    y = p.gather(p(shard))
    y.square().sum().backward()
    assert set(ran) == {one.problem.key for one in bound}
    exact = check_against_float64(plain, layer, x, y, own)
    ran.clear()
    with torch.no_grad():
        other = p.gather(p(p.scatter(x[:3])))
    assert not ran, "another batch is torch's"
    torch.testing.assert_close(other.double(), exact(x[:3].double()), rtol=1e-4, atol=1e-4)


def different_options() -> str:
    p = parallel(network(), (2,), ("h",))
    try:
        optimize(p, p.scatter(torch.randn(4, 3, 10, 13)), planner=Dividing(), workspace=1 + dist.get_rank())
    except RankMismatch as error:
        return str(error)
    return "agreed"


def cases() -> list[str]:
    os.environ["TILEWISE_CACHE_DIR"] = f"{os.environ['TILEWISE_CACHE_DIR']}/{dist.get_rank()}"
    same_as_one_device((2,), ("h",))
    return [different_options()]


def test_two_ranks_plan_and_run_alike() -> None:
    for (text,) in run(2, cases):
        assert "workspace=1" in text
        assert "workspace=2" in text


def watched(passes: PlannedPasses) -> list[object]:
    """What is found for each pass from now on."""
    asked: list[object] = []
    find = passes._bound_plan

    def found(*given: Any) -> Any:
        asked.append(find(*given))
        return asked[-1]

    passes._bound_plan = found  # type: ignore[method-assign]
    return asked


def every_pass_is_planned() -> None:
    """Padding that differs by side, as at an image's border, is planned on every rank, whatever makes it differ."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 4, 7, padding=3),  # put together with its halo: padded on the image's side alone
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Conv2d(4, 2, 2),
        nn.Conv2d(2, 2, 4, padding="same"),
    )
    layer = copy.deepcopy(plain)
    x = torch.randn(4, 3, 17, 9)
    for cuts in ((0, 6, 11, 17), (0, 3, 13, 17), (0, 9, 9, 17)):
        own = x.clone().requires_grad_()
        p = parallel(layer, (3,), ("h",))
        shard = p.scatter(own, {"h": cuts})
        optimize(p, shard, planner=Dividing())
        passes = p.space.passes
        assert isinstance(passes, PlannedPasses)
        asked = watched(passes)
        y = p.gather(p(shard))
        y.square().sum().backward()
        assert asked or not shard.local.numel()
        assert all(one is not None for one in asked), "torch computes what no plan is found for"
        check_against_float64(plain, layer, x, y, own)
        layer.zero_grad()


def planned_everywhere() -> None:
    os.environ["TILEWISE_CACHE_DIR"] = f"{os.environ['TILEWISE_CACHE_DIR']}/{dist.get_rank()}"
    every_pass_is_planned()


@pytest.mark.slow
def test_every_rank_plans_whatever_its_padding() -> None:
    run(3, planned_everywhere)


def blocks() -> None:
    same_as_one_device((2, 2), ("h", "w"))


@pytest.mark.slow
def test_four_ranks_in_blocks() -> None:
    run(4, blocks)
