"""Linear layers divided by their outputs, and forwards cut into pieces: the same results as the whole model's."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.graphs.tape import TapeRecorder
from tests.nn.shared.nets import F64, assert_alike, images, loss_of, normed, twins
from torch import nn
from torch.utils._pytree import tree_leaves

import tilewise
from tilewise.nn import SharedModel
from tilewise.nn.shared.chain import Cut, Untraceable, chain_of, chosen, pieces_of
from tilewise.nn.shared.division import LEAST_BYTES, cuts_for_sums
from tilewise.nn.shared.engine import Engine
from tilewise.nn.shared.replica import Stages
from tilewise.nn.shared.trial import SKIPPED, WINDOW, Trial

CPU = torch.device("cpu")


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=F64, device="cpu")


def network() -> nn.Module:
    """Linear layers that follow one another, an activation in place, and a last layer that is what is returned."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, dtype=F64, device="cpu"),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        linear(72, 17),
        nn.ReLU(inplace=True),
        nn.Sequential(linear(17, 9, bias=False), linear(9, 6)),
    )


LAYERS = {"4", "6.0", "6.1"}


class Late(nn.Module):
    """A forward in Python, and a linear layer with more than two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(6, 12), linear(12, 7)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = torch.tanh(self.first(x.flatten(2).transpose(1, 2))).mul(0.5)
        z = self.second(y)
        return {"both": (z.sum(1), z.amax(1)), "name": "late"}


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(lambda shares: sum(map(bool, shares)) > 1),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_divided_layers_give_what_the_model_gives(
    shares: list[int], batches: list[int], keep: bool, needed: bool
) -> None:
    model, twin = twins(network())
    shared = tilewise.shared(model, parts=len(shares), shares=shares, linear="always")
    for batch in batches:
        x = images(batch)
        mine, its = (x.clone().requires_grad_(needed) for _ in range(2))
        torch.testing.assert_close(shared(mine), twin(its), rtol=1e-10, atol=1e-10)
        for each, given_ in ((shared, mine), (twin, its)):
            loss_of(each(given_)).backward()
        assert_alike(shared, twin)
        if needed:
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-10)
        for each in (shared, twin):
            if not keep:
                each.zero_grad()
    rows = shared.report().rows
    assert set(rows) == LAYERS
    assert all(bool(share) >= bool(count) for each in rows.values() for share, count in zip(shares, each, strict=True))
    assert {name: sum(each) for name, each in rows.items()} == {"4": 17, "6.0": 9, "6.1": 6}


def test_a_forward_in_python_with_more_axes_is_divided() -> None:
    model, twin = twins(Late())
    shared = tilewise.shared(model, parts=3, linear="always")
    for batch in (5, 2):
        x = torch.randn(batch, 6, 2, 4, dtype=F64, device="cpu")
        for each in (shared, twin):
            loss_of(each(x)).backward()
        assert_alike(shared, twin)
    assert set(shared.report().rows) == {"first", "second"}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_states_and_optimizers_are_the_models(optimizer: Any) -> None:
    model, twin = twins(network())
    shared = tilewise.shared(model, parts=2, linear="always")
    steps = [optimizer(each.parameters(), lr=1e-2) for each in (shared, twin)]
    for _ in range(4):
        x = images(6)
        for each, step in zip((shared, twin), steps, strict=True):
            step.zero_grad()
            loss_of(each(x)).backward()
            step.step()
        assert_alike(shared, twin)
    assert shared.report().rows
    assert all(a is b for a, b in zip(shared.parameters(), model.parameters(), strict=True))
    assert [tuple(p.shape) for p in shared.parameters()] == [tuple(p.shape) for p in twin.parameters()]
    state = {name: value * 2 for name, value in twin.state_dict().items()}
    for each in (shared, twin):
        each.load_state_dict(state)
        each.eval()
    x = images(3)
    with torch.no_grad():
        torch.testing.assert_close(shared(x), twin(x))
    other = copy.deepcopy(shared)
    file = io.BytesIO()
    torch.save(shared, file)
    file.seek(0)
    for each in (other, torch.load(file, weights_only=False)):
        with torch.no_grad():
            torch.testing.assert_close(each(x), twin(x))


def test_frozen_weights_and_two_calls_before_a_backward() -> None:
    model, twin = twins(network())
    shared = tilewise.shared(model, parts=2, linear="always")
    for frozen in (False, True, False):
        for each in (shared, twin):
            each.get_submodule("4").requires_grad_(not frozen)
            each.zero_grad()
        x, y = images(4), images(3)
        for each in (shared, twin):
            first, second = each(x), each(y)
            loss_of(second).backward(retain_graph=True)
            (loss_of(first) + loss_of(second)).backward()
        assert_alike(shared, twin)
    assert not shared.report().rebuilt


def captured(model: nn.Module, shares: tuple[int, ...], linear: str) -> tuple[SharedModel, list[TapeRecorder]]:
    """A shared model whose replicas are captured as on a GPU, and the recorders as they are made."""
    made: list[TapeRecorder] = []

    def recorder(device: torch.device) -> TapeRecorder:
        made.append(TapeRecorder())
        return made[-1]

    shared = tilewise.shared(model, parts=len(shares), shares=shares)
    shared._engine = Engine(model, (CPU,) * len(shares), shares, {CPU: recorder}, linear)
    return shared, made


def cut_everywhere(shared: SharedModel, model: nn.Module) -> Stages:
    """Let a shared model run in as many stages as its forward has places for."""
    chain = chain_of(model, (), images(2))
    how = Stages(chain, chosen(chain, chain.cuts, ()))
    shared._ready()._division.how = lambda batch, trained: how  # type: ignore[method-assign]
    return how


def test_divided_layers_are_replayed_between_exchanges() -> None:
    model, twin = twins(network())
    shared, made = captured(model, (1, 1), "always")
    for _ in range(5):
        x = images(6)
        for each in (shared, twin):
            each.zero_grad()
            loss_of(each(x)).backward()
        assert_alike(shared, twin)
    assert sum(recorder.log.count("replay") for recorder in made) >= 4 * 2 * 5
    assert all("replayed" in told for told in shared.report().graphs)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_model_cut_into_stages_gives_the_same_bits(replayed: bool) -> None:
    torch.manual_seed(0)
    plain, twin = twins(network())
    shared, _ = captured(plain, (1, 2), "never")
    other = captured(twin, (1, 2), "never")[0] if replayed else tilewise.shared(twin, parts=2, shares=(1, 2))
    how = cut_everywhere(other, twin)
    assert len(how.spans) == 9
    for _ in range(4):
        x = images(6)
        for each in (shared, other):
            each.zero_grad()
            loss_of(each(x)).backward()
        for a, b in zip(shared.parameters(), other.parameters(), strict=True):
            assert a.grad is not None
            torch.testing.assert_close(a.grad, b.grad, rtol=0 if replayed else 1e-12, atol=0 if replayed else 1e-12)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=F64, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@given(st.integers(2, 5))
@settings(max_examples=6, deadline=None)
def test_gradients_are_added_in_the_order_of_the_parts(parts: int) -> None:
    model = Scaled()
    shared = tilewise.shared(model, parts=parts, shares=(1,) * parts)
    x = torch.randn(parts, 5, dtype=F64, device="cpu")
    shared(x).backward(torch.ones(parts, 5, dtype=F64, device="cpu"))
    wanted = x[0].clone()
    for row in x[1:]:
        wanted += row
    assert torch.equal(model.weight.grad, wanted)  # type: ignore[arg-type]


class Skipping(nn.Module):
    """What the linear layer reads is needed after it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(6, 6), linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y if x.shape[0] < 1000 else 2 * y


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.relu(x)
        return self.linear(y)


class Counting(nn.Module):
    """Gives something else at each call, which no run of pieces can repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = linear(6, 6), Ticking()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))


class Ticking(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Skipping, "more than the result of linear is needed after it"),
        (Tied, "one shares a parameter with another layer"),
        (Twice, "linear is used twice"),
        (Branching, "torch.fx cannot trace it"),
        (Halving, "changes grad mode"),
        (lambda: nn.Sequential(linear(6, 1)), "0 has 1 outputs for 2 devices"),
        (Counting, "do not give what the model gives"),
    ],
)
def test_a_layer_that_cannot_be_divided_is_told_and_runs_by_samples(make: Any, text: str) -> None:
    model, twin = twins(make())
    shared = tilewise.shared(model, parts=2, linear="always")
    x = torch.randn(4, 6, dtype=F64, device="cpu")
    for each in (shared, twin):
        loss_of(each(x)).backward()
    assert_alike(shared, twin)
    report = shared.report()
    assert not report.rows
    assert any(text in reason for reason in report.division), report


def test_hooks_and_more_arguments_keep_a_model_whole() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear(6, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            z: torch.Tensor = self.linear(x)
            return z if y is None else z + y

    x = torch.randn(4, 6, dtype=F64, device="cpu")
    model, twin = twins(Two())
    shared = tilewise.shared(model, parts=2, linear="always")
    for args in ((x,), (x, x), (x,)):
        for each in (shared, twin):
            loss_of(each(*args)).backward()
        assert_alike(shared, twin)
        assert bool(shared.report().rows) == (args == (x,) and shared.report().steps == 1)
    assert any("more than one tensor" in reason for reason in shared.report().division)
    hooked = nn.Sequential(linear(6, 6), nn.ReLU())
    hooked[1].register_forward_hook(lambda *_: None)
    shared = tilewise.shared(hooked, parts=2, linear="always")
    loss_of(shared(x)).backward()
    assert any("hooks on 1" in reason for reason in shared.report().division), shared.report()


def test_the_programs_steps_decide_whether_a_division_is_kept() -> None:
    model, twin = twins(nn.Sequential(linear(64, 200), nn.ReLU(inplace=True), linear(200, 3)))
    shared = tilewise.shared(model, parts=2, linear="auto")
    for step in range(2 * (SKIPPED + WINDOW) + 4):
        x = torch.randn(4, 64, dtype=F64, device="cpu")
        for each in (shared, twin):
            each.zero_grad()
            loss_of(each(x)).backward()
        assert_alike(shared, twin)
        if not step:
            assert set(shared.report().rows) == {"0"}
            assert any("not measured yet" in reason for reason in shared.report().division)
    report = shared.report()
    (told,) = [reason for reason in report.division if "a step of 4 samples" in reason]
    assert bool(report.rows) == ("linear layers by outputs is kept" in told), told
    assert "2 by outputs" not in str(report)  # its weights are smaller than what it reads and returns


@pytest.mark.parametrize(("first", "second", "kept"), [(2.0, 1.0, 1), (1.0, 2.0, 0), (1.0, 1.0, 0)])
def test_a_trial_keeps_the_faster_way(first: float, second: float, kept: int) -> None:
    trial = Trial("one", "two")
    changes = []
    for step in range(40):
        seconds = (first, second)[trial.way] * (100 if step == SKIPPED + 2 else 1)  # one step is interrupted
        if trial.note(8, seconds):
            changes.append(step)
        assert not trial.note(5, 1e-9)  # another size of batch says nothing
    assert trial.over()
    assert trial.way == kept
    assert changes == [SKIPPED + WINDOW - 1, 2 * (SKIPPED + WINDOW) - 1][: 2 - kept]
    assert ("one", "two")[kept] + " is kept" in str(trial)


@given(
    st.lists(st.tuples(st.floats(1, 1e7), st.integers(0, 1 << 28)), max_size=30),
    st.integers(1, 512),
    st.floats(1e9, 1e12),
    st.floats(1e9, 1e13),
)
@settings(max_examples=30, deadline=None)
def test_cuts_for_sums_have_weights_that_are_worth_it(
    places: list[tuple[float, int]], samples: int, link: float, memory: float
) -> None:
    cuts = [Cut(i, None, bytes_, weight) for i, (bytes_, weight) in enumerate(places)]  # type: ignore[arg-type]
    found = cuts_for_sums(cuts, samples, link, memory)
    assert found == sorted(found, key=lambda cut: cut.after)
    for cut, following in zip(found, [*[c.after for c in found[1:]], len(cuts)][-len(found) :], strict=bool(found)):
        between = sum(c.weight_bytes for c in cuts[cut.after : following])
        assert between >= LEAST_BYTES
        assert between / link > cut.sample_bytes * samples / memory


@pytest.mark.parametrize(
    ("make", "shape"),
    [(network, (3, 3, 6, 6)), (normed, (3, 3, 6, 6)), (Late, (3, 6, 2, 4))],
    ids=("network", "normed", "late"),
)
def test_pieces_one_after_the_other_are_the_model(make: Any, shape: tuple[int, ...]) -> None:
    model, x = make().eval(), torch.randn(shape, dtype=F64, device="cpu")
    chain = chain_of(model, (), x)
    assert chain.cuts
    value: Any = x
    for piece in pieces_of(model, chain, chosen(chain, chain.cuts, ())):
        value = piece(value)
    for a, b in zip(tree_leaves(value), tree_leaves(model(x)), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_an_untraceable_model_is_refused_with_a_reason() -> None:
    with pytest.raises(Untraceable, match="cannot trace"):
        chain_of(Branching(), (), torch.randn(2, 6, dtype=F64, device="cpu"))


def test_a_residual_network_is_cut_between_its_blocks_only() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.relu(self.linear(x))

    chain = chain_of(nn.Sequential(Block(), Block(), linear(6, 2)), (), torch.randn(2, 6, dtype=F64, device="cpu"))
    assert [cut.value.name for cut in chain.cuts] == ["_0", "_1", "_2"]
    assert [cut.weight_bytes for cut in chain.cuts] == [8 * 42, 8 * 14, 0]
    assert all(cut.sample_bytes == 8 * size for cut, size in zip(chain.cuts, (6, 6, 2), strict=True))
