"""Comparison of what ranks are about to compute, while they begin: by a digest, and by text only where it differs."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from tilewise.comm.agreement import RankMismatch, difference
from tilewise.comm.link import Link

__all__ = ["Comparison"]


class Comparison:
    """A comparison, under way on the host, of the ``text`` of every rank of ``link``. ``what`` names it in the error.

    Every rank makes one at the same point of the program, and calls :meth:`finish`.
    """

    def __init__(self, link: Link, text: str, what: str) -> None:
        self._link, self._what, self._text = link, what, text
        digest = hashlib.sha256(text.encode()).digest()
        link.texts.tell(digest.hex(), text)
        self._own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        self._all = [torch.empty_like(self._own) for _ in link.ranks]
        try:
            self._work = dist.all_gather(self._all, self._own, link.control, async_op=True)
        except RuntimeError as error:
            raise link.lost(what, link.others, error) from error

    def finish(self) -> None:
        """Raise :class:`RankMismatch` where another rank's text differs, naming the first difference."""
        link = self._link
        assert self._work is not None
        try:
            self._work.wait()
        except RuntimeError as error:
            raise link.lost(self._what, link.others, error) from error
        in_group = sorted(link.ranks)
        for rank, digest in zip(in_group, self._all, strict=True):
            if not torch.equal(digest, self._own):
                words = link.texts.of(rank, digest.numpy().tobytes().hex())
                this_rank = link.ranks[link.index]
                raise RankMismatch(difference(self._what, self._text.splitlines(), words.splitlines(), this_rank, rank))
