"""What else computes a trained network: each peer from the same module and input, at its own best settings."""

from __future__ import annotations

import copy
import importlib.metadata
import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.settings import NothingToMeasure

__all__ = ["PEERS", "Call", "compiled_with", "take_torchs_assembler", "torch_compiled", "versions"]

Call = Callable[[], torch.Tensor]
PACKAGES = ("onnxruntime", "openvino", "onnx", "torch", "torchvision", "timm")
"""Packages whose version decides what a comparison with peers says."""


def versions() -> dict[str, str | None]:
    """The version of each peer's package, and of those that networks come from; ``None`` where it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def take_torchs_assembler() -> None:
    """Have Triton in this process take the ``ptxas`` that torch brings, as torch's compile processes do.

    It belongs to the key of what they compile: by another one the program finds nothing of theirs, and compiles every
    candidate of ``max-autotune`` again. It must be called before Triton compiles anything here.
    """
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()


def compiled_with(module: nn.Module, x: torch.Tensor, mode: str = "default", *, freezing: bool = False) -> Any:
    """``module`` compiled by ``torch.compile`` in one of its modes for inputs like ``x``, for which it is called once.

    With ``freezing`` weights are constants. That is a setting of the process while the graph is traced: among
    ``torch.compile``'s options alone, torch 2.13 compiles weights as inputs and nothing is folded or packed. It is
    among the options as well: two modules of one class share what is compiled for equal options.
    """
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile

    if mode == "max-autotune":  # until its processes are up, torch compiles one candidate after the other
        AsyncCompile.wait_pool_ready()
    compiled = torch.compile(module, options={**torch._inductor.list_mode_options(mode), "freezing": freezing})
    with torch._inductor.config.patch(freezing=freezing):
        compiled(x)
    return compiled


def torch_compiled(module: nn.Module, inputs: torch.Tensor, mode: str = "default") -> Call:
    """``torch.compile`` with freezing: weights are constants, norms folded, convolutions prepacked and fused."""
    compiled = compiled_with(copy.deepcopy(module), inputs, mode, freezing=True)
    return lambda: compiled(inputs)  # type: ignore[no-any-return]


def onnxruntime(module: nn.Module, inputs: torch.Tensor) -> Call:
    """ONNX Runtime's CPU provider with all of its graph rewrites and as many threads as torch."""
    try:
        import onnxruntime as runtime
    except ImportError as error:
        raise NothingToMeasure(f"onnxruntime is not installed ({error})") from error
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(_onnx(module, inputs), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: inputs.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def openvino(module: nn.Module, inputs: torch.Tensor) -> Call:
    """OpenVINO's CPU plugin set to latency, in fp32, with as many threads as torch."""
    try:
        import openvino as vino
    except ImportError as error:
        raise NothingToMeasure(f"openvino is not installed ({error})") from error
    core = vino.Core()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        path.write_bytes(_onnx(module, inputs))
        model = core.read_model(path)
    config: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    request = core.compile_model(model, "CPU", config).create_infer_request()
    array = inputs.numpy()
    return lambda: torch.from_numpy(request.infer([array])[0])


PEERS: dict[str, Callable[[nn.Module, torch.Tensor], Call]] = {
    "compile": torch_compiled,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}


def _onnx(module: nn.Module, inputs: torch.Tensor) -> bytes:
    """The module as an ONNX file, written without a word on the terminal."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (inputs,), buffer, dynamo=False)
    return buffer.getvalue()
