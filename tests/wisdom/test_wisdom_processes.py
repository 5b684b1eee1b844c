"""Wisdom under many processes at once, kills at any time, forks and threads. The processes are real."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from tests.forked import server
from tests.wisdom import wisdom_workers as workers
from tests.wisdom.wisdom_workers import BATCH, CONSTRAINTS, ENVIRONMENT

from tilewise.wisdom import Wisdom, WisdomWarning
from tilewise.wisdom.database import Database
from tilewise.wisdom.schema import Damaged

WRITERS = 8


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes that share nothing with this one, quickly."""
    return server()


@contextlib.contextmanager
def running(processes: ForkServerContext, target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    process = processes.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(30)


def run_writers(processes: ForkServerContext, path: Path, rounds: int) -> list[str]:
    """Run all writers at once to their end; the warnings of all of them."""
    start, (receive, send) = processes.Barrier(WRITERS), processes.Pipe(duplex=False)
    caught: list[str] = []
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(running(processes, workers.write_many, path, i, rounds, start, send))
            for i in range(WRITERS)
        ]
        for _ in writers:
            assert receive.poll(60), "a writer died or hangs"
            caught += receive.recv()
        for writer in writers:
            writer.join(30)
            assert writer.exitcode == 0
    return caught


def check_writers(path: Path, rounds: int) -> None:
    """Everything that the writers wrote is there."""
    wisdom = Wisdom(path)
    problems = [f"writer {writer} problem {i}" for writer in range(WRITERS) for i in range(rounds)]
    assert set(map(len, wisdom.measurements_many(ENVIRONMENT, problems).values())) == {BATCH}
    assert wisdom.plans_many(ENVIRONMENT, problems, CONSTRAINTS).keys() == set(problems)
    assert len(wisdom.measurements(ENVIRONMENT, "shared")) == WRITERS
    assert workers.integrity(path) == "ok"


def test_eight_processes_make_and_write_one_store(processes: ForkServerContext, tmp_path: Path) -> None:
    path = tmp_path / "made" / "by all" / "wisdom.sqlite3"
    assert run_writers(processes, path, rounds=6) == []
    check_writers(path, rounds=6)
    assert workers.aside(path) == []
    assert workers.journal_of(path) == "wal"


def test_eight_processes_meet_a_damaged_file(processes: ForkServerContext, tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    path.write_bytes(random.Random(0).randbytes(10_000))
    messages = run_writers(processes, path, rounds=2)
    check_writers(path, rounds=2)
    assert len(messages) == len(workers.aside(path)) == 1
    assert workers.aside(path)[0] in messages[0]


@pytest.mark.filterwarnings("ignore::tilewise.wisdom.WisdomWarning")
def test_a_file_is_not_moved_while_others_use_it(processes: ForkServerContext, tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    Wisdom(path).record(ENVIRONMENT, "old", workers.some_measurements())
    old = Damaged("damaged", "damaged", (path.stat().st_dev, path.stat().st_ino))
    mover = threading.Thread(target=Database(path)._set_aside, args=(old,))
    held, go_on = processes.Event(), processes.Event()
    with running(processes, workers.read_slowly, path, held, go_on) as reader:
        assert held.wait(30)
        mover.start()
        mover.join(0.2)
        assert mover.is_alive()
        assert path.exists()
        go_on.set()
        reader.join(30)
        mover.join(30)
        assert reader.exitcode == 0
    assert not path.exists()
    assert len(workers.aside(path)) == 1


def test_only_the_file_that_was_damaged_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    path.write_bytes(b"no database")
    late = Damaged("damaged", "damaged", (path.stat().st_dev, path.stat().st_ino))
    with pytest.warns(WisdomWarning, match="renamed"):
        Wisdom(path).record(ENVIRONMENT, "new", workers.some_measurements())
    Database(path)._set_aside(late)
    assert len(Wisdom(path).measurements(ENVIRONMENT, "new")) == BATCH
    assert len(workers.aside(path)) == 1


def test_a_store_survives_kills_while_written(processes: ForkServerContext, tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    draw = random.Random(1)
    for _ in range(10):
        begun = processes.Event()
        with (
            running(processes, workers.write_for_ever, path, begun) as one,
            running(processes, workers.write_for_ever, path, begun),
        ):
            assert begun.wait(30)
            time.sleep(draw.uniform(0, 0.06))
            one.kill()
            time.sleep(draw.uniform(0, 0.02))
        check_killed(path)
    assert Wisdom(path).summary()[0].measurements >= BATCH


def test_a_store_survives_kills_while_made_or_moved_aside(processes: ForkServerContext, tmp_path: Path) -> None:
    draw = random.Random(2)
    for i in range(12):
        path = tmp_path / str(i) / "wisdom.sqlite3"
        path.parent.mkdir()
        if i % 2:
            path.write_bytes(b"not a database" * 100)
        begun = processes.Event()
        with running(processes, workers.write_for_ever, path, begun):
            assert begun.wait(30)
            time.sleep(draw.uniform(0, 0.01))
        with warnings.catch_warnings():
            # Whether the killed process had come to moving it aside is chance.
            warnings.simplefilter("ignore", WisdomWarning)
            Wisdom(path).record(ENVIRONMENT, "after", workers.some_measurements())
        check_killed(path)
        assert len(workers.aside(path)) == i % 2


def check_killed(path: Path) -> None:
    """Every transaction of the killed writer is there as a whole or not at all, and the store can be written."""
    wisdom = Wisdom(path)
    assert workers.integrity(path) == "ok"
    problems = [f"problem {i}" for i in range(50)]
    assert set(map(len, wisdom.measurements_many(ENVIRONMENT, problems).values())) <= {0, BATCH}
    wisdom.plans_many(ENVIRONMENT, problems, CONSTRAINTS)
    wisdom.record(ENVIRONMENT, "after", workers.some_measurements())
    assert len(wisdom.measurements(ENVIRONMENT, "after")) == BATCH


def test_waits_for_a_process_that_holds_the_lock(processes: ForkServerContext, tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    wisdom = Wisdom(path)
    wisdom.record(ENVIRONMENT, "old", workers.some_measurements())
    held = processes.Event()
    with running(processes, workers.hold_lock, path, held, 0.5):
        assert held.wait(30)
        assert len(wisdom.measurements(ENVIRONMENT, "old")) == BATCH
        wisdom.record(ENVIRONMENT, "new", workers.some_measurements())
    assert not wisdom.in_memory
    assert len(Wisdom(path).measurements(ENVIRONMENT, "new")) == BATCH


def test_gives_up_waiting_with_a_warning(
    processes: ForkServerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewise.wisdom.database.WAIT_S", 0.2)
    path = tmp_path / "wisdom.sqlite3"
    wisdom = Wisdom(path)
    wisdom.record(ENVIRONMENT, "old", workers.some_measurements())
    held = processes.Event()
    with running(processes, workers.hold_lock, path, held, 60.0):
        assert held.wait(30)
        with pytest.warns(WisdomWarning, match="locked.*in memory") as caught:
            wisdom.record(ENVIRONMENT, "new", workers.some_measurements())
        assert len(caught) == 1
    assert wisdom.in_memory
    assert len(wisdom.measurements(ENVIRONMENT, "old")) == len(wisdom.measurements(ENVIRONMENT, "new")) == BATCH
    wisdom.close()
    assert not wisdom.in_memory
    assert wisdom.measurements(ENVIRONMENT, "new") == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_an_object_is_used_on_both_sides_of_forks_amid_threads(tmp_path: Path) -> None:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    stop = threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            wisdom.record(ENVIRONMENT, "thread", workers.some_measurements())

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        children = [fork_and_record(wisdom, f"child {i}") for i in range(10)]
        wisdom.record(ENVIRONMENT, "parent", workers.some_measurements())
        deadline = time.monotonic() + 30
        assert [status_of(child, deadline) for child in children] == [0] * len(children)
    finally:
        stop.set()
        thread.join()
    problems = ["thread", "parent", *(f"child {i}" for i in range(10))]
    assert set(map(len, wisdom.measurements_many(ENVIRONMENT, problems).values())) == {BATCH}
    assert workers.integrity(wisdom.path) == "ok"


def fork_and_record(wisdom: Wisdom, problem: str) -> int:
    with warnings.catch_warnings():
        # From Python 3.12 on: forking amid threads is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    with contextlib.suppress(BaseException):
        wisdom.record(ENVIRONMENT, problem, workers.some_measurements())
        status = 0 if len(wisdom.measurements(ENVIRONMENT, problem)) == BATCH else 2
    os._exit(status)


def status_of(child: int, deadline: float) -> int:
    """Exit status of a child; one that hangs is killed."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def test_threads_share_an_object(tmp_path: Path) -> None:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    threads = [
        threading.Thread(target=wisdom.record, args=(ENVIRONMENT, f"thread {i}", workers.some_measurements()))
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = wisdom.measurements_many(ENVIRONMENT, [f"thread {i}" for i in range(16)])
    assert set(map(len, found.values())) == {BATCH}


def test_a_read_only_store_is_read_and_added_to_in_memory(processes: ForkServerContext) -> None:
    # Not in tmp_path, which nobody but its owner may enter.
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = directory / "wisdom.sqlite3"
        Wisdom(path).record(ENVIRONMENT, "old", workers.some_measurements())
        directory.chmod(0o555)
        path.chmod(0o444)
        receive, send = processes.Pipe(duplex=False)
        with running(processes, workers.as_nobody, workers.use_read_only, (path,), send):
            assert receive.poll(60)
            messages, in_memory, before, after = receive.recv()
        directory.chmod(0o755)
    assert in_memory
    assert before == after == BATCH
    assert len(messages) == 1
    assert str(path) in messages[0]
    assert "What the file holds is still used" in messages[0]


def test_a_full_disk_is_a_warning(processes: ForkServerContext, tmp_path: Path) -> None:
    path = tmp_path / "wisdom.sqlite3"
    Wisdom(path).record(ENVIRONMENT, "old", workers.some_measurements())
    receive, send = processes.Pipe(duplex=False)
    with running(processes, workers.use_full_disk, path, send):
        assert receive.poll(60)
        messages, found = receive.recv()
    assert found == [BATCH] * 3
    assert len(messages) == 1
    assert workers.integrity(path) == "ok"
    assert len(Wisdom(path).measurements(ENVIRONMENT, "old")) == BATCH
