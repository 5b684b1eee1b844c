"""Devices by name, and everything on which a measurement depends.

A device's name is ``"cpu"``, or ``"cuda:"`` and the GPU's name, so that equal GPUs share plans.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import asdict, dataclass

import torch

__all__ = ["Environment", "device_name", "environment", "torch_device", "total_memory"]


@dataclass(frozen=True, slots=True)
class Environment:
    """Hardware, driver and library versions of a device: what wisdom is keyed by.

    Times from one environment say nothing about another. ``hardware`` is a CPU's model, or a GPU's compute capability
    and number of multiprocessors; ``threads`` is torch's number of threads, 0 for GPUs. Fields that do not apply are
    empty.

    >>> environment("cpu").threads == torch.get_num_threads()
    True
    """

    device: str
    hardware: str
    torch: str
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    triton: str = ""
    cudnn_frontend: str = ""
    numba: str = ""
    threads: int = 0

    @property
    def key(self) -> str:
        """Canonical text of all fields that are not empty, such as ``device=cpu hardware=... torch=...``."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value)


def device_name(device: torch.device | str) -> str:
    """The name of a device: ``"cpu"``, or ``"cuda:"`` and the GPU's name.

    ``device`` is a ``torch.device`` or text that torch reads as one. Raises ``ValueError`` for anything but a CPU or a
    GPU.

    >>> device_name("cpu")
    'cpu'
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: cpu or cuda would do ({str(error).splitlines()[0]})") from error
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return f"cuda:{_gpu_name(device.index if device.index is not None else torch.cuda.current_device())}"
    raise ValueError(f"device={device}: tilewise plans for cpu and cuda")


@functools.cache
def _gpu_name(index: int) -> str:
    """The name of GPU number ``index``."""
    return torch.cuda.get_device_name(index)


def torch_device(name: str) -> torch.device:
    """The device called ``name`` (see :func:`device_name`); of several such GPUs the current one, else the first.

    Raises ``ValueError`` where this machine has none of that name.

    >>> torch_device("cpu")
    device(type='cpu')
    """
    if name == "cpu":
        return torch.device("cpu")
    kind, _, gpu = name.partition(":")
    if kind == "cuda" and torch.cuda.is_available():
        current = torch.cuda.current_device()
        for index in (current, *range(torch.cuda.device_count())):
            if not gpu or _gpu_name(index) == gpu:
                return torch.device("cuda", index)
    here = ", ".join(repr(f"cuda:{_gpu_name(index)}") for index in range(torch.cuda.device_count()))
    raise ValueError(f"device={name!r}: no such device here; {here + ' or ' if here else ''}'cpu' would do")


def environment(device: str) -> Environment:
    """The environment of the device called ``device`` as it is now; on a CPU with torch's number of threads.

    Raises ``ValueError`` where this machine has no such device.

    >>> environment("cpu").device
    'cpu'
    """
    if device == "cpu":
        return _cpu_environment(torch.get_num_threads())
    return _gpu_environment(device)


@functools.cache
def _cpu_environment(threads: int) -> Environment:
    """The environment of this CPU with ``threads`` threads."""
    return Environment("cpu", _cpu_model(), torch.__version__, numba=_distribution_version("numba"), threads=threads)


@functools.cache
def _gpu_environment(device: str) -> Environment:
    """The environment of the GPU called ``device``."""
    index = torch_device(device).index
    properties = torch.cuda.get_device_properties(index)
    return Environment(
        device,
        f"sm{properties.major}{properties.minor}x{properties.multi_processor_count}",
        torch.__version__,
        driver=_driver_version(),
        cuda=str(torch.version.cuda or ""),
        cudnn=str(torch.backends.cudnn.version() or ""),
        triton=_distribution_version("triton"),
        cudnn_frontend=_distribution_version("nvidia-cudnn-frontend"),
    )


def _cpu_model() -> str:
    """Model name, family, model and stepping of the processor as Linux tells them, else what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
    except OSError:
        fields = {}
    names = {key.strip(): value.strip() for key, value in fields.items()}
    model = [names.get(key, "") for key in ("model name", "cpu family", "model", "stepping")]
    return "/".join(word for word in model if word).replace(" ", "_") or platform.processor() or platform.machine()


def _driver_version() -> str:
    """Version of the NVIDIA driver; empty where there is none."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word.count(".") == 2 and word[0].isdigit()), words[-1] if words else "")


def _distribution_version(name: str) -> str:
    """Version of an installed package; empty where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def total_memory(device: torch.device) -> int:
    """Bytes of memory that ``device`` has.

    For a CPU it is the machine's memory, or what the process's control group may use where that is less.

    >>> total_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        text = "max"
    return min(total, int(text)) if text.isdigit() else total


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is recording a CUDA graph, during which nothing may be measured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def cpu_count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conv_precision() -> str:
    """torch's convolution precision for fp32 operands on a GPU as it is set now: ``"ieee"`` or ``"tf32"``.

    ``torch.backends.cudnn.conv.fp32_precision`` where set, else the settings it inherits from.
    """
    return _precision_of("conv")


def matmul_precision() -> str:
    """As :func:`conv_precision`, for matrix products: ``torch.backends.cuda.matmul.fp32_precision`` where set."""
    return _precision_of("matmul")


def recurrent_precision() -> str:
    """As :func:`conv_precision`, for recurrent layers: ``torch.backends.cudnn.rnn.fp32_precision`` where set."""
    return _precision_of("rnn")


def _precision_of(operation: str) -> str:
    """The precision of fp32 operands of ``operation`` on a GPU."""
    for backend, name in (("cuda", operation), ("cuda", "all"), ("generic", "all")):
        value = torch._C._get_fp32_precision_getter(backend, name)
        if value != "none":
            return "tf32" if value == "tf32" else "ieee"
    return "ieee"
