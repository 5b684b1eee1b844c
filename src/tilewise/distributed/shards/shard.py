"""A rank's part of a tensor that is cut across ranks, with which torch's functions compute as with the whole tensor.

A :class:`Shard` stands for the whole tensor: its ``shape`` is that of the whole. Functions of torch that can be
computed by parts are found in a registry, which :func:`handles` fills. Any other function raises :class:`UnknownLayer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from tilewise.comm.link import Link
from tilewise.distributed.norms.sums import NormSums
from tilewise.distributed.parts.exchange import redistribute
from tilewise.distributed.parts.layout import Cuts, Grid, Layout
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.replicated import Parameters, sum_gradient
from tilewise.distributed.passes.contracts import Passes
from tilewise.distributed.passes.torch_passes import TorchPasses

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "Shard",
    "Space",
    "UnknownLayer",
    "aligned",
    "behind",
    "belong",
    "handles",
    "local",
    "operand",
    "sharded",
    "space_around",
    "space_of",
]

Handler = TypeVar("Handler", bound=Callable[..., Any])
_handlers: dict[Any, Callable[..., Any]] = {}
_spaces: weakref.WeakKeyDictionary[nn.Module, Space] = weakref.WeakKeyDictionary()


class UnknownLayer(NotImplementedError):
    """A function cannot be computed by parts; the message names it and its layer, and says what would do.

    In each of several ranks:

    >>> try:  # doctest: +SKIP
    ...     y = torch.fft.rfft2(shard)
    ... except tilewise.distributed.UnknownLayer:
    ...     y = torch.fft.rfft2(shard.gather())
    """


class Space:
    """What all parts of one model's images share: the ranks, the grid, and the passes that compute convolutions.

    ``mesh`` has the grid's ranks alone. ``copy`` is this rank's place among those that hold copies of its parts.
    ``parameters`` stands for the parameters of the forward under way, or of the last one. ``gather`` and ``to_dtensor``
    are what :meth:`Shard.gather` and :meth:`Shard.to_dtensor` call. They are passed in, because the modules that define
    them make shards and so import this one.
    """

    def __init__(
        self,
        link: Link,
        grid: Grid,
        passes: Passes | None = None,
        mesh: DeviceMesh | None = None,
        copy: tuple[int, ...] = (),
        *,
        gather: Callable[[Shard], torch.Tensor],
        to_dtensor: Callable[[Shard], DTensor],
    ) -> None:
        self.link, self.grid, self.mesh, self.copy = link, grid, mesh, copy
        self.gather, self.to_dtensor = gather, to_dtensor
        self.passes: Passes = passes or TorchPasses()
        self.parameters: Parameters | None = None
        self.wider: dict[dist.ProcessGroup | None, Link] = {}
        """Links of layers that synchronize over more ranks, by their process groups."""
        self.norms: NormSums | None = None
        """The kernels for sums of norms over ranks, where :func:`tilewise.distributed.optimize` chose them."""

    def tell(self, what: str, error: BaseException) -> None:
        """Tell every rank that may wait for this one of ``error``; see :meth:`Link.tell`."""
        for link in (self.link, *self.wider.values()):
            link.tell(what, error)

    def replicated(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, equal on all ranks, prepared so that its gradient becomes the sum over the ranks.

        A handler must pass each plain tensor through this that it combines with a part.
        """
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        used = None if self.parameters is None else self.parameters.use(tensor)
        return sum_gradient(self.link, what, tensor) if used is None else used


class Shard(torch.Tensor):
    """This rank's part of a tensor that is cut across ranks.

    ``spatial`` says how it is cut, ``space`` among which ranks. :attr:`local` is the part as a plain tensor with the
    same memory and gradient. :meth:`tilewise.distributed.SpatialParallel.scatter` makes shards.

    In each of several ranks:

    >>> shard = parallel.scatter(x)  # doctest: +SKIP
    >>> shard.local.shape, shard.gather().shape == x.shape  # doctest: +SKIP
    """

    spatial: Layout
    space: Space

    @staticmethod
    def of(part: torch.Tensor, layout: Layout, space: Space) -> Shard:
        """The shard with ``part`` on this rank. Raises ``ValueError`` where its sizes are not the layout's."""
        if layout.part(part.shape) != tuple(part.shape):
            raise ValueError(
                f"part of shape {tuple(part.shape)}: {layout.part(part.shape)} would do under {layout.own}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            shard = part.as_subclass(Shard)
        shard.spatial, shard.space = layout, space
        return shard

    @property
    def local(self) -> torch.Tensor:
        """This rank's part as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def like(self, part: torch.Tensor, layout: Layout | None = None) -> Shard:
        """A shard among the same ranks with ``part`` on this rank, cut as ``layout`` says, or as this shard is."""
        with torch._C.DisableTorchFunctionSubclass():
            shard = part if isinstance(part, Shard) else part.as_subclass(Shard)
        shard.spatial, shard.space = self.spatial if layout is None else layout, self.space
        return shard

    def gather(self) -> torch.Tensor:  # type: ignore[override]
        """The whole tensor, on every rank; differentiable.

        All ranks must compute the same from it. Then its gradient is the same on all, and each rank takes its part of
        it. Where ranks compute different things from it, gradients are wrong.
        """
        return self.space.gather(self)

    def to_dtensor(self) -> DTensor:
        """The same tensor as a ``DTensor`` on the mesh, cut as ``torch.chunk`` cuts; differentiable.

        Parts that are cut elsewhere move between ranks; see :func:`tilewise.distributed.shards.dtensor.to_dtensor`.
        """
        return self.space.to_dtensor(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute by parts, or raise :class:`UnknownLayer`."""
        handler = _handlers.get(func)
        if handler is None:
            raise UnknownLayer(
                f"{_name(func)} in {current_layer('forward')}: not known to compute by parts of an image; call "
                "gather() on its input to compute it whole on every rank"
            )
        return handler(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Shard is a part of a tensor among running processes: gather() it to keep or send it")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a Shard is a part of a tensor among running processes: clone() it instead")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shard({self.spatial.own} of {tuple(self.shape)}, {self.local!r})"


def _name(func: Any) -> str:
    """The name of a function of torch, for messages."""
    name = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func)))
    owner = getattr(func, "__self__", None)  # a property is known by its getter
    return (
        f"Tensor.{getattr(owner, '__name__', owner)}"
        if name.endswith("__get__")
        else name.replace("TensorBase", "Tensor")
    )


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Let the decorated function compute these functions of torch where an argument is a :class:`Shard`.

    It has the same signature. Raises ``ValueError`` for a function that has a handler already.

    >>> from tilewise.distributed import handles
    >>> @handles(torch.special.erfcx)
    ... def erfcx(x):
    ...     return x.like(torch.special.erfcx(x.local))
    """

    def register(handler: Handler) -> Handler:
        for function in functions:
            if function in _handlers:
                raise ValueError(f"{_name(function)} is computed by {_handlers[function].__qualname__} already")
            _handlers[function] = handler
        return handler

    return register


def local(value: Any) -> Any:
    """The plain tensor of a shard; anything else as it is."""
    return value.local if isinstance(value, Shard) else value


def behind(shard: Shard) -> torch.Tensor:
    """The tensor to change in place of ``shard``: the one that it is a view of, where the view covers all of it.

    To autograd every shard is a view. Where a view is changed in place, backward copies the gradient of its base twice,
    fills as much memory with zeros and adds the two.
    """
    with torch._C.DisableTorchFunctionSubclass():
        base = shard._base
        return shard if base is None or _form(base) != _form(shard) else base


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, shape, strides and offset of ``tensor``, which are equal where two views cover the same elements."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def sharded(value: Any, what: str) -> Shard:
    """``value``, the input of layer ``what``. Raises ``ValueError`` where it is no shard and only the weight is cut."""
    if not isinstance(value, Shard):
        raise ValueError(f"{what}: its weight is cut across ranks and its input is not")
    return value


def space_of(*values: Any) -> Shard:
    """The first shard among ``values``, which tells the space."""
    return next(value for value in values if isinstance(value, Shard))


def belong(model: nn.Module, space: Space) -> None:
    """Remember that the modules of ``model`` belong to ``space``, for inputs that are whole, too."""
    for module in model.modules():
        _spaces[module] = space


def space_around(module: nn.Module, value: torch.Tensor) -> Space | None:
    """The space of ``value``, or of the model that contains ``module``; ``None`` where there is none."""
    return value.space if isinstance(value, Shard) else _spaces.get(module)


def aligned(like: Shard, other: Shard, what: str) -> torch.Tensor:
    """The part of ``other`` at the place of the part of ``like``, moved there where the two are cut differently.

    Raises ``ValueError`` where the two have different sizes or are among different ranks.
    """
    if other.spatial == like.spatial:
        return other.local
    if other.space.link is not like.space.link or other.spatial.grid != like.spatial.grid:
        raise ValueError(f"{what}: its images are cut among different ranks, {like.spatial} and {other.spatial}")
    if other.spatial.sizes != like.spatial.sizes:
        raise ValueError(f"{what}: images of {tuple(like.shape)} and {tuple(other.shape)} do not fit together")
    return redistribute(other.space.link, what, other.spatial, like.spatial, other.local)


def operand(like: Shard, other: Any, what: str) -> Any:
    """``other``, prepared to be combined with the part of ``like`` element by element, with torch's broadcasting.

    A shard is cut as ``like`` is. A plain tensor of the size of the whole is narrowed to this rank's part. A plain
    tensor of size 1 along cut dimensions, such as one number for each channel, stays as it is. Raises ``ValueError``
    for any other size.
    """
    if isinstance(other, Shard):
        return aligned(like, other, what)
    if not isinstance(other, torch.Tensor) or other.dim() == 0:
        return like.space.replicated(what, other) if isinstance(other, torch.Tensor) else other
    other = like.space.replicated(what, other)
    for dim, size, (start, stop) in zip(like.spatial.grid.dims, like.spatial.sizes, like.spatial.own, strict=True):
        if other.dim() < -dim or other.shape[dim] == 1:
            continue
        if other.shape[dim] != size:
            raise ValueError(f"{what}: a tensor of {tuple(other.shape)} does not fit an image of {tuple(like.shape)}")
        other = other.narrow(dim, start, stop - start)
    return other


def recut(shard: Shard, cuts: Mapping[int, Cuts], what: str) -> Shard:
    """``shard``, cut at other points along some dimensions, which are counted from the end."""
    layout = shard.spatial.with_cuts(dict(cuts))
    return (
        shard
        if layout == shard.spatial
        else shard.like(redistribute(shard.space.link, what, shard.spatial, layout, shard.local), layout)
    )
