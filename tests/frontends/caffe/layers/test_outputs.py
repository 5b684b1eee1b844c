"""``HDF5Output``: what it writes, and where it may."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tests.frontends.caffe.layers.nets import net

from tilewise.frontends.caffe.errors import CaffeError

NET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: [2, 3, 2, 2] } } }
layer { name: "y" type: "Input" top: "y" input_param { shape { dim: 2 } } }
layer { name: "double" type: "Power" bottom: "x" top: "double" power_param { scale: 2 } }
layer { name: "out" type: "HDF5Output" bottom: "double" bottom: "y" hdf5_output_param { file_name: "NAME" } }
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_the_last_batch_is_in_the_file_and_can_be_read_as_data(tmp_path: Path) -> None:
    made = net(NET.replace("NAME", "out.h5"))
    for count in (2, 5):
        x, y = torch.randn(count, 3, 2, 2, dtype=torch.float32, device="cpu"), torch.arange(count, device="cpu").float()
        assert made(x, y) == {}
    with h5py.File("out.h5") as file:
        np.testing.assert_array_equal(file["data"][()], 2 * x.numpy())
        np.testing.assert_array_equal(file["label"][()], y.numpy())
    Path("list.txt").write_text("out.h5\n")
    fields = 'hdf5_data_param { source: "list.txt" batch_size: 5 }'
    reader = net(f'layer {{ name: "d" type: "HDF5Data" top: "data" top: "label" {fields} }}')
    reader()
    torch.testing.assert_close(reader.blobs["data"], 2 * x)
    assert [path.name for path in Path().iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("name", ["../out.h5", "/tmp/../out.h5", "link/out.h5", "", "."])
def test_a_network_writes_below_the_current_folder_alone(tmp_path: Path, name: str) -> None:
    Path("link").symlink_to(tmp_path)
    with pytest.raises(CaffeError, match=r"layer 'out' \(HDF5Output\): .*would do"):
        net(NET.replace("NAME", name))
    assert not (tmp_path / "out.h5").exists()


def test_a_file_that_is_no_hdf5_file_is_not_replaced() -> None:
    Path("setup.py").write_text("print()\n")
    with pytest.raises(CaffeError, match=r"file_name = 'setup\.py' is there and no HDF5 file; a new name would do"):
        net(NET.replace("NAME", "setup.py"))
    made = net(NET.replace("NAME", "out.h5"))
    Path("out.h5").write_text("mine")
    with pytest.raises(CaffeError, match="is there and no HDF5 file"):
        made(
            torch.zeros(2, 3, 2, 2, dtype=torch.float32, device="cpu"),
            torch.zeros(2, dtype=torch.float32, device="cpu"),
        )
    assert Path("out.h5").read_text() == "mine"
