"""The kernel of messages by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tests.kernels.recorded import Recorded, apart, at

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def messages() -> list[dict[str, Any]]:
    """Exchanges with two neighbours, of rows as they lie and with channels innermost."""
    from tilewise.comm.peers import CHUNK, Peers, Places

    Recorded.begin()
    places = Places(((1,), (0, 2), (1,)), 8 * CHUNK)
    buffers = [torch.zeros(places.nbytes, dtype=torch.uint8) for _ in places.neighbours]
    found = []
    for near in (False, True):
        one = Peers(places, buffers, 1, 60.0)
        one.near = near
        y = torch.empty(1, 64, 64, 128)
        y = y.contiguous(memory_format=torch.channels_last) if near else y
        rows = (1, 64, 1, 128)
        one.exchange([(0, y[:, :, :1]), (2, y[:, :, -1:])], [(0, rows), (2, rows)], y)
        found += Recorded.compiled(f"near={near}")
    return found


@pytest.mark.slow
def test_messages_are_released_and_acquired_by_all_gpus() -> None:
    for kernel in apart("tests.kernels.test_peer_compiles:messages"):
        assert kernel["stack"] == 0
        lines = kernel["ptx"].splitlines()
        releases = [n for n, line in enumerate(lines) if "release" in line]
        assert len(releases) == 2, "one that writes messages and one that reads them"
        write, read = lines[: releases[0] + 1], lines[releases[0] + 1 : releases[1] + 1]
        for part in (write, read):
            assert_in_order(part)
        assert not any("ld.global.cg" in line for line in write)
        assert any("ld.global.cg" in line for line in read), "what another GPU wrote is not read from L1"


def assert_in_order(lines: list[str]) -> None:
    """Looks, the one that counts, all of the message, a barrier, then the count and its release."""
    (look,) = at(lines, "acquire")
    (release,) = at(lines, "release")
    assert "sys" in lines[look]
    assert "sys" in lines[release]
    turns, barriers, stores = at(lines, "ld.volatile"), at(lines, "bar.sync"), at(lines, "st.global")
    assert turns
    assert max(turns) < look < min(stores)
    # Warps read a look in a loop through shared memory, and may part.
    assert not any(min(turns) < n < look for n in barriers)
    done = max(n for n in barriers if n < release)
    assert min(at(lines, "ld.global.cg") or [done]) > look
    assert len([n for n in stores if n < done]) > 1
    assert len([n for n in stores if done < n]) == 1, "the count alone"
