"""oneDNN's convolution with what follows it as post-operations, and with a constant filter in its own layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilewise.plan import Config
from tilewise.problems.activations import activation_kind, activation_parameters
from tilewise.problems.base import DTYPES
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.conv import ConvSolver

__all__ = ["OneDNNFused"]

POINTWISE = {
    "none": ("none", ""),
    "leaky_relu": ("leaky_relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "sigmoid": ("sigmoid", ""),
    "hardswish": ("hardswish", ""),
}
"""Activations by the names that the operator has for them: the operation, and its algorithm.

Those that cut numbers off are not among them (ReLU, ReLU6, hardsigmoid, clamp): oneDNN makes a bound of a NaN, which
torch keeps.
"""
CHANNELS = {4: 16, 2: 32}
"""Channels of the largest blocks in which oneDNN keeps tensors, by the bytes of a number: with matrix units for 16 bits
they are twice as many."""
FILTERS = ("blocked", "plain")
"""What a config's ``filter`` may be: put into oneDNN's own layout once, or as it is given."""
UNROLLED_PIXELS = 3
"""Pixels of a row that oneDNN's direct kernel for AVX2 computes at a time."""
OPERATORS = ("_convolution_pointwise", "_reorder_convolution_weight", "_nbytes")
EFFICIENCY = 0.85


class OneDNNFused(ConvSolver):
    """``mkldnn::_convolution_pointwise``: oneDNN adds bias and residual and applies the activation as it writes.

    With ``filter=blocked`` a constant weight is kept in the layout that oneDNN computes with, and the result is made
    channels last; torch's own convolution brings the weight there in every call. With ``filter=plain`` the weight is
    taken as it is.
    """

    name, version = "onednn_fused", 2
    passes = frozenset({Pass.FPROP})
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32", "bf16"})
    own_output = True
    adds_bias = True
    adds_residual = True
    activations = frozenset(POINTWISE)

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: padding that differs by side or crops, a wider result, or operators that torch lacks or refuses."""
        reasons = []
        if any(axis.before != axis.after or axis.before < 0 for axis in p.axes):
            reasons.append("oneDNN's operator takes one non-negative padding per axis, the same before and after")
        if p.out_dtype != p.dtype:
            reasons.append(f"gives {p.dtype}, not {p.out_dtype}")
        if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS):
            reasons.append(f"needs a torch with oneDNN's operators {', '.join(OPERATORS)}")
        elif p.dtype == "bf16" and not _computes_bf16():
            reasons.append("needs bf16 in oneDNN, which this processor lacks: AVX-512 would do, or AVX-NE-CONVERT")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """A constant filter in oneDNN's layout, and the filter as it is."""
        names = FILTERS if p.constant_weight else FILTERS[1:]
        return [Config(filter=name) for name in names]

    def does_activate(self, p: ConvProblem, c: Config) -> bool:
        """As for every solver, but none goes with a residual, and a slope of 0 would cut off NaN."""
        known = not p.residual or p.activation == "none"
        return known and super().does_activate(p, c) and 0.0 not in activation_parameters(p.activation)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the filter in oneDNN's layout, which fills up blocks of channels."""
        if not p.constant_weight or c.get("filter") != "blocked":
            return 0
        return _blocked_bytes(p.shape("w"), p.dtype, _options(p))

    def pack(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What brings a filter into oneDNN's layout."""
        return functools.partial(_blocked, options=_options(p))

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """Copies of tensors into layouts that oneDNN computes with, where they are in others, and lowered windows.

        Its blocks of channels are whole. Windows are lowered, by each thread those of one image and group, where it has
        no kernel of the direct method.
        """
        return _copied(p, c) + (torch.get_num_threads() * _lowered(p) if _is_lowered(p) else 0)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic, and copies into other layouts, which do not overlap with it."""
        return Cost(p.flops, p.bytes, efficiency=EFFICIENCY, apart=2 * _copied(p, c))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run that calls the operator. Raises ``SolverUnavailable`` for a config that is none of its own."""
        name = c.get("filter")
        if name not in FILTERS or (name == "blocked" and not p.constant_weight):
            raise SolverUnavailable(f"{c} is no config of {p.key}: filter={'|'.join(FILTERS)} would do")
        return _run(p, is_blocked=name == "blocked")


@functools.cache
def _computes_bf16() -> bool:
    """Whether torch lets oneDNN compute in bf16 on this processor; its operators raise elsewhere."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _copied(p: ConvProblem, c: Config) -> int:
    """Bytes of the copies of tensors that are not as oneDNN computes with them."""
    plain = {role for role in p.roles if p.layout(role) != "channels_last"}
    if c.get("filter") == "blocked":
        plain.discard("w")
    return sum(_in_blocks(p, role) for role in plain)


def _is_lowered(p: ConvProblem) -> bool:
    """Whether oneDNN may multiply lowered windows, as far as runs have shown.

    Its direct kernels want whole vectors of each group's channels, but for one channel a group. Those for AVX2 compute
    three pixels of a row at a time and want no more of them to lie in the padding.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    lanes, channels = (16 if wide else 8), (p.in_channels // p.groups, p.out_channels // p.groups)
    divided = p.groups > 1 and max(channels) > 1 and any(each % lanes for each in channels)
    return divided or (not wide and p.axes[-1].before > UNROLLED_PIXELS)


def _lowered(p: ConvProblem) -> int:
    """Bytes of the lowered windows of one image and group."""
    _, _, *out = p.shape("y")
    taps = math.prod(axis.kernel for axis in p.axes)
    return p.in_channels // p.groups * taps * math.prod(out) * p.torch_dtype("x").itemsize


def _in_blocks(p: ConvProblem, role: str) -> int:
    """Bytes of a tensor in blocks of channels; of a filter these are its outputs and inputs."""
    first, channels, *space = p.shape(role)
    size = p.torch_dtype(role).itemsize
    block = CHANNELS[size]
    blocks = -(-channels // block) * block
    if role == "w":
        first = -(-first // block) * block
    return first * blocks * math.prod(space) * size


def _run(p: ConvProblem, *, is_blocked: bool) -> Run:
    """The run of the operator on the problem's tensors."""
    operation, algorithm = POINTWISE[activation_kind(p.activation)]
    scalars = list(activation_parameters(p.activation))
    unary = (None, [], None) if operation == "none" else (operation, scalars, algorithm)
    alone, with_other = torch.ops.mkldnn._convolution_pointwise.default, torch.ops.mkldnn._convolution_pointwise.binary
    options, groups, is_line = _options(p)[:3], p.groups, p.dims == 1
    formats = {role: _format(p, role) for role in p.roles}
    x_is_view, w_is_view = (p.layout(role) == "view" for role in "xw")
    y_format, has_bias = formats["y"], p.bias

    def run(
        x: torch.Tensor, w: torch.Tensor, _: torch.Tensor | None, __: torch.Tensor | None, *added: torch.Tensor
    ) -> torch.Tensor:
        bias, residual = (added[0] if has_bias else None), added[has_bias:]
        if is_line:
            x = x.unsqueeze(2)
            w = w if is_blocked else w.unsqueeze(2)
        x = x.contiguous(memory_format=formats["x"]) if x_is_view else x
        w = w.contiguous(memory_format=formats["w"]) if w_is_view and not is_blocked else w
        y: torch.Tensor
        if residual:
            other = residual[0].unsqueeze(2) if is_line else residual[0]
            y = with_other(x, other, w, bias, *options, groups, "add", 1.0, *unary)
        else:
            y = alone(x, w, bias, *options, groups, operation, scalars, algorithm)
        y = y.contiguous(memory_format=y_format)  # itself where it is so already
        return y.squeeze(2) if is_line else y

    return run


def _format(p: ConvProblem, role: str) -> torch.memory_format:
    """The dense memory format of a tensor as oneDNN sees it, where a signal is a plane of one row."""
    if p.layout(role) != "channels_last":
        return torch.contiguous_format
    return torch.channels_last_3d if p.dims == 3 else torch.channels_last


Options = tuple[list[int], list[int], list[int], int]
"""Padding, stride and dilation by axis, and the number of groups."""


def _options(p: ConvProblem) -> Options:
    """The operator's options. A signal is a plane of one row."""
    row = p.dims == 1
    padding, stride, dilation = (
        [first] * row + [getattr(axis, name) for axis in p.axes]
        for name, first in (("before", 0), ("stride", 1), ("dilation", 1))
    )
    return padding, stride, dilation, p.groups


def _blocked(weight: torch.Tensor, options: Options) -> torch.Tensor:
    """``weight`` in oneDNN's layout: an opaque tensor."""
    plane: Any = weight.unsqueeze(2) if weight.dim() == 3 else weight
    blocked: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(plane.contiguous(), *options)
    return blocked


def _blocked_bytes(shape: tuple[int, ...], dtype: str, options: Options) -> int:
    """Bytes of a filter of ``shape`` in oneDNN's layout."""
    return _known_bytes(shape, dtype, tuple(map(tuple, options[:3])), options[3])


@functools.lru_cache(maxsize=1024)
def _known_bytes(shape: tuple[int, ...], dtype: str, lists: tuple[tuple[int, ...], ...], groups: int) -> int:
    """As :func:`_blocked_bytes`: oneDNN chooses the layout, so it is asked with a filter of zeros."""
    padding, stride, dilation = (list(numbers) for numbers in lists)
    zeros = torch.zeros(shape, dtype=DTYPES[dtype], device="cpu")
    return int(torch.ops.mkldnn._nbytes(_blocked(zeros, (padding, stride, dilation, groups))))
