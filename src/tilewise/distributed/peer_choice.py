"""Whether halos go through other ranks' memory: checked bit by bit and timed against NCCL, by all ranks together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.comm.link import Link, Noted, Pending
from tilewise.comm.peers import CHUNK, Peers, Places
from tilewise.distributed.trials import Call, said, shared, timed, why_not_shared

__all__ = ["PeerChoice", "choose_peers"]

MOST = 64 << 20
"""Bytes of a mailbox at most: larger messages take so long that what starts them costs nothing."""
PARTS = (1, 4, 16)
"""Messages of the largest size divided by these are timed."""
GAIN = 0.95
"""Part of NCCL's time below which messages go through memory."""
IN_A_ROW = 4
ROUNDS = 3
WHAT = "a trial of exchanges"


@dataclass(frozen=True)
class PeerChoice:
    """Messages up to ``largest`` bytes go through memory, none with 0, and why not more.

    ``times`` has (bytes, milliseconds through memory, milliseconds by NCCL) of an exchange with all neighbours at once,
    the slowest rank of the link.
    """

    largest: int
    reason: str = ""
    times: tuple[tuple[int, float, float], ...] = ()


def choose_peers(link: Link, noted: Noted, device: torch.device, *, graphs: bool) -> PeerChoice:
    """Have ``link`` carry messages as large as were ``noted``, where that is right and faster.

    Every rank of the link calls it. With ``graphs`` replays of CUDA graphs are timed, else calls. What was chosen
    before is given up.
    """
    link.peers = None
    told = link.gather({"largest": sorted(noted.largest.items()), "near": noted.near_bytes})
    talks = [{index for index, _ in one["largest"]} for one in told]
    neighbours = tuple(tuple(o for o in range(link.size) if o in talks[i] or i in talks[o]) for i in range(link.size))
    capacity = max((nbytes for one in told for _, nbytes in one["largest"]), default=0)
    if reason := why_not_shared(link, device) or ("" if capacity else "nothing is exchanged"):
        return PeerChoice(0, reason)
    places = Places(neighbours, min(-(-capacity // CHUNK) * CHUNK, MOST))

    def trial(buffers: list[torch.Tensor], kept: object) -> _Trial:
        peers = Peers(places, buffers, link.index, link.timeout, kept)
        peers.near = sum(one["near"] for one in told) > 0
        peers.compile(torch.empty(2, 4, 128, dtype=torch.float32, device=device)[:, 3:])
        return _Trial(link, peers, device)

    made, failures = shared(link, device, places.nbytes, trial)
    if made is None:
        return PeerChoice(0, failures)
    faults = said(link, made.fault())
    return PeerChoice(0, faults) if faults else made.chosen(graphs)


class _Trial:
    """Exchanges with all neighbours at once, both ways."""

    def __init__(self, link: Link, peers: Peers, device: torch.device) -> None:
        self._link, self._peers, self._device = link, peers, device
        self._neighbours = peers.places.neighbours[link.index]

    def fault(self) -> str:
        """What is wrong with what arrives, compared with NCCL's bit by bit; empty for nothing."""
        generator = torch.Generator(self._device).manual_seed(self._link.index)
        for part in (*PARTS, self._peers.places.capacity // 20):
            rows = max(1, self._peers.places.capacity // part // 80)
            for _ in range(ROUNDS):
                whole = torch.empty(rows, 8, 6, dtype=torch.float32, device=self._device)
                whole.random_(-9, 9, generator=generator)
                for sent in (whole.view(-1), whole[:, 2:7, 1:5], whole.mT[:, :, 3:6]):
                    by_memory, by_nccl = (self._exchanged(sent, peers) for peers in (self._peers, None))
                    if not all(torch.equal(a, b) for a, b in zip(by_memory, by_nccl, strict=True)):
                        return f"messages of {sent.numel() * 4} bytes do not arrive as they were sent"
        return ""

    def _exchanged(self, sent: torch.Tensor, peers: Peers | None) -> list[torch.Tensor]:
        """What comes, and what it is when added to something."""
        self._link.peers = peers
        try:
            return [*self._begun(sent).wait(), *self._added(sent)]
        finally:
            self._link.peers = None

    def _begun(self, sent: torch.Tensor) -> Pending:
        others = self._neighbours
        return self._link.exchange(WHAT, [(o, sent) for o in others], [(o, sent.shape) for o in others], sent)

    def _added(self, sent: torch.Tensor) -> list[torch.Tensor]:
        targets = [torch.full_like(sent, n) for n in range(len(self._neighbours))]
        self._begun(sent).add_to(targets)
        return targets

    def chosen(self, graphs: bool) -> PeerChoice:
        """Time both, and have the link carry what goes faster through memory."""
        capacity, times = self._peers.places.capacity, []
        for nbytes in sorted({max(CHUNK, capacity // part) for part in PARTS}):
            # A message of few rows of a larger image, as halos are.
            whole = torch.zeros((nbytes // 512, 4, 128), dtype=torch.float32, device=self._device)
            sent = whole[:, 3:]
            memory_ms, nccl_ms = timed(
                self._link, self._device, [self._call(sent, self._peers), self._call(sent, None)], IN_A_ROW, graphs
            )
            times.append((sent.numel() * 4, memory_ms, nccl_ms))
        faster = [nbytes for nbytes, memory_ms, nccl_ms in times if memory_ms <= GAIN * nccl_ms]
        if not faster:
            return PeerChoice(0, "NCCL is as fast", tuple(times))
        self._peers.largest = capacity if faster[-1] == times[-1][0] else faster[-1]
        self._link.peers = self._peers
        return PeerChoice(self._peers.largest, "", tuple(times))

    def _call(self, sent: torch.Tensor, peers: Peers | None) -> Call:
        def exchange() -> None:
            self._link.peers = peers
            for _ in range(IN_A_ROW):
                self._begun(sent).wait()
            self._link.peers = None

        return exchange
