"""A plan bound to tensors of fixed shapes and strides, called with no decision left to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise import solvers
from tilewise.execute.elsewhere import release_elsewhere
from tilewise.execute.finished import Finished
from tilewise.execute.node import Addressed, Node, PlanMismatch
from tilewise.execute.nodes import Leaf, node_of, parts_of
from tilewise.kernels.native.sequence import Kernels, LaunchSequence, addressed_of, kernels_of, pass_call
from tilewise.machine.workspaces import Workspaces
from tilewise.plan import Config, Plan
from tilewise.problems.base import Problem, Tensors, Write, as_tuple, dense_strides
from tilewise.problems.operands import described
from tilewise.solvers import Solver, Split, mismatch

__all__ = [
    "Bound",
    "activates",
    "adds_bias",
    "adds_residual",
    "bind",
    "compile_only",
    "finishes",
    "release_workspaces",
    "touch_workspace",
    "writes_over_residual",
]

_workspaces = Workspaces()


def touch_workspace(size: int, device: torch.device) -> None:
    """Make a CPU workspace of ``size`` bytes resident, so that a measurement does not count it as growth.

    >>> touch_workspace(4096, torch.device("cpu"))
    """
    if device.type == "cpu":
        _workspaces.touch(size)


def release_workspaces() -> None:
    """Give the memory of this thread's CPU workspace back to the system.

    >>> release_workspaces()
    """
    _workspaces.release()
    release_elsewhere()


class Bound:
    """A plan bound to tensors of fixed shapes and strides.

    ``bound(a, b, bias=None, out=None, residual=None)`` computes the problem from operands in the order of
    ``problem.operands`` and returns the result. A ``residual``, which a problem that has one needs, has the result's
    shape, type and device; one that lies otherwise than the result is copied first. It shares no memory with the
    result, unless it is the result itself and :func:`writes_over_residual`. Another one raises ``ValueError``.

    ``workspace`` is in bytes; what libraries allocate inside is not counted. ``workspaces`` has it by the name of the
    device, for parts on other devices, too; a GPU that a plan names by its number has that, as in ``cuda:1``. Where the
    plan's solvers add the bias, a bias of another length or device raises ``ValueError``. ``pins`` says that results on
    the host are allocated in pinned memory, to which GPUs copy directly. ``kernels`` is what native code needs to
    launch them itself, or to call the plan by addresses; ``None`` where the plan does more than that.

    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> bound = bind(plan, problem, a, b)
    >>> bound(a, b).tolist()[0], bound.workspace >= 0
    ([3.0, 3.0, 3.0, 3.0], True)
    """

    __slots__ = (
        "_addressed",
        "_adds",
        "_alignment",
        "_bias_dim",
        "_bias_shape",
        "_dtype",
        "_fresh",
        "_like_a",
        "_native",
        "_run",
        "_shape",
        "_strides",
        "kernels",
        "pins",
        "plan",
        "problem",
        "workspace",
        "workspaces",
    )

    def __init__(self, plan: Plan, problem: Problem, node: Node, strides: tuple[tuple[int, ...], ...]) -> None:
        self.plan, self.problem = plan, problem
        self.workspace = node.workspace
        beside = node.elsewhere.get(problem.device, 0)  # what copies to other devices take here
        self.workspaces = {**node.elsewhere, problem.device: node.workspace + beside}
        first = problem.results[0]
        self._shape = problem.shape(first)
        self._strides = strides[0]  # the solvers have been bound to these
        self._dtype = problem.torch_dtype(first)
        self._bias_dim = problem.bias_dim
        self._bias_shape = _along(problem.bias_dim, len(self._shape))
        self._adds = node.adds
        self._alignment = problem.alignment_of(first) if problem.residual else 0
        self._fresh = isinstance(node, Leaf | Finished) and node.returns_new
        self.pins = node.pins
        self._run = node.shortest()
        self._addressed = node.addressed()
        self._like_a = self._dtype is problem.torch_dtype(problem.operands[0])
        self._native: Callable[..., Any] | None = None
        self.kernels: Kernels | None = None

    @property
    def call(self) -> Callable[..., Any]:
        """The shortest way to call it: one call into native code where there is one, else the object itself."""
        return self._native or self._from_python

    if TYPE_CHECKING:  # as all kinds of problems are called: operands, a bias or None, results

        def __call__(
            self,
            *tensors: Tensor | None,
            bias: Tensor | None = None,
            out: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Any: ...

    else:

        def __call__(
            self,
            a: Tensor,
            b: Tensor,
            bias: Tensor | None = None,
            out: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            if self._native is not None and residual is None:
                return self._native(a, b, bias, out)
            return self._from_python(a, b, bias, out, residual)

    def _from_python(
        self,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Compute without native code for the whole, with a workspace of this thread where none is given."""
        size = self.workspace
        if workspace is None and size:
            workspace = _workspaces.take(size, a.device)
        if out is None and not self._fresh:
            if self.pins:
                out = torch.empty_strided(
                    self._shape, self._strides, dtype=self._dtype, device=a.device, pin_memory=True
                )
            elif self._like_a:
                out = a.new_empty_strided(self._shape, self._strides)
            else:
                out = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=a.device)
        added: tuple[Tensor, ...] = (self._fitting(bias, a.device),) if self._adds else ()
        if residual is not None or self._alignment:
            added = (*added, self._like_result(residual, a.device, out))
        if self._addressed is not None and out is not None:
            address = 0 if workspace is None else workspace.data_ptr()
            self._addressed(a.data_ptr(), b.data_ptr(), out.data_ptr(), address, *map(Tensor.data_ptr, added))
        else:
            computed = self._run(a, b, out, workspace, *added)
            out = computed if out is None else out
        return out if bias is None or self._adds else self._add(out, bias)

    def run_in(
        self, workspace: Tensor | None, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
    ) -> Tensor:
        """Compute without native code for the whole, with scratch in ``workspace``."""
        return self._from_python(a, b, bias, out, residual, workspace)

    def use_native(self, node: Node, device: torch.device) -> None:
        """From now on compute by one call into native code, where ``node`` does nothing else than launch kernels.

        Native code is told as well of a node that runs on addresses on a GPU. On a CPU workspaces are kept by Python.
        """
        sequence, addressed = node.launches(), node.addressed()
        if addressed is None or device.type == "meta" or self.problem.residual:
            return
        if sequence is not None:
            self._native = self._pass_call(sequence, addressed, device)
        result = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device="meta")
        sizes: dict[str, Any] = {"workspace": self.workspace, "bias_dim": self._bias_dim, "adds_bias": self._adds}
        if sequence is not None and self._native is not None:
            self.kernels = kernels_of(self._native, sequence.device, result, **sizes)
        elif device.type == "cuda":
            self.kernels = addressed_of(addressed, result, **sizes)

    def _pass_call(self, sequence: LaunchSequence, addressed: Addressed, device: torch.device) -> Any:
        """The call into native code; ``None`` where launches stay in Python."""
        workspace = torch.empty(1, dtype=torch.uint8, device=device).expand(self.workspace) if self.workspace else None
        return pass_call(
            sequence,
            addressed,
            instead=self._from_python,
            result=(self._shape, self._strides),
            dtype=None if self._like_a else self._dtype,
            workspace=workspace,
            fit=self._fitting_like if self._adds else None,
            add=self._add,
        )

    def _add(self, out: Tensor, bias: Tensor) -> Tensor:
        """Add a bias in a pass of its own. Raises ``ValueError`` where the activation has been applied before it."""
        if self.problem.activation != "none":
            raise ValueError(f"bias of {tuple(bias.shape)}: none would do for {self.problem.key}")
        return out.add_(bias.view(self._bias_shape))

    def _like_result(self, residual: Tensor | None, device: torch.device, out: Tensor | None) -> Tensor:
        """The residual as solvers take it, with the result's strides and alignment.

        Raises ``ValueError`` for one that is missing, that the problem does not add, or that does not fit.
        """
        wanted = f"one of {self._shape}, {self._dtype} on {device} would do"
        if residual is None or not self.problem.residual:
            given = "none" if residual is None else "one"
            raise ValueError(f"residual: {given} given, {wanted if residual is None else 'none would do'}")
        if residual.shape != self._shape or residual.dtype is not self._dtype or residual.device != device:
            raise ValueError(f"residual of {tuple(residual.shape)}, {residual.dtype} on {residual.device}: {wanted}")
        same = out is not None and residual.data_ptr() == out.data_ptr()
        if same and not writes_over_residual(self.plan, self.problem):
            raise ValueError("residual: its memory is the result's; memory of its own would do")
        strides = zip(self._shape, residual.stride(), self._strides, strict=True)
        is_like = all(n == 1 or have == want for n, have, want in strides)
        if is_like and residual.data_ptr() % self._alignment == 0:
            return residual
        like = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=device)
        return like.copy_(residual)

    def _fitting_like(self, bias: Tensor | None, operand: Tensor) -> Tensor:
        """:meth:`_fitting` for the device of an operand."""
        return self._fitting(bias, operand.device)

    def _fitting(self, bias: Tensor | None, device: torch.device) -> Tensor:
        """The bias as solvers take it, contiguous and in the result's type; zeros where none is given."""
        channels = self._shape[self._bias_dim]
        if bias is None:
            return torch.zeros(channels, dtype=self._dtype, device=device)
        if bias.shape != (channels,) or bias.device != device:
            raise ValueError(f"bias of {tuple(bias.shape)} on {bias.device}: ({channels},) on {device} would do")
        return bias.to(self._dtype).contiguous()  # itself where it is so already


class BoundMany(Bound):
    """Like :class:`Bound`, for any number of operands and results: ``bound(*operands, bias, *results)``.

    Results that are not given are allocated. Returns the result, or a tuple where there are several.
    """

    __slots__ = ("_count", "_results")

    def __init__(self, plan: Plan, problem: Problem, node: Node, strides: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(plan, problem, node, strides)
        self._count = len(problem.operands)
        self._results = [
            (problem.shape(role), stride, problem.torch_dtype(role))
            for role, stride in zip(problem.results, strides, strict=True)
        ]

    def __call__(
        self,
        *tensors: Tensor | None,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Any:
        if residual is not None:
            raise ValueError(f"residual: one given, none would do for {self.problem.key}")
        operands, given = tensors[: self._count], tensors[self._count + 1 :]
        if bias is None and len(tensors) > self._count:
            bias = tensors[self._count]
        results: tuple[Tensor | None, ...] = given or ((out,) if out is not None else ())
        device = next(operand.device for operand in operands if operand is not None)
        workspace = _workspaces.take(self.workspace, device) if self.workspace else None
        if not any(result is not None for result in results):
            results = tuple(self._allocated(device))
        added = (self._fitting(bias, device),) if self._adds else ()
        computed: Any = self._run(*operands, *results, workspace, *added)
        outputs = as_tuple(computed)
        if bias is not None and not added:
            outputs[0].add_(bias.view(self._bias_shape))
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def call(self) -> Callable[..., Any]:
        """The object itself."""
        return self

    def _allocated(self, device: torch.device) -> Iterator[Tensor | None]:
        """New tensors for the results; ``None`` for each where the solver allocates them itself."""
        for shape, strides, dtype in self._results:
            fresh = self._fresh
            yield None if fresh else torch.empty_strided(shape, strides, dtype=dtype, device=device)


def bind(plan: Plan, problem: Problem, *tensors: Tensor | None) -> Bound:
    """Bind ``plan`` to tensors with the shapes, strides and dtypes of these: all operands, then all results or none.

    Results that a call allocates have the strides of those given, or else those of the problem's layout. Raises
    :class:`PlanMismatch` for a plan of another problem or version and for tensors that are not the problem's,
    ``SolverUnavailable`` for a config that cannot run here.

    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> bind(plan, problem, a, b)(a, b).shape
    torch.Size([2, 4])
    """
    if plan.problem != problem.key:
        raise PlanMismatch(f"the plan is for {plan.problem}, the problem is {problem.key}")
    operands, given_results = tensors[: len(problem.operands)], tensors[len(problem.operands) :]
    if len(operands) < len(problem.operands) or len(given_results) not in (0, len(problem.results)):
        raise PlanMismatch(f"{len(tensors)} tensors given; {', '.join(problem.roles)} would do, results or not")
    results = given_results or (None,) * len(problem.results)
    bound_to = []
    for role, tensor in zip(problem.roles, (*operands, *results), strict=True):
        if tensor is None:
            shape = problem.shape(role)
            strides = dense_strides(shape, problem.layout(role))
            tensor = torch.empty_strided(shape, strides, dtype=problem.torch_dtype(role), device="meta")
        else:
            _check(problem, role, tensor)
        bound_to.append(tensor)
    inputs, outputs = tuple(bound_to[: len(operands)]), tuple(bound_to[len(operands) :])
    node = _node(plan, problem, inputs, outputs)
    pair = len(problem.operands) == 2 and len(problem.results) == 1
    bound = (Bound if pair else BoundMany)(plan, problem, node, tuple(tuple(out.stride()) for out in outputs))
    if pair:
        bound.use_native(node, inputs[0].device)
    return bound


def compile_only(plan: Plan, problem: Problem) -> None:
    """Compile what ``plan`` would run, as :func:`bind` does, without memory for operands and results.

    Kernels for a GPU are compiled for the one that is sought: see
    :func:`~tilewise.kernels.building.target.compiling_for`. Raises as :func:`bind`.

    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> compile_only(plan, problem)
    """
    operands, results, _ = described(problem)
    _node(plan, problem, operands, results)


def _node(plan: Plan, problem: Problem, operands: Tensors, results: Tensors) -> Node:
    """The node of a whole plan, with a pass behind it for what its solvers do not do of residual and activation."""
    if finishes(plan, problem):
        return node_of(plan, problem, operands, results)
    bias = problem.bias and adds_bias(plan, problem)
    if problem.activation == "none" and not problem.residual:
        return node_of(plan, problem.changed(bias=bias), operands, results)
    residual = problem.residual and adds_residual(plan, problem)
    plain = problem.changed(activation="none", bias=bias, residual=residual)
    return Finished(node_of(plan, plain, operands, results), problem, operands, results)


def _along(dim: int, dims: int) -> tuple[int, ...]:
    """The shape in which a vector is added along dimension ``dim`` of a tensor with ``dims`` dimensions."""
    return tuple(-1 if index == dim else 1 for index in range(dims))


def adds_bias(plan: Plan, problem: Problem) -> bool:
    """Whether solvers add the bias themselves: each part of the result gets it from the one leaf that writes it.

    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> type(adds_bias(plan, problem))
    <class 'bool'>
    """
    return _by_leaves(plan, problem, lambda solver, p, c: solver.does_add_bias(p, c))


def activates(plan: Plan, problem: Problem) -> bool:
    """Whether solvers apply the activation themselves, after they have added bias and residual.

    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> activates(plan, problem)
    False
    """
    return _by_leaves(plan, problem, lambda solver, p, c: solver.does_activate(p, c))


def adds_residual(plan: Plan, problem: Problem) -> bool:
    """Whether solvers add the residual themselves, after they have added the bias."""
    return _by_leaves(plan, problem, lambda solver, p, c: solver.does_add_residual(p, c))


def writes_over_residual(plan: Plan, problem: Problem) -> bool:
    """Whether a plan's result may be written over the residual that it adds: the solver reads each number just before.

    Where a pass behind the solver adds the residual, or applies the activation, it may not.
    """
    return solvers.get(plan.solver).writes_over_residual and finishes(plan, problem)


def finishes(plan: Plan, problem: Problem) -> bool:
    """Whether solvers do all of the bias, the residual and the activation, so that no pass is needed behind them.

    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> finishes(plan, problem)
    True
    """
    return (
        (not problem.bias or adds_bias(plan, problem))
        and (not problem.residual or adds_residual(plan, problem))
        and (problem.activation == "none" or activates(plan, problem))
    )


def _by_leaves(plan: Plan, problem: Problem, does: Callable[[Solver, Any, Config], bool]) -> bool:
    """Whether every number of the result is written by one leaf that ``does`` something, of whole sums."""
    try:
        solver = solvers.get(plan.solver)
    except KeyError:
        return False  # which is said where the plan is bound
    if not isinstance(solver, Split):
        return does(solver, problem, plan.config)
    if solver.across and (problem.residual or problem.activation != "none"):
        return False
    parts, plans = parts_of(plan, problem, solver)
    whole = all(
        part.problem is not None
        and part.write is Write.SET
        and all(r.dim != problem.bias_dim for r in part.ranges(problem.result))
        for part in parts
    )
    distinct = {(id(child), part.problem): child for part, child in zip(parts, plans, strict=True)}
    return whole and all(
        _by_leaves(child, _with_epilogue(part, problem), does)
        for (_, part), child in distinct.items()
        if part is not None
    )


def _with_epilogue(part: Problem, whole: Problem) -> Problem:
    """``part`` with what the ``whole`` adds and applies."""
    return part.changed(bias=whole.bias, residual=whole.residual, activation=whole.activation)


def _check(problem: Problem, role: str, tensor: Tensor) -> None:
    """Raise :class:`PlanMismatch` for a tensor that is not the one ``problem`` has for ``role``."""
    if reason := mismatch(problem, role, tensor):
        raise PlanMismatch(reason)
    if tensor.device.type != problem.device_type:
        raise PlanMismatch(f"{role} is on {tensor.device}, the problem on {problem.device}")
