"""What every layer of a Caffe network is: a torch module that knows its blobs and the shapes of its tops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor, nn

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.layers.fillers import fill

__all__ = ["Layer", "Phase", "Shape", "Tops", "choice"]

Shape = tuple[int, ...]
Phase = Literal["train", "test"]
Tops = Tensor | tuple[Tensor, ...]
MOST_AXES = 32
"""Caffe's own limit for the axes of a blob."""
MOST_ELEMENTS = 2**31 - 1
"""Caffe's own limit for the elements of a blob."""


def choice(message: Any, field: str) -> str:
    """The name of an enum field's value: ``choice(pooling_param, "pool")`` is ``"MAX"``."""
    values = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return str(values[getattr(message, field)].name)


class Layer(nn.Module):
    """A layer of a Caffe network.

    ``parameter`` is its ``LayerParameter``, ``shapes`` are those of its bottoms and ``phase`` is ``"train"`` or
    ``"test"``. ``forward`` takes one tensor for each bottom and returns one tensor, or a tuple of several, for its
    tops. :meth:`output_shapes` says what shapes these have. A subclass makes its parts in :meth:`build`.

    What differs between phases follows ``self.training``, which the phase sets at first: ``train()`` and ``eval()``
    work as they do for any torch module.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for fields and shapes that do not fit, which names the
    layer.

    >>> from tilewise.frontends.caffe import Layer, register
    >>> @register("Negative")
    ... class Negative(Layer):
    ...     def forward(self, x):
    ...         return -x
    """

    bottoms: ClassVar[tuple[int, int | None]] = (1, 1)
    """The least and the largest number of bottoms; ``None`` for no limit."""
    tops: ClassVar[tuple[int, int | None]] = (1, 1)
    """The least and the largest number of tops."""
    is_loss: ClassVar[bool] = False
    """Whether the first top counts as a loss of weight 1 where the network does not say otherwise."""
    constant: ClassVar[bool] = False
    """Whether no gradient goes to the bottoms."""

    def __init__(self, parameter: Any, shapes: Sequence[Shape], phase: Phase) -> None:
        super().__init__()
        self.caffe_name, self.caffe_type = str(parameter.name), str(parameter.type)
        self.phase, self.top_count = phase, len(parameter.top)
        self.blob_names: list[str] = []
        """Dotted names of the parameters that are Caffe's blobs of this layer, in Caffe's order."""
        self.fixed_blobs: set[int] = set()
        """Places of blobs that no solver may change, as BatchNorm's statistics."""
        self._check_count("bottom", len(shapes), self.bottoms)
        self._check_count("top", self.top_count, self.tops)
        self.build(parameter, list(shapes))
        self.train(phase == "train")

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        """Take over the fields of ``parameter`` and make the blobs."""

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        """The shapes of the tops for bottoms of ``shapes``. Raises ``CaffeError`` where they do not fit."""
        return shapes[:1]

    def fail(self, text: str) -> NoReturn:
        """Raise ``CaffeError`` that names this layer."""
        raise CaffeError(f"layer {self.caffe_name!r} ({self.caffe_type}): {text}")

    def add_blob(self, name: str, shape: Sequence[int], filler: Any, owner: str = "", *, fixed: bool = False) -> None:
        """Make the next blob: parameter ``name`` of this module, or of its child ``owner``, filled by ``filler``.

        ``filler`` is a ``FillerParameter`` or a number. ``fixed`` says that no solver changes the blob.
        """
        shape = tuple(int(size) for size in shape)
        if math.prod(shape) > MOST_ELEMENTS:
            self.fail(f"blob {len(self.blob_names)} of shape {shape} has more than {MOST_ELEMENTS} elements")
        try:
            tensor = torch.empty(shape, dtype=torch.float32, device="cpu")
        except RuntimeError as error:
            self.fail(f"blob {len(self.blob_names)} of shape {shape} does not fit into memory: {error}")
        fill(tensor, filler, lambda text: self.fail(f"blob {len(self.blob_names)} of shape {shape}: {text}"))
        module = self.get_submodule(owner)
        setattr(module, name, nn.Parameter(tensor, requires_grad=not fixed))
        if fixed:
            self.fixed_blobs.add(len(self.blob_names))
        self.blob_names.append(f"{owner}.{name}" if owner else name)

    def blob(self, place: int) -> nn.Parameter:
        """The blob at ``place``."""
        return self.get_parameter(self.blob_names[place])

    def set_blob(self, place: int, parameter: nn.Parameter) -> None:
        """Use another parameter as the blob at ``place``: the one that layers share."""
        owner, _, name = self.blob_names[place].rpartition(".")
        setattr(self.get_submodule(owner), name, parameter)

    @property
    def blobs(self) -> list[nn.Parameter]:
        """The layer's blobs in Caffe's order."""
        return [self.blob(place) for place in range(len(self.blob_names))]

    def axis(self, value: int, shape: Shape, field: str = "axis", *, end: bool = False) -> int:
        """``value`` as an axis of ``shape``, counted from its end where it is negative.

        With ``end`` the place behind the last axis counts too.
        """
        axes = len(shape) + end
        if not -axes <= value < axes:
            self.fail(f"{field} = {value} is no axis of a bottom of shape {shape}; {-axes} to {axes - 1} would do")
        return value + axes if value < 0 else value

    def need_axes(self, shape: Shape, count: int) -> None:
        """Raise ``CaffeError`` where a bottom has another number of axes."""
        if len(shape) != count:
            self.fail(f"a bottom has shape {shape}; {count} axes would do")

    def need_equal(self, shapes: Sequence[Shape]) -> None:
        """Raise ``CaffeError`` where bottoms differ in shape."""
        if any(shape != shapes[0] for shape in shapes):
            self.fail(f"the bottoms have shapes {', '.join(map(str, shapes))}; they must have the same")

    def _check_count(self, what: str, count: int, limits: tuple[int, int | None]) -> None:
        least, most = limits
        if count < least or (most is not None and count > most):
            wanted = str(least) if most == least else f"{least} or more" if most is None else f"{least} to {most}"
            self.fail(f"it has {count} {what}s; {wanted} would do")

    def extra_repr(self) -> str:
        return f"{self.caffe_type}"
