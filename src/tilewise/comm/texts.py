"""Texts that ranks leave for one another in the store that they started from."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tilewise.machine.recent import Recent

__all__ = ["MOST_TOLD", "Texts"]

MOST_TOLD = 128
"""Texts of one rank that stand in the store: programs whose sizes always change tell new ones for ever."""


class Texts:
    """The texts of ranks under names of their own. ``key`` tells them from those of others in the store."""

    def __init__(self, key: str) -> None:
        self._key, self._this_rank = key, dist.get_rank()
        self._told: Recent[str, None] = Recent(MOST_TOLD, self._remove)

    def __len__(self) -> int:
        """The number of texts of this rank that stand in the store."""
        return len(self._told)

    def tell(self, name: str, text: str) -> None:
        """Store ``text`` under ``name`` for the other ranks. The last :data:`MOST_TOLD` texts are kept."""
        if name not in self._told:
            distributed_c10d._get_default_store().set(self._key_of(self._this_rank, name), text)
        self._told[name] = None  # used just now

    def of(self, rank: int, name: str) -> str:
        """The text that ``rank`` (a global number) stored under ``name``."""
        return distributed_c10d._get_default_store().get(self._key_of(rank, name)).decode()

    def _key_of(self, rank: int, name: str) -> str:
        """The store's key of a text."""
        return f"{self._key}/{rank}/{name}"

    def _remove(self, names: list[str]) -> None:
        """Remove texts from the store."""
        store = distributed_c10d._get_default_store()
        for name in names:
            store.delete_key(self._key_of(self._this_rank, name))
