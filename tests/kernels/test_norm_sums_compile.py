"""The kernels around sums of norms by Triton's compiler for compute capability 9.0, without a GPU."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch
from tests.kernels.recorded import Recorded, apart, at

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
FEW = (3, 70, 9)
"""A part of so few positions that each thread has one of a channel."""


def sums() -> list[dict[str, Any]]:
    """All that norms launch, as one rank of three."""
    from tilewise.comm.peer_sums import BLOCK, PeerSums
    from tilewise.distributed.norms.sums import NormSums

    Recorded.begin()
    buffers = [torch.zeros(PeerSums.nbytes(3, BLOCK), dtype=torch.uint8) for _ in range(3)]
    link: Any = None
    NormSums(link, PeerSums(buffers, 1, BLOCK, 60.0)).compile(torch.device("cpu"), [])
    return Recorded.compiled("norms")


@pytest.mark.slow
def test_sums_are_released_and_acquired_by_all_gpus() -> None:
    found = apart("tests.kernels.test_norm_sums_compile:sums")
    assert {one["kernel"] for one in found} == {"forward", "backward"}
    over_ranks = [one for one in found if one["constants"]["FIRST"] and one["constants"]["LAST"]]
    assert len(over_ranks) == 6
    for one in found:
        assert one["stack"] <= 8, "the frame of a division in float64"
        assert ("acquire" in one["ptx"]) == (one in over_ranks)
    for one in over_ranks:
        lines = one["ptx"].splitlines()
        (look,), (release,) = at(lines, "acquire"), at(lines, "release")
        assert all("sys" in lines[n] for n in (look, release))
        writes, reads, turns = at(lines, "st.global.b64"), at(lines, "ld.global.cg"), at(lines, "ld.volatile")
        # Own sums are written before they are told of; others' are waited for before the look that counts.
        assert writes
        assert max(n for n in writes if n < release) < release < min(turns)
        assert max(turns) < look
        assert reads, "what another GPU wrote is not read from L1"
        first = min(writes)
        assert any(first < n < release for n in at(lines, "bar.sync"))
        assert not any(min(turns) < n < max(turns) for n in at(lines, "bar.sync"))


def parts() -> list[dict[str, Any]]:
    """All that a part's norms launch, in either layout."""
    from tilewise.distributed.norms.parts import NormParts

    Recorded.begin()
    found = []
    cases = [((1, 64, 128, 256), torch.contiguous_format), ((1, 64, 128, 256), torch.channels_last)]
    for shape, order in [*cases, (FEW, torch.contiguous_format)]:
        x = torch.empty(shape).contiguous(memory_format=order)
        rows, one = torch.empty(3, shape[1]), NormParts()
        one.statistics(x)
        one.gradient_sums(x, x, rows)
        one.elements(x, rows, rows[0], rows[0])
        one.gradient(x, x, rows, rows, rows[0])
        found += Recorded.compiled(f"{shape} {order}")
    return found


@pytest.fixture(scope="module")
def of_parts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = apart("tests.kernels.test_norm_sums_compile:parts")
    names = ["statistics", "gradient_sums", "elements", "gradient"]
    assert [one["kernel"] for one in found] == names * 3
    return found


@pytest.mark.slow
def test_parts_are_read_in_wide_words(of_parts: list[dict[str, Any]]) -> None:
    for one in of_parts:
        if str(FEW) in one["of"]:
            continue
        assert one["stack"] <= 8, "the frame of a division in float64"
        assert "ld.global.v4.b32" in one["ptx"], (one["kernel"], one["of"])
        assert ("st.global.v4.b32" in one["ptx"]) == (one["kernel"] in ("elements", "gradient"))


def test_threads_that_hold_one_sum_hold_the_same_bits(of_parts: list[dict[str, Any]]) -> None:
    """What comes from another thread is added to a rounded number, so that both threads get the same."""
    exchanged = 0
    for one in of_parts:
        came = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", one["ptx"]))
        exchanged += len(came)
        for line in one["ptx"].splitlines():
            if re.search(r"\bfma\.", line):
                assert not came & set(re.findall(r"%\w+", line)), (one["kernel"], one["of"], line.strip())
    assert exchanged
