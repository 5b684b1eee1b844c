"""Roofline estimates from a measured device profile: what a candidate takes if its arithmetic or its bytes decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from tilewise.device import torch_device
from tilewise.planner.measure import Timer
from tilewise.problem import ConvProblem
from tilewise.solvers import Cost
from tilewise.torch_state import fp32_precision, undisturbed

__all__ = ["Profile", "estimate_ms", "is_profile", "measure_profile", "rate_name"]

Profile = dict[str, float]
"""``copy`` in bytes/ms (read and written), ``fp32``, ``tf32``, ``bf16``, ``fp16`` in flop/ms, ``launch`` in ms."""

RATES = ("fp32", "tf32", "bf16", "fp16")
SLOWEST, FASTEST = 1e-3, 1e18
"""No device's rates, in bytes or operations a millisecond, are beyond these."""
SLOW = 8
"""So many times slower than fp32, arithmetic is emulated."""


def rate_name(problem: ConvProblem) -> str:
    """Which arithmetic rate of a profile the problem runs at."""
    return "tf32" if problem.dtype == "fp32" and problem.precision == "tf32" else problem.dtype


def estimate_ms(problem: ConvProblem, cost: Cost, profile: Profile) -> float:
    """Milliseconds for ``cost``: the larger of arithmetic and its traffic, the other traffic, a launch per kernel."""
    arithmetic = cost.flops / (profile[rate_name(problem)] * cost.efficiency)
    traffic = max(arithmetic, cost.bytes / profile["copy"]) + cost.apart / profile["copy"]
    return traffic + cost.kernels * profile["launch"]


def is_profile(rates: Mapping[str, float]) -> bool:
    """Whether ``rates``, from a file perhaps, has all that an estimate asks for."""
    sound = all(SLOWEST <= rates.get(name, 0.0) <= FASTEST for name in ("copy", *RATES))
    return sound and 0.0 <= rates.get("launch", -1.0) <= FASTEST


def measure_profile(device_name: str) -> Profile:
    """Measure copy bandwidth, matrix-product rates and launch time; well under a second.

    In the types and the precision that it says, whatever autocast the caller is in and whatever torch is set to.
    """
    with undisturbed():
        return _measured(torch_device(device_name))


def _measured(device: torch.device) -> Profile:
    on_gpu = device.type == "cuda"
    timer = Timer(device)
    profile: Profile = {}
    size = (1 << 28) if on_gpu else (1 << 25)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_(generator=_numbers(device))
    copy = functools.partial(target.copy_, source)
    copy()
    profile["copy"] = 2 * size / timer.median_ms(copy)
    small = source[:256]
    tiny: Callable[[], object] = functools.partial(small.fill_, 1)
    tiny()
    profile["launch"] = timer.median_ms(tiny, 9)
    if on_gpu:
        return profile | {name: _product_rate(timer, name, 4096) for name in RATES}
    return profile | _product_rates_of_a_cpu(timer)


def _product_rates_of_a_cpu(timer: Timer) -> Profile:
    """A processor without 16-bit arithmetic takes over a second for a product that others do in milliseconds."""
    fp32 = max(_product_rate(timer, "fp32", 768), _convolution_rate(timer))
    rates = {"fp32": fp32, "tf32": fp32}
    for name in ("bf16", "fp16"):
        rate = _product_rate(timer, name, 256)
        rates[name] = rate if rate * SLOW < fp32 else _product_rate(timer, name, 768)
    return rates


def _convolution_rate(timer: Timer) -> float:
    """Of fp32 in torch's own convolution: on some processors twice what the library of its matrix products reaches."""
    sizes = (8, 128, 28, 28), (128, 128, 3, 3)
    numbers = _numbers(timer.device)
    x, w = (torch.randn(size, dtype=torch.float32, device=timer.device, generator=numbers) for size in sizes)
    call = functools.partial(torch.conv2d, x, w, padding=1)
    with fp32_precision(timer.device.type, "conv", "ieee"):
        call()
        least_ms = min(timer.time_ms(call) for _ in range(9))  # the first are slower
    return 2 * x.numel() * w.numel() / x.shape[1] / least_ms


def _numbers(device: torch.device) -> torch.Generator:
    """Random numbers of our own: the program's stay where they are."""
    return torch.Generator(device).manual_seed(0)


def _product_rate(timer: Timer, name: str, n: int) -> float:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    numbers = _numbers(timer.device)
    a, b = (torch.randn(n, n, dtype=torch.float32, device=timer.device, generator=numbers).to(dtype) for _ in range(2))
    out = torch.empty(n, n, dtype=dtype, device=timer.device)

    def product() -> None:
        torch.mm(a, b, out=out)

    with fp32_precision(timer.device.type, "matmul", "tf32" if name == "tf32" else "ieee"):
        product()
        # The least of several: a thread that waits for a busy core says nothing of the rate.
        return 2 * n**3 / min(timer.time_ms(product) for _ in range(5))
