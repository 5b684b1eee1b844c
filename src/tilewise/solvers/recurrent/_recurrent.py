"""What solvers of recurrent layers share: the kind that they solve, and runs of the layer that they make."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch

from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.problems.recurrent.packing import packing_of
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost, Run, Solver
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.recurrent._layers import Layer

__all__ = [
    "RecurrentSolver",
    "block_of",
    "blocks_of",
    "is_on_host",
    "moved_bytes",
    "recurrent_cost",
    "rows_at_a_time",
    "with_repeats",
]


HOST = 50
"""Times that a byte takes between host and GPU what it takes in the GPU's memory, roughly."""


class RecurrentSolver(Solver):
    """One way to compute recurrent layers. It makes a layer, and a run calls that forwards, and backwards to train."""

    solves: ClassVar[type[Problem]] = RecurrentProblem
    own_output = True
    projects: ClassVar[bool] = False
    """Whether it takes LSTMs with a projection."""
    by_blocks: ClassVar[bool] = False
    """Whether it takes a config's ``block`` as steps that run at a time. A backward computes them again, or on a GPU
    with ``host`` finds what they kept in the host's memory."""
    moves_to_host: ClassVar[bool] = False
    """Whether it takes a config's ``host``."""
    amounts: ClassVar[frozenset[str]] = Solver.amounts | {"host"}

    @abc.abstractmethod
    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """What computes ``p`` by config ``c``, with forward and backward apart.

        Raises :class:`~tilewise.solvers.base.SolverUnavailable` where the config cannot run here.
        """

    def undeclared(self, p: RecurrentProblem) -> list[str]:
        """As of every solver, and a projection that it does not take."""
        reasons = super().undeclared(p)
        if isinstance(p, RecurrentProblem) and p.projection and not self.projects:
            reasons.append(f"projection={p.projection}: takes no LSTM with a projection")
        return reasons

    def unsupported(self, p: RecurrentProblem) -> list[str]:
        """None: it takes every layer of the declared types."""
        return []

    def configs(self, p: RecurrentProblem) -> Iterable[Config]:
        """One empty config."""
        return (Config(),)

    def offers(
        self, p: RecurrentProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """All configs, and where one needs more than ``ceiling`` bytes some blocks of steps that do not.

        They are the two largest ones and one of an eighth, as libraries may take more than is known. Where no block
        fits, blocks of one step are offered, so that their loss says what is needed.
        """
        for c in self.configs(p):
            blocked = []
            for block in self._blocks(p, c, ceiling) if only is None else ():
                blocked.append(Config(**c, block=block))
                if self._may_move(p) and (
                    ceiling is None or self._needs(p, Config(**c, block=block, host=1)) <= ceiling
                ):
                    blocked.append(Config(**c, block=block, host=1))
            if only is not None:
                blocked = [each for each in only if self.by_blocks and self.like(each) == c and self._is_block(p, each)]
            if only is None or c in only:
                yield c, self.workspace(p, c)
            for each in blocked:
                if each != c:
                    yield each, self.workspace(p, each)

    def _blocks(self, p: RecurrentProblem, c: Config, ceiling: int | None) -> list[int]:
        """Steps that are worth running at a time under a limit: halves of the time, quarters and so on."""
        if ceiling is None or not self.by_blocks or p.time == 1 or self._needs(p, c) <= ceiling:
            return []
        sizes, block = [], p.time
        while block > 1:
            block = -(-block // 2)
            sizes.append(block)
        fitting = [block for block in sizes if self._needs(p, Config(**c, block=block)) <= ceiling]
        return [*fitting[:2], *fitting[3:4]] or sizes[-1:]

    def _is_block(self, p: RecurrentProblem, c: Config) -> bool:
        """Whether the steps of a config that run at a time are some of the problem's, kept where they may be."""
        return 1 <= block_of(c) < p.time and ("host" not in c or (c["host"] == 1 and self._may_move(p)))

    def _may_move(self, p: RecurrentProblem) -> bool:
        """Whether what steps keep may be moved to the host: from a GPU, where there is a backward."""
        return self.moves_to_host and p.device_type == "cuda" and p.task == "training"

    def _needs(self, p: RecurrentProblem, c: Config) -> int:
        """All bytes that a run takes."""
        return self.workspace(p, c) + self.hidden_workspace(p, c)

    def hidden_workspace(self, p: RecurrentProblem, c: Config) -> int:
        """Bytes of what steps give the gates, of outputs between layers, and for training of all that is kept.

        Of steps that run in blocks only the states between blocks are kept beside the outputs.
        """
        size = p.torch_dtype("x").itemsize
        gates, outputs = rows_at_a_time(p, c) * p.gates * p.hidden, p.rows * p.directions * p.width * size
        if p.task == "inference":
            return gates * size + outputs * min(2, p.layers - 1)
        every = p.layers * p.directions
        if not block_of(c):
            return gates * (size + 4 * every) + outputs * (p.layers - 1)
        of_cell = p.hidden * 4 if p.cell == "lstm" else 0
        between = (blocks_of(p, c) - 1) * p.batch * (p.width * size + of_cell) * every
        at_a_time = 2 if is_on_host(c) else 1
        return gates * (size + 4) * at_a_time + outputs * (p.layers - 1) + between

    def bind(self, p: RecurrentProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """A run of the layer into new tensors."""
        layer, count = self.layer(p, c), len(p.weights)
        states = 2 if p.cell == "lstm" else 1
        first, last = 1 + states, 1 + states + count
        training, operands = p.task == "training", len(p.operands)
        packing = packing_of(p) if p.packed else None

        @torch.no_grad()
        def run(*tensors: Any) -> Any:
            x, h0, c0 = tensors[0], tensors[1], tensors[2] if states == 2 else None
            weights = tensors[first:last]
            y, hn, cn, saved = layer.forward(x, h0, c0, weights, packing=packing, keep=training)
            results = (y, hn) if cn is None else (y, hn, cn)
            if not training:
                return results
            dy, dhn, *dcn = tensors[last:operands]
            needs = (True, True, states == 2, *(True for _ in weights))
            gradients = layer.backward(saved, weights, dy, dhn, dcn[0] if dcn else None, needs)
            return (*results, *(each for each, needed in zip(gradients, needs, strict=True) if needed))

        return run


def block_of(c: Config) -> int:
    """Steps that run at a time, 0 for all."""
    block = c.get("block", 0)
    return block if isinstance(block, int) else 0


def is_on_host(c: Config) -> bool:
    """Whether what blocks keep is moved to the host."""
    return "host" in c


def blocks_of(p: RecurrentProblem, c: Config) -> int:
    """The number of parts of the steps that run at a time, where a packed batch runs in parts in which none ends."""
    return max(-(-p.time // (block_of(c) or p.time)), min(p.time, p.batch) if p.packed else 1)


def rows_at_a_time(p: RecurrentProblem, c: Config) -> int:
    """Rows of all steps that run at a time, at the most."""
    return min(p.rows, p.batch * (block_of(c) or p.time))


def with_repeats(p: RecurrentProblem, c: Config) -> int:
    """Floating-point operations with those of a backward that computes its forward again."""
    return p.flops if p.task == "inference" or not block_of(c) or is_on_host(c) else p.flops * 4 // 3


def moved_bytes(p: RecurrentProblem, c: Config) -> int:
    """Bytes of memory traffic that take as long as what ``c`` moves to pinned host memory and back; 0 if nothing."""
    return p.rows * p.layers * p.directions * (p.gates + 1) * p.hidden * 8 * HOST if is_on_host(c) else 0


def recurrent_cost(p: RecurrentProblem, c: Config, kernels: int, factor: float = 1.0) -> Cost:
    """The products' arithmetic, of which a step's has few rows, in ``kernels`` launches and some more a block.

    ``factor`` is the share of a product's rate that is left where other work is done between.
    """
    kernels += 8 * (blocks_of(p, c) - 1) * p.layers * p.directions
    rate = efficiency(p.device_type, -(-p.rows // p.time), p.gates * p.hidden, p.width)
    return Cost(with_repeats(p, c), p.bytes + moved_bytes(p, c), kernels, efficiency=max(rate * factor, 1e-4))
