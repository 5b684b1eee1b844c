"""``plan --gpus``."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
from torch import nn

from tilewise.machine.device import environment
from tilewise.wisdom import Wisdom

FAST = ("--device", "cpu", "--rigor", "estimate")
NET = "mesh_networks:two"


@pytest.fixture(scope="module", autouse=True)
def _factory() -> Iterator[None]:
    module = types.ModuleType("mesh_networks")
    layers = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))  # noqa: E731
    module.two = lambda: (layers(), (4, 64, 32))
    module.volume = lambda: (nn.Conv3d(1, 2, 3, padding=1), (1, 8, 8, 8))
    sys.modules["mesh_networks"] = module
    yield
    del sys.modules["mesh_networks"]


@pytest.fixture(autouse=True)
def _rates(_own_cache: None) -> None:
    """The machine's rates are known, so that nothing is measured."""
    rates = {"copy": 1e6, "fp32": 1e7, "tf32": 1e7, "bf16": 1e7, "fp16": 1e7, "launch": 0.001, "kernel": 0.001}
    Wisdom().remember_profile(environment("cpu").key, rates)


def test_the_document(run, check_document):
    words = ("--gpus", "4", "--batch", "2", "--memory-limit", "1GiB", "--link-bandwidth", "100GB/s", "--json")
    document = check_document(run("plan", NET, *FAST, *words).stdout)
    assert document["schema"] == "tilewise/mesh"
    assert document["input"] == [4, 64, 32]
    assert document["options"]["batch"] == 2
    assert document["links"]["inside"] == {"bandwidth": 1e11, "latency_ms": pytest.approx(0.004)}
    assert document["memory_limit"] == 2**30
    assert document["best"] == document["meshes"][0]
    out = [mesh["reason"] for mesh in document["meshes"] if mesh["cost"] is None]
    assert out == ["a batch of 2 is not divisible by data=4"]
    times = [mesh["cost"]["image_ms"] for mesh in document["meshes"] if mesh["cost"]]
    assert times == sorted(times)
    cost = document["best"]["cost"]
    memory = dict(cost["memory"])
    assert memory.pop("total") == sum(memory.values())


def test_the_table(run):
    result = run("plan", NET, *FAST, "--gpus", "2", "--batch", "1", "--input-size", "128x16")
    assert result.exit_code == 0
    assert "not divisible by data=2" in result.stdout
    assert 'SpatialParallel over dims=("h",)' in result.stdout
    assert "one GPU" in result.stdout


def test_nothing_fits(run):
    result = run("plan", NET, *FAST, "--gpus", "2", "--memory-limit", "1KiB")
    assert result.exit_code == 1
    assert "no mesh of 2 GPUs can be used in 1.0 KiB a GPU" in result.stdout
    assert "the limit is 1.0 KiB" in result.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((NET, "--gpus", "2", "--max-batch", "--memory-limit", "1GiB"), "--max-batch"),
        ((NET, "--gpus", "2", "--pass", "fprop"), "--pass"),
        ((NET, "--link-latency", "1us"), "--link-latency"),
        ((NET, "--gpus", "2", "--link-latency", "soon"), "--link-latency"),
        ((NET, "--gpus", "2", "--node-bandwidth", "0"), "--node-bandwidth"),
        ((NET, "--gpus", "2", "--input-size", "8"), "--input-size"),
        ((NET, "--gpus", "2", "--input-size", "8x0"), "--input-size"),
        ((NET, "--gpus", "0"), "--gpus"),
        (("mb2ic3oc4ih8kh3", "--gpus", "2"), "--gpus"),
        ((NET, "--gpus", "2", "--memory-limit", "lots"), "memory"),
        ((NET, "--gpus", "2", "--rigor", "wisdom_only"), "rigor"),
    ],
)
def test_input_that_makes_no_sense(run, words, named):
    result = run("plan", *words, "--device", "cpu")
    assert result.exit_code == 2
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
