"""Ranks that do not hold the same model hear so on every rank; with ``broadcast=True`` they hold the first's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.comm.agreement import RankMismatch
from tilewise.comm.link import PeerError
from tilewise.distributed import SpatialParallel
from tilewise.distributed.digest import digests

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


@given(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 9), st.randoms())
def test_a_digest_is_of_the_elements_and_of_each_of_them(
    dtype: torch.dtype, shape: list[int], offset: int, random: object
) -> None:
    count = torch.Size(shape).numel()
    values = (
        torch.arange(count + offset, dtype=torch.float64, device="cpu").mul(3).sub(7).to(dtype)[offset:].view(shape)
    )
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = values.permute(order).contiguous().permute([order.index(i) for i in range(len(shape))])
    every_other = torch.stack((values, values), -1)[..., 1]
    one, same, strided = digests([[values], [moved], [every_other]])
    assert one == same == strided
    if count:
        other = values.clone(memory_format=torch.contiguous_format)
        place = random.randrange(count)  # type: ignore[attr-defined]
        flat = other.view(-1).view(torch.uint8)
        flat[place * values.element_size()] ^= 1
        assert digests([[other]]) != [one]


def test_a_digest_tells_places_apart_and_takes_bits_as_they_are() -> None:
    a = torch.arange(3_000_000, dtype=torch.int32, device="cpu")
    b = a.clone()
    b[[5, 2_900_000]] = a[[2_900_000, 5]]
    nan, zero = (torch.full((3,), value, dtype=torch.float32, device="cpu") for value in (float("nan"), 0.0))
    found = digests([[a], [b], [nan], [nan.clone()], [zero], [-zero], [], [zero[:0]]])
    assert found[0] != found[1]
    assert found[2] == found[3]
    assert found[4] != found[5]
    assert found[6] != found[7]


class Model(nn.Module):
    """Every kind of tensor: tied, expanded, strided, of other types, without elements, not kept, not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Conv2d(3, 3, 1, bias=False)
        self.tied = nn.Conv2d(3, 3, 1, bias=False)
        self.tied.weight = self.last.weight
        self.free = nn.Parameter(torch.randn(4, 3).t(), requires_grad=False)
        for name, tensor in {
            "wide": torch.randn(1, 1, 3).expand(5, 1, 3), "mask": torch.rand(7) < 0.5,
            "coarse": torch.randn(3).bfloat16(),
            "number": torch.randint(2**60, ()), "waves": torch.randn(3, dtype=torch.complex64).conj(),
            "none": torch.empty(0, 2), "every": torch.randn(4, 6)[:, ::2],
        }.items():  # fmt: skip
            self.register_buffer(name, tensor, persistent=name != "coarse")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.last(self.norm(self.conv(x))))


def flip(tensor: torch.Tensor) -> None:
    """One bit of the last element."""
    with torch.no_grad():
        tensor.view(torch.int32)[(-1,) * tensor.dim()] ^= 1


def untie(model: Model) -> None:
    model.tied.weight = nn.Parameter(model.last.weight.detach().clone())


def channels_last(model: Model) -> None:
    model.to(memory_format=torch.channels_last)


def seeded(model: Model) -> None:
    torch.manual_seed(2)
    model.conv.reset_parameters()


CASES: dict[str, tuple[Callable[[Model], object], list[str]]] = {
    "seed": (seeded, ["values of parameter conv.weight (3, 2, 3, 3)", "broadcast=True"]),
    "a bit": (lambda model: flip(model.free), ["values of parameter free"]),
    "statistics": (lambda model: flip(model.norm.running_var), ["values of buffer norm.running_var"]),
    "a flag": (lambda model: model.mask.logical_not_(), ["values of buffer mask"]),
    "not kept": (lambda model: model.coarse.add_(1), ["values of buffer coarse"]),
    "zero": (lambda model: model.conv.bias.data.fill_(-0.0), ["values of parameter conv.bias"]),
    "trained": (lambda model: model.conv.bias.requires_grad_(False), ["'parameter conv.bias (3,) torch.float32'"]),
    "mode": (lambda model: model.norm.eval(), ["'module norm (BatchNorm2d) training=False'"]),
    "type": (lambda model: model.last.double(), ["'parameter last.weight (3, 3, 1, 1) torch.float64 requires_grad'"]),
    "tied": (untie, ["parameter tied.weight is parameter last.weight"]),
    "more": (
        lambda model: model.tied.register_buffer("more", torch.zeros(1)),
        ["buffer tied.more (1,)", "nothing more"],
    ),
    "order": (channels_last, []),
    "nan": (lambda model: None, []),
}


def mesh_of(*shape: int, names: tuple[str, ...] = ("h",)) -> object:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def told(make: Callable[[], SpatialParallel]) -> str:
    try:
        make()
    except (RankMismatch, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def differing() -> dict[str, str]:
    found = {}
    mesh = mesh_of(3)
    for name, (change, _) in CASES.items():
        torch.manual_seed(0)
        model = Model()
        with torch.no_grad():
            if name == "zero":
                model.conv.bias.zero_()
            if name == "nan":
                model.conv.bias.fill_(float("nan"))
        if dist.get_rank() == 1:
            change(model)
        found[name] = told(lambda model=model: SpatialParallel(model, mesh, timeout=20))  # type: ignore[misc]
    return found


@pytest.mark.slow
def test_the_first_difference_is_named_on_every_rank() -> None:
    found = run(3, differing)
    assert found[0] == found[1] == found[2], "one text for all"
    for name, (_, words) in CASES.items():
        text = found[0][name]
        if not words:
            assert text == "agreed", name
            continue
        assert text.startswith("RankMismatch: ranks differ"), text
        assert all(word in text for word in [*words, "rank 0 and rank 2 have", "rank 1 has"]), text


def made_equal() -> None:
    torch.manual_seed(dist.get_rank())
    model = Model()
    objects = dict(model.named_parameters()) | dict(model.named_buffers())
    if dist.get_rank() == 0:
        model.conv.bias.data.fill_(float("nan"))
    places = {name: (id(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in objects.items()}
    p = SpatialParallel(model, mesh_of(2), timeout=20, broadcast=True)
    torch.manual_seed(0)
    first = Model()
    first.conv.bias.data.fill_(float("nan"))
    for name, wanted in (dict(first.named_parameters()) | dict(first.named_buffers())).items():
        found = objects[name]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        assert (id(found), found.data_ptr(), found.stride()) == places[name], name
    assert model.tied.weight is model.last.weight
    assert next(iter(p.parameters())) is model.free
    p.compare_weights()
    if dist.get_rank() == 1:
        flip(model.free)
    text = told(lambda: p.compare_weights())  # type: ignore[arg-type,return-value]
    assert "values of parameter free" in text, text
    form = nn.Conv2d(2, 2 + dist.get_rank(), 1)
    text = told(lambda: SpatialParallel(form, mesh_of(2), timeout=20, broadcast=True))
    assert "'parameter weight (3, 2, 1, 1)" in text, "the form is not made equal"


def test_broadcast_gives_all_ranks_the_first_ones_values_in_place() -> None:
    run(2, made_equal)


def replicas() -> None:
    """Over images and stripes: the first rank is the whole mesh's, and other replicas are compared as well."""
    rank = dist.get_rank()
    mesh = mesh_of(2, 2, names=("data", "h"))
    torch.manual_seed(rank // 2)
    model = nn.Conv2d(2, 2, 3, padding=1)
    data = {"replicas": ("data",), "timeout": 20.0}
    text = told(lambda: SpatialParallel(copy.deepcopy(model), mesh, **data))  # type: ignore[arg-type]
    assert "values of parameter weight" in text, text
    assert "rank 0 and rank 1 have one value, rank 2 and rank 3 have another" in text, text
    SpatialParallel(copy.deepcopy(model), mesh, timeout=20, broadcast=True)  # another replica is somebody else's
    SpatialParallel(model, mesh, broadcast=True, **data)  # type: ignore[arg-type]
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Conv2d(2, 2, 3, padding=1).weight)
    with pytest.raises(ValueError, match=r"replicas=\('h',\): names of mesh dimensions .* of \['data'\]"):
        SpatialParallel(model, mesh, replicas=("h",))
    shares = mesh_of(2, 2, names=("c", "h"))
    torch.manual_seed(rank // 2)
    SpatialParallel(nn.Conv2d(2, 1, 3), shares, replicated=("c",), timeout=20)
    torch.manual_seed(rank)
    text = told(lambda: SpatialParallel(nn.Conv2d(2, 1, 3), shares, replicated=("c",), timeout=20))
    first = 2 * (rank // 2)
    assert f"rank {first} has one value, rank {first + 1} has another" in text, text
    torch.manual_seed(rank)
    model = nn.Conv2d(2, 1, 3)
    SpatialParallel(model, shares, replicated=("c",), timeout=20, broadcast=True)
    torch.manual_seed(first)
    assert torch.equal(model.weight, nn.Conv2d(2, 1, 3).weight)


def test_replicas_hold_the_same_and_shares_of_channels_need_not() -> None:
    run(4, replicas)


class Unreadable(nn.Conv2d):
    def named_buffers(self, *_: object, **__: object) -> object:  # type: ignore[override]
        raise OSError("the disk is full")


def failing() -> tuple[str, float]:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 2, 3)
    if dist.get_rank() == 3:
        model.__class__ = Unreadable
    began = time.monotonic()
    try:
        SpatialParallel(model, mesh_of(2, 2, names=("data", "h")), timeout=20, replicas=("data",))
    except (OSError, PeerError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "agreed", 0.0


def test_a_rank_that_cannot_say_what_it_has_fails_on_all() -> None:
    found = run(4, failing)
    assert found[3][0] == "OSError: the disk is full"
    for text, seconds in found[:3]:
        assert "PeerError: rank 3 failed in SpatialParallel: OSError: the disk is full" in text
        assert seconds < 10, "of 20"


def dtensors() -> None:
    """Of one that is cut each rank has its own part; one that is whole on each is compared."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = mesh_of(2)
    rank = dist.get_rank()
    for placement, words in ((Shard(0), "agreed"), (Replicate(), "values of parameter part")):
        part = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [placement], run_check=False)  # type: ignore[arg-type]
        model = nn.Identity()
        model.part = nn.Parameter(part)
        text = told(lambda model=model: SpatialParallel(model, mesh, timeout=20))  # type: ignore[misc]
        assert words in text, text
        SpatialParallel(model, mesh, timeout=20, broadcast=True)
        local = model.part.to_local()
        assert local.eq(rank if placement.is_shard() else 0).all()


def test_dtensors() -> None:
    run(2, dtensors)


@pytest.mark.parametrize("kind", ["meta", "lazy"])
def test_what_has_no_data_has_no_digest(kind: str) -> None:
    from tilewise.distributed.digest import local_parts

    tensor = nn.LazyConv2d(3, 3).weight if kind == "lazy" else torch.empty(3, device="meta", dtype=torch.float32)
    assert local_parts(tensor) == []
