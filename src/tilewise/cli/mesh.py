"""``plan --gpus``: the mesh of GPUs that is fastest for a network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tilewise.cli.given.early import kind_of_text
from tilewise.cli.given.here import modules_here_until_the_end
from tilewise.cli.program import BadInput, bad_input
from tilewise.cli.settings import DEFAULT_BATCH, Asked

if TYPE_CHECKING:
    import torch

    from tilewise.cli.target import tell_assumed
    from tilewise.distributed.mesh.choose import MeshChoice
    from tilewise.distributed.mesh.cost import Cluster
    from tilewise.planner import Planner

__all__ = ["MeshAsked", "mesh_options", "plan_mesh"]

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class MeshAsked:
    """What the user asked for, as given; ``gpus`` is ``None`` where no mesh is asked for."""

    gpus: int | None
    input_size: str | None
    link_bandwidth: str | None
    link_latency: str | None
    gpus_per_node: int | None
    node_bandwidth: str | None
    node_latency: str | None

    def cluster(self) -> Cluster:
        """The links between GPUs that were asked for. Raises :class:`BadInput` for one that is none."""
        from tilewise.distributed.mesh.cost import Cluster, LinkSpeed
        from tilewise.distributed.mesh.link_speed import parse_bandwidth, parse_latency

        default = Cluster()

        def link(known: LinkSpeed, bandwidth: str | None, latency: str | None, name: str) -> LinkSpeed:
            return LinkSpeed(
                known.bandwidth if bandwidth is None else parse_bandwidth(bandwidth, f"--{name}-bandwidth"),
                known.latency if latency is None else parse_latency(latency, f"--{name}-latency"),
            )

        with bad_input():
            return Cluster(
                link(default.inside, self.link_bandwidth, self.link_latency, "link"),
                self.gpus_per_node or default.node,
                link(default.across, self.node_bandwidth, self.node_latency, "node"),
            )

    def shape(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one input, ``known`` but for its sizes. Raises :class:`BadInput`."""
        if self.input_size is None:
            return known
        words = self.input_size.lower().split("x")
        if len(words) != len(known) - 1 or not all(word.isdecimal() and int(word) for word in words):
            like = "x".join(map(str, known[1:]))
            raise BadInput(f"--input-size {self.input_size!r}: sizes such as {like} would do")
        return (known[0], *map(int, words))

    def check(self) -> None:
        """Raises :class:`BadInput` for options of a mesh without ``--gpus``."""
        given = [name for name in self.__dataclass_fields__ if name != "gpus" and getattr(self, name) is not None]
        if self.gpus is None and given:
            raise BadInput(f"--{given[0].replace('_', '-')}: of which mesh? --gpus 4 would do")


def mesh_options(function: Function) -> Function:
    """Add the options of a mesh; the command receives them as ``mesh``."""
    names = MeshAsked.__dataclass_fields__

    @functools.wraps(function)  # click keeps a function's other options on the function
    def command(**values: Any) -> Any:
        return function(mesh=MeshAsked(**{name: values.pop(name) for name in names}), **values)

    wrapped: Any = command
    for option in reversed(OPTIONS):
        wrapped = option(wrapped)
    result: Function = wrapped
    return result


OPTIONS = (
    click.option(
        "--gpus",
        type=click.IntRange(min=1),
        metavar="N",
        help="Find the fastest mesh (data x space) of N GPUs, each with --memory-limit; --batch is that of all.",
    ),
    click.option("--input-size", metavar="HxW", help="With --gpus: sizes of the input.  [default: the network's]"),
    click.option(
        "--link-bandwidth", metavar="RATE", help="With --gpus: of a GPU's link, each way.  [default: 450GB/s]"
    ),
    click.option("--link-latency", metavar="TIME", help="With --gpus: of a message.  [default: 4us]"),
    click.option(
        "--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="With --gpus: linked so.  [default: 8]"
    ),
    click.option(
        "--node-bandwidth", metavar="RATE", help="With --gpus: between nodes, of each GPU.  [default: 50GB/s]"
    ),
    click.option("--node-latency", metavar="TIME", help="With --gpus: between nodes.  [default: 10us]"),
)


def _order(layout: str, axes: int) -> torch.memory_format:
    """The order in memory of images with so many axes."""
    import torch

    if layout != "channels_last":
        return torch.contiguous_format
    return torch.channels_last if axes == 4 else torch.channels_last_3d


def plan_mesh(
    target: str, mesh: MeshAsked, settings: Asked, planner: Planner, memory_limit: str | None
) -> tuple[dict[str, Any], MeshChoice]:
    """The head of the document and the choice. Raises :class:`BadInput`."""
    import torch

    from tilewise.distributed.mesh.choose import choose_mesh
    from tilewise.frontends.networks import load_network
    from tilewise.machine.device import device_name, environment
    from tilewise.machine.torch_state import framework_flags
    from tilewise.planner import Schedule
    from tilewise.problems.base import DTYPES
    from tilewise.report.progress import progress_bar

    if kind_of_text(target):
        raise BadInput(f"--gpus: a mesh is of a network's step, and {target!r} is a layer; NET would do")
    if mesh.gpus is None:
        raise BadInput("--gpus: how many? --gpus 4 would do")
    cluster = mesh.cluster()
    modules_here_until_the_end(target)
    with bad_input("NET|LAYER"), torch.device("cpu"):
        network = load_network(target)
    if network.assumed and mesh.input_size is None:
        tell_assumed(target, settings.batch or DEFAULT_BATCH, network.input_shape)
    shape = (settings.batch or DEFAULT_BATCH, *mesh.shape(network.input_shape))
    device, options = settings.torch_device(), settings.options()
    if options.share_with:
        raise BadInput(
            f"--share-with {options.share_with[0]!r}: a mesh divides each step among its own GPUs; leave it out"
        )
    precision = settings.set_precision(device)
    dtype = DTYPES[settings.dtype]
    order = _order(settings.layout, len(shape))
    module = network.module.to("meta", dtype).train()
    example = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=order)
    with (
        progress_bar("costing meshes", None) as progress,
        framework_flags(device.type, precision, deterministic=options.deterministic),
        bad_input(),
    ):
        choice = choose_mesh(
            module.to(memory_format=order),  # type: ignore[call-overload]
            example,
            gpus=mesh.gpus,
            memory_limit=memory_limit,
            cluster=cluster,
            device=device,
            rigor=settings.rigor,
            workspace=options.workspace,
            exclude=options.exclude,
            precision=precision,
            planner=planner,
            progress=progress,
        )
    name = device_name(device)
    head = Schedule(
        target, name, environment(name).key, options, batch=shape[0], dtype=settings.dtype, precision=precision,
        layout=settings.layout, layers=(),
    ).head  # fmt: skip
    return {**head, "input": list(shape[1:])}, choice
