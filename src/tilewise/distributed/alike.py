"""Whether ranks hold the same model, to the last bit, and making it so.

Every rank describes its model in lines: mesh, modes, parameters and buffers. It tells a digest of them, through the
store, to all ranks that must have the same. Where digests differ the lines are read, and the first that differs is
named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from tilewise.comm.agreement import RankMismatch, named_ranks
from tilewise.comm.link import Link
from tilewise.comm.meeting import Meeting
from tilewise.distributed.digest import bytes_of, digests, local_parts

__all__ = ["Copies", "compare", "equalize"]

Line = tuple[str, str]
"""What a rank has, in words, and a digest of its values ("": none are compared)."""
SAME_VALUES = "the same torch.manual_seed, the same checkpoint on every rank, or broadcast=True, would do"


@dataclass(frozen=True)
class Copies:
    """The ranks that must hold the same model: ``ranks`` (global numbers), of which ``link`` has those of one image.

    ``others`` are the process groups along dimensions of the mesh that replicas lie along, each with its first rank.
    """

    link: Link
    ranks: tuple[int, ...]
    others: tuple[tuple[dist.ProcessGroup, int], ...]

    @classmethod
    def of(cls, link: Link, mesh: DeviceMesh, dims: Sequence[str], replicas: Sequence[str]) -> Copies:
        """The ranks of this rank's image, and of the images along the dimensions ``replicas`` of ``mesh``."""
        names, here = mesh.mesh_dim_names or tuple(dims), mesh.get_coordinate()
        assert here is not None
        along = [slice(None) if name in (*dims, *replicas) else here[i] for i, name in enumerate(names)]
        picked = mesh.mesh[tuple(along)]
        others = []
        for i, name in enumerate(names):
            if name in replicas and mesh.mesh.shape[i] > 1:
                group = mesh.mesh[tuple(slice(None) if i == j else here[j] for j in range(mesh.ndim))]
                others.append((mesh.get_group(name), int(group[0])))
        return cls(link, tuple(int(rank) for rank in picked.flatten()), tuple(others))


def compare(copies: Copies, module: nn.Module, head: str, *, values: bool = True) -> None:
    """Raise :class:`RankMismatch` on every rank where any two differ in ``head`` or in their models.

    With ``values`` parameters and buffers are compared bit by bit. Every rank calls this at the same point of the
    program. Raises :class:`~tilewise.comm.link.PeerError` where a rank fails before, or does not come.
    """
    meeting = Meeting(copies.ranks, "SpatialParallel", copies.link.timeout)
    store = distributed_c10d._get_default_store()
    try:
        text = json.dumps([[head, ""], *_lines(module, values)])
        digest_here = hashlib.sha256(text.encode()).hexdigest()
        store.set(f"tilewise/model/{digest_here}", text)
    except BaseException as error:
        meeting.fail(error)
        raise
    digests_by_rank = meeting.tell(digest_here)
    if len(set(digests_by_rank.values())) > 1:
        lines = {
            d: [(a, b) for a, b in json.loads(store.get(f"tilewise/model/{d}"))] for d in set(digests_by_rank.values())
        }
        raise RankMismatch(_difference({rank: lines[digest] for rank, digest in digests_by_rank.items()}))


def _lines(module: nn.Module, values: bool) -> Iterator[Line]:
    """The lines that describe ``module``, with digests of the tensors where ``values`` are compared."""
    for name, part in module.named_modules():
        yield f"module {name or 'itself'} ({type(part).__name__}) training={part.training}", ""
    names: list[str] = []
    first: dict[int, str] = {}
    parts: list[list[torch.Tensor]] = []
    for kind, name, tensor in _tensors(module):
        again = first.setdefault(id(tensor), f"{kind} {name}")
        names.append(_described(kind, name, tensor) if again == f"{kind} {name}" else f"{kind} {name} is {again}")
        parts.append(local_parts(tensor) if values and again == f"{kind} {name}" else [])
    yield from zip(names, digests(parts), strict=True)


def _tensors(module: nn.Module) -> Iterable[tuple[str, str, torch.Tensor]]:
    """Kind, name and tensor of every parameter and buffer; one with several names comes under each."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def _described(kind: str, name: str, tensor: torch.Tensor) -> str:
    """One tensor in words: kind, name, shape, dtype and other properties."""
    if nn.parameter.is_lazy(tensor):
        return f"{kind} {name} not made yet {tensor.dtype}"
    needs_grad = " requires_grad" if tensor.requires_grad else ""
    form = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    placed = f" {placements}" if (placements := getattr(tensor, "placements", None)) else ""
    data = " without data" if tensor.is_meta else ""
    return f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype}{form}{placed}{data}{needs_grad}"


def _difference(lines: dict[int, list[Line]]) -> str:
    """The first line in which ranks differ, and what each rank has there, in words."""
    longest = max(map(len, lines.values()))
    none: list[Line] = [("nothing more", "")]
    padded = {rank: [*rank_lines, *none * (longest - len(rank_lines))] for rank, rank_lines in lines.items()}
    at = next(i for i in range(longest) if len({rank_lines[i] for rank_lines in padded.values()}) > 1)
    having: dict[Line, list[int]] = {}
    for rank, rank_lines in padded.items():
        having.setdefault(rank_lines[at], []).append(rank)
    texts = [text for text, _ in having]
    who = [f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}" for ranks in having.values()]
    if len(set(texts)) == 1:
        text_parts = ", ".join(f"{ranks} {'another' if i else 'one value'}" for i, ranks in enumerate(who))
        return f"ranks differ in the values of {texts[0]}: {text_parts}; {SAME_VALUES}"
    text_parts = " where ".join(f"{ranks} {text!r}" for ranks, text in zip(who, texts, strict=True))
    return f"ranks differ in their models, meshes or dims: {text_parts}"


def equalize(copies: Copies, module: nn.Module) -> None:
    """Give every rank the parameters and buffers of the first rank, written in place where they differ.

    The models must have the same form, which :func:`compare` checks. Parts of a ``DTensor`` that is cut are left alone.
    """
    done: set[int] = set()
    for kind, name, tensor in _tensors(module):
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"broadcast=True: {kind} {name} is {tensor.layout}: a dense one would do")
        for part in local_parts(tensor):
            _receive(copies, f"the broadcast of {kind} {name}", part)


def _receive(copies: Copies, what: str, tensor: torch.Tensor) -> None:
    """Take the first rank's values for ``tensor``; ``what`` names the broadcast in errors."""
    link = copies.link
    bytes_here = bytes_of(tensor)
    if not bytes_here.numel():
        return
    data = bytes_here.to(link.device, copy=True)
    try:
        for group, first in copies.others:
            dist.broadcast(data, first, group)
        dist.broadcast(data, link.ranks[0], link.sums)
    except RuntimeError as error:
        raise link.lost(what, link.others, error) from error
    data = data.to(bytes_here.device)
    if not torch.equal(data, bytes_here):
        _write(tensor, data.view(tensor.dtype).view(tensor.shape))


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into ``tensor`` in place; elements that share memory are written once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.detach().copy_(values)
