"""Wraps a model so that it computes on images that are cut across ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilewise.comm.comparison import Comparison
from tilewise.comm.link import Link
from tilewise.distributed import layers
from tilewise.distributed.alike import Copies, compare, equalize
from tilewise.distributed.backward import have_errors_told
from tilewise.distributed.parts.layout import Cuts, Layout, even_cuts
from tilewise.distributed.parts.mesh_ranks import among
from tilewise.distributed.parts.names import failed_layer, remember
from tilewise.distributed.parts.replicated import Parameters
from tilewise.distributed.passes.contracts import Passes
from tilewise.distributed.shards.shard import Shard, Space, belong
from tilewise.distributed.shards.whole import gather, scatter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["SpatialParallel"]

MOST_AGREED = 4096
"""How many kinds of input are remembered for which all ranks have agreed."""


class SpatialParallel(nn.Module):
    """``module``, computed on images that are cut along ``dims`` and shared by the ranks of ``mesh``.

    ``dims`` are some of ``"d"``, ``"h"`` and ``"w"``, the last three dimensions of a tensor. ``mesh`` is a
    ``DeviceMesh`` with dimensions of those names, or as many without names. Its other dimensions, such as one of data
    parallelism, are not used here. ``replicated`` names those along which ranks hold the same parts, such as one whose
    ranks divide channels among them; ``nn.SyncBatchNorm`` counts these parts once. A rank that does not answer within
    ``timeout`` seconds is an error on all others. ``passes`` computes a rank's own convolutions, by default torch.

    Every rank wraps the same module with the same weights, and runs the same program. Names, shapes, types, modes and
    all values of parameters and buffers are compared bit by bit among the ranks of an image, and among those along the
    dimensions ``replicas`` of the mesh, such as that of data parallelism. With ``broadcast`` the first of these ranks
    gives the others its values first, in place. In each of four ranks:

    >>> mesh = torch.distributed.init_device_mesh("cuda", (4,), mesh_dim_names=("h",))  # doctest: +SKIP
    >>> parallel = SpatialParallel(model, mesh, dims=("h",))  # doctest: +SKIP
    >>> y = parallel(parallel.scatter(x))  # doctest: +SKIP
    >>> loss = criterion(parallel.gather(y), target)  # doctest: +SKIP
    >>> loss.backward()  # doctest: +SKIP

    There ``x`` is the same on every rank (or put together by :meth:`shard`), and weights have the same gradients as on
    one device.

    The module's forward runs unchanged, with :class:`Shard` as inputs. Parameters, buffers and ``state_dict`` are the
    module's own, under their own names. Gradients of parameters are those of the whole image, on every rank. All ranks
    must have the same random numbers (``torch.manual_seed``).

    Raises ``ValueError`` naming the argument at fault, :class:`~tilewise.comm.agreement.RankMismatch` on every rank
    where their models, weights, meshes or dims differ, with the first difference and the ranks that differ, and
    :class:`~tilewise.comm.link.PeerError` where a rank fails or is silent, here or in any step.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        dims: Sequence[str] = ("h",),
        *,
        replicated: Sequence[str] = (),
        timeout: float = 60.0,
        passes: Passes | None = None,
        broadcast: bool = False,
        replicas: Sequence[str] = (),
    ) -> None:
        super().__init__()
        layers.load()
        have_errors_told()
        names = tuple(dims)
        ranks, grid = among(mesh, names)
        copy = _copy(mesh, names, tuple(replicated))
        _check_replicas(mesh, names, tuple(replicated), tuple(replicas))
        self.dims = names
        link = Link(ranks, timeout, mesh.device_type)
        self.space = Space(link, grid, passes, _spatial(mesh, names), copy, gather=gather, to_dtensor=_to_dtensor)
        self._agreed: set[str] = set()
        self._copies = Copies.of(link, mesh, names, tuple(replicas))
        self._wrap(module)
        head = f"dims={names} replicated={tuple(replicated)} replicas={tuple(replicas)} broadcast={broadcast}"
        head += f" mesh={mesh.mesh.tolist()} {mesh.mesh_dim_names}"
        with link.telling("SpatialParallel"):
            if broadcast:
                compare(self._copies, module, head, values=False)
                equalize(self._copies, module)
            compare(self._copies, module, head)

    def _wrap(self, module: nn.Module) -> None:
        """Take ``module`` in, so that both share parameters, buffers and submodules under the same names."""
        object.__setattr__(self, "module", module)
        # Both share one set of dictionaries, so that whatever walks a module finds the same names in both.
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.training = module.training
        remember(module)
        belong(module, self.space)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`forward` and the hooks of this module. Other ranks are told of an error."""
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            self.space.tell(failed_layer(error), error)
            raise

    @contextlib.contextmanager
    def telling(self, what: str = "its program") -> Iterator[None]:
        """Tell the other ranks of an error that leaves this block, such as one around a training loop.

        They are also told of an error that nobody catches. ``what`` names the block in their message.
        """
        try:
            yield
        except BaseException as error:
            self.space.tell(what, error)
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Inputs that are images are :class:`Shard`."""
        link = self.space.link
        text = self._about((*args, *kwargs.values()))
        inputs = Comparison(link, text, "their inputs")
        # New inputs, and all inputs where the comparison takes no time beside the work, are compared before the step.
        late = text in self._agreed and link.control is not link.sums
        if not late:
            inputs.finish()
            if len(self._agreed) >= MOST_AGREED:
                self._agreed.clear()  # on all ranks at once, as they have agreed on the same inputs
            self._agreed.add(text)
        self.space.parameters = None  # frees the last forward's graph, where nothing else keeps it
        self.space.parameters = Parameters(link, list(self.module.parameters()))
        result = self.module(*args, **kwargs)
        if late:
            inputs.finish()
        return result

    def _about(self, inputs: tuple[Any, ...]) -> str:
        """What all ranks must have alike in a step, as text: the shards' shapes, types and cuts, and the modes."""
        shards = [value for value in inputs if isinstance(value, Shard)]
        modes = f"training={self.training} grad={torch.is_grad_enabled()}"
        return "\n".join([f"{tuple(s.shape)} {s.dtype} cut at {s.spatial.cuts}" for s in shards] + [modes])

    def layout(self, shape: Sequence[int], cuts: Mapping[str, Cuts] | None = None, multiple: int = 1) -> Layout:
        """How a tensor of ``shape`` is cut: at ``cuts`` by dimension, else evenly at multiples of ``multiple``.

        Cut points run from 0 to the size, one more than there are ranks along the dimension. Raises ``ValueError``.
        """
        cuts_by_name = {} if cuts is None else dict(cuts)
        if unknown := set(cuts_by_name) - set(self.dims):
            raise ValueError(f"cuts={cuts}: {sorted(unknown)} not in dims={self.dims}")
        grid, all_points = self.space.grid, []
        for name, dim, ranks in zip(self.dims, grid.dims, grid.shape, strict=True):
            if len(shape) < -dim:
                raise ValueError(f"shape={tuple(shape)}: has no dimension {name!r}")
            points = tuple(cuts_by_name[name]) if name in cuts_by_name else even_cuts(shape[dim], ranks, multiple)
            if points[-1:] != (shape[dim],):
                raise ValueError(f"cuts={cuts}: dimension {name!r} has {shape[dim]} elements")
            all_points.append(points)
        return Layout(grid, tuple(all_points))

    def scatter(self, full: torch.Tensor, cuts: Mapping[str, Cuts] | None = None, *, multiple: int = 1) -> Shard:
        """This rank's part of ``full``, a tensor that is the same on every rank; differentiable.

        Its last dimensions are the spatial ones: images (N, C, H, W), targets (N, H, W). See :meth:`layout`.
        """
        return scatter(full, self.layout(full.shape, cuts, multiple), self.space)

    def shard(self, part: torch.Tensor, shape: Sequence[int], cuts: Mapping[str, Cuts] | None = None) -> Shard:
        """``part``, loaded by this rank itself, as its part of a tensor of ``shape``."""
        return Shard.of(part, self.layout(shape, cuts), self.space)

    def from_dtensor(self, tensor: DTensor) -> Shard:
        """This rank's part of ``tensor``, a ``DTensor`` on the same ranks; differentiable.

        Its placements are ``Shard(dim)`` of the dimension that is cut there, or ``Replicate()``. Raises ``ValueError``;
        see :func:`tilewise.distributed.shards.dtensor.from_dtensor`.
        """
        from tilewise.distributed.shards.dtensor import from_dtensor  # late: see _to_dtensor

        return from_dtensor(tensor, self.space)

    def compare_weights(self) -> None:
        """Compare the ranks' models as at construction, such as after loading a checkpoint; every rank calls it.

        Raises :class:`~tilewise.comm.agreement.RankMismatch` on every rank where they differ.
        """
        compare(self._copies, self.module, f"dims={self.dims}")

    def gather(self, shard: Shard) -> torch.Tensor:
        """The whole of ``shard``, on every rank; differentiable: see :meth:`Shard.gather`."""
        return gather(shard)

    def train(self, mode: bool = True) -> SpatialParallel:
        """Set the mode of the module, and of this one."""
        super().train(mode)
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The ``state_dict`` of the module itself."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a ``state_dict`` into the module itself."""
        return self.module.load_state_dict(*args, **kwargs)


def _to_dtensor(shard: Shard) -> DTensor:
    # Loading torch's DTensor takes seconds, and few programs use one.
    from tilewise.distributed.shards.dtensor import to_dtensor

    return to_dtensor(shard)


def _check_replicas(
    mesh: DeviceMesh, dims: tuple[str, ...], replicated: tuple[str, ...], replicas: tuple[str, ...]
) -> None:
    """Raise ``ValueError`` where ``replicas`` names a dimension that cuts images or is replicated."""
    free = [name for name in mesh.mesh_dim_names or dims if name not in (*dims, *replicated)]
    if not set(replicas) <= set(free):
        raise ValueError(f"replicas={replicas}: names of mesh dimensions with other images, of {free}, would do")


def _spatial(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    """The mesh of ``dims`` alone, in the order that they have in ``mesh``."""
    names = mesh.mesh_dim_names
    return mesh if names is None or len(names) == len(dims) else mesh[tuple(name for name in names if name in dims)]


def _copy(mesh: DeviceMesh, dims: tuple[str, ...], replicated: tuple[str, ...]) -> tuple[int, ...]:
    """The coordinates of this rank along the dimensions ``replicated``. Raises ``ValueError`` for other names."""
    names, here = mesh.mesh_dim_names or dims, mesh.get_coordinate()
    assert here is not None
    free = [name for name in names if name not in dims]
    if not set(replicated) <= set(free):
        raise ValueError(f"replicated={replicated}: names of mesh dimensions that cut no image, of {free}, would do")
    return tuple(here[names.index(name)] for name in replicated)
