"""Finding branches that compute side by side: one value forks, several branches convolve, one node joins them.

A module's own ``forward`` is traced by :mod:`torch.fx` with its children as leaves. So the module found is the smallest
that holds the fork and the join. Running the trace calls the children as before, with their hooks.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx, nn

from tilewise.nn.layers.call import PLAIN_TYPES
from tilewise.nn.layers.convolution import is_convolution
from tilewise.nn.layers.overrides import BY_TORCH
from tilewise.nn.layers.swaps import copies_itself, swapped

__all__ = ["MAIN", "Fork", "Found", "Program", "Slot", "Step", "at_once", "find", "program_of"]

Problem = TypeVar("Problem")
MAIN = -1
"""The lane of the stream on which the module was called."""
MOST_LANES = 8
"""The most lanes of a fork; further branches share a lane."""
ADDS = (operator.add, operator.iadd, torch.add)
CATS = (torch.cat, torch.concat, torch.concatenate, torch.stack)
CONVOLUTIONS = (*BY_TORCH.values(), torch.convolution)
PLAIN = (bool, int, float, str, type(None))


class Untraceable(Exception):
    """A trace would not repeat what the forward does; the message says why."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a value while a program runs."""

    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """One traced node: ``kind`` is ``module``, ``function``, ``method`` or ``attribute``.

    ``target`` is a function, the name of a method, or the path of an attribute. ``args`` and ``kwargs`` hold a
    :class:`Slot` in place of each value. The result goes into slot ``result``; afterwards the slots ``done`` are
    emptied. ``lane`` is that of the branch.
    """

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int
    lane: int = MAIN
    done: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """A region in which one value forks into branches that are joined again.

    ``steps`` are those of the branches in the forward's order, ``joins`` follow them. Lanes 0 to ``width`` - 1 may run
    at once, with each other and with :data:`MAIN`. ``shared`` are the slots from before the fork that they read,
    ``results`` the slots of their results that the joins read. ``done`` are the slots to be emptied at the end.
    ``in_place`` says that a join may write into a branch's result. ``branches`` has the names of the convolutions of
    each lane, the main lane last.
    """

    steps: tuple[Step, ...]
    joins: tuple[Step, ...]
    width: int
    shared: tuple[int, ...]
    results: tuple[int, ...]
    done: tuple[int, ...]
    in_place: bool
    branches: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Program:
    """The traced forward of a module for one tensor: steps and forks in order, then ``output`` with slots for values.

    It is valid while the module's plain attributes equal ``guards``, and only in training or only in evaluation where
    ``training`` is ``True`` or ``False``. ``size`` is the number of slots. It holds no module and no tensor, so any
    copy of the module can run it.
    """

    stages: tuple[Step | Fork, ...]
    output: Any
    size: int
    guards: tuple[tuple[str, Any], ...]
    training: bool | None = None

    @property
    def forks(self) -> tuple[Fork, ...]:
        """The regions of the program."""
        return tuple(stage for stage in self.stages if isinstance(stage, Fork))


@dataclass(frozen=True)
class Found:
    """A module whose forward forks. ``program`` is ``None`` where it cannot be run as a program, for ``reason``."""

    name: str
    module: nn.Module
    program: Program | None
    reason: str = ""

    @property
    def groups(self) -> list[list[list[str]]]:
        """The regions: each a list of branches, and each branch a list of its convolutions' names in the model."""
        prefix = f"{self.name}." if self.name else ""
        forks = () if self.program is None else self.program.forks
        return [[[prefix + name for name in branch] for branch in fork.branches] for fork in forks]


def find(model: nn.Module) -> list[Found]:
    """Every module of ``model`` whose own forward forks into branches with convolutions and joins them again.

    Modules that a trace cannot repeat are included, with the reason. Modules with fewer than two convolutions are left
    out.
    """
    found = []
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn.") or sum(map(convolves, module.children())) < 1:
            continue
        if sum(map(is_convolution, module.modules())) < 2:
            continue
        try:
            program = program_of(module)
        except Untraceable as error:
            found.append(Found(name, module, None, str(error)))
        else:
            if program is not None:
                found.append(Found(name, module, program))
    return found


def convolves(module: nn.Module) -> bool:
    """Whether ``module`` holds a convolution or is one."""
    return any(map(is_convolution, module.modules()))


def program_of(module: nn.Module) -> Program | None:
    """The program of the module's forward for one tensor; ``None`` where the forward does not fork.

    Raises :class:`Untraceable` where a trace may differ from the forward.
    """
    fwd = module.__dict__.get("forward")
    if fwd is not None and swapped(module) is None and getattr(fwd, "__func__", None) is not type(module).forward:
        raise Untraceable("has a forward set on the instance")
    copies = copies_itself(module)
    if copies:
        raise Untraceable(copies)
    if isinstance(module, torch.jit.ScriptModule):
        raise Untraceable("is a script")
    graph = _traced(module, training=module.training)
    regions = list(_regions(graph, module))
    if not regions:
        return None
    program = _assemble(graph, module, regions)
    return program if _same_otherwise(graph, module) else replace(program, training=module.training)


def _same_otherwise(graph: fx.Graph, module: nn.Module) -> bool:
    """Whether the forward has the same trace in training and in evaluation."""
    try:
        return str(_traced(module, training=not module.training)) == str(graph)
    except Untraceable:
        return False


class Shallow(fx.Tracer):
    """A tracer of one forward with one tensor. Children are leaves; what a graph cannot hold is refused."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _surroundings()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether to record a call of the module as it is: always, since only this forward is traced."""
        return True

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """The forward and its arguments: the module, and one tensor as the only input."""
        return root_fn, [self.root, self.create_proxy("placeholder", "input", (), {})]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node as torch.fx makes it; refused in a checkpoint or where grad mode or autocast has changed."""
        if _surroundings() != self._state:
            raise Untraceable("its forward changes grad mode or autocast")
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not fx.Tracer.trace.__code__:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                raise Untraceable("its forward checkpoints")
            frame = frame.f_back  # type: ignore[assignment]
        return super().create_node(*args, **kwargs)


def _surroundings() -> tuple[Any, ...]:
    """The grad mode, inference mode and autocast state that a graph does not hold."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _traced(module: nn.Module, *, training: bool) -> fx.Graph:
    """The graph of the module's forward, traced on a shallow copy. Raises :class:`Untraceable`."""
    twin = object.__new__(type(module))
    containers = ("_parameters", "_buffers", "_modules")
    state = {k: v.copy() if k in containers else v for k, v in module.__dict__.items() if k != "forward"}
    state["training"] = training
    twin.__dict__ = dict(state)
    try:
        graph = Shallow().trace(twin)
    except Untraceable:
        raise
    except Exception as error:  # whatever a user's forward does with what is no tensor
        raise Untraceable(
            f"torch.fx cannot trace it: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if twin.__dict__.keys() != state.keys() or any(_changed(twin.__dict__[k], v) for k, v in state.items()):
        raise Untraceable("its forward changes its own attributes")
    return graph


def _changed(now: Any, before: Any) -> bool:
    """Whether an attribute is another object than before; dictionaries are compared by their values' identity."""
    if isinstance(before, dict):
        return not isinstance(now, dict) or now.keys() != before.keys() or any(now[k] is not before[k] for k in before)
    return now is not before


Region = tuple[list[fx.Node], list[list[fx.Node]]]
"""Joins in order; branches in the order of their first nodes, each in order."""


def _regions(graph: fx.Graph, module: nn.Module) -> Iterator[Region]:
    """The regions of a graph, found from its end; what lies within a region is part of one of its branches."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    in_regions: set[fx.Node] = set()
    refused: list[Untraceable] = []
    for join in reversed(list(order)):
        if join in in_regions or not _joins(join):
            continue
        try:
            region = _region(join, order, module)
        except Untraceable as error:
            refused.append(error)
            continue
        if region is not None:
            in_regions.update(region[0], *region[1])
            yield region
    if refused and not in_regions:
        raise refused[0]


def _joins(node: fx.Node) -> bool:
    """Whether the node may join branches: a sum or a concatenation of at least two values."""
    if "out" in node.kwargs or len(node.all_input_nodes) < 2:
        return False
    return _adds(node) or (node.op == "call_function" and node.target in CATS)


def _adds(node: fx.Node) -> bool:
    """Whether the node adds two values."""
    if node.op == "call_method":
        return node.target in ("add", "add_")
    return node.op == "call_function" and node.target in ADDS


def _region(join: fx.Node, order: dict[fx.Node, int], module: nn.Module) -> Region | None:
    """The region that ends at ``join``; ``None`` where fewer than two of its branches convolve."""
    joins = {join}
    todo = [join]
    while todo and _adds(join):
        for node in todo.pop().all_input_nodes:
            # A constant is added in its branch: at the join, gradients of what forks could be summed in another order.
            sums = _adds(node) and len(node.all_input_nodes) > 1
            if sums and node not in joins and all(user in joins for user in node.users):
                joins.add(node)
                todo.append(node)
    members = _between(joins, order)
    if members is None:
        return None
    branches = _components(members, order)
    if sum(any(_convolves(node, module) for node in branch) for branch in branches) < 2:
        return None
    if any(user not in members and user not in joins for node in members for user in node.users):
        raise Untraceable("what a branch computes is used beside the join")
    first = min(order[node] for node in members)
    between = [node for node, index in order.items() if first < index < order[join]]
    if any(node not in members and node not in joins and node.op != "get_attr" for node in between):
        raise Untraceable("other work lies between its branches")
    _check_apart(module, branches)
    return sorted(joins, key=order.__getitem__), branches


def _between(joins: set[fx.Node], order: dict[fx.Node, int]) -> set[fx.Node] | None:
    """The nodes of the branches that end in ``joins``, without attributes; ``None`` where no fork precedes them."""
    above = _ancestors(joins, None)
    for fork in sorted(above, key=order.__getitem__, reverse=True):
        members = _ancestors(joins, fork)
        if not any(node.op == "placeholder" for node in members):
            return members
    return None


def _ancestors(joins: set[fx.Node], fork: fx.Node | None) -> set[fx.Node]:
    """The nodes on which ``joins`` depend, up to ``fork``, which is left out, and without attributes."""
    ancestors: set[fx.Node] = set()
    todo = list(joins)
    while todo:
        for node in todo.pop().all_input_nodes:
            if node is not fork and node not in ancestors and node not in joins and node.op != "get_attr":
                ancestors.add(node)
                todo.append(node)
    return ancestors


def _components(members: set[fx.Node], order: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """The connected groups of ``members``, each one a branch, in the graph's order."""
    unvisited, components = set(members), []
    for node in sorted(members, key=order.__getitem__):
        if node not in unvisited:
            continue
        unvisited.discard(node)
        todo, branch = [node], [node]
        while todo:
            current = todo.pop()
            near = [n for n in (*current.all_input_nodes, *current.users) if n in unvisited]
            unvisited.difference_update(near)
            todo += near
            branch += near
        components.append(sorted(branch, key=order.__getitem__))
    return components


def _convolves(node: fx.Node, module: nn.Module) -> bool:
    """Whether the node computes a convolution, itself or in a child module."""
    if node.op == "call_module":
        return convolves(module.get_submodule(str(node.target)))
    return node.op == "call_function" and node.target in CONVOLUTIONS


def _check_apart(module: nn.Module, branches: list[list[fx.Node]]) -> None:
    """Raise :class:`Untraceable` where two branches use the same weight, buffer or attribute."""
    ids_before: set[int] = set()
    for branch in branches:
        tensors: list[Any] = []
        for node in branch:
            if node.op == "call_module":
                child = module.get_submodule(str(node.target))
                tensors += [*child.parameters(), *child.buffers()]
            attributes = [read for read in node.all_input_nodes if read.op == "get_attr"]
            tensors += [operator.attrgetter(str(read.target))(module) for read in attributes]
        if any(isinstance(t, torch.Tensor) and type(t) not in PLAIN_TYPES for t in tensors):
            raise Untraceable("its weights are of another type than torch's own")
        branch_ids = {id(t) for t in tensors}
        if branch_ids & ids_before:
            raise Untraceable("two branches share weights or buffers")
        ids_before |= branch_ids


def _assemble(graph: fx.Graph, module: nn.Module, regions: list[Region]) -> Program:
    """The program of a graph with its regions. A slot is emptied after the last stage that reads it."""
    nodes = list(graph.nodes)
    slots = {node: index for index, node in enumerate(nodes)}
    at = {region[0][-1]: region for region in regions}
    inside = {node for joins, branches in regions for part in (joins, *branches) for node in part}
    lines: list[list[fx.Node] | Region] = []
    for node in nodes:
        if node in at:
            lines.append(at[node])
        elif node not in inside and node.op not in ("placeholder", "output"):
            lines.append([node])
    # An attribute may be read between branches; all are read before what follows them in the order of the original.
    ordered = [line for line in lines if isinstance(line, list) and line[0].op == "get_attr"]
    ordered_ids = {id(line) for line in ordered}
    lines = [*ordered, *(line for line in lines if id(line) not in ordered_ids)]
    last: dict[fx.Node, int] = {}
    for index, line in enumerate(lines):
        for node in line if isinstance(line, list) else [*line[0], *(n for branch in line[1] for n in branch)]:
            last.update(dict.fromkeys((node, *node.all_input_nodes), index))
    output = next(node for node in nodes if node.op == "output")
    last.update(dict.fromkeys(output.all_input_nodes, len(lines)))
    stages: list[Step | Fork] = []
    for index, line in enumerate(lines):
        done = {node for node, end in last.items() if end == index}
        if isinstance(line, list):
            stages.append(_step(line[0], slots, done=tuple(slots[node] for node in done)))
        else:
            stages.append(_fork(line, slots, done, module))
    module_attributes = nn.Module().__dict__
    guards = tuple((k, v) for k, v in module.__dict__.items() if type(v) in PLAIN and k not in module_attributes)
    return Program(tuple(stages), _arguments(output.args[0], slots), len(nodes), guards)


def _fork(region: Region, slots: dict[fx.Node, int], done: set[fx.Node], module: nn.Module) -> Fork:
    """The fork of a region; nobody reads the values of the nodes ``done`` after it."""
    joins, branches = region
    wide = [branch for branch in branches if any(_convolves(node, module) for node in branch)]
    # The last is launched last, so its gradients come first: before the main stream waits for those of the others.
    width = min(len(wide) - 1, MOST_LANES - 1)
    lanes = {node: i % width if i < len(wide) - 1 else MAIN for i, branch in enumerate(wide) for node in branch}
    members = sorted((node for branch in branches for node in branch), key=slots.__getitem__)
    member_set = set(members)
    steps = []
    gone: set[fx.Node] = set()
    for index, node in enumerate(members):
        later = {n for later_node in (*members[index + 1 :], *joins) for n in later_node.all_input_nodes}
        over = {n for n in (node, *node.all_input_nodes) if n in member_set and n in done and n not in later} - gone
        gone |= over
        steps.append(_step(node, slots, lanes.get(node, MAIN), tuple(slots[n] for n in over)))
    shared = {n for node in members if node in lanes for n in node.all_input_nodes if n not in member_set}
    shared = {node for node in shared if node.op != "get_attr"}
    results = {n for node in joins for n in node.all_input_nodes if lanes.get(n, MAIN) != MAIN}
    return Fork(
        tuple(steps),
        tuple(_step(node, slots) for node in joins),
        width,
        tuple(sorted(slots[node] for node in shared)),
        tuple(sorted(slots[node] for node in results)),
        tuple(sorted(slots[node] for node in done - gone)),
        any(node.target in (operator.iadd, "add_") for node in joins),
        tuple(_names(module, [n for n in members if lanes.get(n) == lane]) for lane in (*range(width), MAIN)),
    )


def _names(module: nn.Module, nodes: list[fx.Node]) -> tuple[str, ...]:
    """The names of the convolutions in ``nodes``, within the module, each once."""
    names = []
    for node in nodes:
        if node.op == "call_module":
            child = module.get_submodule(str(node.target))
            names += [
                ".".join(filter(None, (str(node.target), n))) for n, m in child.named_modules() if is_convolution(m)
            ]
    return tuple(dict.fromkeys(names))


KINDS = {"call_module": "module", "call_function": "function", "call_method": "method", "get_attr": "attribute"}


def _step(node: fx.Node, slots: dict[fx.Node, int], lane: int = MAIN, done: tuple[int, ...] = ()) -> Step:
    """The step of a program that computes ``node`` on ``lane`` and then empties the slots in ``done``."""
    kind = KINDS[node.op]
    target: Any = tuple(str(node.target).split(".")) if kind in ("module", "attribute") else node.target
    kwargs = {name: _arguments(value, slots) for name, value in node.kwargs.items()}
    return Step(kind, target, tuple(_arguments(a, slots) for a in node.args), kwargs, slots[node], lane, done)


def _arguments(value: Any, slots: dict[fx.Node, int]) -> Any:
    """An argument with a :class:`Slot` in place of every node, in nested containers too."""
    return mapped(value, lambda node: Slot(slots[node]), fx.Node)


def mapped(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """``value`` with ``change`` applied to every ``kind`` in it, in nested lists, tuples, dictionaries and slices."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        parts = [mapped(v, change, kind) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [mapped(v, change, kind) for v in value]
    if isinstance(value, dict):
        return {k: mapped(v, change, kind) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(v, change, kind) for v in (value.start, value.stop, value.step)))
    return value


def at_once(
    model: nn.Module, names: Mapping[Problem, Sequence[str]]
) -> Callable[[Sequence[Problem]], list[list[list[int]]]]:
    """A function that tells which problems' kernels may run at once where branches may run on streams.

    ``names`` has the layers of each problem. The function takes a list of problems, and returns the indices of those in
    each branch of each region.
    """
    regions = [group for candidate in find(model) for group in candidate.groups]

    def places(problems: Sequence[Problem]) -> list[list[list[int]]]:
        posed = [{name.partition(" (call")[0] for name in names[problem]} for problem in problems]
        return [
            [[i for i, layers in enumerate(posed) if not layers.isdisjoint(branch)] for branch in region]
            for region in regions
        ]

    return places
