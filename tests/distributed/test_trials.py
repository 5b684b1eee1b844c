"""What ranks try together."""

from __future__ import annotations

import torch
from tests.distributed.ranks import parallel, run
from torch import nn

from tilewise.comm.trials import everywhere, make_on_symmetric_buffers, said, why_not_symmetric


def failing_on_one() -> list[object]:
    link = parallel(nn.Identity(), (2,), ("h",)).space.link

    def make() -> int:
        if link.index == 1:
            raise OSError("no room\nand more")
        return 7

    return [everywhere(link, make), everywhere(link, lambda: 7), said(link, ""), said(link, f"{link.index} has it")]


def test_what_one_rank_cannot_make_no_rank_has() -> None:
    """Else some would go another way than the others."""
    for found in run(2, failing_on_one):
        assert found == [(None, "rank 1: raised OSError: no room"), (7, ""), "", "rank 0: 0 has it; rank 1: 1 has it"]


def without_memory() -> list[object]:
    link, device = parallel(nn.Identity(), (2,), ("h",)).space.link, torch.device("cpu")
    return [
        why_not_symmetric(link, device),
        *make_on_symmetric_buffers(link, device, 64, lambda buffers, kept: buffers),
    ]


def test_memory_that_is_not_there() -> None:
    for reason, made, failure in run(2, without_memory):
        assert reason == "on cpu"
        assert made is None
        assert "rank 0: raised" in failure
        assert "rank 1: raised" in failure
