"""The operators that a module calls for one example, as a graph of ATen operators without side effects.

The module is run on tensors without memory (torch's fake tensors), so nothing is computed and nothing that depends on
a tensor's values can be asked: control flow on data is refused by torch itself. Control flow on sizes and attributes
is followed, so a trace is valid for these sizes and attributes alone. ``torch.func.functionalize`` replaces operators
that work in place by others with the same results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tilewise.nn.graphs.inputs import CONSTANTS
from tilewise.nn.graphs.standing import Contents
from tilewise.nn.kept_values import values_kept
from tilewise.nn.layers.call import is_plain
from tilewise.nn.layers.swaps import own_attributes
from tilewise.nn.record import state_kept

__all__ = ["ATTENTION", "Traced", "Untraceable", "before", "is_view", "layer_of", "obstacle", "root_of", "trace"]

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Attention on a CPU. Each head of a query, key or value must lie in one piece, which it does not ask."""


class Untraceable(Exception):
    """A trace would not repeat what the module does; the message says why."""


@dataclass(frozen=True)
class Traced:
    """What a module computes for inputs of fixed sizes.

    ``graph`` has a placeholder for each tensor among the arguments, operators of ATen, and as output a tuple of
    tensors. ``sources`` are the module's tensors (and others that its code holds) by the names of the graph's
    attributes, and ``names`` what the model calls them. ``structure`` and ``leaves`` say how results are returned:
    each leaf is the number of a tensor in the graph's output, or a constant.
    """

    module: fx.GraphModule
    sources: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    structure: TreeSpec
    leaves: tuple[tuple[bool, Any], ...]

    @property
    def graph(self) -> fx.Graph:
        """The operators."""
        return self.module.graph

    def returned(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """What the module returns, with ``tensors`` as the graph's output."""
        leaves = [tensors[leaf] if is_tensor else leaf for is_tensor, leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


def trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None = None
) -> Traced:
    """The operators of ``module`` for these arguments. ``forward`` is what computes it, by default its own.

    The module is left as it was. Raises :class:`Untraceable`.
    """
    reason = obstacle(module)
    if reason:
        raise Untraceable(reason)
    leaves, structure = tree_flatten((args, dict(kwargs)))
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
            raise Untraceable(f"called with a {type(leaf).__name__}, which may change from call to call")
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[index] for index in places]
    if not tensors or not all(is_plain(t) for t in tensors):
        raise Untraceable("is not called with plain tensors")
    returned: list[tuple[TreeSpec, tuple[tuple[bool, Any], ...]]] = []

    def flat(*given: torch.Tensor) -> list[torch.Tensor]:
        """The module's tensors among its results."""
        filled = list(leaves)
        for index, tensor in zip(places, given, strict=True):
            filled[index] = tensor
        its_args, its_kwargs = tree_unflatten(filled, structure)
        with NoValues():
            results, results_structure = tree_flatten((forward or module)(*its_args, **its_kwargs))
        outputs = [r for r in results if isinstance(r, torch.Tensor)]
        returned.append((results_structure, tuple(_numbered(results))))
        return outputs

    with (
        state_kept(module, tensors),
        values_kept(module.parameters(), torch.clone),
        _as_classes_compute(module),
        _unchanged(module),  # seen before what is kept is put back
    ):
        graph_module = _graph_of(flat, tensors)
    results_structure, results_leaves = returned[-1]
    for is_tensor, leaf in results_leaves:
        if not is_tensor and not isinstance(leaf, CONSTANTS):
            raise Untraceable(f"returns a {type(leaf).__name__}")
    sources = {str(node.target): getattr(graph_module, str(node.target)) for node in _attributes(graph_module.graph)}
    known = {id(t): name for name, t in (*module.named_buffers(), *module.named_parameters())}
    names = {name: known.get(id(t), name) for name, t in sources.items()}
    for node in list(graph_module.graph.nodes):
        if _is_restrided(node):  # as torch's mean over all pixels of a tensor in channels_last
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        else:
            _check(node)
    graph_module.graph.eliminate_dead_code(_must_stay)
    _check_results(graph_module.graph)
    return Traced(graph_module, sources, names, results_structure, results_leaves)


def obstacle(module: nn.Module) -> str:
    """Why the module cannot be planned as a region, whatever it is called with; empty where it may be."""
    for name, part in module.named_modules():
        where = name or "the model"
        if part.training:
            return f"{where} is in training mode; eval() would do"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{where} is a script"
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            return f"{where} is compiled by torch.compile"
        if part is not module and (part._forward_hooks or part._forward_pre_hooks):
            return f"{where} has a hook"
        if any(nn.parameter.is_lazy(t) for t in (*part._parameters.values(), *part._buffers.values()) if t is not None):
            return f"{where} is not initialized"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "every module has a hook (register_module_forward_hook, or that of a pre-hook)"
    tensors = [*module.parameters(), *module.buffers()]
    if any(not is_plain(t) for t in tensors):
        return "has parameters that are no plain tensors"
    if any(t.is_inference() for t in tensors):
        return "has tensors made under torch.inference_mode, whose changes cannot be seen"
    return ""


def layer_of(name: str) -> str:
    """The layer that has a parameter called ``name``.

    >>> layer_of("layer1.0.conv1.weight")
    'layer1.0.conv1'
    """
    return name.rpartition(".")[0] or name


def _numbered(results: list[Any]) -> Iterator[tuple[bool, Any]]:
    """For each result whether it is a tensor, and its number among the tensors or itself."""
    count = 0
    for result in results:
        if isinstance(result, torch.Tensor):
            yield True, count
            count += 1
        else:
            yield False, result


def _graph_of(function: Callable[..., Any], tensors: list[torch.Tensor]) -> fx.GraphModule:
    """The operators that ``function`` calls for tensors like these. Raises :class:`Untraceable`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad():
            made: Any = make_fx(
                torch.func.functionalize(function, remove="mutations"),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*tensors)
    except Exception as error:  # whatever a user's forward does with what has no values
        if isinstance(error, Untraceable):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Untraceable(f"torch cannot trace it: {type(error).__name__}: {lines[0][:200]}") from error
    return made  # type: ignore[no-any-return]


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Put every attribute of ``module`` back at the end. Raises :class:`Untraceable` where one was changed."""
    before = Contents(module)
    values = [dict(table) for _, table in before.tables]
    yield
    reason = before.difference()
    if reason:
        for (_, table), value in zip(before.tables, values, strict=True):
            table.clear()
            table.update(value)
        raise Untraceable(f"its forward changes its state: {reason}")


@contextmanager
def _as_classes_compute(module: nn.Module) -> Iterator[None]:
    """Meanwhile let every module that runs by plans compute as its class does."""
    with ExitStack() as stack:
        for part in module.modules():
            ours = own_attributes(part)
            for name in ours:
                del part.__dict__[name]
            stack.callback(part.__dict__.update, ours)
        yield


def _attributes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that read an attribute."""
    return (node for node in graph.nodes if node.op == "get_attr")


def _check(node: fx.Node) -> None:
    """Raise :class:`Untraceable` for an operator that a list of steps cannot repeat."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    value = node.meta.get("val")
    unknown = isinstance(value, torch.Tensor) and any(not isinstance(n, int) for n in value.shape)
    if unknown or torch.Tag.data_dependent_output in node.target.tags:
        raise Untraceable(f"what it computes depends on the values of a tensor ({node.target})")
    if torch.Tag.nondeterministic_seeded in node.target.tags and not _is_attention_without_dropout(node):
        raise Untraceable(f"draws random numbers ({node.target})")
    if node.target._schema.is_mutable:
        written = node.args[0] if node.args else None
        which = "a parameter or buffer" if isinstance(written, fx.Node) and written.op == "get_attr" else "its input"
        raise Untraceable(f"its forward writes into {which} ({node.target})")


def _is_attention_without_dropout(node: fx.Node) -> bool:
    """Whether an operator of torch's is attention on a CPU, which draws random numbers for its dropout alone."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target is not ATTENTION:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("dropout_p", 0.0) == 0.0)


def _is_restrided(node: fx.Node) -> bool:
    """Whether the node changes only strides of its input that do not matter: those of dimensions with one place."""
    if node.op != "call_function" or node.target is not torch.ops.aten.as_strided_.default:
        return False
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or len(node.args) > 3:
        return False
    sizes, strides = node.args[1], node.args[2]
    assert isinstance(sizes, Sequence)
    assert isinstance(strides, Sequence)
    pairs = zip(sizes, strides, value.stride(), strict=False)
    return tuple(sizes) == tuple(value.shape) and all(size == 1 or new == old for size, new, old in pairs)


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` shows: itself, or what it is a view of."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares the memory of its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    alias = node.target._schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def _check_results(graph: fx.Graph) -> None:
    """Raise :class:`Untraceable` where a result shares memory with an input, a parameter or another result."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    seen: set[fx.Node] = set()
    for result in output.args[0]:
        root = root_of(result)
        if root.op == "placeholder":
            raise Untraceable("returns its input or a view of it")
        if not any(node.op == "placeholder" for node in before(root)):
            raise Untraceable("returns what does not depend on its input")
        if root in seen:
            raise Untraceable("returns two tensors that share memory")
        seen.add(root)
    if not seen:
        raise Untraceable("returns no tensor")


def before(node: fx.Node) -> set[fx.Node]:
    """The nodes on which ``node`` depends, and itself."""
    found, todo = {node}, [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in found]
        found.update(new)
        todo += new
    return found


class NoValues(TorchFunctionMode):
    """Refuses what would read the memory of a tensor that has none."""

    READS = frozenset({"numpy", "__array__", "tolist", "item", "__dlpack__"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, unless it reads values."""
        name = getattr(func, "__name__", "")
        if name in self.READS:
            raise Untraceable(f"its forward reads the values of a tensor ({name})")
        return func(*args, **(kwargs or {}))


def _must_stay(node: fx.Node) -> bool:
    """Whether a node must stay though nothing reads its result."""
    return node.op in ("placeholder", "output")
