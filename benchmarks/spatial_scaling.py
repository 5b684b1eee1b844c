"""Training steps split over GPUs, strong and weak scaling, the cost model beside them and its projection to 64 GPUs.

ResNet-50 and a 3-D U-Net; ``convolutions`` is a network of nothing else. Strong: one input is split over n GPUs. Weak:
each GPU has as much of its length as one alone has. The baseline is one GPU, times n for weak scaling; ours is n ranks.
Of either the fastest of the ``sides`` counts: torch's convolutions, or ours as planned. ``details`` have each side's
times and what the cost model says of both, with the link as measured between the ranks. Projections say the fastest
mesh of 8 to 64 GPUs by the model alone. A step is forward, a loss and backward, without an optimizer; on GPUs the
replay of a CUDA graph, as launching a network of small kernels takes longer than they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from harness.ranks import Clock, graphed, run_ranks, usable
from harness.result import Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.spatial_networks import NETWORKS
from torch.distributed.device_mesh import init_device_mesh

import tilewise
import tilewise.distributed
from tilewise.distributed import SpatialParallel, UnknownLayer
from tilewise.distributed.mesh.choose import MeshChoice, choose_mesh
from tilewise.distributed.mesh.cost import Cluster, LinkSpeed, StepCost
from tilewise.distributed.mesh.link_speed import measure_link
from tilewise.machine.torch_state import framework_flags
from tilewise.planner import Planner

DEFAULTS = {
    "networks": "resnet50,unet3d",
    "sizes": "resnet50:1024,unet3d:192",
    "batch": "1",
    "gpus": "2,4",
    "projected": "8,16,32,64",
    "precision": "ieee",
    "sides": "torch,planned",
    "rigor": "measure",
    "repeats": "10",
}
QUICK = {
    "networks": "convolutions",
    "sizes": "convolutions:64",
    "gpus": "2",
    "projected": "8",
    "rigor": "estimate",
    "repeats": "5",
}
MODES = ("strong", "weak")
SIDES = ("torch", "planned")


def run(settings: Settings) -> Result:
    """One row a network, mode and number of GPUs; projections are facts."""
    ranks, notes = usable(settings.integers("gpus"), settings.device)
    if not ranks:
        raise NothingToMeasure(f"gpus={settings.text('gpus')}: {'; '.join(notes)}")
    precision = settings.chosen("precision", {name: name for name in ("ieee", "tf32")})[0]
    networks = settings.chosen("networks", {name: name for name in NETWORKS})
    sizes = dict(word.partition(":")[::2] for word in settings.words("sizes"))
    given = {
        "precision": precision, "repeats": settings.integer("repeats"), "rigor": settings.planning().rigor,
        "sides": settings.chosen("sides", {name: name for name in SIDES}),
    }  # fmt: skip
    batch, planner = settings.integer("batch"), settings.planner()
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    for name in networks:
        size = int(sizes[name])
        strong = shape_of(name, batch, size, 1)
        alone = run_ranks(1, settings.device, "spatial_scaling:step", {**given, "name": name, "shape": strong})[0]
        link: dict[str, float] | None = None
        for n, mode in itertools.product(ranks, MODES):
            shape = strong if mode == "strong" else shape_of(name, batch, size, n)
            settings.say(f"{name}, {mode}, {n} ranks")
            found = run_ranks(n, settings.device, "spatial_scaling:step", {**given, "name": name, "shape": shape})
            if found[0]["ms"] is None:
                notes.append(f"{name}: {found[0]['reason']}")
                break
            link = found[0]["link"]
            choice = chosen(name, shape, n, settings.device, precision, planner, link)
            together = {side: max(rank["ms"][side] for rank in found) for side in given["sides"]}
            rows.append(_row(name, mode, n, shape, alone["ms"], together, choice))
            settings.keep(Result(rows, facts=facts, notes=notes))
        for n in settings.integers("projected"):
            whole = shape_of(name, batch, size, n)
            choice = chosen(name, whole, n, settings.device, precision, planner, link)
            facts[f"{name} on {n} GPUs, weak, by the model"] = projection(choice)
            choice = chosen(name, strong, n, settings.device, precision, planner, link)
            facts[f"{name} on {n} GPUs, strong, by the model"] = projection(choice)
    return Result(rows, facts=facts, notes=notes)


def shape_of(name: str, batch: int, size: int, times: int) -> list[int]:
    """Shape of an input whose split axis is ``times`` as long."""
    network = NETWORKS[name]
    sizes = [size] * network.space
    sizes[0] *= times
    return [batch, network.channels, *sizes]


def chosen(
    name: str,
    shape: list[int],
    gpus: int,
    device: torch.device,
    precision: str,
    planner: Planner,
    link: dict[str, float] | None,
) -> MeshChoice:
    """What the cost model says of every mesh."""
    cluster = Cluster() if link is None else Cluster(LinkSpeed(**link))
    return choose_mesh(
        NETWORKS[name].build(), torch.empty(shape, device="meta"), gpus=gpus, cluster=cluster, device=device,
        precision=precision, planner=planner,
    )  # fmt: skip


def projection(choice: MeshChoice) -> dict[str, Any]:
    """The fastest mesh by the model, and why there is none."""
    best = choice.best
    if best is None or best.cost is None:
        return {"mesh": None, "reasons": sorted({result.reason for result in choice.results})}
    single = choice.single.cost
    return {
        "mesh": str(best.mesh),
        "step_ms": best.cost.step_ms,
        "speedup": None if single is None else single.step_ms / best.cost.step_ms,
        "memory": best.cost.memory.total,
        "hidden": best.cost.exchange_ms == 0,
    }


def _row(
    name: str, mode: str, n: int, shape: list[int], alone: dict[str, float], together: dict[str, float],
    choice: MeshChoice,
) -> Row:  # fmt: skip
    dim = NETWORKS[name].dim
    cost = next((r.cost for r in choice.results if r.mesh.data == 1 and r.mesh.dims == (dim,)), None)
    times = n if mode == "weak" else 1
    single, side = min(alone, key=lambda name: alone[name]), min(together, key=lambda name: together[name])
    ms, one = together[side], f"one GPU, {single}"
    return Row(
        f"{name}, {mode}, {n} GPUs",
        f"{name}, {mode}",
        Side(one if times == 1 else f"{one}, {n} times", alone[single] * times),
        Side(f"{n} ranks along {dim}, {side}", ms),
        details={
            "gpus": n,
            "shape": shape,
            "single": alone,
            "ranks": together,
            "predicted_ms": None if cost is None else cost.step_ms,
            "predicted_over_measured": None if cost is None else cost.step_ms / ms,
            "predicted_single_ms": None if choice.single.cost is None else choice.single.cost.step_ms,
            "model": None if cost is None else _told(cost),
            "link": asdict(choice.cluster.inside),
        },
    )


def _told(cost: StepCost) -> dict[str, Any]:
    return {
        "forward_ms": cost.forward_ms,
        "backward_ms": cost.backward_ms,
        "exchange_ms": cost.exchange_ms,
        "sum_ms": cost.sum_ms,
        "reduce_ms": cost.reduce_ms,
        "halo_bytes": cost.halo_bytes,
        "memory": cost.memory.total,
        "sources": dict(cost.sources),
    }


def step(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of this network's step on all ranks together, by side, and their link."""
    found: dict[str, Any] = {"ms": {}, "reason": "", "link": None}
    with framework_flags(device.type, given["precision"], deterministic=False):
        for side in given["sides"]:
            try:
                once = _step(device, given, side == "planned")
            except UnknownLayer as error:
                return {"ms": None, "reason": str(error), "link": None}
            (found["ms"][side],) = Clock(device).medians_ms(graphed(device, [once]), given["repeats"])
            del once
    if dist.get_world_size() > 1:
        found["link"] = asdict(measure_link())
    return found


def _step(device: torch.device, given: dict[str, Any], planned: bool) -> Callable[[], None]:
    """The step of this rank, which was taken once."""
    ranks, network, shape = dist.get_world_size(), NETWORKS[given["name"]], given["shape"]
    torch.manual_seed(0)
    model = network.build().to(device).train()
    call: Any = model
    if ranks > 1:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=(network.dim,))
        parallel = SpatialParallel(model, mesh, dims=(network.dim,))
        start, stop = parallel.layout(shape).own[0]
        part = torch.randn([*shape[:2], stop - start, *shape[3:]], device=device)
        call = lambda x: parallel(parallel.shard(x, shape))  # noqa: E731
        if planned:
            tilewise.distributed.optimize(
                parallel, parallel.shard(part, shape), rigor=given["rigor"], cuda_graphs=device.type == "cuda"
            )
    else:
        part = torch.randn(shape, device=device)
        if planned:
            tilewise.optimize(model, part, rigor=given["rigor"], cuda_graphs=device.type == "cuda")

    def once() -> None:
        outputs = call(part)
        outputs = getattr(outputs, "local", outputs)
        outputs.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    once()
    return once
