"""Nothing stale is replayed: whatever a capture depends on may change between two calls, in any order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.nn.graphs.models import assert_alike, assert_same_steps, images, network, step, twins
from tests.nn.graphs.tape import TapeRecorder
from torch import nn

from tilewise.kernels.native.programs import loading, why_never
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn import graph_report
from tilewise.nn.graphs import standing as standing_module
from tilewise.nn.graphs.graphed import captured
from tilewise.nn.graphs.model import MOST_ALIVE, MOST_CAPTURES
from tilewise.nn.graphs.standing import Standing

Change = Callable[[Any], object]


def other_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state of the model that is not its own, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.rand(t.shape, generator=generator, dtype=torch.float32, device="cpu").to(t.dtype)
        for name, t in model.state_dict().items()
    }


def moved(model: Any) -> None:
    model[6].weight.data = model[6].weight.data * 2


def replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def reshaped(model: Any) -> None:
    square = model[3].conv.weight
    square.data = square.data.transpose(0, 1)  # the same address


def other_part(model: Any) -> None:
    model[2] = nn.Tanh()


def own_forward(model: Any) -> None:
    model[2].forward = torch.sigmoid


def hooked(model: Any) -> None:
    model[2].register_forward_hook(lambda module, args, result: result * 2)


def swapped_average(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.set_(p.detach() * 0.5)  # type: ignore[call-overload]


CHANGES: dict[str, tuple[Change, str]] = {
    # the change, and what becomes of the next call: "old" capture, "new" one, or none
    "load": (lambda m: m.load_state_dict(other_weights(m)), "old"),
    "written": (lambda m: m[0].weight.data.mul_(2), "old"),
    "same mode": (lambda m: m.train(), "old"),
    "assign": (lambda m: m.load_state_dict(other_weights(m), assign=True), "new"),
    "moved": (moved, "new"),
    "replaced": (replaced, "new"),
    "reshaped": (reshaped, "new"),
    "average": (swapped_average, "new"),
    "buffer": (lambda m: setattr(m[1], "running_mean", m[1].running_mean + 1), "new"),
    "frozen": (lambda m: m[0].requires_grad_(False), "new"),
    "eval": (lambda m: m.eval(), "new"),
    "one in eval": (lambda m: m[1].eval(), "new"),
    "momentum": (lambda m: setattr(m[1], "momentum", 0.5), "new"),
    "epsilon": (lambda m: setattr(m[1], "eps", 0.5), "new"),
    "part": (other_part, "new"),
    "forward": (own_forward, "new"),
    "hook": (hooked, "none"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_the_next_call(name: str) -> None:
    change, becomes = CHANGES[name]
    model, twin = twins(network())
    recorders: list[TapeRecorder] = []

    def recorder() -> TapeRecorder:
        recorders.append(TapeRecorder())
        return recorders[-1]

    captured(model, [images()], recorder)
    made = len(recorders)
    x = images()
    assert_same_steps(model, twin, [x])
    for each in (model, twin):
        change(each)
        each.zero_grad()
    assert_same_steps(model, twin, [x, x])
    report = graph_report(model)
    assert report.replayed == (1 if becomes == "none" else 3)
    assert len(recorders) - made == (0 if becomes == "old" else 1)
    assert ("hooks on 2" in report.reason) == (becomes == "none")


WALK = {**CHANGES, "train": (lambda m: m.train(), ""), "thawed": (lambda m: m.requires_grad_(True), "")}


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(sorted(WALK)), min_size=2, max_size=6))
def test_changes_in_any_order(names: list[str]) -> None:
    model, twin = twins(network())
    captured(model, [images()], TapeRecorder)
    for name in names:
        for each in (model, twin):
            WALK[name][0](each)
            each.zero_grad()
        with torch.set_grad_enabled(len(name) % 4 != 0):
            assert_same_steps(model, twin, [images()], tolerance=1e-4)


def test_a_mode_that_comes_back_is_not_captured_again() -> None:
    model, twin = twins(network())
    captured(model, [images()], TapeRecorder)
    for _ in range(3):
        for each in (model, twin):
            each.train()
        assert_same_steps(model, twin, [images()])
        for each in (model, twin):
            each.eval()
        with torch.no_grad():
            assert_same_steps(model, twin, [images()])
    report = graph_report(model)
    assert (report.replayed, len(report.captures)) == (6, 2)
    assert report.bytes == 2 << 20


def test_captures_of_weights_that_are_gone_are_let_go() -> None:
    model = network()
    captured(model, [images()], TapeRecorder)
    with torch.no_grad():
        model(images())
    assert len(graph_report(model).captures) == 2
    moved(model)
    step(model, images())
    assert len(graph_report(model).captures) == 1


def test_the_number_of_captures_is_bounded() -> None:
    model, twin = twins(network())
    captured(model, [images()], TapeRecorder)
    for number in range(MOST_CAPTURES + 3):
        for each in (model, twin):
            each[1].eps = 0.1 + number
        assert_same_steps(model, twin, [images()])
        assert len(graph_report(model).captures) <= MOST_ALIVE
    report = graph_report(model)
    assert report.replayed == MOST_CAPTURES - 1
    assert f"captured {MOST_CAPTURES} times" in report.reason
    assert "eps" in report.reason


def flags() -> dict[str, Any]:
    return {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "deterministic": lambda: torch.backends.cudnn.flags(deterministic=True),
        "benchmark": lambda: torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark),
        "onednn": lambda: torch.backends.mkldnn.flags(enabled=False),
        "precision": lambda: fp32_precision("cpu", "conv", "tf32"),
    }


@pytest.mark.parametrize("name", flags())
def test_flags_have_captures_of_their_own(name: str) -> None:
    model, twin = twins(network())
    captured(model, [images()], TapeRecorder)
    for _ in range(2):
        with flags()[name]():
            assert_same_steps(model, twin, [images()], tolerance=2e-2 if name == "autocast" else 1e-5)
        assert_same_steps(model, twin, [images()], tolerance=2e-2 if name == "autocast" else 1e-5)
    report = graph_report(model)
    assert (report.replayed, len(report.captures)) == (4, 2)


def test_autocast_casts_weights_at_every_replay() -> None:
    model, twin = twins(network())
    with torch.autocast("cpu", torch.bfloat16):
        model(images())  # casts, and keeps what it cast for the block
        captured(model, [images()], TapeRecorder)
        for each in (model, twin):
            with torch.no_grad():
                each[6].weight.mul_(3)
    with torch.autocast("cpu", torch.bfloat16):
        x = images()
        got, want = model(x), twin(x)
    assert got.dtype is torch.bfloat16
    assert_alike([got], [want], 2e-2)
    assert graph_report(model).replayed == 1


@pytest.fixture(params=["in Python", "native"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the module in C++ looks, or Python."""
    if request.param == "in Python":
        monkeypatch.setattr(standing_module, "unchanged", lambda tensors, dicts: None)
    elif why_never() or loading().finished().module is None:
        pytest.skip(why_never() or loading().reason)


@pytest.mark.usefixtures("checked")
def test_the_quick_check_sees_what_the_slow_one_does() -> None:
    for name, (change, becomes) in CHANGES.items():
        model = network()
        standing = Standing(model)
        assert standing.holds()
        assert standing.holds()
        change(model)
        assert standing.holds() == (becomes == "old"), name
        assert (standing.difference() == "") == (becomes == "old"), name


@pytest.mark.usefixtures("checked")
def test_hooks_and_the_state_of_a_thread_are_seen() -> None:
    model = network()
    standing = Standing(model)
    handle = model[0].register_forward_hook(lambda *_: None)
    assert not standing.holds()
    handle.remove()
    assert standing.difference() == ""
    assert standing.holds()
    with torch.inference_mode():
        assert not standing.holds()
    assert standing.holds()


@pytest.mark.usefixtures("checked")
def test_a_state_that_comes_back_is_known_again() -> None:
    model = network()
    standing = Standing(model)
    model.eval()
    model.train()
    assert not standing.holds()
    assert standing.difference() == ""
    assert standing.holds()


def test_a_converted_model_runs_without() -> None:
    model, twin = twins(network())
    captured(model, [images()], TapeRecorder)
    for each in (model, twin):
        each.double()
    x = images().double()
    assert_alike([model(x)], [twin(x)])
    assert "unlike any example" in graph_report(model).reason
    again = copy.deepcopy(model)
    assert_alike([again(x)], [twin(x)])
