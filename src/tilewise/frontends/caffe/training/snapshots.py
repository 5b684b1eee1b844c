"""Snapshots of a training: weights, the solver's histories, and a sidecar with what a run needs for the same bits.

All files of a snapshot are written in a folder beside it, brought to the disk, and then moved to their names one by
one. So a file of the name is whole, and an earlier snapshot is as it was, also where the disk is full or the process is
killed. The ``solverstate`` is moved last: where it is there, what it names is too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.training import sidecar

__all__ = ["Resumed", "Snapshot", "check_writable", "load", "names", "save"]

Arrays = list[npt.NDArray[Any]]
OVERHEAD = 4096
"""Bytes that a file of either format needs beside an array, generously."""
SUFFIXES = {"BINARYPROTO": (".caffemodel", ".solverstate"), "HDF5": (".caffemodel.h5", ".solverstate.h5")}
"""The endings of weights and solver's state by ``snapshot_format``."""


@dataclass(frozen=True)
class Snapshot:
    """All that is kept: ``net`` has the layers, which stand beside the weights; ``told`` and ``pieces`` go beside."""

    iteration: int
    current_step: int
    weights: dict[str, Arrays]
    history: Arrays
    net: Any = None
    told: dict[str, Any] = field(default_factory=dict)
    pieces: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Resumed:
    """What a ``solverstate`` and its sidecar give back; ``told`` is ``None`` where there is no sidecar."""

    iteration: int
    current_step: int
    learned_net: str
    history: Arrays
    told: dict[str, Any] | None
    pieces: dict[str, bytes]
    path: Path


def names(prefix: str, iteration: int, kind: str) -> tuple[Path, Path]:
    """The files of weights and of the solver's state: ``PREFIX_iter_100.caffemodel`` and ``.solverstate``."""
    weights, state = SUFFIXES[kind]
    stem = f"{prefix}_iter_{iteration}"
    return Path(stem + weights), Path(stem + state)


def check_writable(prefix: str) -> None:
    """Raise ``CaffeError`` where no snapshot could be written, before anything is computed."""
    folder = Path(prefix).absolute().parent
    try:
        with _beside(folder):
            _remove_leftovers(folder)
    except OSError as error:
        text = f"snapshot_prefix: {prefix}: {folder} cannot be written ({error.strerror})"
        raise CaffeError(f"{text}; a folder that is there and can be written would do") from error


def _beside(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder in ``folder`` for a while, whose name says which process made it."""
    return tempfile.TemporaryDirectory(prefix=f"{_mark()}{os.getpid()}-", dir=folder)


def _mark() -> str:
    """What names of such folders begin with on this machine."""
    return f".snapshot-{os.uname().nodename}-"


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes of this machine left here that were killed while they wrote a snapshot."""
    for path in folder.iterdir():
        process = path.name.removeprefix(_mark()).partition("-")[0]
        if path.name.startswith(_mark()) and process.isascii() and process.isdigit() and not _runs(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def save(snapshot: Snapshot, prefix: str, kind: str) -> tuple[Path, Path]:
    """Write a snapshot and return the paths of weights and state. Raises ``CaffeError`` where it cannot be written."""
    from tilewise.frontends.caffe.files import SavedSolver, write_solverstate, write_weights

    weights, state = names(prefix, snapshot.iteration, kind)
    resume = state.with_name(state.name + sidecar.SUFFIX)
    try:
        with _beside(weights.absolute().parent) as place:
            made = [Path(place) / path.name for path in (weights, resume, state)]
            _reserve(Path(place) / "room", snapshot)
            solver = SavedSolver(snapshot.iteration, str(weights), snapshot.current_step, snapshot.history)
            _written(lambda: write_weights(made[0], snapshot.weights, snapshot.net))
            _written(lambda: write_solverstate(made[2], solver))
            seal = {"iteration": snapshot.iteration, "solverstate": sidecar.checksum(made[2])}
            sidecar.write(made[1], {**snapshot.told, **seal}, snapshot.pieces)
            for path in made:
                _bring_to_disk(path)
            for path, target in zip(made, (weights, resume, state), strict=True):
                os.replace(path, target)
            _bring_to_disk(weights.absolute().parent)
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"snapshot {state} cannot be written: {reason}"
        raise CaffeError(f"{text}; earlier snapshots are as they were; room in that folder would do") from error
    return weights, state


def _reserve(path: Path, snapshot: Snapshot) -> None:
    """Raise ``OSError`` where there is no room for a snapshot, before HDF5's library meets a full disk.

    It cannot be relied on after that: closing a file that could not be written leaves it in a state in which it crashes
    later.
    """
    arrays = [*snapshot.history, *(array for arrays in snapshot.weights.values() for array in arrays)]
    size = sum(array.nbytes for array in arrays) + OVERHEAD * (1 + len(arrays))
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    path.unlink()


def _written(write: Callable[[], object]) -> None:
    """Call what writes a file; HDF5's library has errors of its own for a disk that is full."""
    try:
        write()
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _bring_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: Path) -> Resumed:
    """Read a ``solverstate`` and the sidecar beside it.

    A sidecar that belongs to another ``solverstate`` counts as none. Raises ``CaffeError`` for what cannot be read.
    """
    from tilewise.frontends.caffe.files import read_solverstate

    found = read_solverstate(path)
    told, pieces = _sidecar(path, found.iter)
    history = [np.asarray(each) for each in found.history]
    return Resumed(found.iter, found.current_step, found.learned_net, history, told, pieces, path)


def _sidecar(path: Path, iteration: int) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """The sidecar's content, or ``None``."""
    resume = path.with_name(path.name + sidecar.SUFFIX)
    try:
        told, pieces = sidecar.read(resume)
        if told.get("iteration") != iteration or told.get("solverstate") != sidecar.checksum(path):
            return None, {}
    except FileNotFoundError:
        return None, {}
    except OSError as error:
        raise CaffeError(f"{resume} cannot be read: {error.strerror}") from error
    return told, pieces
