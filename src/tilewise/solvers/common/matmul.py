"""Matrix products as the solvers need them: batched over images and groups, in the convolution's own precision."""

from __future__ import annotations

import os
from typing import Any

import torch

from tilewise.machine.torch_state import BACKENDS, FITTING, fp32_precision, read_precision
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Run
from tilewise.solvers.common import cublas as _cublas
from tilewise.solvers.common.buffers import Strided

__all__ = ["add_over_images", "as_matrix", "at_precision", "compute_dtype", "library_scratch", "multiply", "straight"]

MIB = 2**20
CPU_SCRATCH = 2 * MIB
"""MKL packs panels of both operands into buffers that it keeps; measured growth is about 1 MiB a thread."""


def compute_dtype(p: ConvProblem) -> torch.dtype:
    """The dtype that matrix products take: the operands' on CUDA, always fp32 on a CPU.

    CPU libraries sum bf16 and fp16 products in fp32 but can only return them rounded, and most processors have no
    such units, so operands are widened on the way into the workspace instead.
    """
    return torch.float32 if p.device_type == "cpu" else p.torch_dtype(p.operands[0])


def as_matrix(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """``strides`` that BLAS accepts for a matrix in the last two dimensions.

    Strides of rows or columns of size 1 do not matter to torch but do to BLAS, so they are replaced.
    """
    rows, columns = sizes[-2:]
    row, column = strides[-2:]
    if columns == 1:
        column = 1 if row != 1 else rows
    if rows == 1:
        row = columns if column == 1 else 1
    return (*strides[:-2], row, column)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """``out[n, g] (+)= a[n, g] @ b[n, g]`` for 4-D (n, g, rows, columns) tensors; stride 0 over n is allowed.

    Takes one library call where there is one image or one group, otherwise one for each image or each group, whichever
    are fewer.
    """
    images, groups = out.shape[0], out.shape[1]
    if images == 1 and groups == 1:
        _matmul(a[0, 0], b[0, 0], out[0, 0], add)
    elif images == 1:
        _matmul(a[0], b[0], out[0], add)
    elif groups == 1:
        _matmul(a[:, 0], b[:, 0], out[:, 0], add)
    elif images <= groups:
        for n in range(images):
            _matmul(a[n], b[n], out[n], add)
    else:
        for g in range(groups):
            _matmul(a[:, g], b[:, g], out[:, g], add)


def add_over_images(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """``out[0, g] (+)= sum over n of a[n, g] @ b[n, g]``, the images one after another."""
    for n in range(a.shape[0]):
        multiply(a[n : n + 1], b[n : n + 1], out, add or n > 0)


def straight(p: ConvProblem, b: Strided, a: Strided, out: Strided, device: torch.device) -> Run:
    """A run that computes ``out (+)= b @ a`` on views of its tensors, each (images, groups, rows, columns).

    It adds if ``p.accumulate``. On CUDA it is one call of cuBLAS by address where one call can express it. Otherwise it
    makes three views and calls torch, with as little else as possible: small layers feel every microsecond.
    """
    add, views = p.accumulate, [b, a, out]
    if 1 in out.sizes[:2]:
        batch_dim = 1 if out.sizes[0] == 1 else 0
        views = [
            Strided((v.sizes[batch_dim], *v.sizes[2:]), (v.strides[batch_dim], *v.strides[2:]), v.offset) for v in views
        ]
        if views[2].sizes[0] == 1:
            views = [Strided(v.sizes[1:], v.strides[1:], v.offset) for v in views]
    left, right, result = views
    if device.type == "cuda":
        product = _cublas.bind(p, left, right, result, device)
        if product is not None:
            return product
    if len(result.sizes) == 2 and not add and not any(v.offset for v in views):
        return _one_product(left, right, result)
    multiply_views = multiply if len(result.sizes) == 4 else _matmul

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None) -> torch.Tensor:
        assert out is not None
        multiply_views(left.of(b), right.of(a), result.of(out), add)
        return out

    return run


def _one_product(left: Strided, right: Strided, result: Strided) -> Run:
    """A run of one 2-D product, written without helper calls: a layer of some 20 us feels each of them."""
    (left_sizes, left_strides), (right_sizes, right_strides) = left[:2], right[:2]
    sizes, strides = result[:2]
    mm, view = torch.mm, torch.as_strided

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None) -> torch.Tensor:
        assert out is not None
        target = view(out, sizes, strides)
        first, second = view(b, left_sizes, left_strides), view(a, right_sizes, right_strides)
        if out.dtype is a.dtype:
            mm(first, second, out=target)
        else:
            mm(first, second, out_dtype=out.dtype, out=target)
        return out

    return run


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """``out (+)= a @ b`` for matrices, or for each of a batch of matrices. 16-bit products may be given out in fp32."""
    plain, adding = (torch.mm, torch.addmm) if out.dim() == 2 else (torch.bmm, torch.baddbmm)
    widened: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        adding(out, a, b, **widened, out=out)
    else:
        plain(a, b, **widened, out=out)


def at_precision(p: Problem, run: Run) -> Run:
    """``run`` with its fp32 or complex64 products done at the problem's precision, whatever torch's matmul flag says.

    The flag is read on every call (0.3 us) and only written where it differs. Not safe against another thread that
    changes it meanwhile. A product by address has its precision among its arguments and is returned as it is.
    """
    if isinstance(run, _cublas.CublasRun):
        return run
    device_type, backend = p.device_type, BACKENDS[p.device_type]
    wanted = p.precision if device_type == "cuda" else "ieee"
    fits, read = FITTING[wanted], read_precision

    def guarded(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        if read(backend, "matmul") in fits:
            return run(a, b, out, workspace)
        with fp32_precision(device_type, "matmul", wanted):
            return run(a, b, out, workspace)

    return guarded


def library_scratch(p: Problem, streams: int = 1) -> int:
    """Bytes of scratch that the matrix library holds while it multiplies on ``streams`` streams.

    On CUDA torch gives each cuBLAS handle and stream one buffer, on first use and for good: what
    ``CUBLAS_WORKSPACE_CONFIG`` says (``:KiB:count`` pairs), else 32 MiB from compute capability 9 on and 8.1 before.
    """
    if p.device_type == "cpu":
        return CPU_SCRATCH
    words = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").split(":")[1:]
    if words and len(words) % 2 == 0 and all(word.isdigit() for word in words):
        size = sum(int(k) * int(n) * 1024 for k, n in zip(words[::2], words[1::2], strict=True))
    elif torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        size = 4096 * 2 * 1024 + 16 * 8 * 1024
    else:
        size = 32 * MIB
    return size * streams
