"""Functions of single elements, in place or not: each rank computes the elements of its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, behind, handles, operand, space_of

UNARY = (
    "abs acos acosh alias angle asin asinh atan atanh bfloat16 bool byte ceil celu clone contiguous cos cosh cpu "
    "cuda deg2rad detach double elu erf erfc erfinv exp exp2 expm1 float floor frac gelu half hardshrink "
    "hardsigmoid hardswish hardtanh int isfinite isinf isnan leaky_relu log log10 log1p log2 logical_not logit "
    "logsigmoid long mish nan_to_num neg negative ones_like positive reciprocal relu relu6 rrelu round rsqrt selu "
    "sgn short sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink "
    "threshold to trunc type zeros_like empty_like full_like type_as requires_grad_ zero_ fill_ __neg__ __pos__ "
    "__abs__ __invert__"
)
BINARY = (
    "add addcdiv addcmul atan2 bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_max clamp_min clip "
    "copysign div divide eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt hypot le lerp less "
    "less_equal logical_and logical_or logical_xor lt masked_fill maximum minimum mul multiply ne not_equal pow "
    "remainder rsub sub subtract true_divide where xlogy copy_ __add__ __radd__ __iadd__ __sub__ __rsub__ "
    "__isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ "
    "__floordiv__ __pow__ __rpow__ __ipow__ __mod__ __rmod__ __imod__ __rfloordiv__ __ifloordiv__ __rand__ __ror__ "
    "__rxor__ __iand__ __ior__ __ixor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__"
)

NO_VALUES = ("detach_", "requires_grad_")
"""In-place functions that change no element."""


def _by_elements(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The counterpart of ``function``, called ``name``, that computes the elements of a rank's part."""
    changes_first = (name.endswith("_") and not name.startswith("__")) or (
        name.startswith("__i") and name != "__invert__"
    )

    def compute(*args: Any, **kwargs: Any) -> Any:
        like = space_of(*args, *kwargs.values())
        if "out" in kwargs and kwargs["out"] is not None:
            raise ValueError(f"out= of {current_layer(name)}: an image cut across ranks has no place for it")
        if changes_first or kwargs.get("inplace"):
            if not isinstance(args[0], Shard):
                raise ValueError(f"{current_layer(name)}: cannot write parts of an image into a whole tensor")
            like = args[0]
        if len(args) > 1 or kwargs:
            args = tuple(_operand(like, value, name) for value in args)
            kwargs = {key: _operand(like, value, name) for key, value in kwargs.items()}
        if (changes_first and name not in NO_VALUES) or kwargs.get("inplace"):
            args = (behind(like), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return like.like(function(*args, **kwargs))

    return compute


def _operand(like: Shard, value: Any, name: str) -> Any:
    """An argument of a function, cut as ``like`` is where it is a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Shard) and value.spatial == like.spatial:
        return value
    return operand(like, value, current_layer(name))


def _register() -> None:
    """Register all functions of ``UNARY`` and ``BINARY``, and their in-place forms."""
    done = set()
    for name in (*UNARY.split(), *BINARY.split()):
        for owner in (torch, torch.Tensor, F):
            for spelled in (name,) if name.endswith("_") else (name, f"{name}_"):
                function = getattr(owner, spelled, None)
                if (
                    function is not None
                    and callable(function)
                    and function not in done
                    and not isinstance(function, type)
                ):
                    handles(function)(_by_elements(function, spelled))
                    done.add(function)


_register()


@handles(torch.prelu, torch.Tensor.prelu)
def _prelu(input: Shard, weight: torch.Tensor) -> Shard:
    """The weight is one number for each channel, and channels are never cut."""
    return input.like(torch.prelu(input.local, input.space.replicated(current_layer("prelu"), weight)))


@handles(F.dropout, torch.dropout)
def _dropout(input: Shard, p: float = 0.5, training: bool = True, inplace: bool = False) -> Shard:
    """Drop elements, different ones on each rank.

    All ranks draw one random number as a seed, so that the ranks' random states stay equal. If each drew as many
    numbers as it has elements, whatever is random after a gather would differ between ranks.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}: a probability from 0 to 1 would do")
    if not training or p == 0:
        return input
    part = input.local
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu").item()) + input.spatial.grid.index
    generator = torch.Generator(part.device).manual_seed(seed)
    keep = torch.empty_like(part, requires_grad=False).bernoulli_(1 - p, generator=generator)
    keep.mul_(0.0 if p == 1 else 1 / (1 - p))
    with torch._C.DisableTorchFunctionSubclass():
        return input.like(behind(input).mul_(keep) if inplace else part * keep)


def _feature_dropout(function: Callable[..., torch.Tensor]) -> None:
    """Register a counterpart of ``function``, which drops whole channels."""

    @handles(function)
    def drop(input: Shard, p: float = 0.5, training: bool = True, inplace: bool = False) -> Shard:
        """Drop channels: the same ones on all ranks, as these have the same random numbers."""
        if not 0 <= p <= 1:
            raise ValueError(f"p={p}: a probability from 0 to 1 would do")
        if not training or p == 0:
            return input
        part = input.local
        shape = (*part.shape[:2], *(1,) * (part.dim() - 2))
        keep = part.new_empty(shape).bernoulli_(1 - p).mul_(0.0 if p == 1 else 1 / (1 - p))
        with torch._C.DisableTorchFunctionSubclass():
            return input.like(behind(input).mul_(keep) if inplace else part * keep)


for _function in (F.dropout1d, F.dropout2d, F.dropout3d):
    _feature_dropout(_function)
