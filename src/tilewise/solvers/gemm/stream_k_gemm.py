"""Matrix products of which every multiprocessor gets an equal share, by kernels of our own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.common.triton_run import compiled
from tilewise.solvers.gemm import _stream_k as stream_k
from tilewise.solvers.gemm import _stream_k_configs as tried
from tilewise.solvers.gemm._product import ProductSolver

__all__ = ["StreamKGemm"]


class StreamKGemm(ProductSolver):
    """Stream-K (Osama et al. 2023, "Stream-K", sections 4 and 5.1): as many ``programs`` as the device runs at once.

    Each has an equal stretch of the steps of all tiles, so no multiprocessor is idle, whatever the sizes. Sums of
    parts of tiles go through the workspace and are added up in order by a second kernel: nothing waits, and the result
    has the same bits every time.

    With ``share=parts`` every tile is divided among ``splits`` programs instead, which begin and end with it. Operands
    named in ``pack`` are copied first, with the sums contiguous: rows at odd places would be read number by number.

    fp32 is multiplied by ``product``: ``tf32``, or with fp32's accuracy ``tf32x3`` or ``bf16x6`` on matrix units, in
    three products of TF32 parts or six of bf16 parts (Ootomo and Yokota 2022, section 3).
    """

    name, version = "stream_k_gemm", 3
    devices = frozenset({"cuda"})
    compiles = True
    adds_bias = True
    activations = frozenset(ACTIVATIONS)
    accumulates = True
    most_configs = 4
    error_bound = {"ieee": 5e-6, "tf32": 5e-3}  # noqa: RUF012 (matrix units cut the last bits off)

    def unsupported(self, p: GemmProblem) -> list[str]:
        """Reasons: no Triton, or too many numbers for 32 bits."""
        return stream_k.unsupported(p)

    def family(self, c: Config) -> str:
        """One for each way to multiply fp32, to share tiles and to pack operands, for uneven tiles and others."""
        tile = c.get("tile")
        uneven = "uneven" if isinstance(tile, tuple) and tile[1] & (tile[1] - 1) else ""
        words = (self.name, c.get("product"), c.get("share"), c.get("pack"), uneven)
        return " ".join(str(word) for word in words if word)

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """Tiles of each shape, those that leave the least work to a program first."""
        return tried.configs(p)

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes of the sums of parts of tiles, and of copied operands."""
        return stream_k.workspace(stream_k.work_of(p, c))

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The arithmetic of full tiles, copies of operands, and the sums of parts written and read."""
        return tried.cost(stream_k.work_of(p, c))

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        with config_reasons(p, c):
            work = stream_k.work_of(p, c)
        if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (a, b, out)):
            raise SolverUnavailable("takes matrices whose rows are contiguous")
        return compiled(p, stream_k.launches(work, a, b, out), a.device)
