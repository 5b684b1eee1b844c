"""Links measured between real ranks, and read from text."""

from __future__ import annotations

import json
import os
import signal
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tilewise.distributed.mesh.link_speed import measure_link, parse_bandwidth, parse_latency

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def rank_of(rank: int, ranks: int, folder: Path) -> None:
    """One rank: what it measured, in a file of its own."""
    signal.alarm(60)  # a hang is a failure
    torch.set_num_threads(1)  # the parent's threads are not in a fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    found = measure_link(nbytes=1 << 22, repeats=3)
    pair = dist.new_group([0, 1])
    two = measure_link(pair, nbytes=1 << 22, repeats=3) if rank < 2 else found
    refused = ""
    alone = [dist.new_group([other]) for other in range(ranks)][rank]
    try:
        measure_link(alone)
    except ValueError as error:
        refused = str(error)
    (folder / f"{rank}.json").write_text(
        json.dumps([found.bandwidth, found.latency, two.bandwidth, two.latency, refused]), "utf-8"
    )
    dist.destroy_process_group()


def test_all_ranks_measure_one_link(tmp_path: Path) -> None:
    ranks, children = 3, []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                rank_of(rank, ranks, tmp_path)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * ranks
    found = [json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(ranks)]
    assert found[0][:2] == found[1][:2] == found[2][:2]
    assert found[0][2:4] == found[1][2:4]
    for bandwidth, latency, *_, refused in found:
        assert 1e6 < bandwidth < 1e12
        assert 0 < latency < 1
        assert refused == "group has 1 rank: a link is between two or more"


def test_rates_and_times_are_read() -> None:
    assert parse_bandwidth("300GB/s") == 300e9
    assert parse_bandwidth(" 1 GiB/s ") == 2**30
    assert parse_latency("10us") == pytest.approx(1e-5)
    assert parse_latency("2 ms") == pytest.approx(2e-3)
    assert parse_latency("1.5s") == 1.5
    for text in ("fast", "0GB/s", "-1GB/s", ""):
        with pytest.raises(ValueError, match="--link"):
            parse_bandwidth(text, "--link-bandwidth")
    for text in ("10", "us", "-1us", "nan s", ""):
        with pytest.raises(ValueError, match="--link"):
            parse_latency(text, "--link-latency")
