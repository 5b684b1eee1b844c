"""Timing whole training steps of a network as the framework runs it and as planned, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tilewise.machine import random_states
from tilewise.planner.measuring.times import Timer, peak_bytes
from tilewise.report.values import NetworkTime, StepTime

__all__ = ["time_training_steps"]

BUDGET_MS = {"cpu": 20_000.0, "cuda": 2_000.0}
"""Most milliseconds for timing a network's steps, without warming up, by type of device."""
LEAST, MOST = 5, 51
"""Fewest and most timed steps of each side."""

Loss = Callable[[object], torch.Tensor]


class Stepper:
    """Runs training steps of one module: forward with loss, then backward. Gradients are empty before each step."""

    def __init__(self, module: nn.Module, inputs: torch.Tensor, loss: Loss, timer: Timer) -> None:
        self._module, self._inputs, self._loss, self._timer = module, inputs, loss, timer
        self._value = inputs.new_empty(())
        self._forward_ms: list[float] = []
        self._backward_ms: list[float] = []

    def _forward(self) -> None:
        """Compute the loss and keep it for :meth:`_backward`."""
        self._value = self._loss(self._module(self._inputs))

    def _backward(self) -> None:
        """Compute the gradients of the loss that :meth:`_forward` kept."""
        self._value.backward()

    def _step(self) -> None:
        """Run one whole step."""
        self._forward()
        self._backward()

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        """Give every step the same random numbers, and drop its gradients and graph at the end."""
        random_states.seed(0, self._inputs.device)
        try:
            yield
        finally:
            self._module.zero_grad(set_to_none=True)
            self._value = self._value.detach()

    def first_loss(self) -> float:
        """Run one step to warm up, and return its loss."""
        with self._fresh():
            self._step()
            return float(self._value.detach())

    def peak(self, device: torch.device) -> int | None:
        """Bytes that one step takes at its peak beyond the model and its input; ``None`` where nothing tells."""
        with self._fresh():
            try:
                return peak_bytes(self._step, device)
            except RuntimeError as error:
                if "/proc" not in str(error):
                    raise
                return None  # the report says that it is not known

    def time(self) -> float:
        """Run one timed step and return its time in milliseconds."""
        with self._fresh():
            self._forward_ms.append(self._timer.time_ms(self._forward))
            self._backward_ms.append(self._timer.time_ms(self._backward))
        return self._forward_ms[-1] + self._backward_ms[-1]

    def start_over(self) -> None:
        """Forget the times so far."""
        self._forward_ms.clear()
        self._backward_ms.clear()

    def result(self, peak: int | None, loss: float) -> StepTime:
        """Medians of the timed steps."""
        return StepTime(statistics.median(self._forward_ms), statistics.median(self._backward_ms), peak, loss)


def time_training_steps(
    plain: nn.Module, planned: nn.Module, inputs: torch.Tensor, loss: Loss, iterations: int | None = None
) -> NetworkTime:
    """Time forward and backward of both modules in turns.

    Both have the same weights and are in training mode. ``iterations`` steps of each side are timed, or as many as fit
    into the time set aside. Returns medians, the peak memory of each side, and the loss of its first step. Gradients
    are dropped and random states put back.
    """
    with random_states.kept([*plain.modules(), *planned.modules()]):
        timer = Timer(inputs.device)
        sides = [Stepper(module, inputs, loss, timer) for module in (plain, planned)]
        losses = [side.first_loss() for side in sides]
        peaks = [side.peak(inputs.device) for side in sides]
        # The first timed round only says how many to run.
        once = sum(side.time() for side in sides)
        count = iterations or max(LEAST, min(MOST, int(BUDGET_MS[inputs.device.type] / once)))
        for side in sides:
            side.start_over()
        for turn in range(count):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                side.time()
    framework, replaced = (side.result(peak, value) for side, peak, value in zip(sides, peaks, losses, strict=True))
    return NetworkTime(framework, replaced, count)
