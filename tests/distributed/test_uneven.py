"""Means over the samples of ranks that have different numbers of them, against one process with the whole batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run
from torch import nn

import tilewise.distributed

F64 = torch.float64
Weights = list[list[float]]


def weights_of(model: nn.Module) -> Weights:
    return [p.detach().reshape(-1).tolist() for p in model.parameters()]


def net() -> nn.Sequential:
    generator = torch.Generator("cpu").manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 6, dtype=F64), nn.Tanh(), nn.Linear(6, 2, dtype=F64), nn.Linear(3, 3, dtype=F64, bias=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64, device="cpu"))
    return model


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The mean over samples of what the first three parts give; the last has no gradient."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, nn.Sequential)
    return inner[:3](x).square().sum(1).mean()


class Loss(nn.Module):
    """The loss as a module, for a wrapper that must see the call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return loss(self.net, x)


def batches(counts: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
    """By step, the samples of each rank."""
    generator = torch.Generator("cpu").manual_seed(2)
    return [[torch.randn(n, 4, generator=generator, dtype=F64, device="cpu") for n in step] for step in counts]


def alone(counts: Sequence[Sequence[int]]) -> Weights:
    """The weights of one process that has the whole batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in batches(counts):
        whole = torch.cat(step)
        if len(whole):
            optimizer.zero_grad()
            loss(model, whole).backward()
            optimizer.step()
    return weights_of(model)


def by_hand(counts: Sequence[Sequence[int]]) -> Weights:
    """The weights of this rank, which leaves its loop when no rank has samples."""
    rank, model = dist.get_rank(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rest = iter([step[rank] for step in batches(counts)])
    while True:
        x = next(rest, torch.empty(0, 4, dtype=F64, device="cpu"))
        optimizer.zero_grad()
        if len(x):
            loss(model, x).backward()
        elif rank % 2:
            model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)  # what a mean of nothing gives
        if not tilewise.distributed.uneven_mean(model, len(x)):
            break
        optimizer.step()
    assert model[3].weight.grad is None
    return weights_of(model)


def wrapped(counts: Sequence[Sequence[int]], ended: Sequence[int]) -> Weights:
    """The weights of this rank by DistributedDataParallel, which joins after its number of steps."""
    rank, module = dist.get_rank(), Loss()
    module.net[3].requires_grad_(False)
    model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-4)  # type: ignore[arg-type]
    mean = tilewise.distributed.UnevenMean(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    with dist.algorithms.Join([model]):  # type: ignore[attr-defined]
        for step in batches(counts)[: ended[rank]]:
            x = step[rank]
            optimizer.zero_grad()
            value = model(x)  # of no samples nan
            mean.count(len(x))
            value.backward()
            optimizer.step()
    return weights_of(module.net)


def assert_all(
    found: Sequence[Sequence[torch.Tensor]], wanted: Sequence[torch.Tensor], but: Sequence[int] = ()
) -> None:
    for rank, weights in enumerate(found):
        if rank not in but:
            for got, expected in zip(weights, wanted, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "counts",
    [
        [(3, 5), (1, 7), (0, 2), (4, 0)],
        [(2, 2), (0, 0)],  # all have ended
        [(1, 0, 6), (2, 0, 3), (0, 0, 1)],
    ],
)
def test_the_mean_is_that_of_the_whole_batch(counts: list[tuple[int, ...]]) -> None:
    assert_all(run(len(counts[0]), by_hand, counts), alone(counts))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_mean_of_any_numbers_of_samples(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    counts = [tuple(draw.choice((0, 0, 1, 2, 9)) for _ in range(ranks)) for _ in range(5)]
    while counts and not any(counts[-1]):
        counts.pop()
    stop = next((i for i, step in enumerate(counts) if not any(step)), len(counts))
    assert_all(run(ranks, by_hand, counts), alone(counts[:stop]))


def test_a_wrapped_model_weighs_ranks_by_their_samples() -> None:
    counts = [(3, 5), (1, 7), (0, 2), (4, 0)]
    assert_all(run(2, wrapped, counts, (4, 4)), alone(counts))


def test_a_wrapped_model_whose_rank_ends_early() -> None:
    counts = [(3, 5), (1, 7), (0, 2), (0, 6)]
    found = run(2, wrapped, counts, (2, 4))
    assert_all(found, alone(counts), but=(0,))


def refused() -> list[str]:
    """What is said of arguments that cannot be."""
    model = nn.Linear(2, 2)
    wrapper = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    mean = tilewise.distributed.UnevenMean(wrapper)
    calls = [
        lambda: tilewise.distributed.uneven_mean(model, -1),
        lambda: tilewise.distributed.uneven_mean(model, 2.0),  # type: ignore[arg-type]
        lambda: tilewise.distributed.uneven_mean(wrapper, 1),
        lambda: tilewise.distributed.UnevenMean(model),  # type: ignore[arg-type]
        lambda: mean.count(True),
    ]
    found = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_arguments_that_cannot_be_are_named() -> None:
    (found,) = run(1, refused)
    for text, part in zip(
        found, ("count=-1", "count=2.0", "UnevenMean is for", "model=Linear", "count=True"), strict=True
    ):
        assert part in text
    with pytest.raises(RuntimeError, match="no process group"):
        tilewise.distributed.uneven_mean(nn.Linear(2, 2), 1)
