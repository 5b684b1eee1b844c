"""What to compute: frozen, hashable problems with a canonical text key, and the algebra that cuts them.

A :class:`ConvProblem` is one pass of one convolution layer. It knows its sizes, floating-point operations and least
memory traffic, how it splits into smaller problems of the same kind, and its value in float64. It knows nothing of
algorithms: planner, plan and wisdom see only what :class:`Problem` declares.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from tilewise.axis import Axis

__all__ = ["DTYPES", "ConvProblem", "Part", "Pass", "Problem", "Range", "Write", "layout_of"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DTYPE_NAMES = {value: key for key, value in DTYPES.items()}
LAYOUTS = ("contiguous", "channels_last", "view")
PRECISIONS = ("ieee", "tf32")
ROLES = ("x", "w", "y")
"""Tensors of a convolution by place: image, filter, output. For DGRAD the result has the place ``x``."""
ALIGNMENT = 16
"""Bytes; the widest memory access a kernel makes, so more alignment than this makes no other problem."""
SPACE = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
LARGEST = 2**63 - 1
"""Bytes that a tensor can have at all."""
_N = r"(\d{1,18})"
_AXES = r"((?:i[dhw]\d{1,18}k[dhw]\d{1,18}s[dhw]\d{1,18}d[dhw]\d{1,18}p[dhw]-?\d{1,18},-?\d{1,18}){1,3})"
KEY = re.compile(
    rf"conv (fprop|dgrad|wgrad) (\w{{4}})(?:>(\w{{4}}))? (ieee|tf32) g{_N}mb{_N}ic{_N}oc{_N}{_AXES} "
    r"x:(co|ch|vi)(\d{1,2})w:(co|ch|vi)(\d{1,2})y:(co|ch|vi)(\d{1,2})( bias)?( accumulate)?( constant_weight)?"
    r"( checked_weight)? (cpu|cuda:[^\n]+)"
)
"""The form of :attr:`ConvProblem.key`."""
AXIS = re.compile(r"i[dhw](\d+)k[dhw](\d+)s[dhw](\d+)d[dhw](\d+)p[dhw](-?\d+),(-?\d+)")


class Pass(enum.Enum):
    """Which of a layer's three computations (cuDNN's words; fbfft: fprop, bprop, accGrad)."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    __hash__ = object.__hash__  # members are single: problems are hashed often while planning, names in Python's code


_OPERANDS = {Pass.FPROP: ("x", "w"), Pass.DGRAD: ("y", "w"), Pass.WGRAD: ("x", "y")}
_RESULT = {Pass.FPROP: "y", Pass.DGRAD: "x", Pass.WGRAD: "w"}


class Write(enum.Enum):
    """How a part's result joins the whole."""

    SET = "set"
    ADD = "add"
    OVERLAP_ADD = "overlap_add"


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``[start, start + length)`` of tensor dimension ``dim``."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a split problem.

    ``problem`` is ``None`` for a part that meets no data: its share of the result is zero. ``x``, ``w`` and ``y`` are
    the ranges the part uses of each tensor (none: all of it).
    """

    problem: ConvProblem | None
    x: tuple[Range, ...]
    w: tuple[Range, ...]
    y: tuple[Range, ...]
    write: Write

    def ranges(self, role: str) -> tuple[Range, ...]:
        """Ranges of the tensor with place ``role`` (``"x"``, ``"w"`` or ``"y"``)."""
        return {"x": self.x, "w": self.w, "y": self.y}[role]


@runtime_checkable
class Problem(Protocol):
    """What planner, plan and wisdom need to know of a problem of any kind."""

    @property
    def key(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def accumulate(self) -> bool: ...
    @property
    def operands(self) -> tuple[str, str]: ...
    @property
    def result(self) -> str: ...
    def shape(self, role: str) -> tuple[int, ...]: ...
    def torch_dtype(self, role: str) -> torch.dtype: ...
    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part, ...]: ...
    def reference(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """One pass of a convolution in 1, 2 or 3 dimensions.

    Tensors by place, in torch's order: ``x`` (batch, in_channels, *sizes), ``w`` (out_channels,
    in_channels / groups, *kernels), ``y`` (batch, out_channels, *outs). FPROP takes x, w and gives y; DGRAD takes y, w
    and gives x; WGRAD takes x, y and gives w. A transposed convolution's forward is DGRAD.

    ``dtype`` is the operands', ``out_dtype`` the result's (sums over parts are kept in fp32 whatever the operands);
    ``precision`` is torch's convolution precision for fp32 operands: ``ieee`` or ``tf32``. ``bias`` adds a vector over
    the result's channels (FPROP, DGRAD). ``accumulate`` adds into the result. ``layouts`` and ``alignment`` (bytes, at
    most 16) describe x, w, y; exact strides are bound later, so that all tiles of one size are one problem.
    ``device`` is ``"cpu"`` or ``"cuda:<name>"``.

    ``constant_weight``: what the weight comes to (a spectrum, say) may be kept between calls. With ``checked_weight``
    every call compares the weight with a copy first, and that is part of the time; without, the caller promises that
    the weight stays. On a GPU a comparison would have to tell the host, so there a checked weight is not kept at all:
    both flags are off.

    Raises ``ValueError`` naming the field for sizes that make no convolution.
    """

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
    accumulate: bool = False
    constant_weight: bool = False
    checked_weight: bool = False
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    alignment: tuple[int, int, int] = (ALIGNMENT, ALIGNMENT, ALIGNMENT)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)
        for name in ("batch", "in_channels", "out_channels", "groups"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        for name in ("in_channels", "out_channels"):
            value = getattr(self, name)
            if value % self.groups:
                raise ValueError(f"{name}={value} is not a multiple of groups={self.groups}")
        if len(self.axes) not in SPACE:
            raise ValueError(f"axes: {len(self.axes)} given; a convolution here has 1, 2 or 3 spatial axes")
        for name, known in (("dtype", DTYPES), ("out_dtype", DTYPES), ("precision", PRECISIONS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r}: one of {', '.join(known)} would do")
        for layout in self.layouts:
            if layout not in LAYOUTS:
                raise ValueError(f"layouts has {layout!r}: one of {', '.join(LAYOUTS)} would do")
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
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.device.split(":", 1)[0]

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
        return _OPERANDS[self.pass_]

    @property
    def result(self) -> str:
        """Place of the result."""
        return _RESULT[self.pass_]

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

    def torch_dtype(self, role: str) -> torch.dtype:
        """Element type of the tensor with place ``role``."""
        return DTYPES[self.out_dtype if role == self.result else self.dtype]

    def nbytes(self, role: str) -> int:
        """Bytes of the elements of the tensor with place ``role``."""
        return math.prod(self.shape(role)) * self.torch_dtype(role).itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of the direct method, padding counted, two for a multiply-add."""
        taps = math.prod(a.kernel * a.out for a in self.axes)
        return 2 * self.batch * self.out_channels * (self.in_channels // self.groups) * taps

    @property
    def bytes(self) -> int:
        """Least memory traffic: operands read once, the result written once (and read, when accumulated into)."""
        moved = sum(self.nbytes(role) for role in ROLES)
        return moved + (self.nbytes(self.result) if self.accumulate else 0)

    @property
    def key(self) -> str:
        """Canonical text: equal for equal problems, different for different ones."""
        sizes = [f"g{self.groups}mb{self.batch}ic{self.in_channels}oc{self.out_channels}"]
        for name, a in zip(self.space, self.axes, strict=True):
            sizes.append(f"i{name}{a.size}k{name}{a.kernel}s{name}{a.stride}d{name}{a.dilation - 1}")
            sizes.append(f"p{name}{a.before},{a.after}")
        flags = [name for name in ("bias", "accumulate", "constant_weight", "checked_weight") if getattr(self, name)]
        dtypes = self.dtype if self.dtype == self.out_dtype else f"{self.dtype}>{self.out_dtype}"
        tensors = "".join(
            f"{role}:{layout}{align}"
            for role, layout, align in zip(ROLES, (n[:2] for n in self.layouts), self.alignment, strict=True)
        )
        words = ["conv", self.pass_.value, dtypes, self.precision, "".join(sizes), tensors, *flags, self.device]
        return " ".join(words)

    @classmethod
    def from_key(cls, text: str) -> ConvProblem:
        """Read :attr:`key` back, whoever wrote it. Raises ``ValueError`` for what is no problem's key."""
        found = KEY.fullmatch(text)
        if found is None:
            raise ValueError(f"problem {text[:200]!r}: not a problem's key")
        pass_, dtype, out_dtype, precision, groups, batch, into, outof, axes, *rest = found.groups()
        lx, ax, lw, aw, ly, ay, bias, accumulate, constant_weight, checked_weight, device = rest
        layouts = {name[:2]: name for name in LAYOUTS}
        problem = cls(
            Pass(pass_),
            batch=int(batch),
            in_channels=int(into),
            out_channels=int(outof),
            axes=tuple(
                Axis(size, kernel, stride, dilation + 1, before, after)
                for size, kernel, stride, dilation, before, after in (map(int, axis) for axis in AXIS.findall(axes))
            ),
            groups=int(groups),
            dtype=dtype,
            out_dtype=out_dtype or "",
            precision=precision,
            bias=bool(bias),
            accumulate=bool(accumulate),
            constant_weight=bool(constant_weight),
            checked_weight=bool(checked_weight),
            layouts=(layouts[lx], layouts[lw], layouts[ly]),
            alignment=(int(ax), int(aw), int(ay)),
            device=device,
        )
        if problem.key != text or any(n not in (1, 2, 4, 8, 16) for n in problem.alignment):
            raise ValueError(f"problem {text[:200]!r}: not as tilewise writes a problem's key")
        if max(problem.nbytes(role) for role in ROLES) > LARGEST:
            raise ValueError(f"problem {text[:200]!r}: one of its tensors is beyond any memory")
        return problem

    def split(self, axis: str, sizes: Sequence[int], *, scatter: bool = False) -> tuple[Part, ...]:
        """Cut along ``axis`` into parts of the given ``sizes``, in order.

        ``axis`` is ``batch``, ``groups``, ``in_channels``, ``out_channels`` or a name in :attr:`space`. Sizes along
        space count outputs for FPROP and WGRAD and inputs for DGRAD, or with ``scatter=True`` DGRAD's outputs, whose
        results overlap (the halo reduction of Jin et al. 2018, section 2). Channels are cut at group boundaries or
        inside one group. Parts that add keep their sums in fp32.

        Raises ``ValueError`` for an unknown axis, sizes that do not sum to the whole or a cut across groups.
        """
        whole = self.extent(axis, scatter=scatter)
        if any(size < 1 for size in sizes) or sum(sizes) != whole:
            raise ValueError(f"sizes={list(sizes)}: must be positive and sum to {axis}={whole}")
        if scatter and (self.pass_ is not Pass.DGRAD or axis not in self.space):
            raise ValueError(f"scatter=True: only DGRAD along space scatters, not {self.pass_.value} along {axis}")
        parts, start = [], 0
        for size in sizes:
            parts.append(self._part(axis, start, start + size, scatter))
            start += size
        return tuple(parts)

    def extent(self, axis: str, *, scatter: bool = False) -> int:
        """What the sizes of a split along ``axis`` sum to. Raises ``ValueError`` for an unknown axis."""
        if axis in ("batch", "groups", "in_channels", "out_channels"):
            return int(getattr(self, axis))
        if axis not in self.space:
            known = ("batch", "groups", "in_channels", "out_channels", *self.space)
            raise ValueError(f"axis={axis!r}: one of {', '.join(known)} would do")
        a = self.axes[self.space.index(axis)]
        return a.size if self.pass_ is Pass.DGRAD and not scatter else a.out

    def _part(self, axis: str, start: int, stop: int, scatter: bool) -> Part:
        if axis == "batch":
            cut = (Range(0, start, stop - start),)
            write = Write.ADD if self.pass_ is Pass.WGRAD else Write.SET
            return self._child(write, cut, (), cut, batch=stop - start)
        if axis in self.space:
            return self._space_part(self.space.index(axis), start, stop, scatter)
        if axis == "groups":
            step = self.out_channels // self.groups
            return self._channel_part("out_channels", start * step, stop * step)
        return self._channel_part(axis, start, stop)

    def _space_part(self, index: int, start: int, stop: int, scatter: bool) -> Part:
        axis = self.axes[index]
        gathers = self.pass_ is Pass.DGRAD and not scatter
        found = axis.writing(start, stop) if gathers else axis.reading(start, stop)
        write = Write.SET
        if self.pass_ is Pass.WGRAD:
            write = Write.ADD
        elif scatter:
            write = Write.OVERLAP_ADD
        mine = Range(index + 2, start, stop - start)
        if found is None:
            return Part(None, (mine,) if gathers else (), (), () if gathers else (mine,), write)
        other = Range(index + 2, found[0], found[1] - found[0])
        x, y = (mine, other) if gathers else (other, mine)
        axes = (*self.axes[:index], found[2], *self.axes[index + 1 :])
        return self._child(write, (x,), (), (y,), axes=axes)

    def _channel_part(self, axis: str, start: int, stop: int) -> Part:
        ic, oc = self.in_channels // self.groups, self.out_channels // self.groups
        unit = oc if axis == "out_channels" else ic
        first, last = start // unit, -(-stop // unit)
        groups = last - first
        if start % unit == 0 and stop % unit == 0:
            x, y = Range(1, first * ic, groups * ic), Range(1, first * oc, groups * oc)
            w: tuple[Range, ...] = (Range(0, first * oc, groups * oc),)
            write = Write.SET if self.groups > 1 or self._adds(axis) is False else Write.ADD
        elif groups == 1:
            inside = Range(1, start, stop - start)
            if axis == "out_channels":
                x, y = Range(1, first * ic, ic), inside
                w = (Range(0, start, stop - start),)
            else:
                x, y = inside, Range(1, first * oc, oc)
                w = (Range(0, first * oc, oc), Range(1, start - first * ic, stop - start))
            write = Write.ADD if self._adds(axis) else Write.SET
        else:
            raise ValueError(
                f"{axis} [{start}, {stop}) cuts across groups of {unit}: cut at their boundaries or in one"
            )
        return self._child(write, (x,), w, (y,), in_channels=x.length, out_channels=y.length, groups=groups)

    def _adds(self, axis: str) -> bool:
        return (self.pass_, axis) in ((Pass.FPROP, "in_channels"), (Pass.DGRAD, "out_channels"))

    def _child(
        self, write: Write, x: tuple[Range, ...], w: tuple[Range, ...], y: tuple[Range, ...], **changes: object
    ) -> Part:
        narrowed = [self._narrowed(role, ranges) for role, ranges in zip(ROLES, (x, w, y), strict=True)]
        (lx, ax), (lw, aw), (ly, ay) = narrowed
        sums = write is not Write.SET
        child = replace(
            self,
            bias=False,
            accumulate=self.accumulate or sums,
            out_dtype="fp32" if sums else self.out_dtype,
            layouts=(lx, lw, ly),
            alignment=(ax, aw, ay),
            **changes,  # type: ignore[arg-type]
        )
        return Part(child, x, w, y, write)

    def _narrowed(self, role: str, ranges: tuple[Range, ...]) -> tuple[str, int]:
        layout, align = self.layout(role), self.alignment[ROLES.index(role)]
        shape = list(self.shape(role))
        ranges = tuple(r for r in ranges if r.length != shape[r.dim])
        if not ranges:
            return layout, align
        itemsize = self.torch_dtype(role).itemsize
        strides = dense_strides(tuple(shape), layout)
        for r in ranges:
            shape[r.dim] = r.length
            # How far apart the elements of a view lie is not known here.
            align = math.gcd(align, r.start * itemsize * (1 if layout == "view" else strides[r.dim]))
        return ("view" if layout == "view" else layout_of(shape, strides)), align

    def reference(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The result in float64, without bias or accumulation, from operands in the order of :attr:`operands`."""
        a, b = a.double(), b.double()
        grow = [side for axis in reversed(self.axes) for side in (axis.before, axis.after)]
        options = (
            [axis.stride for axis in self.axes],
            [0] * self.dims,
            [axis.dilation for axis in self.axes],
        )
        if self.pass_ is not Pass.DGRAD:
            a = torch.nn.functional.pad(a, grow)
        if self.pass_ is Pass.FPROP:
            return torch.convolution(a, b, None, *options, False, [0] * self.dims, self.groups)
        padded = [axis.size + axis.before + axis.after for axis in self.axes]
        mask = [self.pass_ is Pass.DGRAD, self.pass_ is Pass.WGRAD, False]
        if self.pass_ is Pass.DGRAD:
            dy, w, x = a, b, a.new_empty(1).expand(self.batch, self.in_channels, *padded)
        else:
            dy, w, x = b, b.new_empty(1).expand(self.shape("w")), a
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dy, x, w, None, *options, False, [0] * self.dims, self.groups, mask
        )
        result: torch.Tensor = dw if self.pass_ is Pass.WGRAD else torch.nn.functional.pad(dx, [-n for n in grow])
        return result


def dense_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides in elements of a dense tensor of ``shape`` laid out ``contiguous`` or ``channels_last``."""
    order = list(range(len(shape)))
    if layout == "channels_last":
        order = [0, *order[2:], 1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Layout class of a tensor: ``contiguous`` where both dense orders fit, ``view`` where neither does."""
    for layout in ("contiguous", "channels_last"):
        dense = dense_strides(shape, layout)
        if all(n == 1 or got == want for n, got, want in zip(shape, strides, dense, strict=True)):
            return layout
    return "view"
