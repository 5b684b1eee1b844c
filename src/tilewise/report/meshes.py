"""The table and the document of ``tilewise plan --gpus``."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from tilewise.distributed.mesh.choose import MeshChoice, MeshResult
from tilewise.distributed.mesh.cost import LinkSpeed
from tilewise.plan import format_bytes
from tilewise.planner.schedules.results_json import document
from tilewise.report.sheet import Sheet
from tilewise.report.words import format_ms, format_ratio

__all__ = ["mesh_document", "mesh_table", "mesh_text"]


def mesh_table(choice: MeshChoice) -> Sheet:
    """Meshes by time per image, then those that cannot be used with their reasons, and one GPU alone last."""
    numbers = ["ms an image", "speed-up", "step ms", "forward", "backward", "halos", "sums", "gradients"]
    numbers += ["memory a GPU", "halos received", "times"]
    table = Sheet((("mesh", ""), *((name, "right") for name in numbers), ("why not", "note")))
    alone = choice.single.cost
    for result in choice.results:
        table.add_row(*_cells(result, None if alone is None else alone.image_ms))
    if choice.gpus > 1:
        table.add_row(*_cells(MeshResult(choice.single.mesh, alone, choice.single.reason), None, "one GPU"))
    return table


def _cells(result: MeshResult, alone_ms: float | None, name: str = "") -> list[str]:
    """The cells of one mesh; ``alone_ms`` is the time per image on one GPU, ``name`` its name where it is not the
    mesh's.
    """
    title = name or str(result.mesh)
    cost = result.cost
    if cost is None:
        return [title, *["-"] * 11, escape(result.reason)]
    sources = ", ".join(f"{count} {source}" for source, count in cost.sources.items())
    return [
        title,
        format_ms(cost.image_ms),
        format_ratio(None if alone_ms is None else alone_ms / cost.image_ms),
        *map(format_ms, (cost.step_ms, cost.forward_ms, cost.backward_ms)),
        *map(format_ms, (cost.exchange_ms, cost.sum_ms, cost.reduce_ms)),
        format_bytes(cost.memory.total),
        format_bytes(cost.halo_bytes),
        sources,
        f"[red]{escape(result.reason)}[/]" if result.reason else "",
    ]


def mesh_text(choice: MeshChoice) -> str:
    """The fastest mesh in words, or that none can be used."""
    best = choice.best
    limit = "" if choice.memory_limit is None else f" in {format_bytes(choice.memory_limit)} a GPU"
    if best is None or best.cost is None:
        return f"[red]no mesh of {choice.gpus} GPUs can be used{limit}[/]"
    dims = ", ".join(f'"{name}"' for name in best.mesh.dims)
    how = f"SpatialParallel over dims=({dims},)" if dims else "data parallelism alone"
    return f"fastest{limit}: [bold]{best.mesh}[/], {how}, {format_ms(best.cost.image_ms)} ms an image"


def mesh_document(head: dict[str, Any], choice: MeshChoice) -> dict[str, Any]:
    """The document of ``tilewise plan --gpus``; ``head`` holds target, device, environment, options and input."""
    return document(
        "mesh",
        **head,
        gpus=choice.gpus,
        memory_limit=choice.memory_limit,
        links={
            "inside": _link(choice.cluster.inside),
            "across": _link(choice.cluster.across),
            "gpus_per_node": choice.cluster.node,
        },
        best=None if choice.best is None else _result(choice.best),
        meshes=[_result(result) for result in choice.results],
        single=_result(choice.single),
    )


def _link(link: LinkSpeed) -> dict[str, float]:
    """Fields of a link: bytes per second and milliseconds."""
    return {"bandwidth": link.bandwidth, "latency_ms": 1e3 * link.latency}


def _result(result: MeshResult) -> dict[str, Any]:
    """The fields of one mesh in the document: its cost, or the reason why it is not possible."""
    cost = result.cost
    fields: dict[str, Any] = {
        "data": result.mesh.data,
        "space": [{"dim": name, "parts": parts} for name, parts in result.mesh.space],
        "reason": result.reason,
        "cost": None,
    }
    if cost is not None:
        fields["cost"] = {
            "image_ms": cost.image_ms,
            "step_ms": cost.step_ms,
            "forward_ms": cost.forward_ms,
            "backward_ms": cost.backward_ms,
            "exchange_ms": cost.exchange_ms,
            "sum_ms": cost.sum_ms,
            "reduce_ms": cost.reduce_ms,
            "halo_bytes": cost.halo_bytes,
            "messages": cost.messages,
            "memory": {
                "total": cost.memory.total,
                "parameters": cost.memory.parameters,
                "gradients": cost.memory.gradients,
                "activations": cost.memory.activations,
                "workspace": cost.memory.workspace,
            },
            "sources": {name: cost.sources.get(name, 0) for name in ("measured", "scaled", "estimated")},
        }
    return fields
