"""Whether halos go through other ranks' memory, which all ranks check bit by bit and time against NCCL."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.comm.link import Link, Noted, Pending
from tilewise.comm.peers import CHUNK, Peers, Places
from tilewise.comm.trials import Call, make_on_symmetric_buffers, said, timed, why_not_symmetric

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
    """The messages that go through memory: those up to ``largest`` bytes, none where it is 0, for ``reason``.

    ``times`` has (bytes, milliseconds through memory, milliseconds by NCCL) of an exchange with all neighbours at once,
    as on the slowest rank of the link.
    """

    largest: int
    reason: str = ""
    times: tuple[tuple[int, float, float], ...] = ()


def choose_peers(link: Link, noted: Noted, device: torch.device, *, graphs: bool) -> PeerChoice:
    """Let ``link`` carry messages of the sizes in ``noted`` through memory, where that is right and faster.

    Every rank of the link calls this. With ``graphs`` replays of CUDA graphs are timed, else calls. An earlier choice
    is dropped.
    """
    link.peers = None
    notes = link.gather({"largest": sorted(noted.largest.items()), "near": noted.near_bytes})
    talks = [{index for index, _ in note["largest"]} for note in notes]
    neighbours = tuple(tuple(o for o in range(link.size) if o in talks[i] or i in talks[o]) for i in range(link.size))
    capacity = max((nbytes for note in notes for _, nbytes in note["largest"]), default=0)
    if reason := why_not_symmetric(link, device) or ("" if capacity else "nothing is exchanged"):
        return PeerChoice(0, reason)
    places = Places(neighbours, min(-(-capacity // CHUNK) * CHUNK, MOST))

    def trial(buffers: list[torch.Tensor], kept: object) -> _Trial:
        """A trial over the ranks' ``buffers``."""
        peers = Peers(places, buffers, link.index, link.timeout, kept)
        peers.near = sum(note["near"] for note in notes) > 0
        peers.compile(torch.empty(2, 4, 128, dtype=torch.float32, device=device)[:, 3:])
        return _Trial(link, peers, device)

    trial_made, failures = make_on_symmetric_buffers(link, device, places.nbytes, trial)
    if trial_made is None:
        return PeerChoice(0, failures)
    faults = said(link, trial_made.fault())
    return PeerChoice(0, faults) if faults else trial_made.chosen(graphs)


class _Trial:
    """Exchanges with all neighbours at once, through memory and by NCCL."""

    def __init__(self, link: Link, peers: Peers, device: torch.device) -> None:
        self._link, self._peers, self._device = link, peers, device
        self._neighbours = peers.places.neighbours[link.index]

    def fault(self) -> str:
        """How received messages differ from those by NCCL, compared bit by bit; empty where they do not."""
        generator = torch.Generator(self._device).manual_seed(self._link.index)
        for part in (*PARTS, self._peers.places.capacity // 20):
            rows = max(1, self._peers.places.capacity // part // 80)
            for _ in range(ROUNDS):
                image = torch.empty(rows, 8, 6, dtype=torch.float32, device=self._device)
                image.random_(-9, 9, generator=generator)
                for sent in (image.view(-1), image[:, 2:7, 1:5], image.mT[:, :, 3:6]):
                    by_memory, by_nccl = (self._exchanged(sent, peers) for peers in (self._peers, None))
                    if not all(torch.equal(a, b) for a, b in zip(by_memory, by_nccl, strict=True)):
                        return f"messages of {sent.numel() * 4} bytes do not arrive as they were sent"
        return ""

    def _exchanged(self, sent: torch.Tensor, peers: Peers | None) -> list[torch.Tensor]:
        """The received tensors, and what received tensors come to when added to others."""
        self._link.peers = peers
        try:
            return [*self._begun(sent).wait(), *self._added(sent)]
        finally:
            self._link.peers = None

    def _begun(self, sent: torch.Tensor) -> Pending:
        """Begin to send ``sent`` to every neighbour and to receive as much."""
        neighbours = self._neighbours
        return self._link.exchange(WHAT, [(o, sent) for o in neighbours], [(o, sent.shape) for o in neighbours], sent)

    def _added(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """The sums of received tensors and targets."""
        targets = [torch.full_like(sent, n) for n in range(len(self._neighbours))]
        self._begun(sent).add_to(targets)
        return targets

    def chosen(self, graphs: bool) -> PeerChoice:
        """Time both ways, and let the link carry those messages through memory that are faster so."""
        capacity, times = self._peers.places.capacity, []
        for nbytes in sorted({max(CHUNK, capacity // part) for part in PARTS}):
            # A message of few rows of a larger image, as halos are.
            image = torch.zeros((nbytes // 512, 4, 128), dtype=torch.float32, device=self._device)
            sent = image[:, 3:]
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
        """A call of several exchanges in a row, through the memory of ``peers`` or, with ``None``, by NCCL."""

        def exchange() -> None:
            """Exchange several times in a row."""
            self._link.peers = peers
            for _ in range(IN_A_ROW):
                self._begun(sent).wait()
            self._link.peers = None

        return exchange
