"""What a command is about: a network, or one layer of any kind of problems given as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tilewise.cli.given.early import check_target, kind_of_text, own_passes
from tilewise.cli.given.here import modules_here_until_the_end
from tilewise.cli.program import BadInput, bad_input, is_out_of_memory, one_line
from tilewise.cli.settings import DEFAULT_BATCH, OPS, PASSES, ROLES, TASKS, Asked

if TYPE_CHECKING:
    import torch

    from tilewise.frontends.networks import Network
    from tilewise.problems.gemm.problem import GemmProblem
    from tilewise.report.values import Layer

__all__ = [
    "Target",
    "layer_target",
    "lrn_target",
    "network_target",
    "pooling_target",
    "product_target",
    "recurrent_target",
    "resolve",
    "tell_assumed",
    "text_target",
]


ANOTHER = "a factory that returns module and shape gives another"
"""How to plan for inputs of another shape than the one that is assumed."""


@dataclass(frozen=True)
class Target:
    """A network or layer on a device: ``layers`` in the order they run, equal ones once.

    ``network`` and its ``inputs`` are ``None`` for a layer. ``make_inputs`` gives those of other batches.
    """

    name: str
    batch: int
    device: torch.device
    precision: str
    layers: tuple[Layer, ...]
    network: Network | None = None
    inputs: torch.Tensor | None = None
    make_inputs: Callable[[int], torch.Tensor] | None = None


def resolve(text: str, settings: Asked, passes: tuple[str, ...] = ()) -> Target:
    """The target that ``text`` names: a layer of any kind of problems, or else a network.

    ``passes`` narrows it to those (by torch's words ``forward``, ``grad_input``, ``grad_weight``; ``fprop``, ``dgrad``,
    ``wgrad``; of a product ``nn``, ``nt``, ``tn``, ``tt``; of a recurrent layer, a pooling or a normalization
    ``inference``, ``training``). Raises :class:`BadInput`.
    """
    found = text_target(text)
    if found is None:
        return network_target(text, settings, passes)
    make, _ = found
    return make(text, settings, passes)


def text_target(text: str) -> tuple[Callable[[str, Asked, tuple[str, ...]], Target], str] | None:
    """What makes the target of a ``text`` that is no network's name, and its first pass; ``None`` for a network's."""
    makers = {
        "pooling": (pooling_target, TASKS[0]),
        "lrn": (lrn_target, TASKS[0]),
        "gemm": (product_target, OPS[0]),
        "rnn": (recurrent_target, TASKS[0]),
        "conv": (layer_target, PASSES[0]),
    }
    return makers.get(kind_of_text(text))


def _asked(settings: Asked, operation: str = "conv") -> tuple[torch.device, dict[str, Any]]:
    """The device that is asked for, and fields of a problem: element type, precision of the operation and device."""
    from tilewise.machine.device import device_name

    device = settings.torch_device()
    precision = settings.set_precision(device, operation)
    return device, {"dtype": settings.dtype, "precision": precision, "device": device_name(device)}


def layer_target(text: str, settings: Asked, passes: tuple[str, ...] = ()) -> Target:
    """The layer given in benchdnn's notation, as a target. Raises :class:`BadInput` where it is none."""
    from tilewise.problems.conv.notation import layer_name, parse_layer
    from tilewise.problems.conv.problem import Pass
    from tilewise.report.values import Layer

    check_target(text, settings, passes, "conv")
    passes = own_passes("conv", passes)
    with bad_input():
        layer = parse_layer(text, batch=settings.batch)
        device, fields = _asked(settings)
        fields |= {"batch": settings.batch, "layout": settings.layout}
        problems = tuple(parse_layer(text, pass_=p, **fields) for p in Pass if not passes or p.value in passes)
    name = layer_name(text) or "layer"
    return Target(text, layer.batch, device, fields["precision"], (Layer((name,), problems),))


def product_target(text: str, settings: Asked, passes: tuple[str, ...] = ()) -> Target:
    """The matrix product given in benchdnn's notation, as a target: a layer with a problem for each way of storage.

    Without ``passes`` these are ``nn``, ``nt`` and ``tn``. Raises :class:`BadInput` where it is none.
    """
    from tilewise.problems.gemm.notation import parse_product, product_name
    from tilewise.report.values import Layer

    check_target(text, settings, passes, "gemm")
    with bad_input():
        product = parse_product(text)
        device, fields = _asked(settings, "matmul")
        problems = tuple(dict.fromkeys(_of_product(text, name, fields) for name in passes or OPS[:3]))
    layer = Layer((product_name(text) or "product",), problems)
    return Target(text, product.batch_size, device, fields["precision"], (layer,))


def _of_product(text: str, name: str, fields: dict[str, Any]) -> GemmProblem:
    """The product ``text`` as its pass ``name`` stores it; of a linear layer's gradients the sizes change places."""
    from dataclasses import replace

    from tilewise.problems.gemm.notation import parse_product

    (op,) = own_passes("gemm", (name,))
    found = parse_product(text, op=op.upper(), **fields)
    if name not in ROLES[1:]:
        return found
    m, k, n = (found.m, found.n, found.k) if name == "grad_input" else (found.n, found.m, found.k)
    return replace(found, m=m, k=k, n=n, bias=False, activation="none")


def recurrent_target(text: str, settings: Asked, passes: tuple[str, ...] = ()) -> Target:
    """The recurrent layer given as text, as a target: a layer with a problem for each of its passes.

    Raises :class:`BadInput` where it is none.
    """
    from tilewise.problems.recurrent.notation import parse_recurrent
    from tilewise.report.values import Layer

    check_target(text, settings, passes, "rnn")
    with bad_input():
        recurrent = parse_recurrent(text)
        device, fields = _asked(settings, "rnn")
        problems = tuple(parse_recurrent(text, task=task, **fields) for task in passes or TASKS)
    return Target(text, recurrent.batch, device, fields["precision"], (Layer((recurrent.cell,), problems),))


def pooling_target(text: str, settings: Asked, passes: tuple[str, ...] = ()) -> Target:
    """The pooling given as text, as a target: a layer with a problem for each of its passes.

    Raises :class:`BadInput` where it is none.
    """
    from tilewise.problems.pooling.notation import parse_pooling

    return _of_images(text, settings, passes, "pooling", parse_pooling)


def lrn_target(text: str, settings: Asked, passes: tuple[str, ...] = ()) -> Target:
    """The local response normalization given as text, as a target: a layer with a problem for each of its passes.

    Raises :class:`BadInput` where it is none.
    """
    from tilewise.problems.lrn.notation import parse_lrn

    return _of_images(text, settings, passes, "lrn", parse_lrn)


def _of_images(text: str, settings: Asked, passes: tuple[str, ...], kind: str, parse: Callable[..., Any]) -> Target:
    """A layer without weights that takes a batch of images, whose text ``parse`` reads, as a target."""
    from tilewise.report.values import Layer

    check_target(text, settings, passes, kind)
    with bad_input():
        batch = parse(text).batch
        device, fields = _asked(settings)
        precision = fields.pop("precision")  # there are no products
        fields["layout_name"] = settings.layout
        problems = tuple(parse(text, task=task, **fields) for task in passes or TASKS)
    layer = Layer((text.strip().partition(":")[0],), problems)
    return Target(text, batch, device, precision, (layer,))


def network_target(text: str, settings: Asked, passes: tuple[str, ...] = ()) -> Target:
    """A network with its input, on its device. Raises :class:`BadInput`."""
    check_target(text, settings, passes, "")
    import torch

    from tilewise.frontends.networks import load_network
    from tilewise.problems.base import DTYPES

    modules_here_until_the_end(text)
    with bad_input("NET|LAYER"), torch.device("cpu"):
        network = load_network(text)
    device, batch = settings.torch_device(), settings.batch or DEFAULT_BATCH
    dtype = DTYPES[settings.dtype]
    order = torch.contiguous_format
    if settings.layout == "channels_last":
        orders = {3: torch.channels_last, 4: torch.channels_last_3d}
        if len(network.input_shape) not in orders:
            raise BadInput(
                f"--layout 'channels_last': torch has it for (C, H, W) and (C, D, H, W), and {text} takes "
                f"{network.input_shape}; contiguous would do"
            )
        order = orders[len(network.input_shape)]
    network.module.to(device, dtype).to(memory_format=order)  # type: ignore[call-overload]

    def make_inputs(batch: int) -> torch.Tensor:
        return network.example_inputs(batch, device, dtype).contiguous(memory_format=order)

    inputs = make_inputs(batch)
    precision = settings.set_precision(device)
    try:
        layers = layers_of(network.module.train(), inputs, precision, passes)
    except Exception as error:  # whatever the network's own code raises
        if is_out_of_memory(error):
            raise
        reason = one_line(f"{type(error).__name__}: {error}")[:300]
        on = f"an input of {tuple(inputs.shape)}" + (f", which was assumed ({ANOTHER})" if network.assumed else "")
        raise BadInput(f"NET|LAYER: {text!r} does not run on {on}: {reason}") from error
    if network.assumed:
        tell_assumed(text, batch, network.input_shape)
    return Target(text, batch, device, precision, layers, network, inputs, make_inputs)


def tell_assumed(text: str, batch: int, shape: tuple[int, ...]) -> None:
    """Say on stderr for which inputs the network ``text`` is planned, as neither it nor the user said it."""
    sizes, inputs = "x".join(map(str, shape)), "input" if batch == 1 else "inputs"
    click.echo(
        f"tilewise: {text} does not say what it takes: {batch} {inputs} of {sizes} assumed ({ANOTHER})", err=True
    )


def layers_of(
    module: torch.nn.Module, inputs: torch.Tensor, precision: str, passes: tuple[str, ...]
) -> tuple[Layer, ...]:
    """The network's convolution layers, equal ones once, in the order they first run."""
    from dataclasses import replace

    from tilewise.cli.layers import grouped, layer_of
    from tilewise.frontends.layers import convolution_layers

    layers = [layer_of(call, precision, inputs.device) for call in convolution_layers(module, inputs)]
    if passes:
        wanted = {kind: own_passes("transposed" if kind else "conv", passes) for kind in (False, True)}
        layers = [replace(x, problems=tuple(p for p in x.problems if p.task in wanted[x.transposed])) for x in layers]
    return grouped(layers)
