"""What a ``solverstate`` does not hold and a run needs to go on with the same bits: random states and places in data.

A sidecar lies beside a ``solverstate`` under the same name with ``.resume`` after it. It is one line that says what it
is, one line of JSON, and raw bytes whose names, sizes and checksums are in the JSON. Nothing in it is run.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["SUFFIX", "checksum", "put_random_states", "random_states", "read", "write"]

SUFFIX = ".resume"
HEAD = b"tilewise caffe resume 1\n"
MOST_TEXT = 4 << 20
"""Most bytes of the line of JSON."""
MOST_BYTES = 1 << 20
"""Most bytes of one raw piece."""
WORDS = 624
"""32-bit words in the state of the generators of Python and NumPy."""


def write(path: Path, told: dict[str, Any], pieces: dict[str, bytes]) -> None:
    """Write a sidecar. Raises ``OSError``."""
    sizes = [[name, len(piece), zlib.crc32(piece)] for name, piece in pieces.items()]
    text = json.dumps({**told, "pieces": sizes}, allow_nan=True).encode()
    path.write_bytes(b"".join([HEAD, text, b"\n", *pieces.values()]))


def read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What was told, and the pieces by name. Raises ``OSError``, and ``CaffeError`` for what is no sidecar."""
    with path.open("rb") as file:
        if file.read(len(HEAD)) != HEAD:
            raise CaffeError(
                f"{path}: is not what tilewise writes beside a solverstate; without it Caffe's way would do"
            )
        text = file.readline(MOST_TEXT)
        try:
            told = json.loads(text)
            sizes = [(str(name), int(size), int(check)) for name, size, check in told["pieces"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CaffeError(f"{path}: its second line is not the JSON of a sidecar: {error}") from error
        pieces = {}
        for name, size, check in sizes:
            if not 0 <= size <= MOST_BYTES:
                raise CaffeError(f"{path}: {name} says that it has {size} bytes; at most {MOST_BYTES} would do")
            pieces[name] = file.read(size)
            if len(pieces[name]) != size or zlib.crc32(pieces[name]) != check:
                raise CaffeError(f"{path}: {name} is damaged; another snapshot would do")
        if file.read(1):
            raise CaffeError(f"{path}: has more bytes than it says; another snapshot would do")
    return told, pieces


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def random_states() -> tuple[dict[str, Any], dict[str, bytes]]:
    """The states of the process's random numbers: torch's as bytes; Python's and NumPy's as numbers."""
    pieces = {"torch.cpu": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            pieces[f"torch.cuda.{index}"] = torch.cuda.get_rng_state(index).numpy().tobytes()
    legacy: Any = np.random.get_state(legacy=False)
    numpy = {**legacy, "state": {"key": legacy["state"]["key"].tolist(), "pos": int(legacy["state"]["pos"])}}
    return {"python": random.getstate(), "numpy": numpy}, pieces


def put_random_states(told: dict[str, Any], pieces: dict[str, bytes], path: Path) -> None:
    """Go on with states that :func:`random_states` gave. Raises ``CaffeError`` for what is none."""
    try:
        version, words, gauss = told["python"]
        random.setstate((version, tuple(words), gauss))
        state = told["numpy"]
        key = np.asarray(state["state"]["key"], dtype=np.uint32)
        if key.shape != (WORDS,):
            raise ValueError(f"NumPy's state has {key.size} words")
        np.random.set_state({**state, "state": {"key": key, "pos": int(state["state"]["pos"])}})
        for name, piece in pieces.items():
            library, _, place = name.partition(".")
            if library != "torch":
                continue
            values = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            if place == "cpu":
                torch.set_rng_state(values)
            elif torch.cuda.is_available() and int(place.removeprefix("cuda.")) < torch.cuda.device_count():
                torch.cuda.set_rng_state(values, int(place.removeprefix("cuda.")))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CaffeError(f"{path}: a random state is not one: {error}") from error
