"""Devices by their number, for plans that share work out: of two equal GPUs each has a place of its own.

A place is text. ``"here"`` is the device where a layer's tensors lie, ``"cpu"`` the CPU, and ``"cuda:1=NVIDIA H100 80GB
HBM3"`` a GPU by its number and its name. The name makes a plan useless on a machine that has another GPU in that place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.machine.device import device_name

__all__ = [
    "HERE",
    "check_present",
    "join_places",
    "name_of_place",
    "other_places",
    "place_of",
    "place_on_this_machine",
    "split_places",
]

HERE = "here"
"""The place of a layer's own tensors."""
BETWEEN = "; "


def place_of(device: torch.device) -> str:
    """The place of ``device``.

    >>> place_of(torch.device("cpu"))
    'cpu'
    """
    if device.type == "cpu":
        return "cpu"
    index = torch.cuda.current_device() if device.index is None else device.index
    name = device_name(torch.device(device.type, index)).partition(":")[2]
    return f"{device.type}:{index}={name}"


def name_of_place(place: str) -> str:
    """The device's name as problems have it: ``"cpu"`` or ``"cuda:"`` and the GPU's name.

    Raises ``ValueError`` for text that is no place of a device of its own.

    >>> name_of_place("cuda:1=NVIDIA H100 80GB HBM3")
    'cuda:NVIDIA H100 80GB HBM3'
    """
    number, separator, name = place.partition("=")
    if place == "cpu":
        return place
    index = number.removeprefix("cuda:")
    if not separator or not name or not number.startswith("cuda:") or not (index.isascii() and index.isdecimal()):
        raise ValueError(f"place={place[:80]!r}: cpu, or a GPU such as 'cuda:1=NVIDIA H100 80GB HBM3', would do")
    return f"cuda:{name}"


def place_on_this_machine(place: str) -> torch.device:
    """The device at ``place``. Raises ``ValueError`` where this machine has none there, or one of another name.

    >>> place_on_this_machine("cpu")
    device(type='cpu')
    """
    name = name_of_place(place)
    if name == "cpu":
        return torch.device("cpu")
    index = int(place.partition("=")[0].removeprefix("cuda:")[:9])
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"place={place!r}: this machine has {count} GPUs")
    device = torch.device("cuda", index)
    if device_name(device) != name:
        raise ValueError(f"place={place!r}: this machine has {device_name(device).partition(':')[2]} there")
    return device


def other_places(names: Sequence[str], home: torch.device) -> tuple[str, ...]:
    """The places of the devices that torch calls by ``names`` (``cpu``, ``cuda:1``), without ``home``, in order.

    Raises ``ValueError`` naming ``share_with`` for a GPU that this machine has not.

    >>> other_places(("cpu",), torch.device("cpu"))
    ()
    """
    check_present(names)
    return tuple(place_of(device) for device in map(torch.device, names) if device != home)


def check_present(names: Sequence[str]) -> None:
    """Raise ``ValueError`` naming ``share_with`` for a GPU in ``names``, such as ``cuda:1``, that this machine has not.

    >>> check_present(("cpu",))
    """
    for device in map(torch.device, names):
        if device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
            raise ValueError(f"share_with: {str(device)!r} is not here, this machine has {count} GPUs; cpu would do")


def join_places(places: list[str] | tuple[str, ...]) -> str:
    """Several places as one text."""
    return BETWEEN.join(places)


def split_places(text: str) -> tuple[str, ...]:
    """The places in the text that :func:`join_places` made."""
    return tuple(text.split(BETWEEN))
