"""Planning leaves no trace: what it did not change it does not write, wherever that lies, and the rest is put back."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.dividing import Dividing, assert_same
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.kept_values import buffers_kept, values_kept
from tilewise.nn.record import state_kept
from tilewise.nn.step import Step


class Held(nn.Module):
    """A convolution with a mask, a normalization after it, and what a test adds."""

    def __init__(self, mask: torch.Tensor, change: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.register_buffer("mask", mask)
        self.norm = nn.BatchNorm2d(8)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x)) * self.mask
        self.change(self)
        return y


def example() -> torch.Tensor:
    return torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor], places: dict[str, int]) -> None:
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(t, before[name]), name
        assert t.data_ptr() == places[name], name


def planned_either_way(model: Any, whole: bool) -> None:
    options: dict[str, Any] = {}
    if whole:

        def step(model: nn.Module) -> None:
            model(example()).square().mean().backward()

        options = {"memory_limit": "1GiB", "memory_step": step}
    tilewise.optimize(model, example(), planner=Dividing(), **options)


@pytest.mark.parametrize("whole", [False, True], ids=["workspace", "whole step"])
@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 1, 3, 3).expand(8, 1, 3, 3).sum((2, 3)).expand(8, 1)[:, :, None],
        torch.ones(1).expand(1, 8, 9, 9),
        torch.arange(24.0).as_strided((8, 9, 9), (1, 1, 1)),
        torch.ones(9, 8)[:, 0],
    ],
    ids=["one axis", "all axes", "overlapping", "a column"],
)
def test_expanded_buffers(mask: torch.Tensor, whole: bool) -> None:
    model = Held(mask)
    before, places = states(model), {n: t.data_ptr() for n, t in (*model.named_parameters(), *model.named_buffers())}
    version, buffer = mask._version, model.mask
    planned_either_way(model, whole)
    assert_untouched(model, before, places)
    assert (model.mask is buffer, mask._version) == (True, version)
    assert model.conv.weight.grad is None


def _read_only(shape: tuple[int, ...], path: Path, number: int) -> torch.Tensor:
    """A tensor in a mapped file that cannot be written: doing so ends the process."""
    file = path / f"{number}"
    torch.randn(shape).numpy().tofile(file)
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.float32)).reshape(shape)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("whole", [False, True], ids=["workspace", "whole step"])
def test_read_only_memory(whole: bool, tmp_path: Path) -> None:
    model = Held(_read_only((8, 9, 9), tmp_path, 0))
    for number, conv in enumerate((model.conv,), 1):
        conv.weight = nn.Parameter(_read_only(conv.weight.shape, tmp_path, number))
    model.norm.weight = nn.Parameter(_read_only((8,), tmp_path, 9), requires_grad=False)
    want = model.eval()(example())
    model.train()
    before, places = states(model), {n: t.data_ptr() for n, t in (*model.named_parameters(), *model.named_buffers())}
    planned_either_way(model, whole)
    assert_untouched(model, before, places)
    assert report(model).layers[0].replaced
    assert_same(model.eval()(example()), want)


def test_memory_mapped_checkpoints(tmp_path: Path) -> None:
    torch.save(Held(torch.ones(1, 8, 9, 9)).state_dict(), tmp_path / "model")
    loaded = torch.load(tmp_path / "model", mmap=True, weights_only=True)
    model = Held(torch.ones(1, 8, 9, 9))
    model.load_state_dict(loaded, assign=True)
    before, places = states(model), {n: t.data_ptr() for n, t in (*model.named_parameters(), *model.named_buffers())}
    planned_either_way(model, False)
    assert_untouched(model, before, places)
    assert report(model).layers[0].replaced


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.mask.add_(1),
    "behind the version": lambda m: m.mask.data.add_(1),
    "through NumPy": lambda m: m.mask.numpy().fill(3),
    "replaced": lambda m: setattr(m, "mask", m.mask + 1),
    "other memory": lambda m: setattr(m.mask, "data", m.mask.detach() + 1),
    "another shape": lambda m: m.mask.resize_(2, 8, 9, 9).fill_(2),
    "removed": lambda m: m._buffers.pop("mask"),
    "a sign": lambda m: m.mask.mul_(-1) if bool((m.mask == 0).all()) else m.mask.neg_(),
    "not a number": lambda m: m.mask.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("first", [1.0, 0.0, float("nan")])
def test_whatever_changed_comes_back(change: str, first: float) -> None:
    mask = torch.full((1, 8, 9, 9), first)
    model = Held(mask)
    model.register_buffer("view", mask[:, 2:5])
    model.register_buffer("cache", None)
    want, place = mask.clone().view(torch.uint8), mask.data_ptr()

    def changes() -> None:
        CHANGES[change](model)
        model.cache = torch.ones(1)

    with state_kept(model):
        changes()
    assert model.mask is mask
    assert mask.shape == (1, 8, 9, 9)
    assert mask.data_ptr() == place or change == "another shape"  # the memory itself grew
    assert torch.equal(mask.view(torch.uint8), want)
    assert model.view.data_ptr() == mask[:, 2:5].data_ptr()
    assert model.cache is None


class Refusing(torch.Tensor):
    """A buffer that cannot be written."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.copy_, torch.Tensor.data.__set__):
            raise RuntimeError("not here")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_each_is_put_back_whatever_becomes_of_the_others() -> None:
    model = nn.Module()
    for name, make in (("a", torch.ones), ("b", lambda n: torch.ones(n).as_subclass(Refusing)), ("c", torch.ones)):
        model.register_buffer(name, make(3))

    def run() -> None:
        with buffers_kept(model, torch.clone):
            for buffer in list(model.buffers()):
                buffer.add_(1)

    with pytest.raises(RuntimeError, match="not here"):
        run()
    assert model.a.tolist() == model.c.tolist() == [1, 1, 1]


SPECIAL = [
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    lambda: torch.ones(3, device="meta"),
    lambda: torch.ones(3, dtype=torch.complex64).conj(),
    lambda: torch._neg_view(torch.ones(3)),
    lambda: torch.ones(0, 3),
    lambda: torch.tensor(True),
    lambda: torch.tensor(7),
    lambda: torch.ones(3).to(torch.float8_e4m3fn),
]


@pytest.mark.parametrize("make", SPECIAL, ids=range(len(SPECIAL)))
def test_buffers_of_every_sort(make: Callable[[], torch.Tensor]) -> None:
    model = Held(torch.ones(1))
    model.register_buffer("odd", make())
    version = model.odd._version
    with state_kept(model):
        model.norm.running_mean.add_(1)
    assert model.odd._version == version
    assert model.norm.running_mean.eq(0).all()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4), st.data())
def test_views_of_one_memory(axes: list[tuple[int, int]], data: st.DataObject) -> None:
    shape, strides = [n for n, _ in axes], [s for _, s in axes]
    memory = torch.randn(64)
    views = [memory.as_strided(shape, strides, data.draw(st.integers(0, 3))) for _ in range(2)]
    want, write = memory.clone(), data.draw(st.booleans())
    extent = 1 + sum((n - 1) * s for n, s in axes)
    version = memory._version
    with values_kept(views, torch.clone):
        if write:
            views[0].as_strided((extent,), (1,)).add_(1)
    assert torch.equal(memory, want)
    assert write or memory._version == version


@pytest.mark.parametrize("how", ["plain", "no gradients", "inside the mode", "whole step", "not training"])
def test_models_made_in_inference_mode(how: str) -> None:
    with torch.inference_mode():
        model = Held(torch.ones(1, 8, 9, 9))
    if how == "no gradients":
        model.requires_grad_(False)
    options: dict[str, Any] = {"training": False} if how == "not training" else {}
    if how == "whole step":
        options = {"memory_limit": "1GiB"}
    with torch.inference_mode() if how == "inside the mode" else nullcontext():
        tilewise.optimize(model, example(), planner=Dividing(), **options)
    assert report(model).layers[0].replaced
    assert model.norm.running_mean.eq(0).all()
    assert not model.norm.num_batches_tracked
    plain = Held(torch.ones(1, 8, 9, 9))
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert_same(model(example()), plain(example()))
    with torch.no_grad():
        assert_same(model.eval()(example()), plain.eval()(example()))


def test_a_step_writes_nothing_that_did_not_change() -> None:
    model = Held(torch.ones(1, 8, 9, 9))
    model(example()).sum().backward()
    grads = [p.grad for p in model.parameters()]
    versions = [t._version for t in (*model.parameters(), *grads, model.mask)]
    values = [g.clone() for g in grads]
    step = Step(model, [example()], lambda m: m(example()).sum().backward(), training=True)
    with step.repeatable():
        step()
        assert not torch.equal(grads[0], values[0])
    assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    after = [t._version for t in (*model.parameters(), model.mask)]
    assert after == [*versions[: len(grads)], versions[-1]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
