"""Other data in a CPU's caches between runs."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.planner.measuring import cold
from tilewise.planner.measuring.cold import MOST, USUAL, last_level_bytes, other_data
from tilewise.planner.measuring.times import Timer, rounds

CPU = torch.device("cpu")


def told(folder: Path, *sizes: str) -> Path:
    for number, text in enumerate(sizes):
        place = folder / f"index{number}"
        place.mkdir(parents=True)
        (place / "size").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("sizes", "bytes_"),
    [
        (["32K\n", "1024K\n", "32768K\n"], 32 << 20),
        (["1M\n", "2G\n"], 2 << 30),
        (["512\n"], 512),
        ([], USUAL),
        (["many\n", "-3K\n", "\n"], USUAL),
        (["0K\n"], USUAL),
    ],
)
def test_the_largest_cache_is_the_last(sizes: list[str], bytes_: int, tmp_path: Path) -> None:
    assert last_level_bytes(told(tmp_path / "cache", *sizes)) == bytes_


@given(st.text(max_size=12))
def test_whatever_the_system_tells_is_a_size(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    assert last_level_bytes(told(tmp_path_factory.mktemp("cache") / "it", text)) > 0


def test_this_machine_has_a_cache() -> None:
    assert 1 << 16 <= last_level_bytes() < 1 << 34


@pytest.fixture(autouse=True)
def _whole_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much data as in a program; all other tests fill less."""
    monkeypatch.setattr(cold, "MOST", MOST)


def test_data_is_shared_while_it_is_used_and_then_gone() -> None:
    first, second = other_data(), other_data()
    assert first is second
    assert first.nbytes == min(last_level_bytes() * 5 // 4, MOST)
    assert bool((first == 1).all())
    del first, second
    gc.collect()
    assert "data" not in cold._shared


def test_data_is_made_once_for_all_that_is_timed_together() -> None:
    with cold.made_once():
        first = id(other_data())
        gc.collect()
        assert id(other_data()) == first
    with cold.made_once(wanted=False):
        gc.collect()
        assert "data" not in cold._shared


def test_data_lies_on_the_cpu_whatever_torchs_defaults_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "_shared", {})  # as in a process that has none yet
    x = torch.ones(4)
    with torch.device("meta"):
        assert other_data().device == CPU
        times = rounds([lambda: x + x], CPU, repeats=2)
    assert [len(each) for each in times] == [2]
    assert other_data().dtype is torch.float32


def test_caches_are_filled_before_each_run_of_rounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(Timer, "_flush", lambda self: order.append("filled"))
    rounds([lambda: order.append("a"), lambda: order.append("b")], CPU, repeats=3)
    assert order[::2] == ["filled"] * len(order[1::2])
    assert sorted(set(order[1::2])) == ["a", "b"]
    order.clear()
    Timer(CPU).time(lambda: order.append("a"))
    assert order == ["a"]
