"""Launches of loaded kernels and products as values: what is told of each, with tensors' addresses left open."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tilewise.kernels.native import building

__all__ = [
    "SCALAR_TYPES",
    "Address",
    "KernelLaunch",
    "Kernels",
    "LaunchSequence",
    "LibraryCalls",
    "LtProduct",
    "Matrix",
    "Product",
    "addressed_of",
    "joined",
    "kernels_of",
    "launch_list",
    "pass_call",
]

SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
"""The numbers of dtypes in ``c10::ScalarType``, which do not change."""

Sizes = tuple[int, int, int]


class Address(NamedTuple):
    """A parameter that is an address: ``offset`` bytes into tensor number ``source`` of a call."""

    source: int
    offset: int


def _placed(address: Address, places: Sequence[Address]) -> Address:
    """``address`` where its source lies at one of ``places``; those after them stay."""
    if address.source >= len(places):
        return address
    source, offset = places[address.source]
    return Address(source, offset + address.offset)


class KernelLaunch(NamedTuple):
    """One launch, as ``LaunchList`` in C takes it.

    ``function`` is the ``CUfunction``. ``grid`` and ``block`` are numbers of blocks and of threads. ``shared`` is the
    dynamic shared memory of a block in bytes. ``attributes`` are pairs of number and value as in
    ``CUlaunchAttribute``. A parameter is an :class:`Address`, or its 1, 2, 4 or 8 bytes.
    """

    function: int
    grid: Sizes
    block: Sizes
    shared: int
    attributes: tuple[tuple[int, bytes], ...]
    parameters: tuple[Address | bytes, ...]

    def over(self, places: Sequence[Address]) -> KernelLaunch:
        """The same over other memory: ``places`` say where each source lies, those after them stay."""
        parameters = (_placed(p, places) if isinstance(p, Address) else p for p in self.parameters)
        return self._replace(parameters=tuple(parameters))


class Matrix(NamedTuple):
    """A matrix as BLAS is told of it: the number of its type, its leading dimension, and its step within a batch."""

    type: int
    leading: int
    step: int = 0


class LibraryCalls(NamedTuple):
    """What a product needs of Python: torch's handle of cuBLAS, which device is current, and the error of a status.

    ``current`` is ``None`` where there is one device. ``failed(status)`` raises.
    """

    handle: Callable[[], int]
    current: Callable[[], int] | None
    failed: Callable[[int], Any]


class Product(NamedTuple):
    """A matrix product by cuBLAS in place of a launch, as ``LaunchList`` in C takes it.

    ``function`` is the address of ``cublasGemmEx``, or of ``cublasGemmStridedBatchedEx`` for a ``batch`` of so many
    products; 0 is no batch. ``set_mode`` is the address of ``cublasSetMathMode``, called with ``mode`` before; 0 leaves
    the handle's mode. ``operations`` are those of the factors, ``sizes`` rows, columns and depth. ``parameters`` say
    where both factors and the result lie.
    """

    function: int
    set_mode: int
    operations: tuple[int, int]
    sizes: Sizes
    batch: int
    compute: int
    alpha: float
    beta: float
    mode: int
    parameters: tuple[Address, ...]
    matrices: tuple[Matrix, ...]
    calls: LibraryCalls
    device: int

    def over(self, places: Sequence[Address]) -> Product:
        """The same over other memory, as :meth:`KernelLaunch.over`."""
        return self._replace(parameters=tuple(_placed(p, places) for p in self.parameters))


class LtProduct(NamedTuple):
    """A matrix product by one algorithm of cuBLASLt in place of a launch, as ``LaunchList`` in C takes it.

    ``function`` is the address of ``cublasLtMatmul``, ``set_attribute`` that of ``cublasLtMatmulDescSetAttribute``.
    ``operation`` and ``matrices`` are the addresses of its descriptors, of both factors and the result; ``owner`` is
    what keeps them. ``scales`` are of the product and of what the result holds. ``algorithms`` have
    the library's 64 bytes each: for a bias at a multiple of 16 bytes or none, and for a bias anywhere. ``workspace`` is
    in bytes. ``parameters`` say where both factors, the result, the workspace and the bias lie; the last two may be
    ``None``. The address of the bias is the operation's attribute number ``attribute``.
    ``failed(status)`` raises.
    """

    function: int
    set_attribute: int
    handle: int
    operation: int
    matrices: tuple[int, int, int]
    scales: tuple[float, float]
    algorithms: tuple[bytes, bytes]
    workspace: int
    attribute: int
    parameters: tuple[Address | None, ...]
    failed: Callable[[int], Any]
    owner: Any

    def over(self, places: Sequence[Address]) -> LtProduct:
        """The same over other memory, as :meth:`KernelLaunch.over`."""
        return self._replace(parameters=tuple(p and _placed(p, places) for p in self.parameters))


@dataclass(frozen=True, slots=True)
class LaunchSequence:
    """Launches in order on the GPU with number ``device``, of kernels and of products.

    ``hooks`` are ``(owner, name)`` of attributes that hold functions which must be told of each launch. While there are
    such functions, launches come from Python.
    """

    launches: tuple[KernelLaunch | Product | LtProduct, ...]
    device: int
    hooks: tuple[tuple[Any, str], ...] = ()

    def over(self, places: Sequence[Address]) -> LaunchSequence:
        """The same launches over other memory: ``places`` say where each source lies, those after them stay."""
        return replace(self, launches=tuple(launch.over(places) for launch in self.launches))

    def moved(self, offsets: Sequence[int]) -> LaunchSequence:
        """The same launches over other parts of the tensors; ``offsets`` in bytes, one for each of the first ones."""
        return self.over([Address(source, offset) for source, offset in enumerate(offsets)])

    @property
    def sources(self) -> int:
        """How many tensors a call must give the address of."""
        used = (p.source for launch in self.launches for p in launch.parameters if isinstance(p, Address))
        return 1 + max(used, default=0)


def joined(sequences: Iterable[LaunchSequence]) -> LaunchSequence | None:
    """All launches one after the other; ``None`` where they are for several devices, or there are none.

    ``None`` as well for products of which only some set the mode of the library's handle: others would meet it.
    """
    parts = list(sequences)
    modes = {bool(one.set_mode) for part in parts for one in part.launches if isinstance(one, Product)}
    if len({part.device for part in parts}) != 1 or len(modes) > 1:
        return None
    hooks = dict.fromkeys(hook for part in parts for hook in part.hooks)
    return LaunchSequence(tuple(launch for part in parts for launch in part.launches), parts[0].device, tuple(hooks))


def launch_list(sequence: LaunchSequence, instead: Callable[..., None]) -> Any:
    """A ``LaunchList``: ``launches(stream, *addresses)`` queues all. ``None`` where launches stay in Python.

    ``instead(*addresses)`` is called while a hook holds functions. A sequence that does not agree with its loaded
    kernels stays in Python with a warning.
    """
    found = building.native()
    if found is None:
        return None
    try:
        if threading.current_thread() is not threading.main_thread():
            torch.cuda.mem_get_info(sequence.device)  # a thread that has not used a GPU yet has no context of it
        with torch.cuda.device(sequence.device):
            return found.module.LaunchList(found.driver, sequence.sources, sequence.launches, sequence.hooks, instead)
    except (RuntimeError, TypeError, ValueError) as error:
        warnings.warn(f"kernels are launched from Python, which takes longer: {error}", RuntimeWarning, stacklevel=2)
        return None


def pass_call(
    sequence: LaunchSequence,
    addressed: Callable[..., None],
    *,
    instead: Callable[..., Any],
    result: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype | None,
    workspace: torch.Tensor | None,
    fit: Callable[..., torch.Tensor] | None,
    add: Callable[..., Any],
) -> Any:
    """A ``PassCall`` that runs two operands and one result: ``call(a, b, bias=None, out=None)`` returns the result.

    ``None`` where launches stay in Python. The sequence is over the addresses of operands, result, workspace and, where
    there is ``fit``, bias. ``addressed`` runs it from Python. ``instead`` is the whole call from Python, used while a
    hook holds functions. A new result has the shape and strides of ``result``, and ``dtype`` or that of ``a``.
    ``workspace`` is an example of one, which may share one element's memory. ``fit(bias, a)`` makes the bias as the
    kernels take it, and without it ``add(out, bias)`` adds one.
    """
    launches = launch_list(sequence, addressed)
    found = building.native()
    if launches is None or found is None:
        return None
    described = (*result, dtype) if dtype is not None else result
    return found.module.PassCall(
        launches,
        instead,
        torch._C._cuda_getCurrentRawStream,
        sequence.device,
        torch.Tensor.data_ptr,
        (torch.Tensor.new_empty_strided, described, ("dtype",) if dtype is not None else ()),
        None if workspace is None else (torch.empty_like, (workspace,), ()),
        fit,
        add,
    )


class Kernels(NamedTuple):
    """A plan that does nothing else than launch kernels and products, as ``Kernels`` in ``plan_pass.h`` takes it.

    Without ``api`` and ``stream`` it is one that runs on addresses, which ``launches(*addresses)`` does in Python.
    ``launches`` are over the addresses of two operands, a result with ``shape``, ``strides`` and the number ``dtype``,
    a ``workspace`` of so many bytes and a bias. ``api`` queues them on ``stream(device)``. A bias lies along the
    result's dimension ``bias_dim``; where not ``adds_bias`` it is added afterwards. ``range`` is the name under which a
    profiler shows a call; it is empty where none is shown.
    """

    launches: Any
    api: Any
    stream: Callable[[int], int] | None
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    workspace: int
    bias_dim: int
    adds_bias: bool
    range: str = ""


def kernels_of(
    call: Any, device: int, result: torch.Tensor, *, workspace: int, bias_dim: int, adds_bias: bool
) -> Kernels | None:
    """The kernels of a ``PassCall``; ``None`` where its result's type has no number here.

    ``result`` is an example of one, of which the memory does not matter.
    """
    found = building.native()
    if found is None:
        return None
    stream = torch._C._cuda_getCurrentRawStream
    return _kernels(call.launches, found.module.api, stream, device, result, workspace, bias_dim, adds_bias)


def addressed_of(
    addressed: Callable[..., None], result: torch.Tensor, *, workspace: int, bias_dim: int, adds_bias: bool
) -> Kernels | None:
    """What native code needs to call a plan that runs on addresses, as :func:`kernels_of`."""
    return _kernels(addressed, None, None, -1, result, workspace, bias_dim, adds_bias)


def _kernels(
    launches: Any,
    api: Any,
    stream: Callable[[int], int] | None,
    device: int,
    result: torch.Tensor,
    workspace: int,
    bias_dim: int,
    adds_bias: bool,
) -> Kernels | None:
    """The description of a plan with a result like this one; ``None`` where its type has no number here."""
    dtype = SCALAR_TYPES.get(result.dtype)
    if dtype is None:
        return None
    shape, strides = tuple(result.shape), result.stride()
    return Kernels(launches, api, stream, device, shape, strides, dtype, workspace, bias_dim, adds_bias)
