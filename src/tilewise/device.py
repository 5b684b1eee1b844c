"""Devices by name, and everything on which a measurement depends."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import asdict, dataclass

import torch

__all__ = ["Environment", "device_name", "environment", "torch_device", "total_memory"]


@dataclass(frozen=True, slots=True)
class Environment:
    """Hardware, driver and library versions: what wisdom is keyed by. Times from one say nothing about another."""

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
        """Canonical text."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value)


def device_name(device: torch.device | str) -> str:
    """``"cpu"``, or ``"cuda:"`` and the GPU's name: equal GPUs share plans. Raises ``ValueError`` for others."""
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
    return torch.cuda.get_device_name(index)


def torch_device(name: str) -> torch.device:
    """A device of that name: the current GPU where it matches, else the first that does.

    Raises ``ValueError`` when there is none here.
    """
    if name == "cpu":
        return torch.device("cpu")
    kind, _, gpu = name.partition(":")
    if kind == "cuda" and torch.cuda.is_available():
        current = torch.cuda.current_device()
        for index in (current, *range(torch.cuda.device_count())):
            if not gpu or _gpu_name(index) == gpu:
                return torch.device("cuda", index)
    raise ValueError(f"device={name!r}: no such device here")


def environment(device: str) -> Environment:
    """The environment of the device called ``device`` as it is now (thread count included on a CPU)."""
    if device == "cpu":
        return _cpu_environment(torch.get_num_threads())
    return _gpu_environment(device)


@functools.cache
def _cpu_environment(threads: int) -> Environment:
    return Environment("cpu", _cpu_model(), torch.__version__, numba=_distribution_version("numba"), threads=threads)


@functools.cache
def _gpu_environment(device: str) -> Environment:
    index = torch_device(device).index
    properties = torch.cuda.get_device_properties(index)
    return Environment(
        device,
        f"sm{properties.major}{properties.minor}x{properties.multi_processor_count}",
        torch.__version__,
        driver=_driver_version(),
        cuda=str(torch.version.cuda or ""),
        cudnn=str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        triton=_distribution_version("triton"),
        cudnn_frontend=_distribution_version("nvidia-cudnn-frontend"),
    )


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
    except OSError:
        fields = {}
    names = {key.strip(): value.strip() for key, value in fields.items()}
    wanted = [names.get(key, "") for key in ("model name", "cpu family", "model", "stepping")]
    return "/".join(word for word in wanted if word).replace(" ", "_") or platform.processor() or platform.machine()


def _driver_version() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word.count(".") == 2 and word[0].isdigit()), words[-1] if words else "")


def _distribution_version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def total_memory(device: torch.device) -> int:
    """Bytes of memory that ``device`` has; a CPU's is the machine's, or the control group's where that allows less."""
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
    """Whether the current stream of ``device`` is recording a CUDA graph, when nothing may be measured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conv_precision() -> str:
    """torch's convolution precision for fp32 operands on a GPU as it is set now: ``"ieee"`` or ``"tf32"``.

    ``torch.backends.cudnn.conv.fp32_precision`` where set, else the settings it inherits from.
    """
    for backend, operation in (("cuda", "conv"), ("cuda", "all"), ("generic", "all")):
        value = torch._C._get_fp32_precision_getter(backend, operation)
        if value != "none":
            return "tf32" if value == "tf32" else "ieee"
    return "ieee"
