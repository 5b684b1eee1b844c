"""The programs of the manual's page on several devices, by 2 and 4 ranks: as they stand, with a planner for tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run
from tests.nn.dividing import Dividing
from tests.sampling import EVERY

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(port: int, folder: str) -> dict[str, float]:
    """All blocks of ranks in one namespace, from where torchrun would start them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    os.chdir(folder)
    text = PAGE.read_text("utf-8")
    names: dict[str, object] = {"__name__": "__main__", "planner": Dividing()}
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(1))
        code = (
            block.group(1)
            .replace("measure_link()", "measure_link(nbytes=1 << 16)")
            .replace('workspace="256MiB")', 'workspace="256MiB", planner=planner)')
        )
        exec(compile("\n" * before + code, str(PAGE), "exec"), names)
    return {"loss": names["loss"].item(), "bandwidth": names["link"].bandwidth}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.skipif(not EVERY, reason="as by 2: make test-all runs it"))]
)
def test_blocks_run(ranks: int, tmp_path: Path) -> None:
    # As torchrun does: it serves the store itself. A port that rank 0 were to listen at could be taken until then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run(ranks, program, store.port, str(tmp_path), timeout=250)
    assert all(one == found[0] for one in found)
    assert found[0]["bandwidth"] > 0
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved["first.0.weight"].shape == (8, 3, 3, 3)
