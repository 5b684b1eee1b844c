"""Tables 1 and 2 of Jin et al. 2018: one convolution split over GPUs along its rows, in time and memory of each.

Batch 32, 64 channels, 3x3, dilation 1 (Table 1) and 3 (Table 2). Each row is one size, number of GPUs, precision and
direction. The baseline is the best single GPU, ours the best of the ranks: contiguous or channels_last tensors, torch's
convolutions with its benchmark mode or our plans. All are CUDA-graph replays over a cold L2, medians, the slowest rank
of each round. Memory is that of one GPU, of the same two sides: input, output and workspace of one forward, ghost zones
and mailboxes included; of a backward, both gradients and their inputs. The single GPU's plans have no limit; those of
the ranks, in each direction, what keeps a rank's memory within the bar's part of the single GPU's plan's, and 1 MiB at
least. ``details`` have every side's times and memory, how the halos of the first rank travel, and how much faster the
ranks are than torch on one GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from harness.ranks import Clock, each_of_ranks, graphed, usable
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilewise
import tilewise.distributed
from tilewise.distributed import SpatialParallel
from tilewise.distributed.planned import PlannedPasses
from tilewise.machine.torch_state import framework_flags
from tilewise.nn.memory.meter import meter_of

DEFAULTS = {
    "sizes": "128,256,512",
    "dilations": "1,3",
    "gpus": "2,4",
    "precisions": "ieee,tf32",
    "batch": "32",
    "channels": "64",
    "kernel": "3",
    "repeats": "30",
    "rigor": "measure",
}
QUICK = {
    "sizes": "16", "dilations": "1,3", "gpus": "2", "precisions": "ieee", "batch": "2", "channels": "4",
    "repeats": "5", "rigor": "estimate",
}  # fmt: skip
DIRECTIONS = ("forward", "backward")

PAPER = {
    (1, 128): {2: (1.7, 1.9, 0.52), 4: (2.1, 2.8, 0.27)},
    (1, 256): {2: (1.9, 2.3, 0.51), 4: (3.2, 3.9, 0.26)},
    (1, 512): {2: (2.2, 2.1, 0.50), 4: (4.2, 4.7, 0.25)},
    (3, 128): {2: (1.5, 1.7, 0.57), 4: (1.6, 2.0, 0.31)},
    (3, 256): {2: (1.8, 1.9, 0.54), 4: (2.9, 3.5, 0.28)},
    (3, 512): {2: (1.9, 2.0, 0.52), 4: (3.5, 4.1, 0.26)},
}
"""By dilation and size, and number of V100s: speed-up forward and backward, and memory over one GPU's."""
LEAST = {
    (128, "ieee"): (3.2, 3.4), (256, "ieee"): (3.7, 3.8), (512, "ieee"): (3.9, 3.9),
    (128, "tf32"): (2.2, 2.8), (256, "tf32"): (3.2, 3.5), (512, "tf32"): (3.7, 3.8),
}  # fmt: skip
"""Speed-up to reach on four GPUs, forward and backward."""
MOST_MEMORY = {128: 0.28, 256: 0.26, 512: 0.255}
SLOWER_DILATED = 0.95
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LEAST_WORKSPACE = 1 << 20


@dataclass(frozen=True)
class Case:
    """One convolution."""

    size: int
    dilation: int
    precision: str
    batch: int
    channels: int
    kernel: int

    def layer(self, device: torch.device) -> nn.Conv2d:
        """The layer, the same on every rank."""
        torch.manual_seed(0)
        pad = self.dilation * (self.kernel - 1) // 2
        return nn.Conv2d(
            self.channels, self.channels, self.kernel, padding=pad, dilation=self.dilation, bias=False, device=device
        )

    def image(self, device: torch.device, rows: int | None = None) -> torch.Tensor:
        """Random input, or so many rows of it, that wants a gradient."""
        shape = (self.batch, self.channels, self.size if rows is None else rows, self.size)
        return torch.randn(shape, device=device, requires_grad=True)


def run(settings: Settings) -> Result:
    """One row a size, dilation, number of GPUs, precision and direction."""
    ranks, notes = usable(settings.integers("gpus"), settings.device)
    if not ranks:
        raise NothingToMeasure(f"gpus={settings.text('gpus')}: {'; '.join(notes)}")
    cases = [
        {"size": size, "dilation": dilation, "precision": precision}
        | {name: settings.integer(name) for name in ("batch", "channels", "kernel")}
        for dilation, size, precision in itertools.product(
            settings.integers("dilations"),
            settings.integers("sizes"),
            settings.chosen("precisions", {name: name for name in ("ieee", "tf32")}),
        )
    ]
    given = {"cases": cases, "repeats": settings.integer("repeats"), "rigor": settings.planning().rigor}
    with settings.cache_directory():
        alone = []
        for case, (found,) in zip(
            cases, each_of_ranks(1, settings.device, "spatial_tables:single", given), strict=True
        ):
            settings.say(f"one device, {case}: {found}")
            alone.append(found)
    rows: list[Row] = []
    for n in ranks:
        limits = [
            {layout: _limits(Case(**case), n, side[f"planned, {layout}"]["memory"]) for layout in LAYOUTS}
            for case, side in zip(cases, alone, strict=True)
        ]
        found_by_ranks = each_of_ranks(n, settings.device, "spatial_tables:several", {**given, "limits": limits})
        for case, single_sides, found in zip(cases, alone, found_by_ranks, strict=True):
            rows += _rows(Case(**case), n, single_sides, found)
            settings.say(f"{n} ranks: {rows[-2].name} {rows[-2].ratio:.2f}x, backward {rows[-1].ratio:.2f}x")
            settings.keep(Result(rows, bars(rows, settings), notes=notes))
    return Result(rows, bars(rows, settings), notes=notes)


def _limits(case: Case, n: int, memory: list[int]) -> list[int]:
    """Bytes of workspace forward and backward that keep one of ``n`` ranks within its part of one GPU's ``memory``.

    Beside its part of the tensors a rank has, of each neighbour, a mailbox, what came and what it sends home.
    """
    rows = 4 * case.batch * case.channels * case.size
    image, halo = rows * case.size // n, rows * case.dilation * (case.kernel // 2)
    part = MOST_MEMORY.get(case.size, 0.25) * 4 / n
    tensors = (2 * image, 3 * image + 4 * case.channels**2 * case.kernel**2)
    neighbours = min(n - 1, 2)
    return [
        max(LEAST_WORKSPACE, int(part * total) - own - 3 * neighbours * halo)
        for total, own in zip(memory, tensors, strict=True)
    ]


def _rows(case: Case, n: int, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> list[Row]:
    found = []
    together = {
        side: {
            "ms": [max(times) for times in zip(*(rank[side]["ms"] for rank in ranks), strict=True)],
            "memory": [max(nbytes) for nbytes in zip(*(rank[side]["memory"] for rank in ranks), strict=True)],
            "travels": ranks[0][side].get("travels"),
        }
        for side in ranks[0]
    }
    for index, direction in enumerate(DIRECTIONS):
        what, single_side = min(alone.items(), key=lambda item: item[1]["ms"][index])
        how, side = min(together.items(), key=lambda item: item[1]["ms"][index])
        by_torch = min(s["ms"][index] for name, s in alone.items() if name.startswith("torch"))
        paper = PAPER.get((case.dilation, case.size), {}).get(n)
        found.append(
            Row(
                f"D={case.dilation} H=W={case.size}, {n} GPUs, {case.precision}, {direction}",
                f"{direction}, {n} GPUs, {case.precision}",
                Side(f"one GPU: {what}", single_side["ms"][index]),
                Side(f"{n} ranks: {how}", side["ms"][index]),
                details={
                    "dilation": case.dilation,
                    "size": case.size,
                    "gpus": n,
                    "precision": case.precision,
                    "single": alone,
                    "ranks": together,
                    "over_torch": by_torch / side["ms"][index],
                    "memory": side["memory"][index],
                    "memory_ratio": side["memory"][index] / single_side["memory"][index],
                    "paper_speedup": None if paper is None else paper[index],
                    "paper_memory_ratio": None if paper is None or index else paper[2],
                },
            )
        )
    return found


def single(device: torch.device, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Times and memory of one device, by side: torch and our plan, in either layout."""
    for values in given["cases"]:
        case, found = Case(**values), {}
        with framework_flags(device.type, case.precision, deterministic=False):
            for layout, order in LAYOUTS.items():
                layer = case.layer(device).to(memory_format=order)  # type: ignore[call-overload]
                x = case.image(device).detach().contiguous(memory_format=order).requires_grad_()
                found[f"torch, {layout}"] = _timed(device, layer, layer, x, given["repeats"])
                tilewise.optimize(layer, x, rigor=given["rigor"], cuda_graphs=True)
                found[f"planned, {layout}"] = _timed(device, layer, layer, x, given["repeats"])
        yield found


def several(device: torch.device, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Times and memory of this rank's part of each convolution: by torch and by our plans, in either layout."""
    import torch.distributed as dist

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("h",))
    for values, limits in zip(given["cases"], given["limits"], strict=True):
        case, found = Case(**values), {}
        with framework_flags(device.type, case.precision, deterministic=False):
            for layout in LAYOUTS:
                part = Part(case, device, mesh, layout)
                found[f"torch, {layout}"] = part.timed(given["repeats"])
                found[f"planned, {layout}"] = _planned(case, device, mesh, layout, limits[layout], given)
        yield found


class Part:
    """This rank's part of a convolution, in one layout."""

    def __init__(self, case: Case, device: torch.device, mesh: DeviceMesh, layout: str) -> None:
        order = LAYOUTS[layout]
        self._device, self._shape = device, (case.batch, case.channels, case.size, case.size)
        self._layer = case.layer(device).to(memory_format=order)  # type: ignore[call-overload]
        self.parallel = SpatialParallel(self._layer, mesh, dims=("h",))
        start, stop = self.parallel.layout(self._shape).own[0]
        self._x = case.image(device, stop - start).detach().contiguous(memory_format=order).requires_grad_()

    def plan(self, limit: int, rigor: str, training: bool) -> None:
        """Plan it within ``limit`` bytes of workspace."""
        tilewise.distributed.optimize(
            self.parallel, self.parallel.shard(self._x, self._shape), training=training, rigor=rigor, workspace=limit,
            cuda_graphs=True,
        )  # fmt: skip

    def timed(self, repeats: int) -> dict[str, Any]:
        """As :func:`_timed`."""
        return _timed(self._device, self._layer, self._call, self._x, repeats)

    def _call(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.parallel(self.parallel.shard(x, self._shape)).local
        return result


def _planned(
    case: Case, device: torch.device, mesh: DeviceMesh, layout: str, limits: list[int], given: dict[str, Any]
) -> dict[str, Any]:
    """Each direction within its own limit: by one module where they are equal, else by one each."""
    sides = []
    for direction, limit in enumerate(limits):
        if direction and limit == limits[0]:
            sides.append(sides[0])
            continue
        part = Part(case, device, mesh, layout)
        part.plan(limit, given["rigor"], training=bool(direction) or limits[1] == limit)
        side = part.timed(given["repeats"])
        side["travels"] = _travels(part.parallel)
        side["memory"] = [nbytes + side["travels"]["mailboxes"] for nbytes in side["memory"]]
        sides.append(side)
    found = {key: [sides[direction][key][direction] for direction in (0, 1)] for key in ("ms", "memory", "workspaces")}
    return found | {"limits": limits, "travels": [side["travels"] for side in sides]}


def _travels(parallel: SpatialParallel) -> dict[str, Any]:
    """How the halos of the planned layer travel, and what that takes of memory."""
    passes, peers = parallel.space.passes, parallel.space.link.peers
    assert isinstance(passes, PlannedPasses)
    return {
        "mailboxes": 0 if peers is None else peers.places.nbytes,
        "exchanges": None if passes.exchanges is None else dataclasses.asdict(passes.exchanges),
        "fused": [
            {"blocks": None if chosen.terms is None else dataclasses.astuple(chosen.terms.kernels)}
            | {name: getattr(chosen, name) for name in ("reason", "fused_ms", "looped_ms")}
            for _, chosen in passes.halos.values()
        ],
    }


def _timed(
    device: torch.device, layer: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Milliseconds forward and backward, and of each its bytes: inputs, results and workspace, and the last alone."""
    (weight,) = layer.parameters()
    with torch.no_grad():
        made: list[torch.Tensor] = [call(x)]
    dy = torch.randn_like(made[0])

    def forward() -> None:
        made[0] = call(x)

    def backward() -> None:
        torch.autograd.grad(made[0], (x, weight), dy, retain_graph=True)

    def alone() -> None:
        with torch.no_grad():
            call(x)

    times = Clock(device).medians_ms(graphed(device, [forward, backward]), repeats)
    made[0] = call(x)
    memory = [_peak(device, alone, [x]), _peak(device, backward, [x, dy])]
    needed = [x.nbytes + dy.nbytes, 2 * x.nbytes + dy.nbytes + weight.nbytes]
    workspaces = [max(0, nbytes - least) for nbytes, least in zip(memory, needed, strict=True)]
    return {"ms": times, "memory": memory, "workspaces": workspaces}


def _peak(device: torch.device, call: Callable[[], object], inputs: list[torch.Tensor]) -> int:
    """Most bytes alive in a second ``call``, of what it makes and of ``inputs``."""
    if device.type != "cuda":
        return meter_of(device, lambda: inputs).traced(call, call).peak
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + sum(tensor.nbytes for tensor in inputs)


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """What four GPUs must reach; dilation 3 within 5 % of dilation 1 in time, its wider ghost zones apart."""
    applies = settings.device.type == "cuda" and not settings.quick
    found = []
    for row in rows:
        d = row.details
        least = LEAST.get((d["size"], d["precision"]))
        if d["gpus"] != 4 or least is None:
            continue
        backward = "backward" in row.group
        bar = least[backward] * (SLOWER_DILATED if d["dilation"] == 3 else 1)
        found.append(Bar(f"{row.name}: speed-up", row.ratio, least=bar, applies=applies))
        if not backward:
            wider = 2 * (d["dilation"] - 1) / d["size"] if d["dilation"] > 1 else 0.0
            most = MOST_MEMORY[d["size"]] + wider
            found.append(Bar(f"{row.name}: memory of a GPU", d["memory_ratio"], most=most, applies=applies))
    return found
