"""What the driver is told when a compiled Triton kernel is launched, as Triton's own launcher tells it.

Triton compiles a launcher in C for each list of argument types as it loads a kernel. Launches that the driver is told
of directly never call it, so within :func:`late_launchers` it is made when it is first called.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from triton import knobs

from tilewise.kernels.native.sequence import Address, KernelLaunch

__all__ = ["LateLauncher", "hooks", "kernel_launch", "late_launchers", "made_now"]

FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""Of Triton's types of numbers, how the driver takes them."""
THREADS_OF_WARP = 32
COOPERATIVE, SERIALIZATION = 2, 6
"""``CU_LAUNCH_ATTRIBUTE_COOPERATIVE`` and ``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""
SCRATCH = (bytes(8), bytes(8))
"""Each kernel of Triton ends with two addresses of scratch memory, which are 0 where it needs none."""


class LateLauncher:
    """Stands for the launcher that ``make(*arguments)`` makes, which is made once, when it is called or looked at."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._make = functools.partial(make, *arguments, **named)
        self._lock = threading.Lock()
        self._made: Any = None

    def made(self) -> Any:
        """The launcher itself."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.made()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)


@contextlib.contextmanager
def late_launchers() -> Iterator[None]:
    """Within the block kernels are loaded without compiling their launchers.

    It is a setting of the process: a kernel that another thread loads meanwhile gets such a launcher too, which
    launches as its own would. Nothing changes where this version of Triton makes launchers in another way.
    """
    global _within, _usual
    from triton.runtime import driver

    with _lock:
        active = driver.active
        usual = getattr(active, "launcher_cls", None)
        if usual is not None and not _within:
            _usual = active, usual
            active.launcher_cls = functools.partial(LateLauncher, usual)
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within and _usual is not None:
                _usual[0].launcher_cls = _usual[1]
                _usual = None


def made_now(launcher: Any) -> None:
    """Make ``launcher`` if it was left for later: it will be called."""
    if isinstance(launcher, LateLauncher):
        launcher.made()


_lock = threading.Lock()
_within = 0
_usual: tuple[Any, Any] | None = None
"""The driver whose launchers are made late, and the class of those."""


def kernel_launch(compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> KernelLaunch | None:
    """A launch of a loaded kernel; ``arguments`` are those of its function in order, addresses as :class:`Address`.

    ``None`` where it needs more than this tells: scratch memory, clusters, tensor descriptors, or types that none of
    our kernels takes. Warns where this version of Triton keeps what is needed elsewhere.
    """
    try:
        return _kernel_launch(compiled, grid, arguments)
    except (AttributeError, OverflowError, TypeError, ValueError, struct.error) as error:
        text = f"this version of Triton describes kernels in another way than is known here ({error})"
        warnings.warn(f"{text}: they are launched from Python, which takes longer", RuntimeWarning, stacklevel=2)
        return None


def _kernel_launch(compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> KernelLaunch | None:
    """:func:`kernel_launch`, which raises where Triton is not as known."""
    metadata = compiled.metadata
    warps, clusters, shared = compiled.packed_metadata[:3]
    if clusters != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    parameters: list[Address | bytes] = []
    for kind, value in zip(compiled.src.signature.values(), arguments, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(value, Address):
            parameters.append(value)
        elif kind in FORMATS:
            parameters.append(struct.pack(f"={FORMATS[kind]}", value))
        else:
            return None
    asked = ((SERIALIZATION, metadata.launch_pdl), (COOPERATIVE, metadata.launch_cooperative_grid))
    attributes = tuple((number, struct.pack("=i", 1)) for number, wanted in asked if wanted)
    block = (THREADS_OF_WARP * warps, 1, 1)
    return KernelLaunch(compiled.function, grid, block, shared, attributes, (*parameters, *SCRATCH))


def hooks() -> tuple[tuple[Any, str], ...]:
    """Where Triton keeps the functions that profilers want to be called at each launch."""
    return (knobs.runtime, "launch_enter_hook"), (knobs.runtime, "launch_exit_hook")
