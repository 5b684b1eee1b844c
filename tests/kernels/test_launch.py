"""Launches of one kind share what they compiled to: against Triton, for compute capability 9.0, and on a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.test_compile_workers import peak_launch, real_launches, run, watched

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ALIGNED = (256,) * 4


def moved(launch: Any, by: int) -> Any:
    return replace(launch, pointers=tuple(replace(p, offset=p.offset + by) for p in launch.pointers))


def other_numbers(launch: Any) -> Iterator[tuple[str, Any]]:
    """Each number a little larger, and beyond 32 bits."""
    for index, parameter in enumerate(launch.kernel.params[len(launch.pointers) :][: len(launch.scalars)]):
        for what, by in (("a number", 3), ("a large number", 2**33)):
            scalars = list(launch.scalars)
            scalars[index] += by
            yield f"{what}, {parameter.do_not_specialize}, {index}", replace(launch, scalars=tuple(scalars))


def kinds() -> None:
    """Whether launches are of one kind, and whether Triton gives one and the same for them."""
    watched()
    found = []
    for launch in [peak_launch(256), *real_launches()]:
        others = {
            "another grid": replace(launch, grid=(7, 1, 1)),
            "moved by 48 bytes": moved(launch, 48),
            "moved by 4 bytes": moved(launch, 4),
            "more warps": replace(launch, warps=2 * launch.warps),
            **dict(other_numbers(launch)),
            "other constants": replace(launch, constants={**launch.constants, "BLOCK": 64}),
        }
        if "BLOCK" not in launch.constants:
            del others["other constants"]
        own = launch.compile(ALIGNED)
        for what, other in others.items():
            alike = other.kind(ALIGNED) == launch.kind(ALIGNED)
            large = what.startswith("a large")  # what kernels may not compile for
            found.append((what, alike, not large and other.compile(ALIGNED) is own))
    json.dump(found, sys.stdout)


def test_what_is_of_one_kind_compiles_to_the_same(tmp_path: Path) -> None:
    found = run(kinds, tmp_path)
    assert len(found) >= 30
    for what, alike, same in found:
        assert same or not alike, what
        assert alike == (what in ("another grid", "moved by 48 bytes") or what.startswith("a number, True")), what


def types() -> None:
    """How many kinds there are of launches whose numbers are equal."""
    launch = peak_launch(256)
    first, *rest = launch.scalars
    found = {replace(launch, scalars=(value, *rest)).kind(ALIGNED) for value in (1, 1.0, True)}
    found |= {replace(launch, constants={**launch.constants, "DENSE": value}).kind(ALIGNED) for value in (1, True)}
    found |= {launch.kind((16, 256)), launch.kind((8, 256)), launch.kind((4, 256))}
    pointer = replace(launch.pointers[0], dtype=torch.int32)
    found.add(replace(launch, pointers=(pointer, launch.pointers[1])).kind(ALIGNED))
    assert launch.kind((16, 256)) == launch.kind(ALIGNED) == replace(launch).kind((48, 64))
    json.dump([first, len(found)], sys.stdout)


def test_types_tell_kinds_apart(tmp_path: Path) -> None:
    assert run(types, tmp_path) == [400, 8]


@pytest.mark.gpu
def test_a_program_asks_triton_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.triton import launch as module

    compiled: list[Any] = []
    monkeypatch.setattr(module, "_known", {})
    whole = module.Launch.compile
    monkeypatch.setattr(module.Launch, "compile", lambda self, to: compiled.append(self) or whole(self, to))
    values = torch.tensor([0.5, -3.0, 2.0, 70.0] * 100, device="cuda")
    for size in (100, 200):
        peaks = torch.zeros(5, dtype=torch.int32, device="cuda")
        scalars = (size, 1, 1, 10, 10, 400, 100, 0, 10, 1)
        each = replace(peak_launch(256), scalars=scalars, grid=(1, 1, 1))
        for _ in range(2):
            module.Program([each, moved(each, 0)], (16, 16), values.device)([values, peaks])
        assert int(peaks[1]) > 0
    assert len(compiled) == 2
