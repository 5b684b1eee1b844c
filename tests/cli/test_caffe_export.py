"""``tilewise caffe export``: to torch's files and back to Caffe's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from tilewise.frontends import caffe
from tilewise.frontends.caffe.files import read_weights, write_weights

Run = Callable[..., Result]

TEXT = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "extra" type: "InnerProduct" bottom: "conv" top: "extra" include { stage: "more" }
  inner_product_param { num_output: 2 } }
"""


@pytest.fixture
def net(tmp_path: Path) -> tuple[str, str]:
    """Prototxt and caffemodel of a network of one convolution."""
    model, weights = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    model.write_text(TEXT)
    write_weights(weights, caffe.load(TEXT).weights())
    return str(model), str(weights)


@pytest.mark.parametrize("ending", [".caffemodel", ".h5"])
def test_weights_go_to_torch_and_come_back(run: Run, tmp_path: Path, net: tuple[str, str], ending: str) -> None:
    model, weights = net
    result = run("caffe", "export", "-model", model, f"--weights={weights}", "-output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "1 layers loaded; not in the network: none; not in the file: none" in result.stderr
    assert "class Small(nn.Module):" in (tmp_path / "out.py").read_text()
    back = str(tmp_path / f"back{ending}")
    result = run("caffe", "export", "-model", model, "-state", str(tmp_path / "out.pth"), "-output", back)
    assert result.exit_code == 0, result.output
    want, found = read_weights(weights), read_weights(back)
    assert list(want) == list(found) == ["conv"]
    for mine, theirs in zip(found["conv"], want["conv"], strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(theirs), strict=True)


def test_stages_choose_layers(run: Run, tmp_path: Path, net: tuple[str, str]) -> None:
    model, weights = net
    result = run(
        "caffe", "export", "-model", model, "-weights", weights, "-stage", "more", "-output", str(tmp_path / "out")
    )
    assert result.exit_code == 0, result.output
    assert "not in the file: extra" in result.stderr
    assert "self.extra = nn.Linear(144, 2)" in (tmp_path / "out.py").read_text()


def test_what_is_wrong_is_one_line(run: Run, tmp_path: Path, net: tuple[str, str]) -> None:
    model, weights = net
    result = run("caffe", "export", "-model", model, "-output", "out")
    assert (result.exit_code, "-weights and -state: one of them would do" in result.output) == (2, True)
    result = run("caffe", "export", "-model", model, "-state", weights, "-output", "out")
    assert (result.exit_code, "is no file of torch.save's" in result.output) == (2, True)
