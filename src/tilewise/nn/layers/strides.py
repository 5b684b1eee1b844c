"""The strides that torch gives to a convolution's result and to its gradients.

torch reads a memory format from the operands' strides, also where axes of size 1 leave it open, and its backends lay
out what they return by it (``determine_backend_memory_format`` and ``is_channels_last_strides`` in ATen):

- A signal's convolution is that of planes with one row, of a contiguous input.
- Result and gradients are dense, ``channels_last`` where the format of input or weight is, else contiguous: by oneDNN
  in all passes.
- cuDNN's forward pass does the same. Its backward passes read formats once more: the gradient of the result is brought
  to the input's, that of the input follows it and the weight, and that of the weight follows it and the input
  (``cudnn_convolution_backward`` in ATen). So it counts how an operand of one pixel or one channel says what it is.
- ATen's own kernels on a CPU, which take what oneDNN does not, know ``channels_last`` for planes alone. They compute
  each group apart and put the results together, and read the format of the parts anew. That of a weight's gradient is
  read from the weight, as it was brought to the format of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tilewise.nn.layers.geometry import Geometry
from tilewise.problems.base import dense_strides

__all__ = ["Strides", "backend_layout", "suggested_layout", "torch_strides"]

Ints = tuple[int, ...]
Operand = tuple[Ints, Ints]
"""Shape and strides."""


@dataclass(frozen=True, slots=True)
class Strides:
    """The strides, in elements, of a call's result and of the gradients of its input and weight.

    They hold for a gradient of the result that has the result's strides. ``given(strides)`` tells those for other
    strides of that gradient; it is ``None`` where they do not matter.
    """

    result: Ints
    grad_input: Ints
    grad_weight: Ints
    given: Callable[[Ints], Strides] | None = field(default=None, compare=False)


def suggested_layout(shape: Ints, strides: Ints) -> str:
    """The memory format that torch reads from strides, which it also does where axes of size 1 leave it open.

    Only of images and volumes, not of signals.
    """
    dims = len(shape)
    if dims not in (4, 5) or strides[1] == 0:
        return "contiguous"
    least = 0
    for d in (1, *range(dims - 1, 1, -1), 0):
        if shape[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return "contiguous"
        least = strides[d] * max(shape[d], 1)
    return "channels_last"


def backend_layout(x_shape: Ints, x_strides: Ints, w_shape: Ints, w_strides: Ints) -> str:
    """The memory format that torch chooses for a call: ``channels_last`` where input or weight suggests it."""
    if len(x_shape) == 3:
        x_shape, x_strides = _one_row(x_shape, _brought_to("contiguous", x_shape, x_strides))
        w_shape, w_strides = _one_row(w_shape, w_strides)
    if suggested_layout(x_shape, x_strides) == "channels_last":
        return "channels_last"
    return suggested_layout(w_shape, w_strides)


def torch_strides(
    geometry: Geometry, x: Operand, w: Operand, result_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Strides:
    """The strides that torch gives to the results of a call with operands of these shapes and strides."""
    layout = backend_layout(*x, *w)
    # A group's part may read as channels_last where axes of size 1 leave the format of the whole open.
    if device.type == "cpu" and (layout == "channels_last" or geometry.groups > 1):
        own_kernel = _own_kernel(geometry, x, w, dtype)
        if own_kernel and geometry.dims == 3:
            layout = "contiguous"
        elif own_kernel:
            return _by_own_kernel(geometry, layout, x, w, result_shape, again="Dilated" not in own_kernel)
    if device.type == "cuda":
        return _by_cudnn(geometry, layout, x, w, result_shape)
    result, grad_input, grad_weight = (dense_strides(shape, layout) for shape in (result_shape, x[0], w[0]))
    return Strides(result, grad_input, grad_weight)


def _own_kernel(geometry: Geometry, x: Operand, w: Operand, dtype: torch.dtype) -> str:
    """The name of ATen's own kernel that takes a call on a CPU; empty where a library does.

    torch is asked with tensors that are never written, so that they take no memory.
    """
    tensors = [torch.empty_strided(*operand, dtype=dtype, device="cpu") for operand in (x, w)]
    backend = torch._C._select_conv_backend(
        *tensors, None, geometry.stride, [before for before, _ in geometry.padding], geometry.dilation,
        geometry.transposed, geometry.output_padding or [0] * geometry.dims, geometry.groups, None,
    )  # fmt: skip
    name = str(backend).rpartition(".")[2]
    return name if name.startswith("Slow") else ""


def _by_cudnn(geometry: Geometry, layout: str, x: Operand, w: Operand, result_shape: Ints) -> Strides:
    """The strides that cuDNN gives."""
    if geometry.dims == 1:
        x = x[0], _brought_to("contiguous", *x)
    image = x[0], _brought_to(layout, *x)
    result = result_shape, dense_strides(result_shape, layout)
    given = functools.partial(_given_gradient, geometry.transposed, image, w, result)
    strides = given(result[1])
    # Strides of axes of size 1 are anybody's: by them a gradient may say that it is of the other format.
    return replace(strides, given=given) if 1 in result_shape else strides


def _given_gradient(transposed: bool, image: Operand, weight: Operand, result: Operand, strides: Ints) -> Strides:
    """The strides that cuDNN gives for a result's gradient with ``strides``.

    ``image`` is the input, already brought to the layout of the call.
    """
    gradient, image_layout = (result[0], strides), _suggested(image)
    if transposed:
        gradient = result[0], _brought_to(image_layout, *gradient)
    elif _suggested(gradient) != image_layout:
        gradient = result[0], dense_strides(result[0], image_layout)
    of_input, of_weight = (
        "channels_last" if "channels_last" in (_suggested(gradient), _suggested(operand)) else "contiguous"
        for operand in (weight, image)
    )
    return Strides(result[1], dense_strides(image[0], of_input), dense_strides(weight[0], of_weight))


def _suggested(operand: Operand) -> str:
    """The memory format that torch reads from an operand; a signal counts as an image with one row."""
    return suggested_layout(*(_one_row(*operand) if len(operand[0]) == 3 else operand))


def _by_own_kernel(
    geometry: Geometry, layout: str, x: Operand, w: Operand, result_shape: tuple[int, ...], *, again: bool
) -> Strides:
    """The strides that ATen's own kernel gives for images or signals in ``layout``.

    ``again`` says that the format for the weight's gradient is read once more from the weight.
    """
    signal, groups = geometry.dims == 1, geometry.groups
    if signal:
        x, w = _one_row(x[0], _brought_to("contiguous", *x)), _one_row(*w)
        result_shape = (*result_shape[:2], 1, *result_shape[2:])
    image, weight = ((shape, _brought_to(layout, shape, strides)) for shape, strides in (x, w))
    if groups > 1:
        image, weight = _part(*image, 1, groups), _part(*weight, 0, groups)
        layout = backend_layout(*image, *weight)
    weights = suggested_layout(weight[0], _brought_to(layout, *weight)) if again else layout

    def whole(shape: tuple[int, ...], place: int, layout: str) -> tuple[int, ...]:
        if groups > 1:
            part = tuple(n // groups if d == place else n for d, n in enumerate(shape))
            layout = suggested_layout(part, dense_strides(part, layout))
        dense = dense_strides(shape, layout)
        return (*dense[:2], *dense[3:]) if signal else dense

    return Strides(whole(result_shape, 1, layout), whole(x[0], 1, layout), whole(w[0], 0, weights))


def _part(shape: tuple[int, ...], strides: tuple[int, ...], place: int, groups: int) -> Operand:
    """One group's part of an operand, in the memory format of the whole operand."""
    part = tuple(n // groups if d == place else n for d, n in enumerate(shape))
    return part, _brought_to(suggested_layout(shape, strides), part, strides)


def _one_row(shape: Ints, strides: Ints) -> Operand:
    """A signal as an image with one row, with the strides that ``unsqueeze`` gives."""
    return (*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2])


def _brought_to(layout: str, shape: Ints, strides: Ints) -> Ints:
    """The strides after ``contiguous(memory_format)``, which are unchanged where a tensor is in that format already."""
    dense = dense_strides(shape, layout)
    fits = all(n == 1 or have == want for n, have, want in zip(shape, strides, dense, strict=True))
    return strides if fits else dense
