"""Properties of tensors, backward, and operations along dimensions that are not cut, such as batch and channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, handles, local, operand, space_of

Tensor = torch.Tensor
SAME = (
    "dtype device requires_grad is_leaf grad_fn layout ndim dim is_floating_point is_complex is_cuda is_quantized "
    "is_sparse is_mkldnn is_meta is_nested is_mps is_xpu get_device element_size itemsize _version output_nr "
    "retain_grad retains_grad register_hook register_post_accumulate_grad_hook is_inference "
    "data_ptr is_shared is_contiguous"
)
"""Properties and methods that are the same for a part and the whole, or that concern the part alone."""


@handles(Tensor.shape.__get__)  # type: ignore[attr-defined]
def _shape(x: Shard) -> torch.Size:
    return torch.Size(x.spatial.whole(x.local.shape))


@handles(Tensor.size)
def _size(x: Shard, dim: int | None = None) -> torch.Size | int:
    return _shape(x) if dim is None else _shape(x)[dim]


@handles(Tensor.numel, torch.numel, Tensor.nelement)
def _numel(x: Shard) -> int:
    return _shape(x).numel()


@handles(Tensor.__len__)
def _len(x: Shard) -> int:
    return _shape(x)[0]


def _of_part(name: str) -> None:
    """Register the property or method called ``name`` to be answered by the part."""
    attribute = getattr(Tensor, name)
    function = attribute if callable(attribute) else attribute.__get__

    @handles(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


for _name in SAME.split():
    _of_part(_name)


@handles(torch.is_floating_point)
def _is_floating_point(x: Shard) -> bool:
    return bool(x.dtype.is_floating_point)


@handles(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(x: Shard, value: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        x.requires_grad = value


@handles(Tensor.grad.__get__)  # type: ignore[union-attr]
def _grad(x: Shard) -> Tensor | None:
    """The gradient of the part, a plain tensor, as gradients are within backward."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.grad


@handles(Tensor.backward)
def _backward(x: Shard, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    """Backward from a shard: each rank gives the gradient of its part."""
    _backward_of(x, gradient, *args, **kwargs)


@handles(torch.autograd.backward)
def _backward_of(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """Backward from shards. Functions stay replaced meanwhile, as checkpointing computes parts again in backward."""
    if grad_tensors is not None and not isinstance(grad_tensors, Tensor):
        grad_tensors = [local(gradient) for gradient in grad_tensors]
    roots = (tensors,) if isinstance(tensors, Tensor) else tensors
    with torch.enable_grad():  # within another backward gradients are disabled
        parts = [local(tensor) for tensor in roots]
    torch.autograd.backward(parts, local(grad_tensors), *args, **kwargs)


@handles(torch.autograd.grad)
def _grad_of(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Gradients of shards are shards that are cut alike, so that their norms are those of the whole images."""
    if grad_outputs is not None and not isinstance(grad_outputs, Tensor):
        grad_outputs = [local(gradient) for gradient in grad_outputs]
    asked = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    roots = (outputs,) if isinstance(outputs, Tensor) else outputs
    with torch.enable_grad():
        parts = [local(tensor) for tensor in roots]
    with torch._C.DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(x) if isinstance(x, Shard) else x for x in asked]
    gradients = torch.autograd.grad(parts, edges, local(grad_outputs), *args, **kwargs)
    return tuple(
        x.like(gradient) if isinstance(x, Shard) and gradient is not None else gradient
        for x, gradient in zip(asked, gradients, strict=True)
    )


def free(x: Shard, dim: int, what: str) -> int:
    """``dim`` counted from the front. Raises ``ValueError`` where it is out of range or that dimension is cut."""
    dims = x.dim()
    if not -dims <= dim < dims:
        raise ValueError(f"{what}: dim={dim}: the image has {dims} dimensions")
    front = dim % dims
    if front - dims in x.spatial.grid.dims:
        raise ValueError(f"{what}: dim={dim} is cut across ranks: gather() first, or cut along another dimension")
    return front


@handles(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Any], dim: int = 0) -> Shard:
    what = current_layer("cat")
    like = space_of(*tensors)
    dim = free(like, dim, what)
    return like.like(torch.cat([operand(like, tensor, what) for tensor in tensors], dim))


@handles(torch.stack)
def _stack(tensors: Sequence[Any], dim: int = 0) -> Shard:
    what = current_layer("stack")
    like = space_of(*tensors)
    dims = like.dim() + 1
    if not 0 <= dim % dims <= dims + min(like.spatial.grid.dims) - 1:
        raise ValueError(f"{what}: dim={dim} would come behind a dimension that is cut across ranks")
    return like.like(torch.stack([operand(like, tensor, what) for tensor in tensors], dim))


def _along(function: Callable[..., Any], name: str, default: int | None) -> None:
    """Register ``function``, called ``name``, for dimensions that are not cut.

    It takes one dimension, which is ``default`` where not given, and returns one tensor or several.
    """

    @handles(function)
    def compute(x: Shard, *args: Any, **kwargs: Any) -> Any:
        what = current_layer(name)
        position = 1 if name in ("chunk", "split", "tensor_split") else 0
        given = kwargs.get("dim", args[position] if len(args) > position else default)
        if not isinstance(given, int):
            raise ValueError(f"{what}: dim={given!r}: one dimension would do")
        free(x, given, what)
        result = function(x.local, *(local(value) for value in args), **kwargs)
        return x.like(result) if isinstance(result, Tensor) else type(result)(x.like(part) for part in result)


for _owner in (torch, Tensor):
    for _name, _default in (
        ("chunk", 0), ("split", 0), ("tensor_split", 0), ("narrow", None), ("index_select", None), ("softmax", None),
        ("log_softmax", None), ("cumsum", None), ("unbind", 0),
    ):  # fmt: skip
        _along(getattr(_owner, _name), _name, _default)
for _name in ("softmax", "log_softmax", "glu"):
    _along(getattr(torch.nn.functional, _name), _name, -1)
