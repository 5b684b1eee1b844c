"""The layer that writes what it reads into a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.frontends.caffe.layers.base import Layer, Shape, Tops
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["HDF5Output"]


@register("HDF5Output")
class HDF5Output(Layer):
    """Writes its bottoms as ``data`` and ``label`` of an HDF5 file at each forward: those of the last one are there.

    Caffe ends at a second forward. A network's file must not be able to write anywhere: ``file_name`` has to lead to a
    place below the current folder, where there is no file yet or an HDF5 file.
    """

    bottoms: ClassVar = (2, 2)
    tops: ClassVar = (0, 0)
    constant: ClassVar = True

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.file_name = str(parameter.hdf5_output_param.file_name)
        if not self.file_name:
            self.fail("hdf5_output_param.file_name is not given; the path of a file would do")
        self._path()

    def _path(self) -> Path:
        """Where the file is. Raises ``CaffeError`` for a place that a network may not write to."""
        from tilewise.frontends.caffe.files.mapped import HDF5, begins_with

        here, path = Path.cwd().resolve(), Path(os.path.realpath(self.file_name))
        if here not in path.parents:
            self.fail(f"file_name = {self.file_name!r} leads out of {here}; a path below the current folder would do")
        if path.exists() and not (path.is_file() and begins_with(path, HDF5)):
            self.fail(f"file_name = {self.file_name!r} is there and no HDF5 file; a new name would do")
        return path

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if not all(shapes) or shapes[0][0] != shapes[1][0]:
            self.fail(f"the bottoms have shapes {shapes[0]} and {shapes[1]}; as many images in both would do")
        return []

    @torch.no_grad()
    def forward(self, data: Tensor, label: Tensor) -> Tops:
        from tilewise.frontends.caffe.files.hdf5 import write_datasets_h5

        arrays = {
            name: x.detach().to(device="cpu", dtype=torch.float32).numpy()
            for name, x in (("data", data), ("label", label))
        }
        write_datasets_h5(self._path(), arrays)
        return ()
