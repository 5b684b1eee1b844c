"""A first guess of how fast devices are, until whole steps have been measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from tilewise.machine.device import device_name

__all__ = ["copy_rate", "first_rates"]

SIZE = 1024
"""Rows and columns of the product that is timed."""
RUNS = 5
COPIED = 32 << 20
"""Bytes of a copy that is timed."""


def first_rates(devices: Sequence[torch.device]) -> tuple[tuple[float, ...], str]:
    """A rate for each device, and where the rates come from, as text.

    Devices of one name are equal. Others are as fast as they multiply matrices: the share by FLOPS of Hadjis et al.
    2015, section 2.3.
    """
    names = [device_name(device) for device in devices]
    if len({*names}) == 1:
        return (1.0,) * len(devices), "equal shares, as the devices are of one kind"
    rates = tuple(_flops(name, device) / names.count(name) ** (device.type == "cpu")
                  for name, device in zip(names, devices, strict=True))  # fmt: skip
    told = ", ".join(f"{device} {rate / 1e9:.3g}" for device, rate in zip(devices, rates, strict=True))
    return rates, f"shares by GFLOP/s of a matrix product: {told}"


@functools.lru_cache(maxsize=256)
def copy_rate(source: torch.device, target: torch.device) -> float:
    """Bytes a second of a copy from one device to another, or within one; measured once."""
    a = torch.zeros(COPIED, dtype=torch.uint8, device=source, pin_memory=_pinned(source, target))
    b = torch.zeros(COPIED, dtype=torch.uint8, device=target, pin_memory=_pinned(target, source))
    best = float("inf")
    for _ in range(RUNS):
        _finish(source)
        _finish(target)
        start = time.perf_counter()
        b.copy_(a, non_blocking=True)
        _finish(source)
        _finish(target)
        best = min(best, time.perf_counter() - start)
    return COPIED / best


def _pinned(device: torch.device, other: torch.device) -> bool:
    return device.type == "cpu" and other.type == "cuda"


@functools.cache
def _flops(name: str, device: torch.device) -> float:
    """Operations a second in a product of fp32 matrices."""
    a = torch.ones(SIZE, SIZE, dtype=torch.float32, device=device)
    out = torch.empty_like(a)
    best = float("inf")
    with torch.no_grad():
        for _ in range(RUNS):
            _finish(device)
            start = time.perf_counter()
            torch.mm(a, a, out=out)
            _finish(device)
            best = min(best, time.perf_counter() - start)
    return 2.0 * SIZE**3 / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
