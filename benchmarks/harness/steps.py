"""A convolution in steps: how long transforms, products and the inverse take inside one call.

The steps of the solvers ``fft`` and ``tiled_fft`` are marked from here: a run calls ``mark(step)`` where one begins.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from tilewise.machine.device import torch_device
from tilewise.plan import Config
from tilewise.planner.measuring import times as measure
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Run, Solver
from tilewise.solvers.common.matmul import at_precision
from tilewise.solvers.fourier._library import Index, Steps
from tilewise.solvers.fourier._own import in_order
from tilewise.solvers.fourier._own_configs import plan_of
from tilewise.solvers.fourier.fft import FFT
from tilewise.solvers.fourier.tiled_fft import TiledFFT

Mark = Callable[[str], None]
END = "end"


class MarkedSteps(Steps):
    """The ``fft`` solver's steps by the names of the paper's Table 5: A and B are the operands, C the result.

    The library's inverse copies its input, so that the transposition of C is part of ``inverse C``.
    """

    def __init__(self, mark: Mark, p: ConvProblem, c: Config, *strides: tuple[int, ...]) -> None:
        super().__init__(FFT._plan(p, c), dict(zip((*p.operands, p.result), strides, strict=True)))
        self.mark, self.letters = mark, dict(zip(p.operands, "AB", strict=True))
        product = self.multiply
        if product is None:
            raise ValueError(f"{p.key}: steps of depthwise convolutions are not told apart")

        def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: float, add: bool) -> None:
            mark("product")
            product(a, b, out, scale, add)

        self.multiply = multiply

    def _transformer(
        self, role: str, tensor: torch.Tensor, workspace: torch.Tensor | None
    ) -> Callable[[Index], torch.Tensor]:
        letter = self.letters[role]
        self.mark(f"transform {letter}")
        forward = super()._transformer(role, tensor, workspace)

        def marked(index: Index) -> torch.Tensor:
            self.mark(f"transform {letter}")
            spectrum = forward(index)
            self.mark(f"transpose {letter}")
            return spectrum

        return marked

    def _invert(self, spectrum: torch.Tensor, out: torch.Tensor, index: Index) -> None:
        self.mark("inverse C")
        super()._invert(spectrum, out, index)


def can_mark(solver: Solver) -> bool:
    """Whether the solver can be broken down."""
    return solver.name in (FFT.name, TiledFFT.name)


def marked(
    solver: Solver, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, mark: Mark
) -> Run:
    """A run that marks its steps."""
    if solver.name == FFT.name and c.get("transform") != "own":
        return at_precision(p, MarkedSteps(mark, p, c, a.stride(), b.stride(), out.stride()).run)
    queue = in_order(plan_of(p, c).steps((a, b, out), a.device), mark)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None) -> torch.Tensor:
        assert out is not None
        queue(a, b, out, workspace)
        return out

    return at_precision(p, run)


class StepClock:
    """Times between marks: by CUDA events on a GPU, so that nothing waits between steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []

    def mark(self, step: str) -> None:
        """``step`` begins, and what came before it ends."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((step, event))
        else:
            self._marks.append((step, time.perf_counter()))

    def durations(self) -> dict[str, float]:
        """Milliseconds by step since the last call; the last mark only ends."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        marks, self._marks = self._marks, []
        found: dict[str, float] = {}
        for (step, start), (_, stop) in itertools.pairwise(marks):
            if isinstance(start, float):
                assert isinstance(stop, float)
                took = (stop - start) * 1e3
            else:
                took = start.elapsed_time(stop)
            found[step] = found.get(step, 0.0) + took
        return found


def breakdown(
    solver: Solver, p: ConvProblem, c: Config, operands: Sequence[torch.Tensor], repeats: int
) -> tuple[dict[str, float], torch.Tensor]:
    """Median milliseconds of each step over a cold cache, and the result."""
    device = torch_device(p.device)
    a, b = operands
    out = torch.full(p.shape(p.result), float("nan"), dtype=a.dtype, device=device)
    workspace = torch.empty(solver.workspace(p, c), dtype=torch.uint8, device=device)
    clock, timer = StepClock(device), measure.Timer(device)
    run = marked(solver, p, c, a, b, out, clock.mark)

    def whole() -> None:
        clock.mark("clear")
        run(a, b, out, workspace)
        clock.mark(END)

    timer.time_ms(whole)
    clock.durations()
    rounds = []
    for _ in range(repeats):
        timer.time_ms(whole)
        rounds.append(clock.durations())
    return {step: statistics.median(each[step] for each in rounds) for step in rounds[0]}, out
