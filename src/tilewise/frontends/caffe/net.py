"""A Caffe network as a torch module."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.layers import registry
from tilewise.frontends.caffe.layers.base import Layer, Phase, Shape
from tilewise.frontends.caffe.structure import Node, node_of, outputs_of, unique_name
from tilewise.frontends.caffe.weights import Learnable, LoadReport, load_into, share_parameter, weights_of

__all__ = ["Learnable", "LoadReport", "Net"]

LOGGER = logging.getLogger("tilewise.caffe")


class Runner(nn.Module):
    """Runs the layers of a network in order: what :class:`Net` does once it is made."""

    nodes: list[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_shapes: dict[str, Shape]
    sources: dict[str, Any]
    blobs: dict[str, Tensor]
    loss: Tensor | None
    phase: Phase
    seed: int | None
    keep_blobs: bool
    debug_info: bool
    _data: dict[str, bytes]
    _seen: set[tuple[tuple[str, Shape], ...]]

    def reshape(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
        """The shapes of all tensors by name for inputs of ``shapes``, which nothing is computed for.

        Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` where they do not fit, with the layer.
        """
        known = {name: tuple(int(size) for size in shape) for name, shape in shapes.items()}
        for node in self.nodes:
            if not node.module:
                missing = [top for top in node.tops if top not in known]
                if missing:
                    raise CaffeError(f"shapes has no {missing[0]!r}; one for each of {', '.join(self.inputs)} would do")
                continue
            layer = self._modules[node.module]
            assert isinstance(layer, Layer)
            found = self._checked_shapes(layer, node, [known[bottom] for bottom in node.bottoms])
            known.update(zip(node.tops, found, strict=True))
        return known

    def forward(
        self, *inputs: Tensor, start: str | None = None, end: str | None = None, **named: Tensor
    ) -> dict[str, Tensor]:
        """The outputs by name, or with ``end`` the tops of the layer of that name, where the run ends.

        With ``start`` it begins at the layer of that name, with the other tensors as :attr:`blobs` has them.
        """
        nodes = self._range(start, end)
        given = self._given(inputs, named)
        blobs = {**self.blobs, **given} if start is not None else dict(given)
        self.blobs, self.loss = {}, None
        if start is None:
            self._fetch(nodes, blobs, given)
            if not torch.compiler.is_compiling():
                self._check_once({name: blobs[name] for name in self.inputs if name in blobs})
        losses: list[Tensor] = []
        for node in nodes:
            if node.module:
                tops = self._run(node, blobs)
                blobs.update(zip(node.tops, tops, strict=True))
                losses += [top.sum() * w for top, w in zip(tops, node.weights, strict=True) if w]
        self.loss = torch.stack(losses).sum() if losses else None
        if self.keep_blobs:
            self.blobs = blobs
        names = nodes[-1].tops if end is not None else self.outputs
        return {name: blobs[name] for name in names if name in blobs}

    def _run(self, node: Node, blobs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The tops of one layer."""
        layer: Any = self._modules[node.module]
        missing = [bottom for bottom in node.bottoms if bottom not in blobs]
        if missing:
            layer.fail(f"bottom {missing[0]!r} has no value: run the layers before it first")
        bottoms = [
            blobs[name].detach() if place in node.blocked else blobs[name] for place, name in enumerate(node.bottoms)
        ]
        if torch.compiler.is_compiling():
            found = layer(*bottoms)
        else:
            try:
                found = layer(*bottoms)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError) as error:
                shapes = ", ".join(str(tuple(x.shape)) for x in bottoms)
                raise CaffeError(f"layer {node.name!r} ({node.type}) on bottoms of shapes {shapes}: {error}") from error
        tops = found if isinstance(found, tuple) else (found,)
        if len(tops) != len(node.tops):
            layer.fail(f"its forward returned {len(tops)} tensors for {len(node.tops)} tops")
        if self.debug_info and not torch.compiler.is_compiling():
            self._log(node, layer, tops)
        return tops

    def _range(self, start: str | None, end: str | None) -> list[Node]:
        """The nodes from the layer ``start`` to the layer ``end``, both included."""
        names = [node.name for node in self.nodes]
        for what, name in (("start", start), ("end", end)):
            if name is not None and name not in names:
                raise CaffeError(f"{what} = {name!r} is no layer; one of {', '.join(names)} would do")
        first = names.index(start) if start is not None else 0
        last = len(names) - 1 - names[::-1].index(end) if end is not None else len(names) - 1
        if first > last:
            raise CaffeError(f"start = {start!r} lies behind end = {end!r}; a layer before it would do")
        return self.nodes[first : last + 1]

    def _given(self, inputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a call by name."""
        known = ", ".join(self.inputs) or "none"
        if len(inputs) > len(self.inputs):
            raise CaffeError(f"{len(inputs)} tensors were given; the inputs are {known}")
        given = dict(zip(self.inputs, inputs, strict=False))
        for name, value in named.items():
            if name in given:
                raise CaffeError(f"input {name!r} was given twice: by place and by name")
            if name not in self.inputs and not any(name in node.tops for node in self.nodes):
                raise CaffeError(f"{name!r} is no tensor of the network; the inputs are {known}")
            given[name] = value
        return given

    def _fetch(self, nodes: Sequence[Node], blobs: dict[str, Tensor], given: Mapping[str, Tensor]) -> None:
        """Add to ``blobs`` the tops of layers of data that were not given, from their sources."""
        from tilewise.frontends.caffe.data import DATA_LAYERS

        for node in nodes:
            missing = [top for top in node.tops if top not in blobs]
            if node.module or not missing:
                continue
            if node.type not in DATA_LAYERS or (given and node.type == "Input"):
                raise CaffeError(f"input {missing[0]!r} was not given; the inputs are {', '.join(self.inputs)}")
            if node.name not in self.sources:
                self.sources[node.name] = self._reopened(node.name)
            place = self.get_buffer("_place")
            batch = self.sources[node.name].next()
            for top, tensor in zip(node.tops, batch, strict=True):
                blobs.setdefault(top, tensor.to(device=place.device, dtype=place.dtype, non_blocking=True))

    def _reopened(self, name: str) -> Any:
        """The source of a layer of data in a copy of the network, or in one whose input shapes were given."""
        from tilewise.frontends.caffe.data import source
        from tilewise.frontends.caffe.schema import LayerParameter

        parameter: Any = LayerParameter()
        parameter.ParseFromString(self._data[name])
        return source(parameter, self.phase, self.seed)

    @staticmethod
    def _key(shapes: Mapping[str, Shape]) -> tuple[tuple[str, Shape], ...]:
        return tuple(sorted(shapes.items()))

    def _check_once(self, inputs: Mapping[str, Tensor]) -> None:
        """Check the shapes of inputs that were not seen before."""
        shapes = {name: tuple(x.shape) for name, x in inputs.items()}
        key = self._key(shapes)
        if key not in self._seen and len(shapes) == len(self.inputs):
            self.reshape(shapes)
            self._seen.add(key)

    def _log(self, node: Node, layer: Layer, tops: Sequence[Tensor]) -> None:
        """Caffe's lines of ``debug_info``: means of absolute values, forward and, once they are known, of gradients."""
        for name, top in zip(node.tops, tops, strict=True):
            LOGGER.info("    [Forward] Layer %s, top blob %s data: %g", node.name, name, _mean(top))
            if top.requires_grad:
                top.register_hook(
                    lambda gradient, name=name: LOGGER.info(
                        "    [Backward] Layer %s, top blob %s diff: %g", node.name, name, _mean(gradient)
                    )
                )
        for place, blob in enumerate(layer.blobs):
            LOGGER.info("    [Forward] Layer %s, param blob %d data: %g", node.name, place, _mean(blob))

    @staticmethod
    def _checked_shapes(layer: Layer, node: Node, shapes: list[Shape]) -> list[Shape]:
        """The shapes of a layer's tops. Raises ``CaffeError`` where it has another number of them."""
        found = [tuple(shape) for shape in layer.output_shapes(list(shapes))]
        if len(found) != len(node.tops):
            layer.fail(f"it has {len(node.tops)} tops {list(node.tops)}; {len(found)} would do")
        return found


class Net(Runner):
    """A network of Caffe's layers that computes Caffe's numbers, forward and backward.

    ``net`` is a ``NetParameter``, as :func:`tilewise.frontends.caffe.files.read_net` reads it. Its layers for
    ``phase``, ``"train"`` or ``"test"``, become submodules of their names; a dot becomes an underscore, and a name that
    a module cannot have gets one behind it (:attr:`layers` has them by Caffe's names). ``shapes`` gives shapes of
    inputs by name, where the network has none or others are wanted; a layer of data whose tops all have one is not
    read, and may be of a type that is not known. ``seed`` decides what layers of data draw.

    Called with tensors, in the order of :attr:`inputs` or by name, it returns the outputs by name: the tensors that no
    layer reads. Called with none, it takes the next batch of its :attr:`sources`. Afterwards :attr:`blobs` has all
    tensors by name, unless ``keep_blobs`` is set to false, and :attr:`loss` the weighted sum of the losses, ``None``
    where there is none. Tensors of any size that fits the weights may come.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for layers that are not known (all at once), for tensors
    that are read before they are made or made twice, for wrong fields, and for shapes that do not fit, with the layer.

        >>> from tilewise.frontends.caffe.files import read_net
        >>> net = Net(read_net('''
        ...     layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
        ...     layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { kernel_size: 3 } }
        ... '''))
        >>> net(torch.zeros(2, 3, 10, 10))["pool"].shape
        torch.Size([2, 3, 8, 8])
    """

    def __init__(
        self,
        net: Any,
        phase: Phase = "test",
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        from tilewise.frontends.caffe.data import DATA_LAYERS
        from tilewise.frontends.caffe.files import filtered

        net = filtered(net, phase)
        registry.name_losses(net.layer)
        self.caffe_name, self.phase, self.debug_info = str(net.name), phase, bool(net.debug_info)
        self.keep_blobs, self.seed = True, seed
        self.blobs: dict[str, Tensor] = {}
        self.loss: Tensor | None = None
        self.nodes: list[Node] = []
        self.sources: dict[str, Any] = {}
        self._data: dict[str, bytes] = {}
        self._owners: list[tuple[str, int]] = []
        self._factors: list[tuple[str, float, float]] = []
        self._seen: set[tuple[tuple[str, Shape], ...]] = set()
        # Tells where the module's tensors are: layers of data give tensors of the CPU.
        self.register_buffer("_place", torch.zeros((), dtype=torch.float32, device="cpu"), persistent=False)
        given = {name: tuple(int(size) for size in shape) for name, shape in (shapes or {}).items()}
        inputs = registry.input_places(net.layer, DATA_LAYERS, given)
        unknown = registry.unknown_layers(layer for place, layer in enumerate(net.layer) if place not in inputs)
        if unknown is not None:
            raise unknown
        self.input_shapes: dict[str, Shape] = {}
        self._build(net, given, inputs)
        self.inputs = tuple(top for node in self.nodes if not node.module for top in node.tops)
        strange = sorted(given.keys() - set(self.inputs))
        if strange:
            raise CaffeError(f"shapes has {strange}, which are no inputs; {', '.join(self.inputs) or 'none'} would do")
        self.outputs = outputs_of(self.nodes)
        self.train(phase == "train")

    def _build(self, net: Any, given: Mapping[str, Shape], inputs: Collection[int]) -> None:
        """Make all layers in order, with the shapes of their bottoms."""
        made: dict[str, str] = {}
        later = {top: str(layer.name) for layer in reversed(net.layer) for top in layer.top}
        known: dict[str, Shape] = {}
        names: dict[str, tuple[int, float | None, float | None]] = {}
        taken = set(dir(self)) | self.__dict__.keys()
        for index, parameter in enumerate(net.layer):
            if index in inputs:
                node = node_of(parameter, "", made, later, is_loss=False)
                self.nodes.append(node)
                self.input_shapes.update(zip(node.tops, self._data_shapes(parameter, node, given), strict=True))
                known.update(self.input_shapes)
                continue
            found = [known[bottom] for bottom in parameter.bottom if bottom in known]
            module = unique_name(parameter.name, taken | self._modules.keys())
            # Bottoms are checked before the layer is made, its loss weights behind it: the class says if it is a loss.
            if len(found) != len(parameter.bottom):
                node_of(parameter, module, made, later, is_loss=False)
            layer = self._layer(parameter, found)
            node = node_of(parameter, module, made, later, is_loss=layer.is_loss)
            self.add_module(module, layer)
            self.nodes.append(node)
            known.update(zip(node.tops, self._checked_shapes(layer, node, found), strict=True))
            self._take_parameters(parameter, layer, module, names)
        self._seen.add(self._key(self.input_shapes))

    @staticmethod
    def _layer(parameter: Any, shapes: list[Shape]) -> Layer:
        """Make one layer."""
        make = registry.maker_of(parameter)
        assert make is not None
        layer = make(parameter, shapes, "train" if parameter.phase == 0 else "test")
        if not isinstance(layer, Layer):
            raise CaffeError(
                f"layer {parameter.name!r} ({parameter.type}): what is registered made a {type(layer).__name__}; a "
                "subclass of tilewise.frontends.caffe.layers.Layer would do"
            )
        return layer

    def _data_shapes(self, parameter: Any, node: Node, given: Mapping[str, Shape]) -> list[Shape]:
        """The shapes of the tops of a layer of data: those that are given, else its source's."""
        from tilewise.frontends.caffe.data import source

        self._data[node.name] = parameter.SerializeToString()
        if node.tops and all(top in given for top in node.tops):
            return [given[top] for top in node.tops]
        if node.type == "Input" and not parameter.input_param.shape:
            raise CaffeError(
                f"layer {node.name!r} (Input): no shape is given; input_param {{ shape {{ dim: ... }} }} would do, or "
                f"shapes={{{node.tops[0]!r}: (...)}}"
            )
        self.sources[node.name] = source(parameter, self.phase, self.seed)
        return [given.get(top, shape) for top, shape in zip(node.tops, self.sources[node.name].shapes, strict=True)]

    def _take_parameters(
        self, parameter: Any, layer: Layer, module: str, names: dict[str, tuple[int, float | None, float | None]]
    ) -> None:
        """List a layer's blobs with their factors; those of a name that is known become the ones of that name."""
        specs = list(parameter.param)
        if len(specs) > len(layer.blob_names):
            layer.fail(f"{len(specs)} param are given; {len(layer.blob_names)}, one for each blob, would do")
        if layer.blob_names and any(node.name == layer.caffe_name and node.module != module for node in self.nodes):
            layer.fail("another layer has the same name; another one would do, since weights go by name")
        for place in range(len(layer.blob_names)):
            spec = specs[place] if place < len(specs) else None
            fixed = place in layer.fixed_blobs
            lr = float(spec.lr_mult) if spec is not None and spec.HasField("lr_mult") else None
            decay = float(spec.decay_mult) if spec is not None and spec.HasField("decay_mult") else None
            name = str(spec.name) if spec is not None else ""
            if name and name in names:
                index = self._shared(layer, place, name, lr, decay, names)
            else:
                index = len(self._owners)
                self._owners.append((module, place))
                names.update({name: (index, lr, decay)} if name else {})
                label = name or f"{layer.caffe_name}[{place}]"
                self._factors.append(
                    (label, 0.0 if fixed else 1.0 if lr is None else lr, 1.0 if decay is None else decay)
                )
            layer.blob(place).requires_grad_(self._factors[index][1] != 0)

    def _shared(
        self,
        layer: Layer,
        place: int,
        name: str,
        lr: float | None,
        decay: float | None,
        names: dict[str, tuple[int, float | None, float | None]],
    ) -> int:
        """Give a layer the blob that already has ``name``, and return its number."""
        index, known_lr, known_decay = names[name]
        for field, new, old in (("lr_mult", lr, known_lr), ("decay_mult", decay, known_decay)):
            if None not in (new, old) and new != old:
                layer.fail(f"param {name!r} has {field} = {new}, and {old} in another layer; one value would do")
        module, owner_place = self._owners[index]
        owner = self._modules[module]
        assert isinstance(owner, Layer)
        share_parameter(layer, place, owner.blob(owner_place), f"layer {owner.caffe_name!r}, which is named {name!r}")
        label, factor, decay_factor = self._factors[index]
        self._factors[index] = (label, factor if lr is None else lr, decay_factor if decay is None else decay)
        names[name] = (index, known_lr if lr is None else lr, known_decay if decay is None else decay)
        return index

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers by Caffe's names, in order. Of layers of one name it is the first."""
        found: dict[str, Layer] = {}
        for node in self.nodes:
            layer = self._modules[node.module] if node.module else None
            if isinstance(layer, Layer):
                found.setdefault(node.name, layer)
        return found

    @property
    def learnable(self) -> list[Learnable]:
        """All parameters in Caffe's order, shared ones once, with the factors of their rate and decay.

        Statistics of BatchNorm are among them, with a factor of 0: histories of a solver's state count them.
        """
        found = []
        for (module, place), (name, lr, decay) in zip(self._owners, self._factors, strict=True):
            layer = self._modules[module]
            assert isinstance(layer, Layer)
            found.append(Learnable(name, layer.blob(place), lr, decay))
        return found

    def load_weights(self, weights: Mapping[str, Sequence[Any]]) -> LoadReport:
        """Copy arrays, by layer name and in Caffe's order, into the layers of the same names.

        ``weights`` is what :func:`tilewise.frontends.caffe.files.read_weights` reads. Layers on one side only stay as
        they are, and the report names them. Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` where shapes
        differ, before anything is copied.
        """
        return load_into(self.layers, weights)

    def weights(self) -> dict[str, list[Any]]:
        """float32 arrays of blobs by layer name, in Caffe's order and shapes. They may share the module's memory."""
        return weights_of(self.layers)

    def share_weights(self, other: Net) -> None:
        """Use the parameters of ``other``'s layers of the same names, as a net for tests uses those that are trained.

        Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` where shapes differ.
        """
        theirs = other.layers
        for name, layer in self.layers.items():
            if name in theirs and len(layer.blob_names) == len(theirs[name].blob_names):
                for place, blob in enumerate(theirs[name].blobs):
                    share_parameter(layer, place, blob, f"layer {name!r} of the other net")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: all but the tensors of the last run and the sources, which are opened again when needed."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "blobs": {}, "loss": None, "sources": {}}

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a network is not iterable; its layers are in net.layers, its tensors in net.blobs")


def _mean(x: Tensor) -> float:
    """The mean of absolute values."""
    return float(x.detach().abs().mean()) if x.numel() else 0.0
