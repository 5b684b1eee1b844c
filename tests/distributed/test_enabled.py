"""Split images where planning is enabled for all of a program."""

from __future__ import annotations

import os
from pathlib import Path

from tests.forked import run_script

PROGRAM = """
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import tilewise
assert torch.nn.functional.conv2d is not torch.conv2d, "planning is enabled"
from tilewise.distributed import SpatialParallel

dist.init_process_group("gloo", init_method="file://STORE", rank=0, world_size=1)
plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, stride=2))
x = torch.randn(2, 3, 9, 7)
parallel = SpatialParallel(plain, init_device_mesh("cpu", (1,), mesh_dim_names=("h",)), dims=("h",))
y = parallel.gather(parallel(parallel.scatter(x)))
torch.testing.assert_close(y, plain(x))
print("same")
"""


def test_split_images_where_planning_is_enabled_by_the_import(tmp_path: Path) -> None:
    """Functions of torch that are replaced by then are known by what they replace."""
    environment = {
        **os.environ,
        "TILEWISE_ENABLE": "1",
        "TILEWISE_RIGOR": "estimate",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": "src",
    }
    program = PROGRAM.replace("STORE", str(tmp_path / "store"))
    done = run_script("-c", program, environment=environment, has_tilewise=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same"]
