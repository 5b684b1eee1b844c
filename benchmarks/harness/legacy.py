"""The paper's baseline on a GPU: the fastest of cuDNN's legacy algorithms that fits a limit, undivided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.sides import Tensors
from tilewise.machine.device import torch_device
from tilewise.planner.measuring import times as measure
from tilewise.problems.conv.problem import ROLES, ConvProblem


@dataclass(frozen=True)
class Legacy:
    """One algorithm by cuDNN's name, its workspace in bytes and a call that runs it."""

    name: str
    workspace: int
    run: Callable[[], object]


def fastest_legacy(problem: ConvProblem, tensors: Tensors, limit: int) -> Legacy | None:
    """The fastest algorithm whose workspace keeps ``limit`` bytes; ``None`` on a CPU, which has none.

    It writes the layer's own result; its workspace is allocated before, as the paper's frameworks do.
    """
    if problem.device_type != "cuda":
        return None
    import legacy_cudnn  # loads cuDNN

    x, w, y = (tensors[role] for role in ROLES)
    found = legacy_cudnn.algorithms(
        problem.pass_.value,
        x,
        w,
        y,
        padding=[axis.before for axis in problem.axes],
        stride=[axis.stride for axis in problem.axes],
        dilation=[axis.dilation for axis in problem.axes],
        groups=problem.groups,
        allow_tf32=problem.precision == "tf32",
    )
    device, usable = torch_device(problem.device), []
    for algorithm in legacy_cudnn.find(found, limit):
        workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=device)
        candidate = Legacy(algorithm.name, algorithm.workspace, _call(algorithm, workspace))
        try:
            candidate.run()
        except legacy_cudnn.LegacyError:
            continue  # cuDNN accepts some sizes that the algorithm then refuses
        usable.append(candidate)
    if not usable:
        raise RuntimeError(f"no legacy algorithm of cuDNN solves {problem.key} within {limit} bytes")
    times = measure.interleaved([each.run for each in usable], device, repeats=5)
    return usable[min(range(len(usable)), key=times.__getitem__)]


def _call(algorithm: Callable[[torch.Tensor], None], workspace: torch.Tensor) -> Callable[[], object]:
    return lambda: algorithm(workspace)
