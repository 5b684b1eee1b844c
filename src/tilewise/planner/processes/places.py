"""The devices of one machine that measure for one planner, and how a process is held to one of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tilewise.kernels.building import workers as compilers
from tilewise.machine.device import cpu_count, device_name, torch_device

__all__ = ["Devices", "Place", "environment_of", "find_places", "identity", "own_place"]

Devices = str | Iterable[str | int | torch.device]
"""``"all"``, or a list of devices of one kind."""
CORES = 2
"""CPU cores for each process that measures: one launches kernels, which a plan's time includes; one does all else."""


@dataclass(frozen=True, slots=True)
class Place:
    """One device: its name in problems, its number in this process, and whether this process itself plans there."""

    name: str
    index: int | None = None
    own: bool = False

    @property
    def title(self) -> str:
        """The device as messages name it."""
        return self.name if self.index is None else f"cuda:{self.index}"


def find_places(devices: Devices) -> tuple[Place, ...]:
    """The places that ``devices`` name, this process's own first.

    ``"all"``: every GPU of the current one's model, as far as there are two cores for each; without a GPU the CPU. On
    a CPU given more than once, measurements at the same time disturb one another. Raises ``ValueError`` naming
    ``devices``.
    """
    if devices == "all":
        all_places = _all()
        return all_places[: max(1, cpu_count() // CORES)]
    if isinstance(devices, str):
        devices = devices.split(",")
    if not isinstance(devices, Iterable):
        raise ValueError(f"devices={devices!r:.80}: 'all' or a list of devices would do, such as ['cuda:0', 'cuda:1']")
    places = [_place(device) for device in devices]
    if not places:
        raise ValueError("devices=[]: 'all' or a list of devices would do")
    names = sorted({place.name for place in places})
    if len(names) > 1:
        raise ValueError(f"devices: {' and '.join(names)} share no plans; devices of one kind would do")
    numbers = [place.index for place in places if place.index is not None]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"devices: a GPU twice among {numbers} would disturb itself; each once would do")
    return _own_first(places)


def _all() -> tuple[Place, ...]:
    """All GPUs of the current one's model; the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        return (Place("cpu", own=True),)
    name = device_name("cuda")
    places = [Place(name, i) for i in range(torch.cuda.device_count()) if device_name(f"cuda:{i}") == name]
    return _own_first(places)


def _own_first(places: list[Place]) -> tuple[Place, ...]:
    """``places`` with the one on which this process plans first, and marked; of equal places it is the first."""
    own_index = torch_device(places[0].name).index
    own_at = next((i for i, place in enumerate(places) if place.index == own_index), None)
    if own_at is None:
        return tuple(places)
    return (Place(places[own_at].name, places[own_at].index, own=True), *places[:own_at], *places[own_at + 1 :])


def _place(device: str | int | torch.device) -> Place:
    """The place that ``device`` names. Raises ``ValueError``."""
    try:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        named = torch.device("meta")
    if named.type == "cpu":
        return Place("cpu")
    count = torch.cuda.device_count()
    index = named.index if named.index is not None else torch.cuda.current_device() if count else 0
    if named.type != "cuda" or index >= count:
        raise ValueError(f"devices has {device!r}: cpu, or the number of one of {count} GPUs here would do")
    return Place(device_name(torch.device("cuda", index)), index)


def identity(place: Place) -> str:
    """A name for the device of ``place`` that holds in every process of this machine; ``"cpu"`` for the CPU."""
    if place.index is None:
        return "cpu"
    return f"GPU-{torch.cuda.get_device_properties(place.index).uuid}"


def own_place(name: str) -> str:
    """The :func:`identity` of the device on which this process plans for the device called ``name``."""
    return identity(Place(name, torch_device(name).index))


def environment_of(place: Place, processes: int) -> dict[str, str]:
    """Environment variables that hold a process to ``place``, where ``processes`` share this machine's cores."""
    compiling = compilers.most_workers()
    share = {compilers.VARIABLE: str(max(1, compiling // processes) if compiling else 0)}
    if place.index is None:
        return share
    listed = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # A part of a GPU (MIG) has a name of its own, which is not the one that torch tells.
    part = place.index < len(listed) and listed[place.index].startswith("MIG-")
    visible = listed[place.index] if part else identity(place)
    return {**share, "CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": str(max(1, cpu_count() // processes))}
