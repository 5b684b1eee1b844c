"""CPU kernels that another process compiles, where a program goes on beside planning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tilewise.kernels.building import elsewhere
from tilewise.kernels.building.elsewhere import compiled_elsewhere
from tilewise.kernels.building.kept import refuse
from tilewise.kernels.cpu import compile_process
from tilewise.machine.turns import taking


class Always:
    is_ending = False

    def pause(self) -> None:
        pass

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def beside(self, *, short: bool) -> Iterator[None]:
        yield


def test_only_in_turns_and_only_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: set[int] = set()
    asked: list[tuple[str, tuple[int, ...]]] = []

    @compiled_elsewhere
    def load(number: int) -> int:
        if number not in kept:
            refuse("a kernel")
        return number + 1

    def compile(name: str, arguments: tuple[int, ...]) -> None:
        asked.append((name, arguments))
        kept.update(arguments)

    monkeypatch.setattr(elsewhere, "_compile", compile)
    assert load(1) == 2
    with taking(Always()):
        assert [load(2), load(2)] == [3, 3]
    assert asked == [("load", (2,))]


def test_the_process_calls_nothing_but_what_loads_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda by: 0)
    for name, arguments, raised in (("LOCK", "[]", "one of"), ("load_direct", "[[1, [2]], 3]", "argument")):
        monkeypatch.setattr("sys.argv", ["compile_process", name, arguments])
        with pytest.raises((SystemExit, TypeError), match=raised):
            compile_process.main()
    assert compile_process._tuples([1, [2, [3]]]) == (1, (2, (3,)))


def test_a_process_that_fails_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with taking(Always()):
        elsewhere._compile("load", (4,))
