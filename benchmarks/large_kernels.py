"""Depthwise layers, long 1-D kernels and volumes: where frameworks are furthest from the hardware.

Each layer and pass against torch (benchmark mode, the better of contiguous and channels_last; conversion not counted).
1-D depthwise layers are also held against what a user would write with ``torch.fft``: transform both, multiply,
transform back. Without a memory limit. On a GPU times are the device's; the host's are in ``details``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness import queued
from harness.layer_pass import LAYOUTS, LayerPass
from harness.layers import PASSES
from harness.result import Bar, Result, Row, Side, least_replaced
from harness.settings import Settings
from harness.sides import Call, Tensors, framework_call, is_framework, plan_line, planned_call

from tilewise.machine.device import device_name
from tilewise.plan import Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

DEFAULTS = {"layers": "", "passes": "", "modes": "", "rigor": "measure", "seconds": "0"}
QUICK = {"layers": "tiny2d,tiny1d", "passes": "fprop", "modes": "fp32", "rigor": "estimate"}
MODES = {"fp32": ("fp32", "ieee"), "tf32": ("fp32", "tf32"), "bf16": ("bf16", "ieee"), "frozen": ("fp32", "ieee")}
"""Data type and precision; ``frozen``: the weight is constant, as with ``training=False, frozen=True``."""


@dataclass(frozen=True)
class Layer:
    """A layer with equal axes. ``least``: the modes it is measured in with their bars, one for all passes, one each or
    none; over ``by_hand``'s time where that is set."""

    name: str
    batch: int
    channels: int
    axes: tuple[Axis, ...]
    depthwise: bool = True
    by_hand: bool = False
    least: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def problem(self, pass_: Pass, mode: str, device: torch.device) -> ConvProblem:
        """One pass."""
        dtype, precision = MODES[mode]
        return ConvProblem(
            pass_, self.batch, self.channels, self.channels, self.axes,
            groups=self.channels if self.depthwise else 1, dtype=dtype, precision=precision,
            constant_weight=mode == "frozen", device=device_name(device),
        )  # fmt: skip


def _same(size: int, kernel: int, stride: int = 1) -> Axis:
    return Axis(size, kernel, stride, 1, kernel // 2, kernel // 2)


GPU = (
    Layer(
        "depthwise 31x31",
        64,
        128,
        (_same(56, 31),) * 2,
        least=(("fp32", (10, 20, 40)), ("bf16", (15, 20, 40)), ("frozen", ())),
    ),
    Layer("depthwise 7x7 at 56", 64, 96, (_same(56, 7),) * 2, least=(("fp32", (1.5,)), ("bf16", (1.5,)))),
    Layer("depthwise 7x7 at 14", 64, 384, (_same(14, 7),) * 2, least=(("fp32", (1.5,)), ("bf16", (1.5,)))),
    Layer("1-D 1025 of 8192", 8, 768, (_same(8192, 1025),), by_hand=True, least=(("fp32", (2.5,)),)),
    Layer("1-D 8192 of 8192", 8, 768, (_same(8192, 8192),), by_hand=True, least=(("fp32", (2.5,)),)),
    Layer("1-D dense 101 of 8192", 32, 64, (_same(8192, 101),), depthwise=False, least=(("fp32", ()),)),
    Layer("volume 5x5x5", 1, 64, (Axis(96, 5),) * 3, depthwise=False, least=(("fp32", (3,)),)),
    Layer("depthwise 31x31 stride 2", 64, 128, (_same(56, 31, 2),) * 2, least=(("fp32", ()), ("bf16", ()))),
    Layer("depthwise 13x13 stride 2", 64, 96, (_same(56, 13, 2),) * 2, least=(("fp32", ()), ("bf16", ()))),
    Layer("1-D 1025 of 8192 stride 2", 8, 768, (_same(8192, 1025, 2),), least=(("fp32", ()),)),
)
CPU = (
    Layer("depthwise 31x31", 4, 64, (_same(56, 31),) * 2, least=(("fp32", (8,)), ("frozen", ()))),
    Layer("depthwise 31x31 of one image", 1, 64, (_same(56, 31),) * 2, least=(("fp32", ()), ("frozen", ()))),
    Layer("depthwise 7x7", 8, 96, (_same(56, 7),) * 2, least=(("fp32", (0.97, 10, 10)),)),
    Layer("1-D 1025 of 8192", 2, 256, (_same(8192, 1025),), least=(("fp32", (5,)),)),
    Layer("1-D 1025 of 8192 stride 2", 2, 64, (_same(8192, 1025, 2),), least=(("fp32", ()),)),
    Layer("depthwise 31x31 stride 2", 4, 64, (_same(56, 31, 2),) * 2, least=(("fp32", ()),)),
)
TINY = (
    Layer("tiny2d", 2, 4, (_same(9, 3),) * 2),
    Layer("tiny1d", 2, 4, (_same(64, 9),), by_hand=True),
)
HOPELESS = 4
"""Times as long as in the other layout."""


def run(settings: Settings) -> Result:
    """All chosen layers, modes and passes."""
    own = TINY if settings.quick else GPU if settings.device.type == "cuda" else CPU
    layers = settings.chosen("layers", {layer.name: layer for layer in own})
    passes = settings.chosen("passes", PASSES)
    asked = settings.chosen("modes", {name: name for name in MODES})
    rows: list[Row] = []
    bars: list[Bar] = []
    notes: list[str] = []
    planner, deadline = settings.planner(), settings.deadline()
    for layer in layers:
        modes = [mode for mode in asked if settings.quick or settings.text("modes") or mode in dict(layer.least)]
        for mode in modes:
            for pass_ in passes:
                if mode == "frozen" and pass_ is Pass.WGRAD:
                    continue
                if deadline.passed:
                    notes.append(f"out of time before {mode} {layer.name} {pass_.value}")
                    continue
                problem = layer.problem(pass_, mode, settings.device)
                plan = planner.plan(problem, settings.planning())
                row = _row(layer, mode, problem, plan)
                rows.append(row)
                bars += _bars(layer, mode, pass_, row)
                settings.say(f"  {mode} {row.name}: {row.ratio:.2f}x")
                settings.keep(_result(settings, rows, bars, [*notes, f"ended after {mode} {row.name}"]))
    return _result(settings, rows, bars, notes)


def _result(settings: Settings, rows: list[Row], bars: list[Bar], notes: list[str]) -> Result:
    least = Bar(
        "least replaced over torch's better layout", least_replaced(rows), least=0.97, applies=not settings.quick
    )
    return Result(rows, [*bars, least], notes=notes)


def _row(layer: Layer, mode: str, problem: ConvProblem, plan: Plan) -> Row:
    """Torch in the layouts there are, the plan and what a user would write, in turns.

    A layout in which torch takes :data:`HOPELESS` times as long as in the other is timed before alone: beside calls of
    half a second no cache holds what those of a millisecond would find there.
    """
    layouts = LAYOUTS if problem.dims > 1 else LAYOUTS[:1]
    tensors = {layout: Tensors(problem, layout) for layout in layouts}
    by_layout = [framework_call(problem, tensors[layout]) for layout in layouts]
    alone = dict(
        zip(layouts, (each.device_ms for each in queued.medians(problem, by_layout, budget_ms=0, least=1)), strict=True)
    )
    close = {
        layout: call for layout, call in zip(layouts, by_layout, strict=True)
        if alone[layout] <= HOPELESS * min(alone.values())
    }  # fmt: skip
    calls = [*close.values(), planned_call(problem, plan, tensors["contiguous"])]
    if layer.by_hand:
        calls.append(by_hand(problem, tensors["contiguous"]))
    took = queued.medians(problem, calls)
    times = [each.device_ms for each in took]
    torch_ms = alone | dict(zip(close, times, strict=False))
    found = LayerPass(f"{layer.name} {problem.pass_.value}", torch_ms, times[len(close)], plan)
    details = {
        **found.to_json(),
        "host_ms": [each.host_ms for each in took],
        "workspace": plan.workspace,
        "error": None if plan.error is None else plan.error.l2,
        "by_hand_ms": times[-1] if layer.by_hand else None,
    }
    what = "torch " + min(found.torch_ms, key=found.torch_ms.__getitem__)
    return Row(found.name, mode, Side(what, found.best_torch_ms), Side(plan_line(plan), found.ours_ms),
               replaced=not is_framework(plan), details=details)  # fmt: skip


def by_hand(p: ConvProblem, tensors: Tensors) -> Call:
    """A 1-D depthwise pass as a user of ``torch.fft`` would write it: padded to where nothing wraps around."""
    (axis,) = p.axes
    a, b = (tensors[role] for role in p.operands)
    basis = 1 << (axis.size + axis.before + axis.after - 1).bit_length()
    fft, ifft = torch.fft.rfft, torch.fft.irfft

    def fprop() -> torch.Tensor:
        product = fft(torch.nn.functional.pad(a, (axis.before, axis.after)), basis) * fft(b[:, 0], basis).conj()
        return ifft(product, basis)[..., : axis.out]

    def dgrad() -> torch.Tensor:
        return ifft(fft(a, basis) * fft(b[:, 0], basis), basis)[..., axis.before : axis.before + axis.size]

    def wgrad() -> torch.Tensor:
        product = fft(torch.nn.functional.pad(a, (axis.before, axis.after)), basis) * fft(b, basis).conj()
        return ifft(product.sum(0), basis)[:, None, : axis.kernel]

    return {Pass.FPROP: fprop, Pass.DGRAD: dgrad, Pass.WGRAD: wgrad}[p.pass_]


def _bars(layer: Layer, mode: str, pass_: Pass, row: Row) -> Sequence[Bar]:
    least = dict(layer.least).get(mode)
    if not least:
        return []
    bar = least[list(Pass).index(pass_) % len(least)]
    if not layer.by_hand:
        return [Bar(f"{mode} {row.name} over torch", row.ratio, least=bar)]
    by_hand_ms = row.details["by_hand_ms"]
    return [Bar(f"{mode} {row.name} over torch.fft by hand", by_hand_ms / row.ours.value or math.nan, least=bar)]
