"""A rank's part of a tensor that is cut across ranks, which torch's functions take for the whole one.

A :class:`Shard` stands for the whole tensor: its ``shape`` is the whole one's, and functions of torch that know how to
compute by parts are looked up in a registry, filled by :func:`handles`. Any other raises :class:`UnknownLayer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from tilewise.comm.link import Link
from tilewise.distributed.exchange import redistribute
from tilewise.distributed.layout import Cuts, Grid, Layout
from tilewise.distributed.names import current_layer
from tilewise.distributed.norm_sums import NormSums
from tilewise.distributed.passes import Passes, TorchPasses
from tilewise.distributed.replicated import Parameters, sum_gradient

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
    """A function that is not known to compute by parts; the message names it and its layer, and says what would do."""


class Space:
    """What the parts of one model's images have in common: ranks, grid, and what computes a rank's convolutions.

    ``mesh`` is that of the grid's ranks alone. ``copy`` is this rank's place among those that hold copies of its parts.
    ``parameters`` stands for the parameters of the forward under way, or last begun.
    """

    def __init__(
        self,
        link: Link,
        grid: Grid,
        passes: Passes | None = None,
        mesh: DeviceMesh | None = None,
        copy: tuple[int, ...] = (),
    ) -> None:
        self.link, self.grid, self.mesh, self.copy = link, grid, mesh, copy
        self.passes: Passes = passes or TorchPasses()
        self.parameters: Parameters | None = None
        self.wider: dict[dist.ProcessGroup | None, Link] = {}
        """Links of layers that synchronize over more ranks, by their process groups."""
        self.norms: NormSums | None = None
        """Computes sums of norms over ranks, once :func:`tilewise.distributed.optimize` found that it does."""

    def tell(self, what: str, error: BaseException) -> None:
        """Have every rank that may wait for this one hear of ``error``; see :meth:`Link.tell`."""
        for link in (self.link, *self.wider.values()):
            link.tell(what, error)

    def replicated(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, the same on all ranks, as it is to meet a part: its gradient becomes the sum over the ranks.

        A handler passes every plain tensor through this that it computes with beside a part's elements.
        """
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        used = None if self.parameters is None else self.parameters.use(tensor)
        return sum_gradient(self.link, what, tensor) if used is None else used


class Shard(torch.Tensor):
    """This rank's part of a tensor that is cut across ranks.

    ``spatial`` says how it is cut, ``space`` among whom; :attr:`local` is the part as a plain tensor, with the same
    memory and gradient. Made by :meth:`tilewise.distributed.SpatialParallel.scatter`.
    """

    spatial: Layout
    space: Space

    @staticmethod
    def of(part: torch.Tensor, layout: Layout, space: Space) -> Shard:
        """The shard whose part here is ``part``. Raises ``ValueError`` where that has not the layout's sizes."""
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
        """This rank's part."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def like(self, part: torch.Tensor, layout: Layout | None = None) -> Shard:
        """A shard among the same ranks: ``part`` is the part here, cut as ``layout`` says or as this one is."""
        with torch._C.DisableTorchFunctionSubclass():
            shard = part if isinstance(part, Shard) else part.as_subclass(Shard)
        shard.spatial, shard.space = self.spatial if layout is None else layout, self.space
        return shard

    def gather(self) -> torch.Tensor:  # type: ignore[override]
        """The whole tensor, on every rank; differentiable.

        What is computed from it is the same on all ranks, and so is its gradient, of which each takes its part. Where
        ranks compute different things from it, gradients are wrong.
        """
        from tilewise.distributed.whole import gather

        return gather(self)

    def to_dtensor(self) -> DTensor:
        """The same tensor as a ``DTensor`` on the mesh, cut as ``torch.chunk`` cuts; differentiable.

        Parts that are cut elsewhere move between ranks; see :func:`tilewise.distributed.dtensor.to_dtensor`.
        """
        from tilewise.distributed.dtensor import to_dtensor

        return to_dtensor(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute by parts, or say that it is not known how."""
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
    name = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func)))
    owner = getattr(func, "__self__", None)  # a property is known by its getter
    return (
        f"Tensor.{getattr(owner, '__name__', owner)}"
        if name.endswith("__get__")
        else name.replace("TensorBase", "Tensor")
    )


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Have a function compute these of torch's where one of their arguments is a :class:`Shard`.

    It has their signature. Raises ``ValueError`` for a function that is taken.
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
    """What a function is to change in place of ``shard``: the tensor that this is a view of, where it is all of it.

    To autograd every shard is a view. Changed in place, a view's backward copies the gradient of what it is a view of,
    twice, fills as much with zeros and adds the two.
    """
    with torch._C.DisableTorchFunctionSubclass():
        base = shard._base
        return shard if base is None or _form(base) != _form(shard) else base


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def sharded(value: Any, what: str) -> Shard:
    """``value``, the input of layer ``what``. Raises ``ValueError`` where it is no shard: then a weight is."""
    if not isinstance(value, Shard):
        raise ValueError(f"{what}: its weight is cut across ranks and its input is not")
    return value


def space_of(*values: Any) -> Shard:
    """The first shard among ``values``."""
    return next(value for value in values if isinstance(value, Shard))


def belong(model: nn.Module, space: Space) -> None:
    """Know the modules of ``model`` as those of ``space``, also where their input is whole."""
    for module in model.modules():
        _spaces[module] = space


def space_around(module: nn.Module, value: torch.Tensor) -> Space | None:
    """The space of ``value``, or of the model that ``module`` is in; ``None`` where there is none."""
    return value.space if isinstance(value, Shard) else _spaces.get(module)


def aligned(like: Shard, other: Shard, what: str) -> torch.Tensor:
    """The part of ``other`` that lies where ``like``'s does, moved there where it is cut elsewhere.

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
    """``other`` as it is to meet the part of ``like`` element by element, broadcast as torch does.

    A shard is brought to the same cuts; of a plain tensor as large as the whole the part is taken; a plain tensor that
    has size 1 there, such as one number a channel, stays. Raises ``ValueError`` for any other size.
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
    """``shard``, cut at other points along some dimensions (counted from the end)."""
    layout = shard.spatial.with_cuts(dict(cuts))
    return (
        shard
        if layout == shard.spatial
        else shard.like(redistribute(shard.space.link, what, shard.spatial, layout, shard.local), layout)
    )
