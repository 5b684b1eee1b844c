"""Weights of a Caffe network as torch's ``state_dict``, and back."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.layers.base import Layer
from tilewise.frontends.caffe.layers.normalization import BatchNorm
from tilewise.frontends.caffe.net import LoadReport, Net
from tilewise.machine.files import replacing

__all__ = ["load_torch_state", "read_torch_state", "torch_state", "write_torch_state"]

State = dict[str, Tensor]


def torch_state(net: Net) -> State:
    """The weights of ``net`` by the names that its exported module has: ``conv1.weight``, ``conv1.bias``.

    Statistics of BatchNorm are ``running_mean`` and ``running_var``, already divided by Caffe's third blob. The tensors
    are fp32 copies on the CPU; those of layers that share a blob share one.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> torch_state(load(TEXT))["score.weight"].shape
    torch.Size([4, 192])
    """
    found: State = {}
    copies: dict[int, Tensor] = {}
    for module, layer in _layers(net).items():
        if isinstance(layer, BatchNorm):
            mean, variance, factor = (blob.detach().to("cpu", torch.float32) for blob in layer.blobs)
            share = torch.where(factor == 0, torch.zeros_like(factor), 1 / factor)
            found[f"{module}.running_mean"], found[f"{module}.running_var"] = mean * share, variance * share
            found[f"{module}.num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device="cpu")
            continue
        for name, blob in zip(layer.blob_names, layer.blobs, strict=True):
            if id(blob) not in copies:
                copy = blob.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
                copies[id(blob)] = copy.reshape(-1) if layer.caffe_type == "PReLU" else copy
            found[f"{module}.{name.rpartition('.')[2]}"] = copies[id(blob)]
    return found


def load_torch_state(net: Net, state: Mapping[str, Any]) -> LoadReport:
    """Copy a ``state_dict`` into a network: that of an exported module, or of a network that ``caffe.load`` made.

    Layers that only one side has stay as they are, and the report names them. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` for what is no real tensor, for a layer of which only some
    blobs are there, and for shapes that differ, before anything is copied.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> net = load(TEXT)
    >>> load_torch_state(net, torch_state(net)).matched
    ('score',)
    """
    arrays: dict[str, list[Any]] = {}
    used: set[str] = set()
    for module, layer in _layers(net).items():
        names = _names(module, layer, state)
        if not names:
            continue
        missing = [name for name in names if name not in state]
        if missing:
            layer.fail(f"the state_dict has no {missing[0]!r}; all of {', '.join(names)} would do")
        used.update(names)
        arrays[layer.caffe_name] = [_array(state[name], name) for name in names]
        if names[0].endswith(".running_mean"):
            arrays[layer.caffe_name].append(_array(torch.ones(1, dtype=torch.float32, device="cpu"), "factor"))
    report = net.load_weights(arrays)
    counted = (".num_batches_tracked",)
    left = sorted({name.rpartition(".")[0] for name in state if name not in used and not name.endswith(counted)})
    return LoadReport(report.matched, tuple(left), report.missing)


def write_torch_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Write a ``state_dict`` for ``torch.load(path, weights_only=True)``. Tensors alone are written.

    An existing file stays as it was until the new one is complete. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` for what is no tensor, and ``OSError`` where the file cannot be
    written.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> import tempfile
    >>> write_torch_state(tempfile.mkdtemp() + "/net.pth", torch_state(load(TEXT)))
    """
    wrong = [name for name, value in state.items() if type(name) is not str or not isinstance(value, Tensor)]
    if wrong:
        raise CaffeError(f"state has {wrong[0]!r}, which is no tensor; tensors by name would do")
    with replacing(path, CaffeError) as partial, partial.open("wb") as file:
        torch.save(dict(state), file)


def read_torch_state(path: str | os.PathLike[str]) -> State:
    """The tensors of a file that ``torch.save`` wrote, by name. Nothing of the file is run.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` where the file holds something else than tensors by
    name, and ``OSError`` where it cannot be read.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/net.pth"
    >>> write_torch_state(path, torch_state(load(TEXT)))
    >>> sorted(read_torch_state(path))
    ['score.bias', 'score.weight']
    """
    source = os.fspath(path)
    with Path(path).open("rb") as file:
        sound = zipfile.is_zipfile(file)
    if not sound:
        raise CaffeError(f"{source} is no file of torch.save's; one written by tilewise caffe export would do")
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises what it likes for files that are damaged
        reason = str(error).partition("\n")[0]
        raise CaffeError(
            f"{source} cannot be read as tensors: {reason}; torch.save(net.state_dict()) would do"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise CaffeError(f"{source} holds a {type(found).__name__} that is not tensors by name; a state_dict would do")
    return dict(found)


def _layers(net: Net) -> dict[str, Layer]:
    """The layers with blobs, by the name of their module."""
    found = {}
    for node in net.nodes:
        layer = net.get_submodule(node.module) if node.module else None
        if isinstance(layer, Layer) and layer.blob_names:
            found[node.module] = layer
    return found


def _names(module: str, layer: Layer, state: Mapping[str, Any]) -> list[str]:
    """The names that a layer's blobs have in a ``state_dict``, in Caffe's order; none where it has none of them."""
    short = [f"{module}.{name.rpartition('.')[2]}" for name in layer.blob_names]
    own = [f"{module}.{name}" for name in layer.blob_names]
    forms = [[f"{module}.running_mean", f"{module}.running_var"]] if isinstance(layer, BatchNorm) else []
    return next((names for names in [*forms, own, short] if any(name in state for name in names)), [])


def _array(value: Any, name: str) -> Any:
    """A tensor as an array."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() and value.layout is torch.strided):
        raise CaffeError(
            f"state has {name!r}, a {getattr(value, 'dtype', type(value).__name__)}; real numbers would do"
        )
    return value.detach().to(device="cpu", dtype=torch.float32).numpy()
