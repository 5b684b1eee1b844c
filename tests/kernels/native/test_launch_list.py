"""Lists of launches in C, against a driver without a GPU: what it is told, wrong uses, errors, threads, memory."""

from __future__ import annotations

import gc
import random
import struct
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tests.kernels.native.standin import Standin, words

from tilewise.kernels.native.building import Native
from tilewise.kernels.native.sequence import Address, KernelLaunch, LaunchSequence, joined

ONE = (1, 1, 1)


def nothing(*addresses: int) -> None:
    raise AssertionError("called from Python")


def described(standin: Standin, *parameters: Address | bytes, **changes: Any) -> KernelLaunch:
    """A launch of a kernel that has these parameters."""
    function = standin.function([len(p) if isinstance(p, bytes) else 8 for p in parameters])
    return KernelLaunch(function, (3, 2, 1), (128, 1, 1), 0, (), parameters)._replace(**changes)


def made(native: Native, sources: int, *launches: Any, hooks: tuple[Any, ...] = (), instead: Any = nothing) -> Any:
    return native.module.LaunchList(native.driver, sources, launches, hooks, instead)


def drawn(standin: Standin, random_: random.Random, sources: int) -> KernelLaunch:
    """A launch with any sizes, attributes and parameters."""
    parameters = [
        Address(random_.randrange(sources), random_.randrange(-(2**40), 2**40))
        if random_.random() < 0.4
        else random_.randbytes(random_.choice((1, 2, 4, 8)))
        for _ in range(random_.randrange(1, 40))
    ]
    grid, block = (tuple(random_.randrange(1, 2**10) for _ in range(3)) for _ in range(2))
    attributes = tuple(
        (random_.randrange(1, 17), random_.randbytes(random_.randrange(1, 64)) + b"\1")
        for _ in range(random_.randrange(5))
    )
    shared = random_.randrange(2**18)
    return described(standin, *parameters, grid=grid, block=block, shared=shared, attributes=attributes)


def expected_bytes(launch: KernelLaunch, addresses: list[int]) -> bytes:
    return b"".join(
        words((addresses[p.source] + p.offset) % 2**64) if isinstance(p, Address) else p for p in launch.parameters
    )


def test_the_driver_is_told_what_was_described(native: Native, standin: Standin) -> None:
    random_ = random.Random(1)
    for _ in range(50):
        sources = random_.randrange(1, 7)
        launches = [drawn(standin, random_, sources) for _ in range(random_.randrange(5))]
        run = made(native, sources, *launches)
        assert run.descriptions == tuple(launches)
        addresses = [random_.randrange(2**63) for _ in range(sources)]
        standin.begin()
        assert run(77, *addresses) is None
        told = standin.told()
        assert len(told) == len(launches)
        for got, launch in zip(told, launches, strict=True):
            assert got.function == launch.function
            assert got.stream == 77
            assert (got.grid, got.block, got.shared) == (launch.grid, launch.block, launch.shared)
            assert got.attributes == launch.attributes
            assert got.parameters == expected_bytes(launch, addresses)


def test_moved_and_joined_sequences_read_other_parts_of_the_same_tensors(native: Native, standin: Standin) -> None:
    launch = described(standin, Address(0, 8), Address(2, 0), struct.pack("=i", -5), Address(3, 64))
    part = LaunchSequence((launch,), 0)
    whole = joined([part.moved((100, 7, 1000)), part.moved((0, 0, -8))])
    assert whole is not None
    assert whole.sources == 4
    standin.begin()
    made(native, whole.sources, *whole.launches)(0, 2**20, 1, 2**30, 2**40)
    first, second = standin.told()
    assert first.parameters == words(2**20 + 108, 2**30 + 1000) + struct.pack("=i", -5) + words(2**40 + 64)
    assert second.parameters == words(2**20 + 8, 2**30 - 8) + struct.pack("=i", -5) + words(2**40 + 64)
    inside = part.over([Address(3, 100), Address(0, 0), Address(2, 4)])
    standin.begin()
    made(native, inside.sources, *inside.launches)(0, 1, 2, 2**30, 2**40)
    (third,) = standin.told()
    assert third.parameters == words(2**40 + 108, 2**30 + 4) + struct.pack("=i", -5) + words(2**40 + 64)
    assert joined([part, LaunchSequence((launch,), 1)]) is None
    assert joined([]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (1, 0, 1)}, r"grid of \(1, 0, 1\)"),
        ({"block": (1, 1)}, "three numbers"),
        ({"attributes": ((1, bytes(65)),)}, "65 bytes"),
        ({"attributes": ((1, b"a"),) * 5}, "at most 4"),
        ({"parameters": (Address(2, 0),)}, "source 2: 0 to 1 would do"),
        ({"parameters": (Address(-1, 0),)}, "source -1"),
        ({"parameters": (b"abc",)}, "3 bytes: 1, 2, 4 or 8 would do"),
        ({"parameters": (b"abcd",)}, "parameter 0 of 1 has 4 bytes, in the kernel 8"),
        ({"parameters": (b"abcdefgh",) * 2}, "2 parameters given, the kernel has 1"),
        ({"parameters": ()}, "the kernel 8"),
        ({"parameters": (b"abcdefgh",) * 257}, "at most 256"),
        ({"parameters": (3,)}, r"parameter 3: bytes or \(source, offset\)"),
    ],
)
def test_what_makes_no_sense_is_refused(native: Native, standin: Standin, change: Any, message: str) -> None:
    launch = described(standin, Address(0, 0))._replace(**change)
    with pytest.raises((TypeError, ValueError), match=message):
        made(native, 2, launch)


def test_calls_with_other_arguments_are_refused(native: Native, standin: Standin) -> None:
    run = made(native, 2, described(standin, Address(1, 0)))
    standin.begin()
    for arguments in ((), (0, 1), (0, 1, None), (0, "1", 2), (0, -1, 2), (0, 2**64, 2)):
        with pytest.raises((TypeError, OverflowError)):
            run(*arguments)
    with pytest.raises(TypeError):
        run(0, 1, 2, stream=3)
    assert standin.launched == 0
    run(0, 1, 2, 3)  # a bias's address, say, of which these kernels take nothing
    assert standin.launched == 1
    for sources, hooks in ((0, ()), (65, ()), (1, (3,)), (1, ((sys, 3),)), (1, ((sys, "no_such_name"),))):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            made(native, sources, hooks=hooks)
    with pytest.raises(TypeError, match="description"):
        made(native, 1, (1, 2))
    with pytest.raises(OSError, match="no_such_library"):
        native.module.Driver("/no_such_library.so")
    with pytest.raises(OSError, match="no cuLaunchKernelEx"):
        native.module.Driver("libc.so.6")


def test_an_error_of_the_driver_names_it_and_the_launch(native: Native, standin: Standin) -> None:
    run = made(native, 1, *[described(standin, Address(0, 0)) for _ in range(4)])
    standin.begin()
    standin.fail(700, after=2)
    with pytest.raises(RuntimeError, match=r"launch 3 of 4 failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        run(0, 1)
    assert standin.launched == 2, "nothing is queued after an error"
    standin.begin()
    standin.fail(999, after=0)
    with pytest.raises(RuntimeError, match=r"an unknown error \(999\)"):
        run(0, 1)
    standin.begin()
    run(0, 1)
    assert standin.launched == 4


def test_launches_go_to_the_context_that_the_list_was_made_in(native: Native, standin: Standin) -> None:
    """Where another device is current, and in a thread that has not touched the GPU yet."""
    run = made(native, 1, described(standin, Address(0, 0)))
    own = standin.library.standin_context()
    other = 12345
    seen: list[int | None] = []

    def elsewhere(context: int | None) -> None:
        standin.library.standin_set_context(context)
        run(0, 1)
        seen.append(standin.library.standin_context())
        if context is None:
            with pytest.raises(RuntimeError, match="no CUDA context is current"):
                made(native, 1)

    standin.begin()
    for context in (other, None):
        thread = threading.Thread(target=elsewhere, args=(context,))
        thread.start()
        thread.join()
    assert seen == [other, None], "what was current is so again"
    assert [told.context for told in standin.told()] == [own, own]
    standin.fail(700, after=0)
    standin.library.standin_set_context(other)
    try:
        with pytest.raises(RuntimeError):
            run(0, 1)
        assert standin.library.standin_context() == other
    finally:
        standin.library.standin_set_context(own)


class Chain:
    """A list of functions to be called, as Triton keeps them."""

    def __init__(self) -> None:
        self.calls: list[Callable[..., None]] = []


class Knobs:
    """An owner of two hooks, of which one may be replaced."""

    def __init__(self) -> None:
        self.enter: Any = Chain()
        self.leave: Any = None


def test_python_launches_while_a_hook_is_set(native: Native, standin: Standin) -> None:
    knobs = Knobs()
    heard: list[tuple[int, ...]] = []
    hooks = ((knobs, "enter"), (knobs, "leave"))
    run = made(native, 1, described(standin, Address(0, 0)), hooks=hooks, instead=lambda *given: heard.append(given))
    standin.begin()
    run(5, 1)
    knobs.enter.calls.append(nothing)
    run(5, 2, 3)
    knobs.enter.calls.clear()
    knobs.leave = nothing
    run(5, 4)
    knobs.leave = None
    knobs.enter = Chain()  # another one than the list knows
    run(5, 6)
    knobs.enter = None
    run(5, 7)
    assert heard == [(2, 3), (4,), (6,)]
    assert standin.launched == 2


def test_threads_share_a_list(native: Native, standin: Standin) -> None:
    """Each call's addresses are its own, although the lock is released while the driver works."""
    launches = [described(standin, Address(0, i), Address(1, -i), struct.pack("=q", i)) for i in range(4)]
    run = made(native, 2, *launches)
    standin.begin()
    start = threading.Barrier(4)

    def call(number: int) -> None:
        start.wait()
        for turn in range(4):
            run(number, number << 40 | turn, number << 50 | turn)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = standin.told()
    assert len(told) == 64
    got = sorted((one.stream, one.parameters) for one in told)
    want = sorted(
        (n, words((n << 40 | turn) + i, (n << 50 | turn) - i, i))
        for n in range(1, 5)
        for turn in range(4)
        for i in range(4)
    )
    assert got == want


def test_ten_thousand_calls_and_lists_leave_nothing(native: Native, standin: Standin) -> None:
    hooks = ((Knobs(), "enter"),)
    launch = described(standin, Address(0, 0), b"abcd", Address(1, 0))
    run = made(native, 2, launch, hooks=hooks)
    standin.begin(record=False)

    def use() -> None:
        for _ in range(10_000):
            run(2**40, 2**41, 2**42)
        for _ in range(1_000):
            made(native, 2, launch, hooks=hooks)
            with pytest.raises(ValueError, match="bytes"):
                made(native, 2, launch, launch._replace(parameters=(b"abc",)), hooks=hooks)

    use()
    gc.collect()
    before = [sys.getrefcount(one) for one in (launch, hooks[0][0], native.driver, None)]
    tracemalloc.start()
    use()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    after = [sys.getrefcount(one) for one in (launch, hooks[0][0], native.driver, None)]
    assert kept < 20_000
    *grown, of_none = [now - then for now, then in zip(after, before, strict=True)]
    assert max(map(abs, grown)) < 900, (before, after)
    assert of_none < 9_000, "one for each call; the process has others that come and go"


def test_a_list_that_is_held_by_what_it_calls_goes_with_it(native: Native, standin: Standin) -> None:
    class Owner:
        def __init__(self) -> None:
            self.run = made(native, 1, described(standin, Address(0, 0)), instead=self.call)

        def call(self, *addresses: int) -> None:
            pass

    owner = weakref.ref(Owner())
    gc.collect()
    assert owner() is None
