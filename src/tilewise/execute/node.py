"""The base class of the nodes of a bound plan tree, and ways to call a node with all tensors in one flat list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tilewise.kernels.native.sequence import LaunchSequence
from tilewise.problems.base import Problem, Tensors
from tilewise.solvers import Run

__all__ = ["Addressed", "Flat", "FlatPair", "Node", "PlanMismatch", "Results", "allocating_call", "flat_call"]

Addressed = Callable[..., None]
"""``run(*operands, *results, workspace)`` on addresses of memory; the addresses of bias and residual follow where the
node adds them."""

Results = tuple[Tensor | None, ...]
"""The tensors that results are written to; ``None`` stands for one that the solver allocates."""


class PlanMismatch(ValueError):
    """A plan does not fit the problem or this version's solvers. The message says which of them, and how.

    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> from tilewise.execute import PlanMismatch, bind
    >>> try:
    ...     bind(plan, tilewise.GemmProblem(2, 4, 5), torch.ones(2, 5), torch.ones(5, 4))
    ... except PlanMismatch as error:
    ...     print("a plan of another problem")
    a plan of another problem
    """


class Node:
    """One node of a bound plan tree, called as ``run(operands, results, workspace)``.

    ``workspace`` is the bytes of scratch memory that a call needs. Where ``adds`` is true, a call takes the bias as
    well and adds it; where ``adds_residual`` is, it takes the residual behind that. ``constant`` is the index of the
    operand that may stay the same between calls, -1 for none.
    ``elsewhere`` has the bytes that parts on other devices take there, by the name of the device.
    """

    __slots__ = ("adds", "adds_residual", "constant", "elsewhere", "workspace")
    adds: bool
    adds_residual: bool
    constant: int
    elsewhere: Mapping[str, int]
    workspace: int
    pins = False
    """Whether results on the host are best allocated in pinned memory, to which GPUs copy directly."""

    def run(self, operands: Tensors, results: Results, workspace: Tensor | None, *added: Tensor) -> Tensors:
        """Compute the results and return them. ``added`` are a bias and a residual, those that the node adds."""
        raise NotImplementedError

    def taken(self, operand: Tensor, workspace: Tensor | None) -> Tensor:
        """What :meth:`run` takes in place of the constant ``operand``.

        All parts of one call that share the operand share it.
        """
        return operand

    def shortest(self) -> Run:
        """The node's run as ``call(*operands, *results, workspace, *added)``, with as few Python frames as possible."""
        raise NotImplementedError

    def addressed(self) -> Addressed | None:
        """The node's run on raw addresses, which makes no tensor views; ``None`` unless every leaf takes addresses."""
        return None

    def launches(self) -> LaunchSequence | None:
        """The kernels that :meth:`addressed` launches, in order, over the tensors that it takes the addresses of.

        ``None`` unless the node does nothing else than launch kernels that the driver can be told of.
        """
        return None


class Flat:
    """Calls a node as ``flat(*operands, *results, workspace, *bias)``, for any number of tensors."""

    __slots__ = ("_node", "_operands", "_tensors")

    def __init__(self, node: Node, problem: Problem) -> None:
        self._node, self._operands, self._tensors = node, len(problem.operands), len(problem.roles)

    def __call__(self, *tensors: Any) -> Any:
        node, count = self._node, self._tensors
        operands, results, workspace = tensors[: self._operands], tensors[self._operands : count], tensors[count]
        constant = node.constant
        if constant >= 0:
            prepared = node.taken(operands[constant], workspace)
            operands = (*operands[:constant], prepared, *operands[constant + 1 :])
        computed = node.run(operands, results, workspace, *tensors[count + 1 :])
        return computed[0] if len(computed) == 1 else computed


class FlatPair:
    """:class:`Flat` for two operands, of which the second may be constant, and one result: a few frames less."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, a: Tensor, b: Tensor, out: Tensor | None, workspace: Tensor | None, *bias: Tensor) -> Tensor:
        node = self._node
        if node.constant == 1:
            b = node.taken(b, workspace)
        return node.run((a, b), (out,), workspace, *bias)[0]


def flat_call(node: Node, problem: Problem) -> Run:
    """The run of ``node`` as ``call(*operands, *results, workspace, *bias)``."""
    pair = len(problem.operands) == 2 and len(problem.results) == 1 and node.constant != 0
    return FlatPair(node) if pair else Flat(node, problem)


def allocating_call(call: Run, flat: Run, problem: Problem) -> Run:
    """A call of a solver that allocates its one result: ``call`` itself where no result is given, else ``flat``."""
    if len(problem.results) != 1:
        return flat
    place, dtype = len(problem.operands), problem.torch_dtype(problem.result)

    def run(*given: Any) -> Tensor:
        if given[place] is not None:
            return flat(*given)
        computed = call(*given)
        return computed if computed.dtype is dtype else computed.to(dtype)

    return run
