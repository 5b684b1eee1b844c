"""Parallel branches: which are found, and that a traced forward with lanes is the forward, bit for bit, on a CPU."""

from __future__ import annotations

import copy
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.nn.forking import Forms, counts, inception, programmed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.frontends.networks import load_network
from tilewise.frontends.zoo.googlenet import INCEPTIONS
from tilewise.nn.branches.find import MAIN, Program, Untraceable, find, program_of
from tilewise.nn.branches.streams import execute, fork, forked_forward, is_forked
from tilewise.nn.layers.swaps import swap, swap_back


class Watched(TorchDispatchMode):
    """Lanes without streams: they note the lane of every operator, and that it may read what it reads.

    An operator may read what its own lane wrote, what was there at the fork and, on the main lane, what lanes wrote
    once they are joined. What branches share must live until the join, what lanes give to the join until it is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lane, self.epoch, self.joined = MAIN, 0, 0
        self.writers: dict[int, tuple[int, int]] = {}
        self.kept: list[torch.UntypedStorage] = []
        self.lanes_used: list[int] = []
        self.shared: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor):
                lane, epoch = self.writers.get(t.untyped_storage()._cdata, (MAIN, 0))
                assert lane == self.lane or epoch < self.epoch or (self.lane == MAIN and self.joined == self.epoch), (
                    func
                )
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.writers[t.untyped_storage()._cdata] = (self.lane, self.epoch)
                self.kept.append(t.untyped_storage())  # so that no address comes twice
        self.lanes_used.append(self.lane)
        return result

    def fork(self, width: int, values: Sequence[Any]) -> None:
        self.epoch += 1
        self.width = width
        self.shared = [weakref.ref(v) for v in values if isinstance(v, torch.Tensor)]

    def switch(self, lane: int) -> None:
        assert lane == MAIN or 0 <= lane < self.width
        self.lane = lane

    def join(self, width: int) -> None:
        assert (self.lane, width) == (MAIN, self.width)
        assert all(value() is not None for value in self.shared)
        self.joined = self.epoch

    def release(self, width: int, values: Sequence[Any], *, in_place: bool) -> None:
        assert (self.lane, width) == (MAIN, self.width)
        assert len(values) >= width


def outcome(module: nn.Module, forward: Callable[[torch.Tensor], Any], x: torch.Tensor, grad: bool) -> list[Any]:
    """Result, gradients, buffers and random state after one call with the same random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        xi = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            y = forward(xi * 1)
        heads = [t for t in tree_leaves(y) if t.requires_grad]
        wanted = [xi, *module.parameters()]
        grads = torch.autograd.grad([h.square().sum() for h in heads], wanted, allow_unused=True) if heads else []
        return [*tree_leaves(y), *grads, *module.buffers(), torch.get_rng_state()]


def assert_program_is_forward(module: nn.Module, x: torch.Tensor) -> Watched:
    for training, grad in itertools.product((True, False), repeat=2):
        module.train(training)
        program = programmed(module)
        twin = copy.deepcopy(module)
        lanes = Watched()

        def run(value: torch.Tensor, program: Program = program, twin: nn.Module = twin, lanes: Watched = lanes) -> Any:
            with lanes:
                return execute(program, twin, value, lanes)

        got, want = outcome(twin, run, x, grad), outcome(module, module, x, grad)
        assert len(got) == len(want)
        for mine, its in zip(got, want, strict=True):
            assert mine is its or torch.equal(mine, its)
        assert lanes.lane == MAIN
        assert lanes.joined == lanes.epoch == len(program.forks)
    return lanes


def test_inception_runs_its_four_branches() -> None:
    module = inception()
    lanes = assert_program_is_forward(module, torch.randn(2, 6, 5, 5))
    (region,) = programmed(module).forks
    assert region.branches == (
        ("branch1.0",), ("branch3.0.0", "branch3.1.0"), ("branch5.0.0", "branch5.1.0"), ("branch_pool.1.0",),
    )  # fmt: skip
    assert set(lanes.lanes_used) == {0, 1, 2, MAIN}
    assert [lane for lane, _ in itertools.groupby(lanes.lanes_used)][-4:] == [0, 1, 2, MAIN]


def test_googlenets_regions_are_its_inceptions() -> None:
    with torch.device("meta"):
        model = load_network("googlenet").module
    found = find(model)
    assert [one.name for one in found] == [f"inceptions.inception{name}" for name in INCEPTIONS]
    assert [len(region) for one in found for region in one.groups] == [4] * 9
    names = [name for one in found for region in one.groups for branch in region for name in branch]
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert sorted(names) == sorted(n for n in convolutions if n.startswith("inceptions."))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "norm": lambda: nn.BatchNorm2d(4),
    "drop": lambda: nn.Dropout(0.4),
    "relu": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)),
    "pool": lambda: nn.MaxPool2d(3, 1, 1),
}


class Drawn(nn.Module):
    """A stem, branches drawn by name, launched in turns or one after the other, a join and something after it."""

    def __init__(self, branches: list[list[str]], join: str, in_turns: bool, skip: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(4, 4, 1)
        self.branches = nn.ModuleList(nn.ModuleList(LAYERS[name]() for name in branch) for branch in branches)
        self.join, self.in_turns, self.skip = join, in_turns, skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.stem(x), 0.3, self.training)
        values = [x] * len(self.branches)
        if self.in_turns:
            for depth in range(max(map(len, self.branches))):
                for i, branch in enumerate(self.branches):
                    if depth < len(branch):
                        values[i] = branch[depth](values[i]) + 0.5
        else:
            for i, branch in enumerate(self.branches):
                for layer in branch:
                    values[i] = layer(values[i])
        values += [x] if self.skip else []
        if self.join == "cat":
            y = torch.cat(values, 1)
        elif self.join == "stack":
            y = torch.stack(values, 1).sum(1)
        else:
            y = values[0]
            for value in values[1:]:
                y = y.add_(value) if self.join == "add_" else y + value
        return y.mul(2)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=3), min_size=2, max_size=4),
    st.sampled_from(["cat", "stack", "add", "add_"]), st.booleans(), st.booleans(),
)  # fmt: skip
@example([["drop"], ["conv"], ["conv"]], "add", True, False)  # the first is a sum with what forks, in evaluation
def test_drawn_branches(branches: list[list[str]], join: str, in_turns: bool, skip: bool) -> None:
    # Else the forward itself changes what backward needs.
    assume(join != "add_" or branches[0][-1] in ("conv", "norm"))
    module = Drawn(branches, join, in_turns, skip)
    wide = [i for i, names in enumerate(branches) if "conv" in names or "relu" in names]
    if len(wide) < 2:
        assert program_of(module) is None
        return
    assert_program_is_forward(module, torch.randn(2, 4, 5, 5))
    (region,) = programmed(module).forks
    want = [[n for n, m in module.branches[i].named_modules() if isinstance(m, nn.Conv2d)] for i in wide]
    assert region.branches == tuple(tuple(f"branches.{i}.{n}" for n in ns) for i, ns in zip(wide, want, strict=True))
    assert region.in_place is (join == "add_")


def two_regions(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.cat([m.a(x), m.b(x)], 1)[:, 2:6]
    n = x.size(0)
    return {"y": [torch.add(m.c(x), F.conv2d(x, m.scale.expand(4, 4, 1, 1)), alpha=m.factor), n]}["y"][0]


def nested(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    return torch.cat([torch.cat([m.b(y), F.relu(y)], 1), m.c(x) * m.scale], 1)


@pytest.mark.parametrize(("form", "regions"), [(two_regions, 2), (nested, 1)])
def test_forms(form: Callable[..., Any], regions: int) -> None:
    module = Forms(form)
    assert len(programmed(module).forks) == regions
    assert_program_is_forward(module, torch.randn(2, 4, 5, 5))


def beside(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    return torch.cat([y, m.b(x)], 1), y


def differs(m: Any, x: torch.Tensor) -> Any:
    return m.a(x) + m.b(x) if m.training else m.a(x) + m.b(x) * 2


def frozen(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = m.a(x)
    return y + m.b(x)


REFUSED = {
    "beside the join": beside,
    "changes its own attributes": counts,
    "grad mode": frozen,
    "checkpoints": lambda m, x: checkpoint(m.a, x, use_reentrant=False) + m.b(x),
    "share weights": lambda m, x: m.a(x) + m.a(x * 2),
    "share weights or buffers": lambda m, x: m.norm(m.a(x)) + m.norm(m.b(x)),
    "cannot trace": lambda m, x: m.a(x) + m.b(x) if x.sum() > 0 else x,
    "other work": lambda m, x: (lambda y, z: (y + m.b(x), z))(m.a(x), x * 3),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_trace_would_not_repeat(reason: str) -> None:
    module = Forms(REFUSED[reason])
    with pytest.raises(Untraceable, match=reason):
        program_of(module)
    assert module.calls == 0
    assert reason in find(nn.Sequential(module))[0].reason


@pytest.mark.parametrize("form", [lambda m, x: m.b(m.a(x)), lambda m, x: m.a(x) + x, lambda m, x: F.relu(x) + m.a(x)])
def test_no_branches(form: Callable[..., Any]) -> None:
    assert program_of(Forms(form)) is None
    assert find(nn.Sequential(Forms(form))) == []


def forked(module: nn.Module) -> tuple[nn.Module, list[int]]:
    """The module swapped as on a GPU, its lanes noted but run in sequence."""
    used: list[int] = []

    class Lanes(Watched):
        def switch(self, lane: int) -> None:
            used.append(lane)

        def join(self, width: int) -> None:
            used.append(width)

    swap(module, forked_forward(programmed(module), lambda _: Lanes()))
    return module, used


def test_swapped_modules_keep_hooks_copies_and_pickles() -> None:
    module, used = forked(inception())
    x = torch.randn(2, 6, 5, 5)
    seen: list[str] = []
    module.branch3[1][0].register_forward_hook(lambda *_: seen.append("inner"))
    module.branch1.register_full_backward_hook(lambda *_: seen.append("backward"))
    twin = copy.deepcopy(module)
    assert twin.forward.__self__ is twin
    with torch.no_grad():
        twin.branch1[0].weight.mul_(2)
    want = inception()
    assert torch.equal(module(x), want(x))
    module(x.clone().requires_grad_()).sum().backward()
    assert seen == ["inner", "inner", "backward"]
    want.load_state_dict(twin.state_dict())
    used.clear()
    assert torch.equal(twin(x), want(x))
    assert used
    swap_back(module)
    assert set(module.__dict__) == set(inception().__dict__)


def test_pickles_are_plain_torch() -> None:
    module = inception()
    fork(module, programmed(module))
    assert is_forked(module)
    data = pickle.dumps(module)
    assert b"streams" not in data
    loaded = pickle.loads(data)
    assert not is_forked(loaded)
    x = torch.randn(1, 6, 5, 5)
    assert torch.equal(loaded(x), module(x))
    assert program_of(loaded) is not None
    tilewise.restore(module)
    assert not is_forked(module)


def test_other_calls_and_changed_attributes_run_the_classs_own_forward() -> None:
    module, used = forked(Forms(lambda m, x, scale=1.0: (m.a(x) + m.b(x)) * m.factor))
    x = torch.randn(1, 4, 5, 5)
    module(x)
    assert used
    used.clear()
    want = (module.a(x) + module.b(x)) * 3.0
    module.factor = 3.0
    assert torch.equal(module(x), want)
    assert torch.equal(module(x=x), want)
    assert not used
    with pytest.raises(TypeError):
        module(x, x, x)


def test_a_forward_that_asks_for_training_keeps_to_its_mode() -> None:
    module, used = forked(Forms(differs))
    x = torch.randn(1, 4, 5, 5)
    module(x)
    assert used
    used.clear()
    assert torch.equal(module.eval()(x), module.a(x) + module.b(x) * 2)
    assert not used
    assert programmed(inception()).training is None


def test_a_branch_that_raises_is_joined() -> None:
    module, used = forked(inception())
    with pytest.raises(RuntimeError, match="channels"):
        module(torch.randn(1, 5, 5, 5))
    assert used[-2:] == [MAIN, 3]


def test_compiled_forwards_are_the_classs_own() -> None:
    module, used = forked(inception())
    x = torch.randn(1, 6, 5, 5)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x), inception()(x))
    assert not used
