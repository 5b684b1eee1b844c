"""``transform_param``: from a record's pixels to what a net reads: crop, mean, scale, mirror."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.frontends.caffe.data.images import Colour
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Transform", "colour_of"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def colour_of(parameters: Any, where: str, otherwise: Colour) -> Colour:
    """Which channels ``force_color`` and ``force_gray`` ask for; ``otherwise`` where neither is set."""
    if parameters.force_color and parameters.force_gray:
        raise CaffeError(f"{where}: transform_param has both force_color and force_gray; one of them would do")
    return "color" if parameters.force_color else "gray" if parameters.force_gray else otherwise


class Transform:
    """What ``transform_param`` does to a record. ``where`` begins every message, and names the layer.

    In order, as in Caffe: a window of ``crop_size`` is taken, at a random place in training and from the centre
    otherwise; the mean (of that window, by channel, or one number) is subtracted; ``scale`` multiplies; and with
    ``mirror`` every second record at random is flipped, in testing too.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for parameters that make no sense and for a mean file
    that cannot be read.
    """

    def __init__(self, parameters: Any, training: bool, where: str) -> None:
        self.where, self.training = where, training
        self.scale, self.mirror = np.float32(parameters.scale), bool(parameters.mirror)
        self.crop = int(parameters.crop_size)
        self.mean: Floats | None = None
        if parameters.mean_file:
            if len(parameters.mean_value):
                raise CaffeError(f"{where}: transform_param has both mean_file and mean_value; one of them would do")
            self.mean = _mean(parameters.mean_file, where)
        self.mean_value = np.asarray(list(parameters.mean_value), dtype=np.float32)

    def size(self, shape: tuple[int, ...], record: str) -> tuple[int, int, int]:
        """The size of a record of shape (channels, height, width) afterwards.

        Raises ``CaffeError`` that names the record where it cannot be transformed.
        """
        here = f"{self.where}: {record}"
        channels, height, width = shape
        if min(channels, height, width) < 1:
            raise CaffeError(f"{here}: its size is {channels}x{height}x{width}; 1 or more of each would do")
        if self.crop and self.crop > min(height, width):
            text = f"crop_size: {self.crop} is larger than the {height}x{width} of the record"
            raise CaffeError(f"{here}: {text}; at most {min(height, width)} would do")
        if self.mean is not None and self.mean.shape != (channels, height, width):
            mean = "x".join(map(str, self.mean.shape))
            raise CaffeError(f"{here}: is {channels}x{height}x{width}, but the mean_file {mean}; equal sizes would do")
        if len(self.mean_value) not in (0, 1, channels):
            text = f"{len(self.mean_value)} times mean_value for {channels} channels"
            raise CaffeError(f"{here}: {text}; one or {channels} would do")
        return (channels, self.crop, self.crop) if self.crop else (channels, height, width)

    def put(self, pixels: Array, out: Floats, draws: npt.NDArray[np.int64]) -> None:
        """Write a record of shape (channels, height, width), checked by :meth:`size`, to ``out`` of the size after it.

        ``draws`` are three random numbers, for row, column and mirroring.
        """
        height, width = pixels.shape[1:]
        top = left = 0
        if self.crop and self.training:
            top, left = int(draws[0]) % (height - self.crop + 1), int(draws[1]) % (width - self.crop + 1)
        elif self.crop:
            top, left = (height - self.crop) // 2, (width - self.crop) // 2
        window = (slice(None), slice(top, top + out.shape[1]), slice(left, left + out.shape[2]))
        target = out[:, :, ::-1] if self.mirror and int(draws[2]) % 2 else out
        if self.mean is not None:
            np.subtract(pixels[window], self.mean[window], out=target, dtype=np.float32)
        elif len(self.mean_value):
            np.subtract(pixels[window], self.mean_value[:, None, None], out=target, dtype=np.float32)
        else:
            target[...] = pixels[window]
        if self.scale != 1:
            np.multiply(target, self.scale, out=target)


def _mean(path: str, where: str) -> Floats:
    """The mean image in a file, of shape (channels, height, width)."""
    from tilewise.frontends.caffe.files import read_mean

    try:
        mean = np.asarray(read_mean(path), dtype=np.float32)
    except OSError as error:
        raise CaffeError(f"{where}: mean_file: {path} cannot be read: {error.strerror or error}") from error
    except CaffeError as error:
        raise CaffeError(f"{where}: mean_file: {error}") from error
    if mean.ndim == 4 and mean.shape[0] == 1:
        mean = mean[0]
    if mean.ndim != 3:
        shape = "x".join(map(str, mean.shape))
        raise CaffeError(f"{where}: mean_file: {path} has shape {shape}; channels x height x width would do")
    return mean
