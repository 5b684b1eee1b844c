"""Writes a network as a Python file that needs torch alone."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.export import functions
from tilewise.frontends.caffe.export.emitters import EMITTERS, Call, Piece
from tilewise.frontends.caffe.layers import detection
from tilewise.frontends.caffe.layers.base import Shape
from tilewise.frontends.caffe.net import Net

__all__ = ["module_text"]

HELPERS: dict[str, Any] = {
    **{name: getattr(functions, name) for name in functions.__all__},
    "overlaps": detection.overlaps,
    "suppressed": detection.suppressed,
}
"""What a file may have beside its class, by name."""
RESERVED = {"torch", "math", "F", "nn", "Any", "Sequence", "Tensor", "getattr", "super", "dict", *HELPERS}
"""Names that a file has already."""
STANDARD = {
    r"\bmath\.": "import math",
    r"\bSequence\[": "from collections.abc import Sequence",
    r"\bAny\b": "from typing import Any",
}
"""What else a file imports, where its text has one of these."""


@dataclass(frozen=True, slots=True)
class Written:
    """A layer's lines: those that make its modules, and those that compute its tops."""

    makes: tuple[str, ...]
    computes: tuple[str, ...]


def module_text(net: Net) -> str:
    """A Python file with a class that computes what ``net`` does, by torch alone.

    The class has the network's layers under their names, and its ``state_dict`` is that of
    :func:`~tilewise.frontends.caffe.export.torch_state`. It is called with the inputs in the order of ``net.inputs``,
    and returns the outputs by name. What torch has no module for is a small function in the file.

    Text of the network's file stands in it only as Python's own literals. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` that lists all layers that cannot be written.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> "nn.Linear" in module_text(load(TEXT))
    True
    """
    variables = _variables(net)
    layers = list(_written(net, variables))
    body = "\n".join(line for each in layers for line in (*each.makes, *each.computes))
    helpers = _helpers(body)
    imports = [line for pattern, line in STANDARD.items() if re.search(pattern, "\n".join([*helpers, body]))]
    name = _unique(_identifier(net.caffe_name or "Network", capital=True), RESERVED)
    inputs = [variables[blob] for blob in net.inputs]
    outputs = ", ".join(f"{blob!r}: {variables[blob]}" for blob in net.outputs)
    makes = [line for each in layers for line in each.makes] or ["pass"]
    computes = [line for each in layers for line in each.computes]
    return "\n".join(
        [
            *_head(name, net, inputs),
            *imports,
            *([""] if imports else []),
            "import torch",
            "import torch.nn.functional as F",
            "from torch import Tensor, nn",
            "",
            *helpers,
            "",
            f"class {name}(nn.Module):",
            f'    """Called with {", ".join(inputs) or "nothing"}; gives the outputs by name."""',
            "",
            "    def __init__(self) -> None:",
            "        super().__init__()",
            *(f"        {line}" for line in [*makes, *_shared(net)]),
            "",
            f"    def forward(self{''.join(f', {each}: Tensor' for each in inputs)}) -> dict[str, Tensor]:",
            *(f"        {line}" for line in computes),
            f"        return {{{outputs}}}",
            "",
        ]
    )


def _head(name: str, net: Net, inputs: list[str]) -> list[str]:
    """The file's own description."""
    shapes = ", ".join(f"{blob}: {list(net.input_shapes[top])}" for blob, top in zip(inputs, net.inputs, strict=True))
    return [
        f'"""{name}, a network of Caffe in plain torch, for the phase {net.phase!r}. Written by tilewise.',
        "",
        f"    net = {name}().{'train' if net.phase == 'train' else 'eval'}()",
        '    net.load_state_dict(torch.load("weights.pth", weights_only=True))',
        f"    outputs = net({', '.join(inputs)})",
        "",
        f"Shapes of its inputs in Caffe's file: {shapes or 'none'}.",
        '"""',
        "",
    ]


def _written(net: Net, variables: dict[str, str]) -> Iterator[Written]:
    """All layers in order. Raises one ``CaffeError`` for all that cannot be written."""
    known: dict[str, Shape] = dict(net.input_shapes)
    missing = []
    for node in net.nodes:
        if not node.module:
            continue
        layer: Any = net.get_submodule(node.module)
        shapes = tuple(known[bottom] for bottom in node.bottoms)
        known.update(zip(node.tops, layer.output_shapes(list(shapes)), strict=True))
        simple = node.module.isidentifier() and not keyword.iskeyword(node.module)
        access = f"self.{node.module}" if simple else f"getattr(self, {node.module!r})"
        call = Call(layer, tuple(variables[x] for x in node.bottoms), access, shapes, len(node.tops))
        emitter = EMITTERS.get(type(layer).__name__) if type(layer).__module__.startswith("tilewise.") else None
        piece = emitter(call) if emitter is not None else Piece(missing="no function of torch's computes it")
        if piece.missing:
            missing.append(f"layer {node.name!r} ({node.type}): {piece.missing}")
            continue
        makes: tuple[str, ...] = ()
        if piece.init:
            makes = (f"{access} = {piece.init}" if simple else f"self.add_module({node.module!r}, {piece.init})",)
        tops = [variables[top] for top in node.tops]
        if len(piece.values) == len(tops):
            computes = tuple(f"{top} = {value}" for top, value in zip(tops, piece.values, strict=True) if top != value)
        else:
            computes = (f"{', '.join(tops)} = {piece.values[0]}",)
        if node.blocked:
            # No gradient goes to these bottoms.
            makes_no = [variables[node.bottoms[place]] for place in node.blocked]
            computes = tuple(_detached(line, makes_no) for line in computes)
        yield Written(makes, computes)
    if missing:
        raise CaffeError(
            f"{len(missing)} layers cannot be written in plain torch: {'; '.join(missing)}. A network without them "
            "would do"
        )


def _detached(line: str, names: Iterable[str]) -> str:
    """A line that reads some variables without their gradients."""
    target, equals, value = line.partition(" = ")
    for name in names:
        value = re.sub(rf"(?<![\w.'\"]){re.escape(name)}(?![\w'\"])", f"{name}.detach()", value)
    return target + equals + value


def _shared(net: Net) -> list[str]:
    """Lines that make layers share parameters, as the network's names for them say."""
    owners: dict[int, tuple[str, str]] = {}
    lines = []
    for node in net.nodes:
        layer: Any = net.get_submodule(node.module) if node.module else None
        for name in layer.blob_names if layer is not None else ():
            own = (node.module, name.rpartition(".")[2])
            first = owners.setdefault(id(layer.get_parameter(name)), own)
            if first != own:
                module, parameter = first
                lines.append(f"self.get_submodule({own[0]!r}).{own[1]} = self.get_submodule({module!r}).{parameter}")
    return lines


def _helpers(body: str) -> list[str]:
    """The source of the functions that some lines use, and of those that these use, in their order in the file."""
    sources = {name: inspect.getsource(function) for name, function in HELPERS.items()}
    needed: set[str] = set()
    texts = [body]
    while texts:
        text = texts.pop()
        for name, source in sources.items():
            if name not in needed and re.search(rf"(?<![\w.]){name}\(", text):
                needed.add(name)
                texts.append(source)
    return [f"\n{sources[name]}" for name in sources if name in needed]


def _variables(net: Net) -> dict[str, str]:
    """A name of Python's for each tensor of a network."""
    found: dict[str, str] = {}
    taken = {"self", *RESERVED}
    for node in net.nodes:
        for blob in node.tops:
            if blob not in found:
                found[blob] = _unique(_identifier(blob), taken)
                taken.add(found[blob])
    return found


def _identifier(name: str, *, capital: bool = False) -> str:
    """A text of a network's file as a name of Python's."""
    found = re.sub(r"[^0-9A-Za-z_]+", "_", name).strip("_") or ("Network" if capital else "blob")
    if found[0].isdigit():
        found = ("Net_" if capital else "blob_") + found
    return found[0].upper() + found[1:] if capital else found


def _unique(name: str, taken: Collection[str]) -> str:
    while name in taken or keyword.iskeyword(name):
        name += "_"
    return name
