"""The strides that torch gives to a convolution's result and to its gradients.

torch reads a memory format from the operands' strides, also where axes of size 1 leave it open, and its backends lay
out what they return by it (``determine_backend_memory_format`` and ``is_channels_last_strides`` in ATen):

- A signal's convolution is that of planes with one row, of a contiguous input.
- Result and gradients are dense, ``channels_last`` where the format of input or weight is, else contiguous: by oneDNN
  and cuDNN in all passes.
- ATen's own kernels on a CPU, which take what oneDNN does not, know ``channels_last`` for planes alone. They compute
  each group apart and put the results together, and read the format of the parts anew. That of a weight's gradient is
  read from the weight, as it was brought to the format of the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.nn.geometry import Geometry
from tilewise.problem import dense_strides

__all__ = ["Strides", "backend_layout", "suggested_layout", "torch_strides"]

Ints = tuple[int, ...]
Operand = tuple[Ints, Ints]
"""Shape and strides."""


@dataclass(frozen=True, slots=True)
class Strides:
    """In elements, of a call's result and of the gradients of its input and weight."""

    result: tuple[int, ...]
    grad_input: tuple[int, ...]
    grad_weight: tuple[int, ...]


def suggested_layout(shape: Ints, strides: Ints) -> str:
    """The memory format that torch reads from strides, also where sizes of one leave it open (2-D and 3-D only)."""
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
    """The format of a call by torch's rule: ``channels_last`` where input or weight suggests it."""
    if len(x_shape) == 3:
        x_shape, x_strides = _one_row(x_shape, _brought_to("contiguous", x_shape, x_strides))
        w_shape, w_strides = _one_row(w_shape, w_strides)
    if suggested_layout(x_shape, x_strides) == "channels_last":
        return "channels_last"
    return suggested_layout(w_shape, w_strides)


def torch_strides(
    geometry: Geometry, x: Operand, w: Operand, result_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Strides:
    """What torch gives to a call of operands with these shapes and strides."""
    layout = backend_layout(*x, *w)
    if layout == "channels_last" and device.type == "cpu":
        own = _own_kernel(geometry, x, w, dtype)
        if own and geometry.dims == 3:
            layout = "contiguous"
        elif own:
            return _by_own_kernel(geometry, x, w, result_shape, again="Dilated" not in own)
    return Strides(*(dense_strides(shape, layout) for shape in (result_shape, x[0], w[0])))


def _own_kernel(geometry: Geometry, x: Operand, w: Operand, dtype: torch.dtype) -> str:
    """Which of ATen's own kernels takes a call on a CPU; empty for a library's.

    The tensors that torch is asked about are never written, so that they take no memory.
    """
    tensors = [torch.empty_strided(*operand, dtype=dtype, device="cpu") for operand in (x, w)]
    backend = torch._C._select_conv_backend(
        *tensors, None, geometry.stride, [before for before, _ in geometry.padding], geometry.dilation,
        geometry.transposed, geometry.output_padding or [0] * geometry.dims, geometry.groups, None,
    )  # fmt: skip
    name = str(backend).rpartition(".")[2]
    return name if name.startswith("Slow") else ""


def _by_own_kernel(
    geometry: Geometry, x: Operand, w: Operand, result_shape: tuple[int, ...], *, again: bool
) -> Strides:
    """Of planes or signals in ``channels_last``; ``again``: the format of the weight's gradient is read once more."""
    signal, groups = geometry.dims == 1, geometry.groups
    if signal:
        x, w = _one_row(x[0], _brought_to("contiguous", *x)), _one_row(*w)
        result_shape = (*result_shape[:2], 1, *result_shape[2:])
    layout = "channels_last"
    image, weight = ((shape, _brought_to(layout, shape, strides)) for shape, strides in (x, w))
    if groups > 1:
        image, weight = _part(*image, 1, groups), _part(*weight, 0, groups)
        layout = backend_layout(*image, *weight)
    weights = suggested_layout(weight[0], _brought_to(layout, *weight)) if again else layout

    def whole(shape: tuple[int, ...], place: int, layout: str) -> tuple[int, ...]:
        if groups > 1:
            part = tuple(n // groups if d == place else n for d, n in enumerate(shape))
            layout = suggested_layout(part, dense_strides(part, layout))
        found = dense_strides(shape, layout)
        return (*found[:2], *found[3:]) if signal else found

    return Strides(whole(result_shape, 1, layout), whole(x[0], 1, layout), whole(w[0], 0, weights))


def _part(shape: tuple[int, ...], strides: tuple[int, ...], place: int, groups: int) -> Operand:
    """One group's part of an operand, in the format of the whole."""
    part = tuple(n // groups if d == place else n for d, n in enumerate(shape))
    return part, _brought_to(suggested_layout(shape, strides), part, strides)


def _one_row(shape: Ints, strides: Ints) -> Operand:
    """A signal as a plane of one row, as ``unsqueeze`` makes it."""
    return (*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2])


def _brought_to(layout: str, shape: Ints, strides: Ints) -> Ints:
    """Strides after ``contiguous(memory_format)``, which leaves a tensor alone that is so already."""
    dense = dense_strides(shape, layout)
    fits = all(n == 1 or have == want for n, have, want in zip(shape, strides, dense, strict=True))
    return strides if fits else dense
