"""Planned layers in graphs that Inductor compiles with frozen weights: they stay where the network gains from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sampling import EVERY
from torch import nn

import tilewise
import tilewise.nn
from tilewise.nn.layers import compiled, frozen, plan_table
from tilewise.nn.layers.compiled import Published, published_as
from tilewise.nn.layers.frozen import Compared, chosen

OURS, THEIRS = Compared(1.0, 0.1, 0.1, 2.0), Compared(1.0, 0.1, 0.1, 0.5)
BETWEEN = Compared(1.0, 0.2, 0.6, 1.4)
"""Faster than Inductor's, but not where tensors change their layout for it."""


@pytest.mark.parametrize(
    ("compared", "uses", "alone", "kept"),
    [
        ({"a": OURS, "b": OURS}, {}, 0, "ab"),
        ({"a": THEIRS, "b": THEIRS}, {}, 0, ""),
        ({"a": OURS, "b": THEIRS}, {}, 0, "a"),
        ({"a": BETWEEN, "b": BETWEEN}, {}, 0, "ab"),
        ({"a": BETWEEN, "b": BETWEEN}, {}, 2, ""),  # beside torch's convolutions layouts change after all
        ({"a": OURS, "b": BETWEEN}, {}, 2, "a"),
        ({"a": Compared(1.0, 0.0, 1.0, 1.9), "b": Compared(1.0, 0.0, 1.0, 0.5)}, {"a": 3}, 0, "ab"),
        ({"a": Compared(1.0, 0.0, 1.0, 1.9), "b": Compared(1.0, 0.0, 1.0, 0.5)}, {"b": 3}, 0, ""),
        ({"a": Compared(0.99, 0.0, 0.0, 1.0)}, {}, 0, ""),  # within the margin
        ({"a": None, "b": THEIRS}, {}, 0, "a"),
        ({}, {}, 0, ""),
    ],
)
def test_the_fastest_choice_stays(
    compared: dict[str, Compared | None], uses: dict[str, int], alone: int, kept: str
) -> None:
    assert chosen(compared, uses, alone) == set(kept)


def planned(module: nn.Module, x: torch.Tensor) -> Any:
    """``module`` with all its forwards by plan, whatever their speed."""
    with torch.no_grad():
        return tilewise.optimize(
            module.eval(), x, training=False, frozen=True, rigor="estimate", exclude=("aten",), goal="passes"
        )


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(6, 8, 3, padding=1), (2, 6, 9, 7)),
        (nn.Conv2d(6, 9, (3, 1), stride=2, padding=(2, 0), dilation=2, groups=3, bias=False), (1, 6, 11, 8)),
        (nn.Conv3d(3, 4, 2), (1, 3, 5, 6, 7)),
    ],
)
def test_what_is_timed_computes_the_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float32, device="cpu")
    want = layer.double()(x.double())
    model = planned(nn.Sequential(layer.float()), x)
    published = [published_as(name) for name in names_of_newest()]
    assert published, model
    for each in published:
        assert each is not None
        weight, bias = (None if t is None else t.detach() for t in (layer.weight, layer.bias))
        fused = frozen.packed(each, x, weight, bias)  # type: ignore[arg-type]
        assert fused is not None
        torch.testing.assert_close(fused().double(), want, rtol=1e-5, atol=1e-5)
        found = frozen.compare(each)
        assert found is not None
        assert min(found.planned_ms, found.apart_ms, found.fused_ms) > 0


def names_of_newest() -> list[str]:
    """The names under which compiled graphs find the layers of the model that was planned last."""
    return sorted(plan_table._tables[max(plan_table._tables)].published)


def test_a_signal_is_not_compared() -> None:
    x = torch.randn(2, 3, 40, dtype=torch.float32, device="cpu")
    model = planned(nn.Sequential(nn.Conv1d(3, 4, 5)), x)
    assert [frozen.compare(each) for each in map(published_as, names_of_newest()) if each] == [None], model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "options", "by_plan"),
    [
        (THEIRS, {"freezing": True}, False),
        pytest.param(OURS, {"freezing": True}, True, marks=pytest.mark.skipif(not EVERY, reason="compiles")),
        pytest.param(THEIRS, {"freezing": False}, True, marks=pytest.mark.skipif(not EVERY, reason="compiles")),
    ],
)
def test_a_frozen_graph_has_what_is_faster(
    found: Compared, options: dict[str, bool], by_plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def find(plans: str, *tensors: Any) -> Published:
        calls.append(plans)
        return compiled._published[plans]

    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float32, device="cpu")
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
    model = planned(nn.Sequential(*layers), x)
    want = nn.Sequential(*layers).double()(x.double())
    model.float()
    monkeypatch.setattr(frozen, "compare", lambda published: found)  # which is faster is a matter of the machine
    with torch.no_grad():
        with torch._inductor.config.patch(options):  # the process' setting: alone among options it does nothing
            program = torch.compile(model)
            program(x)
        monkeypatch.setattr(compiled, "_find", find)
        got = program(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    assert bool(calls) is by_plan
    if options["freezing"]:
        kept = 2 if by_plan else 0
        assert tilewise.nn.report(model).facts["frozen"] == {"compared": 2, "kept": kept}
