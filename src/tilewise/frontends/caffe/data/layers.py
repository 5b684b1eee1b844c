"""Which data layer is read how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.frontends.caffe.data.draws import drawn_seed
from tilewise.frontends.caffe.data.dummy import DummyBatches
from tilewise.frontends.caffe.data.hdf5 import Hdf5Batches
from tilewise.frontends.caffe.data.image_list import ImageBatches
from tilewise.frontends.caffe.data.memory import Memory
from tilewise.frontends.caffe.data.records import RecordBatches
from tilewise.frontends.caffe.data.source import Batches, Held, Source, Stream, default_workers
from tilewise.frontends.caffe.data.windows import WindowBatches
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["DATA_LAYERS", "FROM_FILES", "source"]

FROM_FILES: dict[str, Callable[..., Batches]] = {
    "Data": RecordBatches,
    "ImageData": ImageBatches,
    "HDF5Data": Hdf5Batches,
    "WindowData": WindowBatches,
}
DATA_LAYERS = (*FROM_FILES, "MemoryData", "DummyData", "Input")
"""The types of layers that have a source."""
AHEAD = 4
"""Batches that are made ahead where a layer does not say."""


def source(
    layer: Any, phase: str, seed: int | None = None, *, workers: int | None = None, share: tuple[int, int] = (0, 1)
) -> Source:
    """The source of a data layer's tops.

    ``layer`` is a ``LayerParameter`` of a type in :data:`DATA_LAYERS`, ``phase`` is ``"train"`` or ``"test"``. The
    order of records, the crops and what is mirrored follow from ``seed`` alone, whatever the number of ``workers``,
    processes that make batches ahead. Without a seed one is drawn; without a number of workers half as many start as
    there are cores, at most 8, and none for ``HDF5Data``. No process starts before the first batch is asked for.
    ``share`` is a rank and the number of ranks that divide the records among them.

    Only files that the layer names are read. The first record of each is read at once, for the shapes. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the layer, the file and the record.

    ::

        images = source(net.layer[0], "train", seed=1)
        data, label = images.next()
    """
    if phase not in ("train", "test"):
        raise ValueError(f"phase={phase!r}: train or test would do")
    if seed is None:
        seed = drawn_seed()
    training = phase == "train"
    if layer.type in FROM_FILES:
        made = FROM_FILES[layer.type](layer, training, seed, share)
        ahead = int(layer.data_param.prefetch) if layer.type == "Data" else AHEAD
        if workers is None:
            # Rows of HDF5 files are in memory already.
            workers = 0 if layer.type == "HDF5Data" else default_workers()
        return Stream(made, workers, max(1, ahead))
    if layer.type == "DummyData":
        return Stream(DummyBatches(layer, training, seed, share))
    if layer.type == "MemoryData":
        return Memory(layer)
    if layer.type == "Input":
        return Held(_input_shapes(layer))
    raise CaffeError(f"layer {layer.name!r}: type: {layer.type!r} has no source; {', '.join(DATA_LAYERS)} would do")


def _input_shapes(layer: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of an ``Input`` layer's tops: one for all, or one for each."""
    shapes = [tuple(map(int, shape.dim)) for shape in layer.input_param.shape]
    if len(shapes) == 1:
        shapes *= len(layer.top)
    if len(shapes) != len(layer.top):
        text = f"input_param has {len(shapes)} shapes for {len(layer.top)} tops"
        raise CaffeError(f"layer {layer.name!r}: {text}; one, or one for each top, would do")
    return tuple(shapes)
