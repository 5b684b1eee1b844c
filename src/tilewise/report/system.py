"""What is here: devices, library versions, solvers with their declared limits."""

from __future__ import annotations

import inspect
import platform
from importlib import metadata
from typing import Any

import torch
from rich.console import RenderableType
from rich.markup import escape

from tilewise import solvers
from tilewise.frontends.networks import builtin_networks
from tilewise.kernels.native import autograd
from tilewise.kernels.native.building import why_not
from tilewise.machine.device import cpu_count, device_name, environment
from tilewise.plan import format_bytes
from tilewise.report.documents import document
from tilewise.report.sheet import Sheet
from tilewise.solvers import Solver, Split
from tilewise.wisdom import Wisdom

__all__ = ["info_document", "info_tables"]

LIBRARIES = ("torch", "numpy", "triton", "nvidia-cudnn-frontend", "cuda-core", "click", "rich", "torchvision", "timm")
"""Packages whose versions matter or which open up features, the optional ones too."""


def info_document() -> dict[str, Any]:
    """The document of schema ``tilewise/info``."""
    return document(
        "info",
        python=platform.python_version(),
        platform=platform.platform(),
        libraries={name: _version(name) for name in LIBRARIES},
        devices=_devices(),
        native={"used": not why_not(), "reason": why_not()},
        autograd={"used": not autograd.expected(), "reason": autograd.expected()},
        wisdom=str(Wisdom().path),
        networks=list(builtin_networks()),
        solvers=[_solver(solver) for solver in solvers.all_solvers()],
    )


def _version(name: str) -> str | None:
    """The installed version of a Python package; ``None`` where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """The CPU and each GPU, as fields of the document."""
    cpu = environment("cpu")
    devices = [
        {"torch": "cpu", "name": "cpu", "hardware": cpu.hardware, "memory": None, "cores": cpu_count(),
         "threads": torch.get_num_threads(), "environment": cpu.key}
    ]  # fmt: skip
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = device_name(torch.device("cuda", index))
        gpu = environment(name)
        devices.append(
            {"torch": f"cuda:{index}", "name": name, "hardware": gpu.hardware, "memory": properties.total_memory,
             "cores": properties.multi_processor_count, "threads": None, "environment": gpu.key}
        )  # fmt: skip
    return devices


def _solver(solver: Solver) -> dict[str, Any]:
    """What a solver declares, as fields of the document."""
    return {
        "name": solver.name,
        "version": solver.version,
        "what": (inspect.getdoc(type(solver)) or "").split("\n\n", 1)[0].replace("\n", " "),
        "split": solver.axis if isinstance(solver, Split) else None,
        "baseline": solver.baseline,
        "solves": solver.solves.kind,
        **solver.declarations(),
        "deterministic": solver.deterministic,
        "accumulates": solver.accumulates,
        "adds_bias": solver.adds_bias,
        "adds_residual": solver.adds_residual,
        "activations": sorted(solver.activations),
        "error_bound": dict(solver.error_bound),
    }


def info_tables(info: dict[str, Any]) -> list[RenderableType]:
    """The document as text and tables."""
    libraries = ", ".join(f"{name} {version}" for name, version in info["libraries"].items() if version)
    missing = ", ".join(name for name, version in info["libraries"].items() if not version)
    lines = [f"tilewise {info['tilewise']}, Python {info['python']}, {info['platform']}", libraries]
    lines += [f"not installed: {missing}"] if missing else []
    native = info["native"]
    lines += ["launches: from C" if native["used"] else f"launches: from Python ({native['reason']})"]
    calls = info["autograd"]
    way = "from C++" if calls["used"] else f"from Python ({calls['reason']})"
    lines += [f"calls with gradients: {way}"]
    lines += [f"wisdom: {info['wisdom']}", f"networks: {', '.join(info['networks'])}", ""]
    devices = Sheet((("device", ""), ("name", ""), ("hardware", "note"), ("cores", "right"), ("memory", "right")))
    for found in info["devices"]:
        memory = "-" if found["memory"] is None else format_bytes(found["memory"])
        name, hardware = escape(found["name"]), escape(found["hardware"])
        devices.add_row(found["torch"], name, hardware, str(found["cores"]), memory)
    columns = ("solver", "version", "solves", "passes", "devices", "dtypes", "dims", "repeatable")
    table = Sheet((*((name, "text" if name == "passes" else "") for name in columns), ("what", "note")))
    for found in info["solvers"]:
        table.add_row(
            found["name"],
            str(found["version"]),
            found["solves"],
            " ".join(found.get("passes", [])),
            " ".join(found["devices"]),
            " ".join(found["dtypes"]),
            " ".join(f"{n}-D" for n in found.get("dims", [])),
            "yes" if found["deterministic"] else "no",
            escape(found["what"]),
        )
    return [escape("\n".join(lines)), devices, "", table]
