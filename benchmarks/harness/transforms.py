"""Batched transforms as two sides of a comparison, ours and torch's, beside a device copy of the same bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import queued
from harness.picture import Figure, speedup_lines
from harness.result import Result, Row, Side, geometric_mean
from harness.settings import Settings
from harness.sides import SEED, Call
from tilewise import fft
from tilewise.kernels.spectra import from_plain, to_plain

DEFAULTS = {"sizes": "", "largest": "1GiB", "padding": "3", "budget_ms": "150", "seconds": "0"}
QUICK = {"batches": "4", "largest": "64KiB", "budget_ms": "10"}
ERROR_LIMIT = 1e-6
PADDED = ("plain", "frequency_major")
"""Layouts that are measured with padding."""
CHECKED = 32
"""Transforms at either end of a batch whose results are held against float64."""


@dataclass(frozen=True)
class Task:
    """``batch`` transforms of size ``s``, of data ``padding`` elements shorter along each axis."""

    s: tuple[int, ...]
    batch: int
    inverse: bool = False
    layout: str = "plain"
    padding: int = 0

    @property
    def size(self) -> tuple[int, ...]:
        """Of the data."""
        return tuple(n - self.padding for n in self.s)

    @property
    def bytes(self) -> int:
        """Least bytes that are moved: data one way, spectra the other."""
        return self.batch * (4 * math.prod(self.size) + 8 * math.prod(self.s[:-1]) * (self.s[-1] // 2 + 1))

    @property
    def group(self) -> str:
        """Rows that belong together."""
        words = [] if self.layout == "plain" else [self.layout.replace("_", " ")]
        words += ["clipped" if self.inverse else "padded"] if self.padding else []
        return " ".join(["inverse" if self.inverse else "forward", *words])


class Tensors:
    """Data and spectra of a task: spectra of data that fill the whole transform, from torch."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, dims = task, len(task.s)
        generator = torch.Generator(device=device).manual_seed(SEED)
        shape = task.s if task.inverse else task.size
        self.x = torch.randn(task.batch, *shape, device=device, generator=generator)
        self.y = self.x
        if task.inverse:
            plain = torch.fft.rfftn(self.x, dim=tuple(range(-dims, 0)))
            self.y = from_plain(plain, task.s, task.layout)

    def ours(self) -> torch.Tensor:
        """By ``tilewise.fft``."""
        task = self.task
        if len(task.s) == 1:
            if task.inverse:
                return fft.irfft(self.y, task.s[0], size=task.size[0], layout=task.layout)
            return fft.rfft(self.x, task.s[0], layout=task.layout)
        if task.inverse:
            return fft.irfft2(self.y, task.s, size=task.size, layout=task.layout)
        return fft.rfft2(self.x, task.s, layout=task.layout)

    def library(self) -> torch.Tensor:
        """By ``torch.fft``, with the copies that padding and layout then take; clipping gives a view."""
        task, axes = self.task, tuple(range(-len(self.task.s), 0))
        if not task.inverse:
            return from_plain(torch.fft.rfftn(self.x, s=task.s, dim=axes), task.s, task.layout)
        whole: torch.Tensor = torch.fft.irfftn(to_plain(self.y, task.s, task.layout), s=task.s, dim=axes)
        return whole[(..., *(slice(n) for n in task.size))]

    def error(self) -> float:
        """Relative L2 error of ours at both ends of the batch."""
        task, axes = self.task, tuple(range(-len(self.task.s), 0))
        got, worst = self.ours(), 0.0
        for part in (slice(CHECKED), slice(-CHECKED, None)):
            if task.inverse:
                want = self.x[part].double()[(..., *(slice(n) for n in task.size))]
                found = got[part].double()
            else:
                want = torch.fft.rfftn(self.x[part].double(), s=task.s, dim=axes)
                piece = got[part] if task.layout == "plain" else got[:, part]
                found = to_plain(piece, task.s, task.layout).to(torch.complex128)
            worst = max(worst, float((found - want).norm() / want.norm()))
        return worst


def copy_call(size: int, device: torch.device) -> Call:
    """A copy that reads and writes ``size`` bytes together."""
    source = torch.zeros(max(1, size // 8), device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def batches(settings: Settings, task: Task) -> list[int]:
    """The batches asked for that fit ``largest`` bytes, and the largest power of two that does."""
    most = settings.size("largest") // (task.bytes // task.batch)
    found = [batch for batch in settings.integers("batches") if batch <= most]
    greatest = 1 << max(0, most.bit_length() - 1)
    return sorted({*found, greatest})


def tasks(settings: Settings, dims: int) -> Iterator[Task]:
    """What is wanted first comes first: the largest batch of every size, plain, padded and frequency-major.

    Then every size both ways for all smaller batches.
    """
    sizes = settings.chosen("sizes", {str(n): n for n in fft.SIZES[dims]})
    plain = [Task((n,) * dims, 1, inverse) for n in sizes for inverse in (False, True)]
    padding = settings.integer("padding")
    padded = [replace(task, layout=layout, padding=padding) for layout in PADDED for task in plain]
    for task in (*plain, *padded):
        yield replace(task, batch=batches(settings, task)[-1])
    for task in plain:
        for batch in batches(settings, task)[:-1]:
            yield replace(task, batch=batch)


def timed(task: Task, device: torch.device, budget_ms: float) -> Row:
    """Ours, torch's and the copy, in turns. Values are the device's time alone; host time is in ``details``.

    Raises ``RuntimeError`` for a result that is wrong.
    """
    tensors = Tensors(task, device)
    error = tensors.error()
    if not error <= ERROR_LIMIT:
        raise RuntimeError(f"{name(task)} {task.group}: relative error {error:.1e}")
    calls = [tensors.library, tensors.ours, copy_call(task.bytes, device)]
    took = queued.rounds(calls, device, budget_ms=budget_ms, least=7, most=31)
    library, ours, copy = (statistics.median(t.device_ms for t in times) for times in took)
    hosts = [statistics.median(t.host_ms for t in times) for times in took]
    by_kernel = not fft.unsupported(device, *task.s)
    return Row(
        name(task),
        task.group,
        Side("torch.fft", library),
        Side("kernel" if by_kernel else "torch.fft", ours),
        replaced=by_kernel,
        details={
            "n": task.s[0],
            "batch": task.batch,
            "bytes": task.bytes,
            "copy_ms": copy,
            "share_of_copy": copy / ours,
            "torch_share_of_copy": copy / library,
            "host_ms": hosts[1],
            "torch_host_ms": hosts[0],
            "error": error,
        },
    )


def name(task: Task) -> str:
    """Such as ``32x32 @1024``."""
    return f"{'x'.join(map(str, task.s))} @{task.batch}"


def speeds(settings: Settings, dims: int) -> Result:
    """All tasks within the time budget; what is left out is named in the notes."""
    rows, notes = [], list(fft.unsupported(settings.device, *(fft.SIZES[dims][0],) * dims))
    deadline = settings.deadline()
    for task in tasks(settings, dims):
        if deadline.passed:
            notes.append(f"out of time before {name(task)} {task.group}")
            break
        try:
            rows.append(timed(task, settings.device, float(settings.integer("budget_ms"))))
        except RuntimeError as error:  # a wrong result, or too little memory
            notes.append(f"{name(task)} {task.group}: {error}")
            settings.say(f"  {notes[-1]}")
            continue
        row = rows[-1]
        share = f"{100 * row.details['share_of_copy']:.0f} % of copy"
        settings.say(f"  {row.group} {row.name}: {row.ratio:.2f}x, {share}, error {row.details['error']:.1e}")
    return Result(rows, facts=facts(rows), notes=notes)


def facts(rows: Sequence[Row]) -> dict[str, float]:
    """Share of copy bandwidth at each size's largest batch, and its geometric mean over sizes."""
    found, shares = {}, dict[str, list[float]]()
    rising = sorted(rows, key=lambda row: int(row.details["batch"]))
    for (group, n), row in {(row.group, row.details["n"]): row for row in rising}.items():
        found[f"{group} {n}: share of copy, largest batch"] = row.details["share_of_copy"]
        shares.setdefault(group, []).append(row.details["share_of_copy"])
    return found | {f"{group}: geometric mean of shares": geometric_mean(each) for group, each in shares.items()}


def draw(document: dict[str, Any]) -> Figure:
    """The figure's two panels."""
    return speedup_lines(document, ("forward", "inverse"))
