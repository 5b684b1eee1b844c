"""Launches of compiled Triton kernels: a driver is told the same from C as by Triton's own launcher, without a GPU."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kernels.native.standin import COMPILER
from tests.kernels.recorded import apart

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tilewise.kernels.triton.driver_launch import LateLauncher, hooks, kernel_launch, late_launchers, made_now


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_the_driver_is_told_what_tritons_launcher_tells() -> None:
    *alike, clustered = apart("tests.kernels.native.triton_launches:compared")
    for sizes, by_triton, from_c in alike:
        assert sizes == [8, 8, 4, 8, 4, 8, 1, 8, 8]
        assert from_c == by_triton
    for one, other in itertools.combinations(alike, 2):
        assert one != other
    assert clustered[2] is None, "clusters are left to Triton"


def test_hooks_are_where_triton_keeps_them() -> None:
    for owner, name in hooks():
        assert getattr(owner, name).calls == []


def test_a_kernel_of_another_triton_is_left_to_it() -> None:
    class Unknown:
        packed_metadata = (4, 1, 0)

    with pytest.warns(RuntimeWarning, match="describes kernels in another way"):
        assert kernel_launch(Unknown(), (1, 1, 1), ()) is None


def test_a_launcher_is_made_when_it_is_first_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    made: list[tuple[str, str]] = []

    def usual(source: str, metadata: str) -> Any:
        made.append((source, metadata))
        return lambda *arguments: (*arguments, len(made))

    active = SimpleNamespace(launcher_cls=usual)
    monkeypatch.setattr(driver, "_active", active)
    with late_launchers():
        with late_launchers():
            first, second = active.launcher_cls("source", "metadata"), active.launcher_cls("other", "metadata")
        third = active.launcher_cls("third", "metadata")
    assert active.launcher_cls is usual
    assert isinstance(third, LateLauncher)
    assert made == []
    assert first(7) == (7, 1)
    assert first(8) == (8, 1)
    made_now(second)
    made_now(usual)
    assert made == [("source", "metadata"), ("other", "metadata")]
