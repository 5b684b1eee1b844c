"""The examples on several devices, small, by two ranks of torchrun's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def examples(cases: list[tuple[str, list[str]]]) -> list[int]:
    """The exit status of each example, by this rank."""
    sys.path.insert(0, str(EXAMPLES))
    return [importlib.import_module(name).main(arguments) for name, arguments in cases]


@pytest.mark.slow
def test_examples_agree_with_one_device(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    image = tmp_path / "decoded.rgb"
    cases = [
        ("unet_spatial", ["--height", "40", "--width", "32", "--channels", "4", "--steps", "3"]),
        ("volume_spatial", ["--size", "12", "--channels", "2", "--steps", "3"]),
        ("decode_spatial", ["--height", "6", "--width", "5", "--channels", "4", "--check", "1", "-o", str(image)]),
    ]
    assert run(2, examples, cases) == [[0, 0, 0], [0, 0, 0]]
    pixels = np.fromfile(image, np.uint8).reshape(48, 40, 3)
    assert pixels[:24].std() > 1
    assert pixels[24:].std() > 1
