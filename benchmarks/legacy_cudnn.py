"""cuDNN's legacy convolution algorithms, one by one: the baseline of mu-cuDNN (Oyama et al. 2018, section IV).

The v7-style functions (``cudnnConvolutionForward`` and its two backward companions) are still in cuDNN 9. They are
called through ctypes on torch tensors, so that the same harness can time them and our plans side by side.

    for algorithm in algorithms("fprop", x, w, y, padding=(2, 2)):
        if algorithm.reason:
            continue
        scratch = torch.empty(algorithm.workspace, dtype=torch.uint8, device="cuda")
        algorithm(scratch)  # writes y

As a script it prints every algorithm's workspace and time for AlexNet's five layers at batch 256 (the paper's case).
"""

from __future__ import annotations

import ctypes
import functools
import glob
import json
import os
import sys
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_size_t, c_void_p

import torch

ALGORITHMS = {
    "fprop": (
        "IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM", "GEMM", "DIRECT",
        "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED",
    ),
    "dgrad": ("ALGO_0", "ALGO_1", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"),
    "wgrad": ("ALGO_0", "ALGO_1", "FFT", "ALGO_3", "WINOGRAD", "WINOGRAD_NONFUSED", "FFT_TILING"),
}  # fmt: skip
"""Algorithms by pass, at the numbers cuDNN gives them."""
FUNCTIONS = {"fprop": "Forward", "dgrad": "BackwardData", "wgrad": "BackwardFilter"}
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}
CROSS_CORRELATION, NCHW, NHWC = 1, 0, 1
MATH_DEFAULT, MATH_TENSOR_OP, MATH_FMA = 0, 1, 3
ONE, ZERO = c_float(1.0), c_float(0.0)


class LegacyError(RuntimeError):
    """cuDNN refused a call; the message names the function and the status."""


@functools.cache
def library() -> ctypes.CDLL:
    """The cuDNN that torch runs on. Raises ``OSError`` where there is none."""
    torch.cuda.init()
    root = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "cudnn", "lib")
    names = ["libcudnn.so.9", *glob.glob(os.path.join(root, "libcudnn.so.[0-9]*"))]
    failures = []
    for name in names:
        try:
            found = ctypes.CDLL(name)
        except OSError as failure:
            failures.append(str(failure))
            continue
        found.cudnnGetErrorString.restype = ctypes.c_char_p
        return found
    raise OSError(f"cuDNN was not found: {'; '.join(failures)}")


def call(name: str, *arguments: object) -> None:
    """Call a cuDNN function; raises :class:`LegacyError` unless it succeeds."""
    status = getattr(library(), name)(*arguments)
    if status:
        raise LegacyError(f"{name}: {library().cudnnGetErrorString(status).decode()} ({status})")


class Descriptor:
    """A cuDNN descriptor, freed with its owner."""

    def __init__(self, kind: str) -> None:
        self._kind, self.value = kind, c_void_p()
        call(f"cudnnCreate{kind}Descriptor", byref(self.value))

    def __del__(self) -> None:
        if self.value:
            getattr(library(), f"cudnnDestroy{self._kind}Descriptor")(self.value)


def _ints(values: Sequence[int]) -> ctypes.Array[c_int]:
    return (c_int * len(values))(*values)


def _tensor(t: torch.Tensor) -> Descriptor:
    made = Descriptor("Tensor")
    call("cudnnSetTensorNdDescriptor", made.value, DATA_TYPES[t.dtype], t.dim(), _ints(t.shape), _ints(t.stride()))
    return made


def _filter(w: torch.Tensor) -> Descriptor:
    made = Descriptor("Filter")
    if w.is_contiguous():
        layout = NCHW
    elif w.permute(0, *range(2, w.dim()), 1).is_contiguous():
        layout = NHWC
    else:
        raise ValueError(f"w has strides {w.stride()}: a legacy filter is contiguous or channels_last")
    call("cudnnSetFilterNdDescriptor", made.value, DATA_TYPES[w.dtype], layout, w.dim(), _ints(w.shape))
    return made


def _convolution(
    padding: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int, math: int
) -> Descriptor:
    made = Descriptor("Convolution")
    sizes = (_ints(padding), _ints(stride), _ints(dilation))
    call(
        "cudnnSetConvolutionNdDescriptor",
        made.value,
        len(padding),
        *sizes,
        CROSS_CORRELATION,
        DATA_TYPES[torch.float32],
    )
    call("cudnnSetConvolutionGroupCount", made.value, groups)
    call("cudnnSetConvolutionMathType", made.value, math)
    return made


@functools.cache
def _handle(device: int) -> c_void_p:
    made = c_void_p()
    with torch.cuda.device(device):
        call("cudnnCreate", byref(made))
    return made


class Algorithm:
    """One legacy algorithm bound to tensors: ``name``, ``workspace`` in bytes, and why not in ``reason`` (else empty).

    Calling it with a uint8 tensor of at least ``workspace`` bytes (``None`` where that is 0) runs it on the current
    stream and writes the result. Raises :class:`LegacyError`.
    """

    def __init__(
        self, pass_: str, number: int, tensors: tuple[torch.Tensor, ...], parts: tuple[Descriptor, ...]
    ) -> None:
        self.name = ALGORITHMS[pass_][number]
        self._number, self._tensors, self._parts = number, tensors, parts
        self._device = tensors[0].device.index
        self._function = f"cudnnConvolution{FUNCTIONS[pass_]}"
        self.workspace, self.reason = 0, ""
        a, b, convolution, out = (part.value for part in parts)
        size = c_size_t()
        query = f"cudnnGetConvolution{FUNCTIONS[pass_]}WorkspaceSize"
        try:
            call(query, _handle(self._device), a, b, convolution, out, number, byref(size))
        except LegacyError as failure:
            self.reason = str(failure)
        self.workspace = size.value

    def __call__(self, workspace: torch.Tensor | None = None) -> None:
        handle = _handle(self._device)
        call("cudnnSetStream", handle, c_void_p(torch.cuda.current_stream(self._device).cuda_stream))
        a, b, out = self._tensors
        a_kind, b_kind, convolution, out_kind = (part.value for part in self._parts)
        size = 0 if workspace is None else workspace.numel()
        scratch = c_void_p(0 if workspace is None else workspace.data_ptr())
        call(
            self._function, handle, byref(ONE), a_kind, c_void_p(a.data_ptr()), b_kind, c_void_p(b.data_ptr()),
            convolution, self._number, scratch, c_size_t(size), byref(ZERO), out_kind, c_void_p(out.data_ptr()),
        )  # fmt: skip


def algorithms(
    pass_: str,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    *,
    padding: Sequence[int],
    stride: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    allow_tf32: bool = False,
) -> list[Algorithm]:
    """Every legacy algorithm for one pass over these tensors (2-D or 3-D; the pass's result among them is written).

    In fp32 only fused multiply-adds are allowed (``CUDNN_FMA_MATH``) unless ``allow_tf32``. An algorithm that cuDNN
    refuses stays in the list with its reason.
    """
    ones = [1] * len(padding)
    math = MATH_DEFAULT if allow_tf32 else MATH_FMA
    if x.dtype is not torch.float32:
        math = MATH_TENSOR_OP
    convolution = _convolution(padding, stride or ones, dilation or ones, groups, math)
    dx, dw, dy = _tensor(x), _filter(w), _tensor(y)
    tensors, kinds = {
        "fprop": ((x, w, y), (dx, dw, dy)),
        "dgrad": ((w, y, x), (dw, dy, dx)),
        "wgrad": ((x, y, w), (dx, dy, dw)),
    }[pass_]
    parts = (kinds[0], kinds[1], convolution, kinds[2])
    return [Algorithm(pass_, number, tensors, parts) for number in range(len(ALGORITHMS[pass_]))]


def find(found: Sequence[Algorithm], limit: int | None = None) -> list[Algorithm]:
    """Those that cuDNN accepts and whose workspace keeps ``limit`` bytes (``None``: any)."""
    return [each for each in found if not each.reason and (limit is None or each.workspace <= limit)]


def _time_ms(run: Algorithm, workspace: torch.Tensor | None, repeat: int = 7) -> float:
    run(workspace)
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(workspace)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeat // 2]


def main() -> None:
    """Print one JSON row per AlexNet layer, pass and algorithm: MiB, milliseconds or the reason."""
    layers = {
        "conv1": (256, 3, 64, 224, 11, 2, 4),
        "conv2": (256, 64, 192, 27, 5, 2, 1),
        "conv3": (256, 192, 384, 13, 3, 1, 1),
        "conv4": (256, 384, 384, 13, 3, 1, 1),
        "conv5": (256, 384, 256, 13, 3, 1, 1),
    }
    for layer, (n, c, k, size, r, pad, stride) in layers.items():
        out = (size + 2 * pad - r) // stride + 1
        x, w, y = (torch.randn(s, device="cuda") for s in ((n, c, size, size), (k, c, r, r), (n, k, out, out)))
        for pass_ in ALGORITHMS:
            for each in algorithms(pass_, x, w, y, padding=(pad, pad), stride=(stride, stride)):
                row: dict[str, object] = {"layer": layer, "pass": pass_, "algorithm": each.name}
                row |= {"mib": round(each.workspace / 2**20, 1), "reason": each.reason}
                if not each.reason:
                    try:
                        scratch = torch.empty(max(each.workspace, 1), dtype=torch.uint8, device="cuda")
                        row["ms"] = round(_time_ms(each, scratch), 4)
                    except (LegacyError, torch.OutOfMemoryError) as failure:
                        row["reason"] = str(failure)[:200]
                print(json.dumps(row))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
