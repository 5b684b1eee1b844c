"""Kernels as they would be launched, by Triton's compiler for compute capability 9.0, without a GPU.

Whoever launches them says what is compiled: no test has constants and alignments of its own, which might be others.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
}


class Recorded:
    """Stands for :class:`~tilewise.kernels.triton.launch.Program`: keeps what it would compile, launches nothing."""

    made: ClassVar[list[tuple[Launch, list[int]]]] = []
    sequence = None

    def __init__(self, launches: Sequence[Launch], alignment: Sequence[int], device: torch.device) -> None:
        self.made += [(launch, list(alignment)) for launch in launches]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    @classmethod
    def begin(cls) -> None:
        """For the rest of the process."""
        from tilewise.kernels.triton import launch

        launch.Program = cls  # type: ignore[assignment,misc]

    @classmethod
    def compiled(cls, of: str) -> list[dict[str, Any]]:
        """What was made since the last call, and what the compiler makes of it."""
        found = [compiled(*one) | {"of": of} for one in cls.made]
        cls.made.clear()
        return found


def compiled(launch: Launch, alignment: list[int]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_for

    names, count = launch.kernel.arg_names, len(launch.pointers)
    constants = dict(launch.constants)
    signature = {name: TYPES[p.dtype] for name, p in zip(names[:count], launch.pointers, strict=True)}
    aligned = [math.gcd(alignment[p.source], p.offset) % 16 == 0 for p in launch.pointers]
    for parameter, value in zip(launch.kernel.params[count:], launch.scalars, strict=False):
        signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        special = not parameter.do_not_specialize and not isinstance(value, float)
        aligned.append(special and value % 16 == 0)
        if special and value == 1:
            constants[parameter.name] = 1
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in names}
    attributes = {(n,): [["tt.divisibility", 16]] for n, fits in enumerate(aligned) if fits}
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    kernel = compile_for(source, GPUTarget("cuda", 90, 32), options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", used)
    (registers,) = re.findall(r"REG:(\d+)", used)
    return {
        "kernel": launch.kernel.fn.__name__, "constants": launch.constants, "ptx": kernel.asm["ptx"],
        "stack": int(stack), "registers": int(registers), "shared": kernel.metadata.shared,
    }  # fmt: skip


def apart(function: str) -> Any:
    """What ``module:function`` returns in a process of its own, where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src"), environment.get("PYTHONPATH", "")])
    module, name = function.split(":")
    program = f"import json; from {module} import {name}; print(json.dumps({name}()))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def at(lines: list[str], word: str) -> list[int]:
    """Numbers of the lines that have ``word``."""
    return [n for n, line in enumerate(lines) if word in line]
