"""Kernel = stride: the convolutions that are one matrix product, against that product.

Qwen2-VL's patch embedding (Conv3d, huggingface/transformers issue 45750) against the plain GEMM, and ViT-B/16's
(Conv2d) against a GEMM and one copy. The baseline of each row is what a user could write by hand instead; torch's own
convolution is timed in turns with both. A ratio below 1 is what the planned layer takes more than the product.

On a GPU the products take 25 us, as long as Python takes to launch them: values are the device's time alone, what the
host takes is in ``details``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import queued
from harness.layers import convolution
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Call, Tensors, framework_call, is_framework, plan_line, planned_call

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

DEFAULTS = {"dtype": "bf16", "precision": "ieee", "scale": "1", "rigor": "measure"}
QUICK = {"dtype": "fp32", "scale": "256"}


@dataclass(frozen=True)
class Patches:
    """A patch embedding: kernel = stride, and the same three passes by hand."""

    name: str
    batch: int
    in_channels: int
    out_channels: int
    axes: tuple[Axis, ...]
    by_hand: Callable[[ConvProblem, Tensors], Call]
    what: str


def product(problem: ConvProblem, tensors: Tensors) -> Call:
    """Every image is one patch: x (N, K), w (M, K), y (N, M) as they lie in memory."""
    x, w, y = (tensors[role].flatten(1) for role in ("x", "w", "y"))
    if problem.pass_ is Pass.FPROP:
        return lambda: torch.mm(x, w.t())
    if problem.pass_ is Pass.DGRAD:
        return lambda: torch.mm(y, w)
    return lambda: torch.mm(y.t(), x)


def product_and_copy(problem: ConvProblem, tensors: Tensors) -> Call:
    """Images (N, C, H, W) copied to or from patches (N * P, C * k * k), around one product with tokens (N * P, M)."""
    n, channels = problem.batch, problem.in_channels
    (kh, h), (kw, w_) = ((axis.kernel, axis.out) for axis in problem.axes)
    x, w = tensors["x"], tensors["w"].flatten(1)
    tokens = tensors["y"].flatten(2).transpose(1, 2).reshape(n * h * w_, -1).contiguous()

    def patches() -> torch.Tensor:
        cut = x.view(n, channels, h, kh, w_, kw).permute(0, 2, 4, 1, 3, 5)
        return cut.reshape(n * h * w_, channels * kh * kw)

    def input_gradient() -> torch.Tensor:
        cut = torch.mm(tokens, w).view(n, h, w_, channels, kh, kw).permute(0, 3, 1, 4, 2, 5)
        return cut.reshape(x.shape)

    if problem.pass_ is Pass.FPROP:
        return lambda: torch.mm(patches(), w.t())
    if problem.pass_ is Pass.DGRAD:
        return input_gradient
    return lambda: torch.mm(tokens.t(), patches())


CASES = (
    Patches("conv3d 2x14x14", 4096, 3, 1280, (Axis(2, 2, 2), *[Axis(14, 14, 14)] * 2), product, "GEMM"),
    Patches("vit 16x16", 256, 3, 768, (Axis(224, 16, 16),) * 2, product_and_copy, "GEMM + one copy"),
)


def run(settings: Settings) -> Result:
    """One row a case and pass, and one for each case's forward and backward together."""
    planner, rows = settings.planner(), []
    for case in CASES:
        problems = [_problem(case, pass_, settings) for pass_ in Pass]
        settings.say(f"planning {case.name}")
        plans = planner.plan_many(problems, settings.planning())
        passes = []
        for problem in problems:
            tensors, plan = Tensors(problem), plans[problem]
            calls = [case.by_hand(problem, tensors), planned_call(problem, plan, tensors)]
            took = queued.medians(problem, [*calls, framework_call(problem, tensors)], least=7, most=51)
            by_hand, ours, torch_ms = (each.device_ms for each in took)
            row = Row(
                f"{case.name} {problem.pass_.value}",
                case.name,
                Side(case.what, by_hand),
                Side(plan_line(plan), ours),
                # Torch's own operator is compared with the product all the same.
                details={
                    "torch_ms": torch_ms,
                    "left_to_torch": is_framework(plan),
                    "host_ms": dict(zip(("by_hand", "ours", "torch"), (each.host_ms for each in took), strict=True)),
                    "plan": plan.to_json(),
                },
            )
            passes.append(row)
        rows += [*passes, _together(case, passes)]
    return Result(rows, bars(rows, settings))


def _problem(case: Patches, pass_: Pass, settings: Settings) -> ConvProblem:
    return convolution(
        pass_,
        settings.device,
        max(1, case.batch // settings.integer("scale")),
        case.in_channels,
        case.out_channels,
        case.axes,
        dtype=settings.text("dtype"),
        precision=settings.text("precision"),
    )


def _together(case: Patches, passes: list[Row]) -> Row:
    return Row(
        f"{case.name} all",
        f"{case.name} all",
        Side(case.what, math.fsum(row.baseline.value for row in passes)),
        Side("sum of the planned passes", math.fsum(row.ours.value for row in passes)),
        details={"torch_ms": math.fsum(row.details["torch_ms"] for row in passes)},
    )


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """At most 1.2 times the product, forward alone and forward with backward."""
    applies = settings.device.type == "cuda" and not settings.quick
    judged = [row for row in rows if row.name.split()[-1] in ("fprop", "all")]
    return [
        Bar(f"{row.name}: time over {row.baseline.what}", 1 / row.ratio, most=1.2, applies=applies) for row in judged
    ]
