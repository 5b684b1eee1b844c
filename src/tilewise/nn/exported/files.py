"""Files of exported models: one in the safetensors format, whose tensors are the constants and whose header has JSON.

A file holds numbers and names and no code: nothing is unpickled, and nothing is run before it was checked.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.machine.files import replacing
from tilewise.machine.workspaces import aligned
from tilewise.nn.exported.values import ExportError

__all__ = ["SCHEMA", "read", "write"]

SCHEMA, VERSION = "tilewise/exported", 1
MOST_BYTES = 64 * 2**20
"""Longest document that is read."""
INSTALL = "pip install safetensors"
CPU = torch.device("cpu")


def write(path: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Write a document's fields and its tensors, whole or not at all. Returns the bytes of the file.

    Raises ``OSError``, and :class:`ExportError` where safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ExportError(f"exporting takes safetensors: {INSTALL}") from error
    document = {"schema": SCHEMA, "version": VERSION, **fields, "digest": _digest(tensors)}
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={"tilewise": json.dumps(document, allow_nan=False)})
    return path.stat().st_size


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file's document and tensors, each in memory of its own.

    Raises ``OSError``, and :class:`ExportError` for what is no exported model or was changed since.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ExportError(f"loading an exported model takes safetensors: {INSTALL}") from error
    if not path.is_file():
        raise ExportError(f"{path}: no such file; one that tilewise.export wrote would do")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            document = _document((file.metadata() or {}).get("tilewise"), path)
            tensors = {name: _moved(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ExportError(f"{path}: not a file that tilewise.export wrote: {error}") from error
    if document.get("digest") != _digest(tensors):
        raise ExportError(f"{path}: its tensors are not those that were exported; export the model again")
    return document, tensors


def _document(text: str | None, path: Path) -> dict[str, Any]:
    """The document of a file."""
    if text is None or len(text) > MOST_BYTES:
        raise ExportError(f"{path}: holds tensors and no exported model; one that tilewise.export wrote would do")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ExportError(f"{path}: its header is no {SCHEMA}; a file that tilewise.export wrote would do")
    if document.get("version") != VERSION:
        raise ExportError(f"{path}: version={document.get('version')!r:.80}: this tilewise reads version {VERSION}")
    return document


def _moved(tensor: Tensor) -> Tensor:
    """A copy of a file's tensor in memory that begins where kernels expect it."""
    memory = aligned(max(1, tensor.numel() * tensor.element_size()), CPU)
    moved = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return moved.view(tensor.shape).copy_(tensor)


def _digest(tensors: dict[str, Tensor]) -> str:
    """The SHA-256 of all tensors in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
