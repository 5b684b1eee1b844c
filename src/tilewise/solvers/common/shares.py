"""Shares of a batch for several devices: which device takes which parts, with how many threads of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.machine.places import HERE, join_places, name_of_place, split_places
from tilewise.plan import Config

__all__ = ["NAMES", "Shares", "parts_of_size", "shares_by"]

NAMES = ("devices", "sizes", "owners", "copiers")
"""What a config of shares says."""
MOST_COPIERS = 1024
"""Most host threads that copy for one GPU."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of a batch that each of ``places`` computes: ``parts[i]`` has the sizes of those of ``places[i]``.

    A place is ``here``, where the tensors lie, or another device (:mod:`tilewise.machine.places`). ``here`` has one
    part, as nothing is copied there; others may have several, which follow one another. Where the tensors lie on the
    host, ``copiers`` of its threads copy for each GPU.
    """

    places: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    copiers: int = 1

    @classmethod
    def of(cls, config: Config) -> Shares:
        """What ``config`` says, whoever wrote it. Raises ``ValueError`` naming what is wrong."""
        if missing := [name for name in NAMES if name not in config]:
            raise ValueError(f"config={str(config)[:80]!r}: {', '.join(NAMES)} would do, {missing[0]} is missing")
        places, sizes, owners, copiers = (config[name] for name in NAMES)
        if not isinstance(places, str) or type(copiers) is not int or not 1 <= copiers <= MOST_COPIERS:
            raise ValueError(f"devices={places!r:.80}, copiers={copiers!r:.20}: text and a small whole number would do")
        if not isinstance(sizes, tuple) or not isinstance(owners, tuple) or len(sizes) != len(owners):
            raise ValueError(f"sizes={sizes!r:.80}, owners={owners!r:.80}: tuples of one length would do")
        names = split_places(places)
        if list(owners) != sorted(owners) or set(owners) != set(range(len(names))):
            raise ValueError(f"owners={owners!r:.80}: 0 to {len(names) - 1} in order, each at least once, would do")
        if len(set(names)) < len(names):
            raise ValueError(f"devices={places!r:.200}: each device once would do")
        for name in names:
            if name != HERE:
                name_of_place(name)
        parts = tuple(
            tuple(size for size, owner in zip(sizes, owners, strict=True) if owner == i) for i in range(len(names))
        )
        if HERE in names and len(parts[names.index(HERE)]) != 1:
            raise ValueError(f"owners={owners!r:.80}: one part {HERE} would do")
        return cls(names, parts, copiers)

    def config(self) -> Config:
        """The config that :meth:`of` reads. Devices without images are left out."""
        taking = [(place, sizes) for place, sizes in zip(self.places, self.parts, strict=True) if sizes]
        return Config(
            devices=join_places([place for place, _ in taking]),
            sizes=tuple(size for _, sizes in taking for size in sizes),
            owners=tuple(index for index, (_, sizes) in enumerate(taking) for _ in sizes),
            copiers=self.copiers,
        )

    @property
    def images(self) -> tuple[int, ...]:
        """How many images each device computes."""
        return tuple(map(sum, self.parts))

    def threads(self, device_type: str, threads: int) -> tuple[int, ...]:
        """The threads of the host that each device gets out of ``threads``, where ``here`` is of ``device_type``.

        A CPU computes with what GPUs leave. Where the tensors lie on a GPU nothing is copied by threads, so that a CPU
        has them all.
        """
        on_cpu = [place == "cpu" or (place == HERE and device_type == "cpu") for place in self.places]
        copying = self.copiers if device_type == "cpu" else 1
        if all(not each for each in on_cpu):
            return (max(1, threads // len(self.places)),) * len(self.places)
        taken = copying * on_cpu.count(False) if device_type == "cpu" else 0
        each = max(1, (threads - taken) // on_cpu.count(True))
        return tuple(each if cpu else copying for cpu in on_cpu)


def parts_of_size(images: int, size: int) -> tuple[int, ...]:
    """The sizes of parts of ``size`` images, and a rest, that make up ``images``: the rest comes last.

    >>> parts_of_size(20, 8)
    (8, 8, 4)
    """
    full, rest = divmod(images, size)
    return (size,) * full + ((rest,) if rest else ())


def shares_by(weights: Sequence[float], whole: int) -> tuple[int, ...]:
    """``whole`` images divided in proportion to ``weights``, to whole images: what is lost by rounding goes to those
    that lost most.

    >>> shares_by((1.0, 2.0), 256)
    (85, 171)
    """
    total = sum(weights)
    exact = [whole * weight / total for weight in weights]
    images = [int(value) for value in exact]
    by_loss = sorted(range(len(weights)), key=lambda i: images[i] - exact[i])
    for i in by_loss[: whole - sum(images)]:
        images[i] += 1
    return tuple(images)
