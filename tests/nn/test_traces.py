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
from tilewise.nn.step.step import Step


class Held(nn.Module):
    """A convolution with a mask, a normalization after it, and what a test adds."""

    def __init__(self, mask: torch.Tensor, change: Callable[[Any], object] = lambda _: None) -> None:
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

    with state_kept(model, ()):
        changes()
    assert model.mask is mask
    assert mask.shape == (1, 8, 9, 9)
    assert mask.data_ptr() == place or change == "another shape"  # the memory itself grew
    assert torch.equal(mask.view(torch.uint8), want)
    assert model.view.data_ptr() == mask[:, 2:5].data_ptr()
    assert model.cache is None


def test_each_is_put_back_whatever_becomes_of_the_others() -> None:
    model = nn.Module()
    for name in "abc":
        model.register_buffer(name, torch.ones(3))

    copies: list[int] = []

    def copied(t: torch.Tensor) -> torch.Tensor:
        copies.append(t.data_ptr())
        if copies.count(model.get_buffer("b").data_ptr()) > 1:
            copies.clear()
            raise MemoryError("no room to compare")
        return t.clone()

    def run() -> None:
        with buffers_kept(model, copied):
            for buffer in model.buffers():
                buffer.add_(1)

    with pytest.raises(MemoryError, match="no room"):
        run()
    assert model.a.tolist() == model.c.tolist() == [1, 1, 1]


class Strict(torch.Tensor):
    """A tensor that knows one function alone, as a part of a split image knows some."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.add_:
            raise TypeError(f"{func} is not known")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_subclasses_are_not_asked() -> None:
    memory = torch.ones(3)
    example = memory.as_subclass(Strict)
    with state_kept(nn.Module(), ([example],)):
        example.add_(1)
        assert memory.tolist() == [2, 2, 2]
    assert memory.tolist() == [1, 1, 1]


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
    with state_kept(model, ()):
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


def test_lists_and_dictionaries_of_generators() -> None:
    model: Any = Held(torch.ones(1))
    held = [torch.Generator().manual_seed(n) for n in range(5)]
    model.draws = [held[0], {"deep": (held[1], [held[2]])}]
    model.draws.append(model.draws)
    model.change = lambda _: [torch.rand(1, generator=g) for g in held]
    before = [g.get_state() for g in held]
    with state_kept(model, (held[3], [{"argument": held[4]}])):
        model.change(model)
    assert all(torch.equal(g.get_state(), state) for g, state in zip(held, before, strict=True))


class Rude(nn.Module):
    """A model that does to its arguments whatever a test says, and then convolves."""

    def __init__(self, act: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.norm = nn.BatchNorm2d(8)
        self.act = act

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        x = given.pop()
        self.act(self, x)
        y: torch.Tensor = self.norm(self.conv(x))
        return y


RUDE: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "in place": lambda m, x: x.add_(1),
    "in a graph": lambda m, x: x.mul_(m.scale),
    "wants gradients": lambda m, x: x.requires_grad_(),
    "its own backward": lambda m, x: m.conv(x.requires_grad_()).sum().backward(),
    "in evaluation": lambda m, x: m.eval(),
    "one module": lambda m, x: m.norm.train(not m.norm.training),
    "another size": lambda m, x: x.resize_(2, 3, 9, 9),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "whole"),
    [*((act, False) for act in RUDE), *((act, True) for act in RUDE if act != "in a graph")],  # which runs once only
)
def test_examples_and_modes_come_back(act: str, whole: bool) -> None:
    model: Any = Rude(RUDE[act])
    x = example()
    given = [x]
    options: dict[str, Any] = {"memory_limit": "1GiB"} if whole else {}
    tilewise.optimize(model, (given,), planner=Dividing(), **options)
    assert given[0] is x
    assert len(given) == 1
    assert (x.is_leaf, x.requires_grad, x.grad) == (True, False, None)
    assert torch.equal(x, example())
    assert all(module.training for module in model.modules())
    assert model.norm.num_batches_tracked == 0
    assert model.conv.weight.grad is None


def test_a_failing_run_leaves_no_trace() -> None:
    def fail(model: Any, x: torch.Tensor) -> None:
        x.add_(1)
        model.eval()
        raise ArithmeticError("its own")

    model, given = Rude(fail), [example()]
    with pytest.raises(ArithmeticError, match="its own"):
        tilewise.optimize(model, (given,), planner=Dividing())
    assert torch.equal(given[0], example())
    assert model.training


def test_examples_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = example()
    model = tilewise.optimize(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), x, planner=Dividing())
    assert {one.role for _, _, one in report(model).passes()} == {"forward", "grad_weight"}
    assert torch.equal(x, example())


def test_lazy_modules_stay_initialised_with_what_they_begin_with() -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3, padding=1), nn.LazyBatchNorm2d())
    tilewise.optimize(model, example(), planner=Dividing())
    conv: Any = model[0]
    norm: Any = model[1]
    assert conv.weight.shape == (8, 3, 3, 3)
    assert norm.running_mean.tolist() == [0] * 8
    assert norm.running_var.tolist() == [1] * 8
    assert norm.num_batches_tracked == 0
    assert not norm._forward_pre_hooks


def test_buffers_keep_their_order_and_whether_they_are_saved() -> None:
    def change(model: Any) -> None:
        model.register_buffer("mask", model._buffers.pop("mask") + 1)
        model.register_buffer("hidden", torch.zeros(2))
        model.register_buffer("new", torch.zeros(3))

    model: Any = Held(torch.ones(1), change)
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    names = [*model.state_dict()]
    tilewise.optimize(model, example(), planner=Dividing())
    assert sorted(model.state_dict()) == sorted([*names, "new"])
    assert [*dict(model.named_buffers(recurse=False))] == ["mask", "hidden", "new"]
    assert model.hidden.tolist() == [1, 1]


def test_scripted_modules_inside() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), torch.jit.script(nn.BatchNorm2d(8)))
    tilewise.optimize(model, example(), planner=Dividing())
    assert model[1].num_batches_tracked == 0
