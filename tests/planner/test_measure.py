"""Times in turns, and memory at its peak."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests import toys

from tilewise.machine import resident
from tilewise.machine.allocations import countable, recorded
from tilewise.machine.threads import at_once
from tilewise.planner.measuring import times as measure
from tilewise.planner.measuring.times import (
    Timer,
    Took,
    check_peak_is_known,
    interleaved,
    lead_ms,
    peak_bytes,
    rounds,
)

CPU = torch.device("cpu")
MIB = 2**20


def test_calls_are_timed_in_turns() -> None:
    order: list[str] = []
    calls = [lambda name=name: order.append(name) for name in "abc"]
    times = interleaved(calls, CPU, repeats=4)
    assert len(times) == 3
    assert all(ms >= 0 for ms in times)
    assert "".join(order) == "abc" + "abccba" * 2


@pytest.mark.parametrize(("budget_ms", "count_of"), [(0.0, 5), (1e9, 9)])
def test_rounds_keep_to_their_bounds(budget_ms: float, count_of: int) -> None:
    count = [0]

    def call() -> None:
        count[0] += 1

    interleaved([call], CPU, budget_ms=budget_ms, least=5, most=9)
    assert count[0] == 2 + count_of


def test_rounds_stop_where_the_matter_is_decided() -> None:
    times = rounds([lambda: None, lambda: None], CPU, repeats=9, decided=lambda found: len(found[-1]) == 3)
    assert [len(values) for values in times] == [3, 3]


def test_replays_take_the_host_no_time() -> None:
    seen: list[list[list[Took]]] = []

    def decided(found: list[list[Took]]) -> bool:
        seen.append(found)
        return False

    class Launching(Timer):
        def time(self, call: Callable[[], object], lead_ms: float = 0.0, written: torch.Tensor | None = None) -> Took:
            call()
            return Took(1.0, 5.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "Timer", Launching)
        (launched,) = rounds([lambda: None], CPU, repeats=3, decided=decided)
        (replayed,) = rounds([lambda: None], CPU, repeats=3, decided=decided, launched=False)
    assert launched == [Took(1.0, 5.0)] * 3
    assert replayed == [Took(1.0, 0.0)] * 3
    assert seen[-1][0] == replayed


def test_a_long_run_warms_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]

    def call() -> None:
        count[0] += 1

    monkeypatch.setattr(measure, "LONG_MS", 0.0)
    rounds([call], CPU, budget_ms=0.0, least=2)
    assert count[0] == 1 + 2


def test_a_median_is_of_as_many_runs() -> None:
    count = [0]

    def call() -> None:
        count[0] += 1

    assert Timer(CPU).median_ms(call, 5) >= 0
    assert count[0] == 5


def hold(size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [MIB, 5 * MIB, 50 * MIB])
def test_memory_is_seen_at_its_peak(size: int) -> None:
    for call in (hold(size), lambda: hold(size)().max()):
        assert abs(peak_bytes(call, CPU) - size) < MIB // 2
    assert peak_bytes(hold(size), CPU, result_bytes=size) < MIB // 2


def test_nothing_taken_is_nothing() -> None:
    out = torch.zeros(1000)
    out.zero_()
    assert peak_bytes(out.zero_, CPU) == 0


@pytest.mark.parametrize("size", [100, 5000, 30_000, 60_000])
def test_what_torch_takes_is_counted_to_the_byte(size: int) -> None:
    """Also where the resident set shows nothing, freed within the call or not."""
    assert peak_bytes(hold(size), CPU) == size
    assert peak_bytes(lambda: [hold(size)().numel(), hold(size)().numel()], CPU) == size
    assert peak_bytes(lambda: [hold(size)(), hold(size)()], CPU) == 2 * size
    assert peak_bytes(hold(size), CPU, result_bytes=size) == 0


def test_as_much_as_may_not_show_is_added_to_a_rough_measure() -> None:
    assert peak_bytes(lambda: None, CPU, rough=True) >= measure.NOISE
    assert peak_bytes(hold(60_000), CPU, rough=True) >= measure.NOISE + 60_000
    assert peak_bytes(hold(8 * MIB), CPU, rough=True) >= measure.NOISE + 8 * MIB


def test_what_nobody_writes_is_seen() -> None:
    """Another library's memory shows as resident pages, which a block that is only taken has none of."""
    toys.in_fresh_process(see_what_nobody_writes)


def see_what_nobody_writes() -> None:
    for size in (MIB, 256 * MIB):
        assert peak_bytes(functools.partial(np.empty, size, dtype=np.uint8), CPU) > size - MIB // 2


def test_what_the_threads_of_torch_keep_for_themselves_is_seen() -> None:
    """Each thread's allocations come from an arena of its own, whose free end stays resident."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:

        def take(index: int) -> None:
            both.wait(10)
            np.empty(MIB // 2 + index, dtype=np.uint8).fill(1)
            both.wait(10)

        both = threading.Barrier(2)
        call = functools.partial(at_once, take, 2, 2)
        for _ in range(2):
            call()
        assert peak_bytes(call, CPU) > MIB * 3 // 4
    finally:
        torch.set_num_threads(threads)


def test_the_profiler_ends_with_what_raises() -> None:
    def call() -> None:
        hold(100)()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        recorded(call)
    assert countable()
    assert peak_bytes(hold(5000), CPU) == 5000


def test_a_small_limit_is_refused_where_a_profiler_hides_what_is_taken() -> None:
    with torch.autograd.profiler.profile():
        check_peak_is_known(CPU)
        check_peak_is_known(CPU, measure.NOISE)
        assert peak_bytes(hold(5 * MIB), CPU) > 4 * MIB
        with pytest.raises(RuntimeError, match=r"a profiler is running.*128.0 KiB.* or more would do"):
            check_peak_is_known(CPU, 100)
    check_peak_is_known(CPU, 100)


def test_code_that_is_loaded_is_no_workspace(tmp_path: pytest.TempPathFactory) -> None:
    """The first call into a library reads its pages; they are the library's, whoever calls first."""
    path = tmp_path / "library"  # type: ignore[operator]
    path.write_bytes(bytes(8 * MIB))
    mapped = torch.from_file(str(path), size=8 * MIB, dtype=torch.uint8)
    assert peak_bytes(mapped.max, CPU) < MIB


def test_garbage_freed_meanwhile_hides_nothing() -> None:
    size = 24 * MIB
    cycle: list[object] = [torch.ones(2 * size, dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle

    def call() -> torch.Tensor:
        litter = [[] for _ in range(3000)]  # more objects than a collection waits for
        assert len(litter) == 3000
        return torch.ones(size, dtype=torch.uint8)

    assert peak_bytes(call, CPU) > size - MIB // 2
    assert gc.isenabled()


def test_unknown_memory_is_an_error_that_says_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    check_peak_is_known(CPU)

    def no_file(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("no /proc here")

    monkeypatch.setattr(resident, "open", no_file, raising=False)
    with pytest.raises(RuntimeError, match=r"clear_refs.*workspace=None would do"):
        check_peak_is_known(CPU)
    monkeypatch.setattr(measure, "reset_peak", lambda: None)
    with pytest.raises(RuntimeError, match=r"status.*workspace=None would do"):
        check_peak_is_known(CPU)


@pytest.mark.gpu
def test_memory_of_a_gpu_counts_what_is_asked_for() -> None:
    cuda = torch.device("cuda")
    for size in (1, 1000, 5 * MIB + 3):
        assert peak_bytes(lambda size=size: torch.empty(size, dtype=torch.uint8, device=cuda), cuda) == size  # type: ignore[misc]
    a = torch.randn(512, 512, device=cuda)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    first = peak_bytes(lambda: torch.mm(a, a, out=out), cuda)
    assert first > 0, "cuBLAS's own workspace counts"
    assert first == peak_bytes(lambda: torch.mm(a, a, out=out), cuda), "each time"


@pytest.mark.gpu
def test_a_slow_launch_is_not_the_devices_time() -> None:
    timer, out = Timer(torch.device("cuda")), torch.zeros(1, device="cuda")

    def call() -> None:
        time.sleep(0.5e-3)
        out.zero_()

    call()
    hidden = [timer.time(call, lead_ms(Took(0.0, 1.0))) for _ in range(5)]
    assert min(took.host_ms for took in hidden) >= 0.5
    assert min(took.device_ms for took in hidden) < 0.4


@pytest.mark.gpu
def test_no_timer_while_a_graph_is_captured() -> None:
    torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="captured"):
        Timer(torch.device("cuda"))
