"""Data sets made for one test: LMDB databases, images, and layers in Caffe's text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from google.protobuf import text_format
from PIL import Image

from tilewise.frontends.caffe.schema import Datum, LayerParameter


def layer_of(text: str) -> Any:
    """A layer from its text."""
    return text_format.Parse(text, LayerParameter())


@pytest.fixture
def layer() -> Callable[[str], Any]:
    return layer_of


def write_database(path: Path, contents: Iterable[bytes]) -> str:
    """An LMDB database of these records, with keys as Caffe's tools write them."""
    with lmdb.open(str(path), map_size=64 << 20) as environment, environment.begin(write=True) as transaction:
        for number, content in enumerate(contents):
            transaction.put(f"{number:08d}".encode(), content)
    return str(path)


def datum(pixels: np.ndarray, label: int) -> bytes:
    """A record of raw pixels."""
    channels, height, width = pixels.shape
    made = Datum(channels=channels, height=height, width=width, label=label)
    if pixels.dtype == np.uint8:
        made.data = pixels.tobytes()
    else:
        made.float_data.extend(pixels.ravel().tolist())
    return bytes(made.SerializeToString())


@pytest.fixture
def database(tmp_path: Path) -> Callable[..., str]:
    """``database(contents)`` writes an LMDB database and gives its path."""

    def make(contents: Iterable[bytes], name: str = "db") -> str:
        return write_database(tmp_path / name, contents)

    return make


@pytest.fixture
def photographs(tmp_path: Path) -> Callable[..., list[Path]]:
    """``photographs(n)`` writes n smooth images of odd sizes as PNG files."""

    def make(count: int, height: int = 23, width: int = 31, **options: Any) -> list[Path]:
        generator = np.random.default_rng(5)
        paths = []
        for number in range(count):
            coarse = generator.integers(0, 256, (4, 5, 3), np.uint8)
            path = tmp_path / f"image {number}.png"
            Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path)
            paths.append(path)
        return paths

    return make
