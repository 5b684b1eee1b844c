"""Roofline estimates from a measured device profile: what a candidate takes if its arithmetic or its bytes decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from tilewise import solvers
from tilewise.machine.device import device_name, torch_device
from tilewise.machine.torch_state import fp32_precision, undisturbed
from tilewise.machine.turns import pause
from tilewise.plan import Config
from tilewise.planner.measuring.repeats import MOST_LAUNCHES
from tilewise.planner.measuring.times import Timer
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kinds
from tilewise.problems.operands import make_operands, make_results
from tilewise.solvers import Cost

__all__ = ["Profile", "arithmetic_name", "estimate_ms", "is_profile", "measure_profile", "rate_name"]

Profile = dict[str, float]
"""``copy`` in bytes/ms (read and written), ``fp32``, ``tf32``, ``bf16``, ``fp16`` in flop/ms, and in ms ``launch``, a
tiny kernel launched and waited for, and ``kernel``, one among many that are queued, as short candidates are timed."""

RATES = ("fp32", "tf32", "bf16", "fp16")
SLOWEST, FASTEST = 1e-3, 1e18
"""Bounds on sound rates of a device, in bytes or operations per millisecond."""
PIECES = 8
"""A large tensor is filled in so many pieces, between which a program may go on."""
SLOW = 8
"""Arithmetic that is this many times slower than fp32 is taken to be emulated."""


def rate_name(problem: Problem) -> str:
    """Which arithmetic rate of a profile the problem runs at."""
    return arithmetic_name(problem.dtype, problem.precision)


def arithmetic_name(dtype: str, precision: str) -> str:
    """Which arithmetic rate of a profile products of operands of ``dtype`` run at."""
    return "tf32" if dtype == "fp32" and precision == "tf32" else dtype


def estimate_ms(problem: Problem, cost: Cost, profile: Profile) -> float:
    """Milliseconds for ``cost``: the larger of arithmetic and its traffic, plus other traffic, launches and steps."""
    arithmetic = cost.flops / (profile[rate_name(problem)] * cost.efficiency)
    traffic = max(arithmetic, cost.bytes / profile["copy"]) + cost.apart / profile["copy"]
    return traffic + cost.kernels * profile["kernel"] + cost.serial_us / 1e3


def is_profile(rates: Mapping[str, float]) -> bool:
    """Whether ``rates``, which may come from a file, has sound values for all that estimates use."""
    sound = all(SLOWEST <= rates.get(name, 0.0) <= FASTEST for name in ("copy", *RATES))
    return sound and all(0.0 <= rates.get(name, -1.0) <= FASTEST for name in ("launch", "kernel"))


def measure_profile(device_name: str) -> Profile:
    """Measure copy bandwidth, matrix-product rates and launch time; well under a second.

    The caller's autocast and torch's settings have no influence.
    """
    with undisturbed():
        return _measured(torch_device(device_name))


def _measured(device: torch.device) -> Profile:
    """The profile of ``device``, measured under torch's flags as they are."""
    on_gpu = device.type == "cuda"
    timer = Timer(device)
    profile: Profile = {}
    size = (1 << 28) if on_gpu else (1 << 25)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    numbers = _numbers(device)
    for part in source.chunk(PIECES):
        pause()
        part.random_(generator=numbers)
    copy = functools.partial(target.copy_, source)
    pause()
    copy()
    profile["copy"] = 2 * size / timer.median_ms(copy)
    small = source[:256]
    tiny: Callable[[], object] = functools.partial(small.fill_, 1)
    tiny()
    profile["launch"] = timer.median_ms(tiny, 9)
    queued = [timer.time_each([tiny] * MOST_LAUNCHES) for _ in range(9)] if on_gpu else []
    # The least, as for products: a host that is slow to launch says nothing of the device.
    profile["kernel"] = min(took.device_ms for took in queued) if on_gpu else profile["launch"]
    if on_gpu:
        return profile | {name: _product_rate(timer, name, 4096) for name in RATES}
    return profile | _product_rates_of_a_cpu(timer)


def _product_rates_of_a_cpu(timer: Timer) -> Profile:
    """Rates of matrix products on a CPU.

    16-bit types are tried on small matrices first: a processor that emulates them takes over a second for a product
    that others do in milliseconds.
    """
    fp32 = max(_product_rate(timer, "fp32", 768), _rate_of_examples(timer))
    rates = {"fp32": fp32, "tf32": fp32}
    for name in ("bf16", "fp16"):
        rate = _product_rate(timer, name, 256)
        rates[name] = rate if rate * SLOW < fp32 else _product_rate(timer, name, 768)
    return rates


def _rate_of_examples(timer: Timer) -> float:
    """The best rate of fp32 among the problems that their kinds name for this: flops in a millisecond, 0 for none."""
    rates = [0.0]
    for kind in kinds().values():
        problem = kind.fast_example(device_name(timer.device))
        if problem is None:
            continue
        solver = solvers.baseline(problem)
        tensors = *make_operands(problem), *make_results(problem)
        run = solver.bind(problem, Config(), *tensors)
        call = functools.partial(run, *tensors, None)
        with problem.flags(deterministic=False):
            call()
            least_ms = min(timer.time_ms(call) for _ in range(9))  # the first are slower
        rates.append(problem.flops / least_ms)
    return max(rates)


def _numbers(device: torch.device) -> torch.Generator:
    """A random generator of our own, so that the program's own random numbers stay as they are."""
    return torch.Generator(device).manual_seed(0)


def _product_rate(timer: Timer, name: str, n: int) -> float:
    """Flops per millisecond of an ``n`` by ``n`` matrix product in the type called ``name``."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    numbers = _numbers(timer.device)
    pause()
    a, b = (torch.randn(n, n, dtype=torch.float32, device=timer.device, generator=numbers).to(dtype) for _ in range(2))
    pause()
    out = torch.empty(n, n, dtype=dtype, device=timer.device)

    def product() -> None:
        torch.mm(a, b, out=out)

    with fp32_precision(timer.device.type, "matmul", "tf32" if name == "tf32" else "ieee"):
        product()
        # The least of several: a thread that waits for a busy core says nothing of the rate.
        return 2 * n**3 / min(timer.time_ms(product) for _ in range(5))
