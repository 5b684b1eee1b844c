"""Compiled Triton kernels, launched by Triton's own launcher and from C: what a driver without a GPU is told of each.

For a process of its own in which Triton compiles instead of interpreting.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from tests.kernels.native.standin import Standin, build

from tilewise.kernels.native import building, extension
from tilewise.kernels.native.sequence import Address
from tilewise.kernels.triton.driver_launch import hooks, kernel_launch

BYTES = {"u64": 8, "b64": 8, "u32": 4, "b32": 4, "f32": 4, "f64": 8, "u8": 1, "b8": 1, "u16": 2, "b16": 2}
SIGNATURE = {
    "x": "*fp32", "y": "*i64", "n": "i32", "unused": "i64", "one": "constexpr", "scale": "fp32", "exact": "fp64",
    "flag": "i1", "BLOCK": "constexpr",
}  # fmt: skip
VALUES = {"n": -3, "unused": 2**40 + 1, "one": 1, "scale": 0.1, "exact": 0.1, "flag": True, "BLOCK": 64}


@triton.jit
def mixed(x, y, n, unused, one, scale, exact, flag, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads arguments of many types, so that the compiler keeps them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n + one, other=0.0) * scale + exact.to(tl.float32)
    tl.store(y + at, (value + flag.to(tl.float32)).to(tl.int64) + unused, mask=at < n)


def kernels() -> list[Any]:
    """The kernel for compute capability 9.0, plain, cooperative and serialized, and in clusters."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_for

    places = {name: n for n, name in enumerate(SIGNATURE)}
    constants = {(places[name],): VALUES[name] for name, kind in SIGNATURE.items() if kind == "constexpr"}
    source = ASTSource(mixed, SIGNATURE, constants, {(0,): [["tt.divisibility", 16]]})
    options = [
        {"num_warps": 8},
        {"num_warps": 2, "launch_pdl": True, "launch_cooperative_grid": True},
        {"num_warps": 4, "num_ctas": 2},
    ]
    return [compile_for(source, GPUTarget("cuda", 90, 32), one) for one in options]


def compared() -> list[Any]:
    """By kernel: the driver's parameters, and what it was told by Triton and from C."""
    with tempfile.TemporaryDirectory() as folder:
        standin = Standin(build(Path(folder)))
        os.environ |= {"TRITON_LIBCUDA_PATH": folder, "TRITON_CACHE_DIR": folder}
        module = extension._loaded(building.EXTENSION, extension._compiled(building.EXTENSION))
        driver = module.Driver(str(standin.path))
        return [_compared(standin, module, driver, kernel) for kernel in kernels()]


def _compared(standin: Standin, module: Any, driver: Any, kernel: Any) -> list[Any]:
    from triton.backends.nvidia.driver import CudaLauncher

    (entry,) = re.findall(r"\.entry mixed\((.*?)\)", kernel.asm["ptx"], re.S)
    sizes = [BYTES[kind] for kind in re.findall(r"\.param \.(\w+)", entry)]
    kernel.function = standin.function(sizes)
    launcher = CudaLauncher(kernel.src, kernel.metadata)
    given = {"x": 2**40 + 16, "y": 2**41 + 8, **VALUES}
    standin.begin()
    arguments = (given[name] for name in SIGNATURE)
    launcher(5, 3, 2, 77, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
    (by_triton,) = standin.told()
    addresses = {"x": Address(1, 16), "y": Address(0, -8)}
    told = kernel_launch(kernel, (5, 3, 2), [addresses.get(name, given[name]) for name in SIGNATURE])
    if told is None:
        return [sizes, repr(by_triton), None]
    standin.begin()
    module.LaunchList(driver, 2, (told,), hooks(), print)(77, 2**41 + 16, 2**40)
    (from_c,) = standin.told()
    assert sorted(from_c.attributes) == sorted(by_triton.attributes)
    return [sizes, *(repr(told._replace(attributes=())) for told in (by_triton, from_c))]
