"""What to compute: frozen, hashable problems with a canonical text key, and the algebra that cuts them.

A :class:`ConvProblem` is one pass of one convolution layer. It knows its sizes, floating-point operations and least
memory traffic, how it splits into smaller problems of the same kind, and its value in float64. It knows nothing of
algorithms: planner, plan and wisdom see only what :class:`Problem` declares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tilewise.machine.torch_state import framework_flags
from tilewise.problems.base import ALIGNMENT, DTYPES, Part, Problem, require_sizes
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.cuts import cut
from tilewise.problems.conv.fields import require_convolution
from tilewise.problems.conv.key import fields_of, key_of
from tilewise.problems.conv.passes import OPERANDS, RESULTS, ROLES, SPACE, Pass
from tilewise.problems.conv.reference import convolve
from tilewise.problems.limits import INT64_MAX

__all__ = ["ROLES", "SPACE", "ConvProblem", "Pass"]


@dataclass(frozen=True, slots=True)
class ConvProblem(Problem):
    """One pass of a convolution in 1, 2 or 3 dimensions.

    Tensors by place, in torch's order: ``x`` (batch, in_channels, *sizes), ``w`` (out_channels,
    in_channels / groups, *kernels), ``y`` (batch, out_channels, *outs). FPROP takes x, w and gives y; DGRAD takes y, w
    and gives x; WGRAD takes x, y and gives w. A transposed convolution's forward is DGRAD.

    ``dtype`` is the operands', ``out_dtype`` the result's (sums over parts are kept in fp32 whatever the operands);
    ``precision`` is torch's convolution precision for fp32 operands: ``ieee`` or ``tf32``. ``bias`` adds a vector over
    the result's channels (FPROP, DGRAD). FPROP may go on: ``residual`` adds a tensor with the shape, type and layout of
    y, and ``activation``, a name of :mod:`tilewise.problems.activations`, is applied last. So
    y = activation(conv + bias + residual). A batch norm of inference needs no field: it is folded into weight and bias.
    ``accumulate`` adds into the result, with neither of the two. ``layouts`` and ``alignment`` (bytes, at
    most 16) describe x, w, y; exact strides are bound later, so that all tiles of one size are one problem.
    ``device`` is ``"cpu"`` or ``"cuda:<name>"``.

    ``constant_weight``: what the weight comes to (a spectrum, say) may be kept between calls. With ``checked_weight``
    every call compares the weight with a copy first, and that is part of the time; without, the caller promises that
    the weight stays. On a GPU a comparison would have to tell the host, so there a checked weight is not kept at all:
    both flags are off.

    Raises ``ValueError`` naming the field for sizes that make no convolution.

    >>> from tilewise.problem import Axis
    >>> side = Axis(size=56, kernel=3, before=1, after=1)
    >>> problem = tilewise.ConvProblem(tilewise.Pass.FPROP, 8, 64, 128, (side, side), bias=True)
    >>> problem.shape("y"), problem.flops
    ((8, 128, 56, 56), 3699376128)
    """

    kind: ClassVar[str] = "conv"

    pass_: Pass
    batch: int
    in_channels: int
    out_channels: int
    axes: tuple[Axis, ...]
    groups: int = 1
    dtype: str = "fp32"
    out_dtype: str = ""
    precision: str = "ieee"
    bias: bool = False
    activation: str = "none"
    residual: bool = False
    accumulate: bool = False
    constant_weight: bool = False
    checked_weight: bool = False
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    alignment: tuple[int, int, int] = (ALIGNMENT, ALIGNMENT, ALIGNMENT)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)
        require_convolution(self)
        if self.dtype != "fp32" and self.precision != "ieee":
            # Only fp32 operands can be rounded to TF32, so both names would be one problem.
            object.__setattr__(self, "precision", "ieee")
        if self.checked_weight and (self.device_type != "cpu" or not self.constant_weight):
            # Nothing is kept that could be checked, so all these names would be one problem.
            object.__setattr__(self, "constant_weight", False)
            object.__setattr__(self, "checked_weight", False)
        if self.bias and self.pass_ is Pass.WGRAD:
            raise ValueError("bias=True: WGRAD has no bias")
        if self.pass_ is Pass.WGRAD and self.constant_weight:
            raise ValueError("constant_weight=True: WGRAD computes the weight")

    @property
    def dims(self) -> int:
        """Number of spatial axes."""
        return len(self.axes)

    @property
    def space(self) -> tuple[str, ...]:
        """Names of the spatial axes: ``w``, ``h w`` or ``d h w``."""
        return SPACE[self.dims]

    @property
    def depthwise(self) -> bool:
        """Whether each group has one input channel."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def taps(self) -> int:
        """Elements of one plane of the filter."""
        return math.prod(axis.kernel for axis in self.axes)

    @property
    def operands(self) -> tuple[str, str]:
        """Places of the two operands, in the order every solver takes them."""
        return OPERANDS[self.pass_]

    @property
    def written_last(self) -> str:
        """In backward the gradient of the result, else the first operand."""
        return "y" if "y" in self.operands else self.operands[0]

    @property
    def results(self) -> tuple[str]:
        """Place of the result."""
        return RESULTS[self.pass_]

    @property
    def result(self) -> str:
        """Place of the result."""
        return RESULTS[self.pass_][0]

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor with place ``role``."""
        if role == "x":
            return (self.batch, self.in_channels, *(a.size for a in self.axes))
        if role == "w":
            return (self.out_channels, self.in_channels // self.groups, *(a.kernel for a in self.axes))
        if role == "y":
            return (self.batch, self.out_channels, *(a.out for a in self.axes))
        raise ValueError(f"role={role!r}: one of {', '.join(ROLES)} would do")

    def layout(self, role: str) -> str:
        """Layout class of the tensor with place ``role``."""
        return self.layouts[ROLES.index(role)]

    def alignment_of(self, role: str) -> int:
        """Bytes by which the address of the tensor with place ``role`` is aligned."""
        return self.alignment[ROLES.index(role)]

    def torch_dtype(self, role: str) -> torch.dtype:
        """Element type of the tensor with place ``role``."""
        return DTYPES[self.out_dtype if role == self.result else self.dtype]

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes that :meth:`split` knows."""
        return ("batch", "groups", "in_channels", "out_channels", *self.space)

    @property
    def batch_size(self) -> int:
        """The number of images."""
        return self.batch

    @property
    def constant_operand(self) -> str:
        """``"w"`` where what the weight comes to may be kept."""
        return "w" if self.constant_weight else ""

    @property
    def checked_operand(self) -> bool:
        """Whether the weight is compared with a copy at every call."""
        return self.checked_weight

    @property
    def copied_bytes(self) -> int:
        """Bytes of the weight, which may be copied into another layout before an input's gradient is computed."""
        return self.nbytes("w") if self.pass_ is Pass.DGRAD else 0

    @property
    def task(self) -> str:
        """The pass: ``fprop``, ``dgrad`` or ``wgrad``."""
        return self.pass_.value

    @property
    def layouts_in_words(self) -> tuple[str, ...]:
        """Layouts of x, w and y."""
        return self.layouts

    def flags(self, *, deterministic: bool) -> AbstractContextManager[None]:
        """A context with benchmark mode and the problem's precision on a GPU."""
        return framework_flags(self.device_type, self.precision, deterministic=deterministic)

    @property
    def flops(self) -> int:
        """Floating-point operations of the direct method, padding counted, two for a multiply-add."""
        taps = math.prod(a.kernel * a.out for a in self.axes)
        return 2 * self.batch * self.out_channels * (self.in_channels // self.groups) * taps

    @property
    def bytes(self) -> int:
        """Least memory traffic: operands and residual read once, the result written once (and read, when accumulated
        into)."""
        moved = sum(self.nbytes(role) for role in ROLES)
        return moved + (self.nbytes(self.result) if self.accumulate or self.residual else 0)

    @property
    def key(self) -> str:
        """Canonical text: equal for equal problems, different for different ones."""
        return key_of(self)

    @classmethod
    def from_key(cls, text: str) -> ConvProblem:
        """Read :attr:`key` back, whoever wrote it. Raises ``ValueError`` for what is no problem's key."""
        problem = cls(**fields_of(text))
        if problem.key != text or any(n not in (1, 2, 4, 8, 16) for n in problem.alignment):
            raise ValueError(f"problem {text[:200]!r}: not as tilewise writes a problem's key")
        if max(problem.nbytes(role) for role in ROLES) > INT64_MAX:
            raise ValueError(f"problem {text[:200]!r}: one of its tensors is beyond any memory")
        return problem

    def split(self, axis: str, sizes: Sequence[int], *, scatter: bool = False) -> tuple[Part[ConvProblem], ...]:
        """Cut along ``axis`` into parts of the given ``sizes``, in order.

        ``axis`` is ``batch``, ``groups``, ``in_channels``, ``out_channels`` or a name in :attr:`space`. Sizes along
        space count outputs for FPROP and WGRAD and inputs for DGRAD, or with ``scatter=True`` DGRAD's outputs, whose
        results overlap (the halo reduction of Jin et al. 2018, section 2). Channels are cut at group boundaries or
        inside one group. Parts that add keep their sums in fp32. Parts have no bias, residual or activation: who joins
        them adds these, to each part or to the whole. A residual is cut as the result is.

        Raises ``ValueError`` for an unknown axis, sizes that do not sum to the whole or a cut across groups.
        """
        require_sizes(sizes, axis, self.extent(axis, scatter=scatter))
        if scatter and (self.pass_ is not Pass.DGRAD or axis not in self.space):
            raise ValueError(f"scatter=True: only DGRAD along space scatters, not {self.pass_.value} along {axis}")
        ends = itertools.accumulate(sizes)
        cuts = [cut(self, axis, end - size, end, scatter=scatter) for size, end in zip(sizes, ends, strict=True)]
        return tuple(
            Part(None if part.changes is None else replace(self, **part.changes), part.uses, part.write)
            for part in cuts
        )

    def extent(self, axis: str, *, scatter: bool = False) -> int:
        """What the sizes of a split along ``axis`` sum to. Raises ``ValueError`` for an unknown axis."""
        if axis in ("batch", "groups", "in_channels", "out_channels"):
            return int(getattr(self, axis))
        if axis not in self.space:
            raise ValueError(f"axis={axis!r}: one of {', '.join(self.cut_axes)} would do")
        a = self.axes[self.space.index(axis)]
        return a.size if self.pass_ is Pass.DGRAD and not scatter else a.out

    def reference(self, *operands: torch.Tensor) -> torch.Tensor:
        """The result in float64, from operands in the order of :attr:`operands`.

        That is the convolution alone: without bias, residual, activation or accumulation.
        """
        return convolve(self, *operands)
