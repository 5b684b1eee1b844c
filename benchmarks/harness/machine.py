"""Where a benchmark ran: the device's short name for a folder, and every version a result depends on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]


def slug(device: torch.device) -> str:
    """A folder name for the device: ``h100-80gb``, ``cpu-amd-epyc-9r14-2c`` (cores this process may use)."""
    if device.type == "cuda":
        words = _words(torch.cuda.get_device_name(device))
        return "-".join(w for w in words if w != "nvidia" and not re.fullmatch(r"hbm\d\w*|pcie|sxm\d?", w))
    noise = {"r", "tm", "cpu", "processor", "core"}
    words = [w for w in _words(cpu_model().split("@")[0]) if w not in noise and not re.fullmatch(r"\d+ghz", w)]
    return "-".join(["cpu", *words, f"{cores()}c"])


def describe(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit. What this machine does not have is ``None``."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_model(),
        "cpu": cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "driver": _driver() if cuda else None,
        "triton": _version("triton"),
        "cudnn_frontend": _version("nvidia-cudnn-frontend"),
        "tilewise": commit(),
    }


def cpu_model() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """``TILEWISE_COMMIT`` where the checkout has no history, else git's hash, with ``+`` when files differ from it."""
    given = os.environ.get("TILEWISE_COMMIT")
    if given:
        return given
    found = _output("git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD")
    if found is None:
        return None
    changed = _output("git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no")
    return found + ("+" if changed else "")


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
