"""CUDA C++ compiled once through NVIDIA's cuda.core (NVRTC) and launched by address, without any allocation."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewise.kernels.building import cubins, workers
from tilewise.kernels.building.noted import note
from tilewise.kernels.building.target import Architecture, sought
from tilewise.kernels.cuda.nvrtc import compile_text, compiler, core, read_source, unavailable
from tilewise.kernels.native import building
from tilewise.kernels.native.sequence import Address, KernelLaunch, LaunchSequence, launch_list

__all__ = [
    "MOST_PORTABLE",
    "Bound",
    "Kernel",
    "Launch",
    "Program",
    "Unloaded",
    "block_limits",
    "compile_cubin",
    "compiler",
    "has_clusters",
    "kernel",
    "read_source",
    "unavailable",
]

MOST_THREADS = 1024
COOPERATIVE = (2, (1).to_bytes(4, "little"))
"""``CU_LAUNCH_ATTRIBUTE_COOPERATIVE`` and its value: all blocks of a launch run at a time."""
SHARED_LIMIT = 227 * 1024
"""Most bytes of shared memory of a block (compute capability 9.0)."""
MOST_PORTABLE = 8
"""Blocks of a cluster that every GPU with clusters runs. A kernel that is compiled for more has to ask for them."""


def compile_cubin(source: str, architecture: str) -> Any:
    """Compile ``ptx.cu`` and ``source`` for an architecture such as ``sm_90`` into cuda.core's ``ObjectCode``.

    In a thread that a pool of workers serves, one of these compiles it. The code is kept on disk. Raises
    ``RuntimeError`` with the reason where cuda.core is missing or there are errors.
    """
    modules, _, reason = core()
    if reason:
        raise RuntimeError(reason)
    text = read_source("ptx.cu") + source
    path = cubins.path_of(text, architecture, compiler())
    note(f"cuda/{path.name}")
    stored = cubins.load(path)
    if stored is None and workers.compile_cuda(text, architecture):
        stored = cubins.load(path)
    if stored is not None:
        return modules.ObjectCode.from_cubin(stored)
    return compile_text(text, architecture)[0]


class Kernel:
    """A compiled kernel of one device.

    ``registers`` and ``spilled`` (bytes of local memory) are those of one thread. Raises ``RuntimeError`` where it
    cannot be compiled or loaded.
    """

    def __init__(self, source: str, name: str, device: int) -> None:
        modules, driver, reason = core()
        if reason:
            raise RuntimeError(reason)
        building.start()
        self._driver, self.device = driver, device
        major, minor = torch.cuda.get_device_capability(device)
        with torch.cuda.device(device):
            modules.Device(device).set_current()
            self._code = compile_cubin(source, Architecture(major, minor).instructions)
            handle = self._code.get_kernel(name)
            address = int(handle.handle if hasattr(handle, "handle") else handle._handle)
            self.function = int(self._call("cuKernelGetFunction", driver.CUkernel(address)))
        self._attributes = driver.CUfunction_attribute
        self.registers = self._attribute("CU_FUNC_ATTRIBUTE_NUM_REGS")
        self.spilled = self._attribute("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")
        self._shared = 0

    def reserve(self, shared: int) -> None:
        """Allow blocks ``shared`` bytes of dynamic shared memory, taken from the multiprocessor's cache."""
        if shared <= self._shared:
            return
        for name, value in (("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared), ("PREFERRED_SHARED_MEMORY_CARVEOUT", 100)):
            attribute = getattr(self._attributes, f"CU_FUNC_ATTRIBUTE_{name}")
            self._call("cuFuncSetAttribute", self._driver.CUfunction(self.function), attribute, value)
        self._shared = shared

    def resident(self, threads: int, shared: int) -> int:
        """How many blocks of ``threads`` threads and ``shared`` bytes one multiprocessor holds at a time."""
        function = self._driver.CUfunction(self.function)
        return int(self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared))

    def clusters(self, size: int, threads: int, shared: int) -> int:
        """How many clusters of ``size`` blocks, for which it is compiled, the device runs at a time.

        A cluster lies in one group of the multiprocessors, so they may be fewer than the multiprocessors suggest.
        """
        self._allow(size)
        self.reserve(shared)
        driver = self._driver
        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimensions = attribute.value.clusterDim
        dimensions.x, dimensions.y, dimensions.z = size, 1, 1
        config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = shared, [attribute], 1
        return int(self._call("cuOccupancyMaxActiveClusters", driver.CUfunction(self.function), config))

    def launch(
        self,
        grid: int,
        threads: int,
        shared: int,
        pointers: int,
        scalars: Sequence[int | float],
        together: bool = False,
        cluster: int = 1,
    ) -> Launch:
        """A launch of ``grid`` blocks of ``threads`` threads with ``shared`` bytes each; see :class:`Launch`.

        ``cluster`` blocks at a time run together; the kernel is compiled for that.
        """
        self._allow(cluster)
        self.reserve(shared)
        return Launch(self, (grid, threads, shared), pointers, scalars, together)

    def _allow(self, cluster: int) -> None:
        """Allow clusters of so many blocks where not every GPU with clusters runs them."""
        if cluster > MOST_PORTABLE:
            attribute = self._attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._call("cuFuncSetAttribute", self._driver.CUfunction(self.function), attribute, 1)

    def _attribute(self, name: str) -> int:
        """An attribute of the compiled function."""
        function = self._driver.CUfunction(self.function)
        return int(self._call("cuFuncGetAttribute", getattr(self._attributes, name), function))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver. Raises ``RuntimeError`` where it reports an error."""
        error, *results = getattr(self._driver, name)(*arguments)
        _check(self._driver, name, error)
        return results[0] if results else None


class Launch:
    """A launch whose arguments are fixed except for the first ``pointers`` ones, which are addresses.

    All other arguments are eight bytes wide: ``long long`` for an int of ``scalars``, ``double`` for a float. Calls
    follow the current stream of the kernel's device and may come from several threads. With ``together`` the blocks
    only start when all of them fit on the device, so that they may wait for each other (a cooperative launch).
    """

    __slots__ = (
        "_arguments", "_current", "_device", "_dimensions", "_driver", "_extra", "_function", "_lock", "_run",
        "_scalars", "_stream", "_together", "_values",
    )  # fmt: skip

    def __init__(
        self, kernel: Kernel, dimensions: tuple[int, int, int], pointers: int, scalars: Sequence[int | float],
        together: bool = False,
    ) -> None:  # fmt: skip
        count = pointers + len(scalars)
        self._values = (ctypes.c_int64 * count)()
        for i, value in enumerate(scalars, pointers):
            if isinstance(value, float):
                ctypes.c_double.from_buffer(self._values, 8 * i).value = value
            else:
                self._values[i] = value
        first = ctypes.addressof(self._values)
        self._arguments = (ctypes.c_void_p * count)(*(first + 8 * i for i in range(count)))
        grid, threads, shared = dimensions
        self._dimensions = (grid, 1, 1, threads, 1, 1, shared)
        self._driver = kernel._driver
        self._function = self._driver.CUfunction(kernel.function)
        self._run: Callable[..., tuple[Any]] = self._driver.cuLaunchKernel
        self._extra: tuple[int, ...] = (0,)
        self._together = together
        if together:
            self._run, self._extra = self._driver.cuLaunchCooperativeKernel, ()
        self._device = kernel.device
        self._scalars = bytes(self._values)[8 * pointers :]
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        several = torch.cuda.device_count() > 1
        self._current: Callable[[], int] | None = torch._C._cuda_getDevice if several else None
        self._lock = threading.Lock()

    def __call__(self, *addresses: int) -> None:
        device = self._device
        if self._current is not None and self._current() != device:
            with torch.cuda.device(device):
                self(*addresses)
            return
        if not self._dimensions[0]:
            return
        stream, values = self._stream(device), self._values
        # The driver copies the arguments before it returns, so they are in use for no longer than the lock is held.
        with self._lock:
            for i, address in enumerate(addresses):
                values[i] = address
            (error,) = self._run(
                self._function, *self._dimensions, stream, ctypes.addressof(self._arguments), *self._extra
            )
        if error:
            _check(self._driver, "cuLaunchKernel", error)

    def told(self, pointers: Sequence[tuple[int, int]]) -> KernelLaunch:
        """What the driver is told of it; ``pointers`` are numbers of tensors and offsets into them in bytes."""
        grid, threads, shared = (self._dimensions[i] for i in (0, 3, 6))
        scalars = (self._scalars[i : i + 8] for i in range(0, len(self._scalars), 8))
        parameters: list[Address | bytes] = [Address(source, offset) for source, offset in pointers]
        parameters += scalars
        attributes = (COOPERATIVE,) if self._together else ()
        return KernelLaunch(int(self._function), (grid, 1, 1), (threads, 1, 1), shared, attributes, tuple(parameters))

    @property
    def device(self) -> int:
        """The number of the GPU."""
        return self._device

    def listed(self, pointers: int) -> Any:
        """The launch as a ``LaunchList`` in C that takes its addresses; ``None`` where launches stay in Python."""
        told = self.told([(source, 0) for source in range(pointers)])
        return launch_list(LaunchSequence((told,), self._device), self)


class Unloaded:
    """Stands for what was compiled for another machine's ``architecture`` alone, and cannot be run here."""

    __slots__ = ("_architecture",)

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture

    def __call__(self, *_: Any) -> Any:
        """Raises ``RuntimeError``."""
        raise RuntimeError(f"compiled for {self._architecture.name} to be carried elsewhere, not to be run here")

    run_pointers = __call__


class Program(Protocol):
    """What a kernel is compiled from, such as the programs of ``fft1d`` and ``fft2d``."""

    @property
    def name(self) -> str:
        """The name of the kernel's function in CUDA C++."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""

    def source(self) -> str:
        """The CUDA C++; :func:`compile_cubin` puts ``ptx.cu`` before it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A program for fixed shapes and strides, with ``grid`` blocks (0 where there is nothing to do).

    ``cluster`` blocks at a time run together; the kernel is compiled for that.
    """

    program: Program
    grid: int
    scalars: tuple[int | float, ...]
    pointers: int = 2
    cluster: int = 1

    def compile_for(self, architecture: Architecture) -> Unloaded:
        """Compile for another machine's GPU, so that the code is kept. Raises as :func:`compile_cubin`."""
        compile_cubin(self.program.source(), architecture.instructions)
        return Unloaded(architecture)

    def launch(self, device: int) -> Launch:
        """Compile for a device.

        The launch takes the addresses of operand and result, and further ones if there are more pointers.
        """
        p = self.program
        return kernel(p.source(), p.name, device).launch(self.grid, p.threads, p.shared, self.pointers, self.scalars)


def block_limits(wanted: str, threads: int, shared: int) -> list[str]:
    """Reasons why no block can have so many threads and bytes of shared memory; ``wanted`` names who asks for them."""
    reasons = []
    if threads > MOST_THREADS:
        reasons.append(f"{wanted}: {threads} threads in a block are more than {MOST_THREADS}")
    if shared > SHARED_LIMIT:
        reasons.append(f"{wanted}: {shared} bytes of shared memory in a block are more than {SHARED_LIMIT}")
    return reasons


def _check(driver: Any, call: str, error: Any) -> None:
    """Raise ``RuntimeError`` where the driver reports an error."""
    if int(error) != 0:
        _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"{call} failed: {text.decode() if text else error}")


def has_clusters() -> bool:
    """Whether the GPUs that kernels are for run clusters of blocks; true where there is no GPU."""
    architecture = sought()
    return _have_clusters() if architecture is None else (architecture.major, architecture.minor) >= (9, 0)


@functools.cache
def _have_clusters() -> bool:
    """Whether every GPU here runs clusters of blocks; true where there is no GPU."""
    devices = range(torch.cuda.device_count())
    return all(torch.cuda.get_device_capability(device) >= (9, 0) for device in devices)


@functools.lru_cache(maxsize=1024)
def kernel(source: str, name: str, device: int) -> Kernel:
    """The kernel ``name`` of ``source`` on a device, compiled on first use. Raises as :func:`compile_cubin`."""
    return Kernel(source, name, device)
