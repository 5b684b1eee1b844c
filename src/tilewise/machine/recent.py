"""A mapping of bounded size that keeps what was used last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

__all__ = ["Recent", "trim"]

K = TypeVar("K")
V = TypeVar("V")
_ABSENT: Any = object()


class Recent(MutableMapping[K, V]):
    """A mapping that holds at most ``most`` entries, among them the ``most // 2`` used last.

    Entries lie in two halves. What is set or looked up goes to the young half. When that is full, the entries of the
    old half are dropped and the young half becomes the old one. So a use costs one look-up in a plain dictionary, and
    nothing is dropped until a half is full. ``dropped(keys)`` is called with the keys that were dropped for lack of
    room. Threads may share a table: at worst a thread misses an entry that another is moving, as if it had been
    dropped.
    """

    __slots__ = ("_dropped", "_half", "_old", "_young")

    def __init__(self, most: int, dropped: Callable[[list[K]], object] | None = None) -> None:
        self._half, self._dropped = max(1, most // 2), dropped
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K, default: Any = None) -> V | None:  # type: ignore[override]
        """The value under ``key``, or ``default``. It counts as a use."""
        value = self._young.get(key, _ABSENT)
        if value is not _ABSENT:
            return value  # type: ignore[no-any-return]
        value = self._old.pop(key, _ABSENT)
        if value is _ABSENT:
            return default  # type: ignore[no-any-return]
        self[key] = value
        return value  # type: ignore[no-any-return]

    def __getitem__(self, key: K) -> V:
        value: Any = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value  # type: ignore[no-any-return]

    def __setitem__(self, key: K, value: V) -> None:
        self._old.pop(key, None)
        self._young[key] = value
        if len(self._young) >= self._half:
            # In this order, so that another thread finds an entry in one of them.
            gone, self._old = self._old, self._young
            self._young = {}
            if gone and self._dropped is not None:
                self._dropped(list(gone))

    def __delitem__(self, key: K) -> None:
        if self._young.pop(key, _ABSENT) is _ABSENT and self._old.pop(key, _ABSENT) is _ABSENT:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self._young or key in self._old

    def __iter__(self) -> Iterator[K]:
        return iter([*self._old, *self._young])

    def __len__(self) -> int:
        return len(self._old) + len(self._young)

    def values(self) -> Any:
        """A list of all values; reading it does not count as use."""
        return [*self._old.values(), *self._young.values()]

    def items(self) -> Any:
        """A list of all items; reading it does not count as use."""
        return [*self._old.items(), *self._young.items()]

    def clear(self) -> None:
        """Drop all entries, and tell nobody of them."""
        self._young, self._old = {}, {}


def trim(table: dict[K, V], most: int) -> None:
    """Make room for one more entry among ``most`` of a plain dictionary, by dropping those that were set first."""
    while len(table) >= most:
        try:
            table.pop(next(iter(table)), None)
        except (StopIteration, RuntimeError):  # another thread is at it
            return
