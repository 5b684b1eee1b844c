"""A rank's part of a batch norm whose statistics are over ranks: kernels of our own against torch's for the same steps.

The parts are those of ResNet-50 with one image of 1024x1024 over two ranks, of a 3-D U-Net's volume of 192x192x192,
and of a batch of 32. Torch's are the operators of its SyncBatchNorm (``batch_norm_stats`` and the like), its norm of
one device is in ``details``, as is a copy of the bytes that a pass moves at least: forward reads its part twice and
writes it once, backward reads two tensors twice and writes one. Sums over ranks are not in these times.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import queued
from harness.result import Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import SEED, Call
from harness.transforms import copy_call

from tilewise.distributed.norms.parts import LAST, NormParts
from tilewise.problems.base import DTYPES

DEFAULTS = {"shapes": "", "dtypes": "fp32,bf16", "budget_ms": "60"}
QUICK = {"shapes": "U-Net 32", "dtypes": "fp32", "budget_ms": "10"}
SHAPES = {
    "stem": (1, 64, 256, 512),
    "stage 1": (1, 256, 128, 256),
    "stage 2": (1, 512, 64, 128),
    "stage 3": (1, 1024, 32, 64),
    "stage 4": (1, 2048, 16, 32),
    "batch 32": (32, 256, 28, 56),
    "U-Net 32": (1, 32, 96, 192, 192),
    "U-Net 128": (1, 128, 24, 48, 48),
}
EPS = 1e-5
ERROR_LIMIT = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Norm:
    """A part, its gradient, weight and bias; statistics are the part's own."""

    x: torch.Tensor
    dy: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def drawn(shape: tuple[int, ...], dtype: str, last: bool, device: torch.device) -> Norm:
        """With channels ``last``, or contiguous."""
        generator = torch.Generator(device=device).manual_seed(SEED)
        form = LAST[len(shape)] if last else torch.contiguous_format
        x, dy = (
            torch.randn(shape, generator=generator, device=device).add(n).to(DTYPES[dtype])
            .contiguous(memory_format=form) for n in (1, 0)
        )  # fmt: skip
        w, b = (torch.rand(shape[1], generator=generator, device=device) for _ in range(2))
        return Norm(x, dy, w, b)

    def rows(self) -> torch.Tensor:
        """Mean, variance and one over its root, by channel."""
        dims = [0, *range(2, self.x.dim())]
        var, mean = torch.var_mean(self.x.double(), dims, correction=0)
        return torch.stack([mean, var, (var + EPS).rsqrt()]).float()

    def of_torch(self, rows: torch.Tensor) -> list[Call]:
        """Forward and backward by the operators of torch's SyncBatchNorm."""
        mean, _, rstd = rows
        one = torch.ones(1, dtype=torch.int32, device=self.x.device)

        def forward() -> torch.Tensor:
            torch.batch_norm_stats(self.x, EPS)
            return torch.batch_norm_elemt(self.x, self.w, self.b, mean, rstd, EPS)

        def backward() -> torch.Tensor:
            plain, centred, *_ = torch.batch_norm_backward_reduce(self.dy, self.x, mean, rstd, self.w, True, True, True)
            return torch.batch_norm_backward_elemt(self.dy, self.x, mean, rstd, self.w, plain, centred, one)

        return [forward, backward]

    def of_kernels(self, rows: torch.Tensor) -> list[Call]:
        """The same by ours; ``means`` are what is made of the sums of all ranks."""
        parts = NormParts()
        means = torch.ones(2, len(self.w), device=self.x.device)

        def forward() -> torch.Tensor:
            parts.statistics(self.x)
            return parts.elements(self.x, rows, self.w, self.b)

        def backward() -> torch.Tensor:
            parts.gradient_sums(self.dy, self.x, rows)
            return parts.gradient(self.dy, self.x, rows, means, self.w)

        return [forward, backward]

    def of_one_device(self) -> list[Call]:
        """Torch's norm of a device's own statistics, forward and backward: what no sum over ranks interrupts."""
        x, w, b = (t.clone().requires_grad_() for t in (self.x, self.w, self.b))
        y = F.batch_norm(x, None, None, w, b, True, 0.0, EPS)
        return [
            lambda: F.batch_norm(x, None, None, w, b, True, 0.0, EPS),
            lambda: torch.autograd.grad(y, [x, w, b], self.dy, retain_graph=True),
        ]


def run(settings: Settings) -> Result:
    """One row a shape, layout, type and direction. Values are the GPU's time alone."""
    if settings.device.type != "cuda":
        raise NothingToMeasure("the operators of torch's SyncBatchNorm are there on a GPU only")
    rows = []
    for dtype in settings.words("dtypes"):
        for name, shape in settings.chosen("shapes", {name: (name, shape) for name, shape in SHAPES.items()}):
            for last in (False, True):
                rows += _rows(name, shape, dtype, last, settings)
    return Result(rows)


def _rows(name: str, shape: tuple[int, ...], dtype: str, last: bool, settings: Settings) -> list[Row]:
    norm = Norm.drawn(shape, dtype, last, settings.device)
    given = norm.rows()
    library, ours, whole = norm.of_torch(given), norm.of_kernels(given), norm.of_one_device()
    _checked(norm, given, ours[0], ERROR_LIMIT[dtype])
    size = norm.x.numel() * norm.x.element_size()
    found = []
    for n, (direction, tensors) in enumerate((("forward", 3), ("backward", 5))):
        calls = [library[n], ours[n], whole[n], copy_call(tensors * size, settings.device)]
        took = queued.rounds(calls, settings.device, budget_ms=float(settings.integer("budget_ms")), least=7, most=31)
        by_torch, by_us, by_one, copy = (statistics.median(t.device_ms for t in times) for times in took)
        row = Row(
            f"{name} {'channels last' if last else 'contiguous'}",
            f"{dtype} {direction}",
            Side("torch's operators over ranks", by_torch),
            Side("kernels", by_us),
            details={"shape": shape, "one_device_ms": by_one, "copy_ms": copy, "share_of_copy": copy / by_us},
        )
        settings.say(f"  {row.group} {row.name}: {row.ratio:.2f}x, {100 * copy / by_us:.0f} % of copy")
        found.append(row)
    return found


def _checked(norm: Norm, rows: torch.Tensor, forward: Call, most: float) -> None:
    shape = (1, -1, *(1,) * (norm.x.dim() - 2))
    mean, _, rstd = (row.double().view(shape) for row in rows)
    wanted = (norm.x.double() - mean) * rstd * norm.w.double().view(shape) + norm.b.double().view(shape)
    found = forward()
    assert isinstance(found, torch.Tensor)
    error = float((found.double() - wanted).norm() / wanted.norm())
    if not error <= most:
        raise RuntimeError(f"relative error {error:.1e} above {most:.1e}")
