"""Every benchmark runs to its end as a process, in its quick mode, on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from harness import process
from harness.registry import entries
from harness.result import SCHEMA
from tests.forked import ForkedScript
from tests.sampling import EVERY

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = [entry.name for entry in entries()]
LONG = {
    "call_overhead",
    "cct_fig3_network",
    "cct_fig4",
    "cct_fig5",
    "cct_fig9",
    "cct_price",
    "fbfft_figures",
    "fbfft_table3",
    "fbfft_table4",
    "mucudnn_fig1",
    "mucudnn_fig10",
    "mucudnn_fig11",
    "mucudnn_fig9",
    "networks",
    "parallel_planning",
    "patches",
    "planner_time",
    "planning_wait",
    "spatial_accuracy",
    "spatial_scaling",
    "spatial_tables",
    "step_memory",
    "steps",
    "transparent",
    "winograd_tiles",
}
"""Benchmarks whose quick runs take longest, five seconds and more: left to ``make test-all``."""
NOTHING_ON_A_CPU = {
    "branches": "streams",
    "fft_own_vs_library": "transform=own",
    "host_in_place": "the host computes there",
    "mucudnn_fig12": "legacy algorithms",
    "peers_gpu": "CUDA graphs",
    "shared_net": "GPUs",
    "spatial_halos": "fused kernels",
    "spatial_norms": "SyncBatchNorm",
}
"""Benchmarks without a second side on a CPU, and what their message names."""


def begin(*arguments: str, cache: Path) -> ForkedScript:
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    # Without these it would begin again, in a process whose memory allocator is told of them.
    environment |= process.MALLOC
    paths = [str(REPOSITORY / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return ForkedScript(str(REPOSITORY / "benchmarks" / "run.py"), *arguments, environment=environment)


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return begin(*arguments, cache=cache).finished(timeout=240)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, kernels: Path) -> Path:
    """One wisdom for all benchmarks, so that what one measured the next need not."""
    found = tmp_path_factory.mktemp("cache")
    (found / "kernels").symlink_to(kernels)
    return found


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in NOTHING_ON_A_CPU and (EVERY or name not in LONG)]
)
def test_quick_run_gives_both_sides_of_every_ratio(name: str, cache: Path, tmp_path: Path) -> None:
    done = run(name, "--quick", "--device", "cpu", "--json", "--out", str(tmp_path), cache=cache)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == SCHEMA
    assert document["benchmark"] == name
    assert document["rows"] or document["summary"]["notes"], "neither a comparison nor a word on why there is none"
    for row in document["rows"]:
        assert row["baseline"]["value"] > 0
        assert row["ours"]["value"] > 0
        expected = row["baseline"]["value"] / row["ours"]["value"] if row["replaced"] else 1.0
        assert math.isclose(row["ratio"], expected)
    for group in document["summary"]["groups"].values():
        assert group["min"] <= group["geometric_mean"] * (1 + 1e-9)
        assert group["geometric_mean"] <= group["max"] * (1 + 1e-9)
    assert document["machine"]["torch"]
    saved = tmp_path / document["folder"] / f"{name}.json"
    assert json.loads(saved.read_text()) == document
    if importlib.util.find_spec("matplotlib") is not None:
        drawn = "draw" in dir(importlib.import_module(name))
        assert saved.with_suffix(".png").exists() == drawn


@pytest.mark.slow
@pytest.mark.parametrize(("name", "names"), NOTHING_ON_A_CPU.items())
def test_a_missing_side_is_said_and_not_made_up(name: str, names: str, cache: Path, tmp_path: Path) -> None:
    done = run(name, "--quick", "--device", "cpu", "--out", str(tmp_path), cache=cache)
    assert done.returncode == 3
    assert "nothing to measure" in done.stderr
    assert names in done.stderr
    assert not list(tmp_path.rglob("*"))


@pytest.mark.skipif(not EVERY, reason="runs a benchmark four times: in make test-all")
def test_figures_go_on_where_they_stopped(cache: Path, tmp_path: Path) -> None:
    def configurations(sample: int) -> tuple[dict[str, Any], str]:
        options = ("--set", f"sample={sample}", "--set", "kernels=3,5", "--set", "sizes=1")
        done = run(
            "fbfft_figures", "--quick", "--device", "cpu", "--json", "--out", str(tmp_path), *options, cache=cache
        )
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document, done.stderr

    first, _ = configurations(2)
    second, said = configurations(4)
    assert "4 configurations, 2 to measure" in said
    assert second["rows"][:2] == first["rows"]
    assert [row["group"] for row in second["rows"]] == ["3x3", "5x5", "3x3", "5x5"]
    assert len({row["name"] for row in second["rows"]}) == 4
    (saved,) = tmp_path.rglob("*.json")
    document = json.loads(saved.read_text())
    ended_in, other = (row["name"] for row in document["rows"][:2])
    document["rows"] = document["rows"][2:]
    document["summary"]["facts"]["begun"] = [ended_in]
    saved.write_text(json.dumps(document))
    third, said = configurations(4)
    assert said.index(f"1/2 {other}") < said.index(f"2/2 {ended_in}"), "what a run was ended in comes last"
    assert third["summary"]["facts"]["begun"] == []
    stopped = run(
        "fbfft_figures", "--quick", "--device", "cpu", "--json", "--set", "seconds=1", "--set", "sample=4000",
        "--set", "minibatches=1,2,3,4", "--set", "inputs=1,2,3,4", "--set", "outputs=1,2,3,4", cache=cache,
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    document = json.loads(stopped.stdout)
    left = document["summary"]["facts"]["left"]
    assert left + len(document["rows"]) == 768
    assert left > 0
    assert document["summary"]["notes"] == [f"{left} of 768 configurations are not measured yet"]


@pytest.mark.slow
def test_figures_are_measured_in_parts(cache: Path, tmp_path: Path) -> None:
    """Of three parts one process measures two, and another one; a third has the rows of both without measuring."""
    options = ["--quick", "--device", "cpu", "--out", str(tmp_path)]
    options += [word for option in ("sample=3", "sizes=1", "kernels=3") for word in ("--set", option)]
    for part in ("0+2/3", "1/3"):
        done = run("fbfft_figures", *options, "--label", part[0], "--set", f"part={part}", cache=cache)
        assert done.returncode == 0, done.stderr
        (saved,) = tmp_path.rglob(f"*-{part[0]}.json")
        if part == "0+2/3":
            first = json.loads(saved.read_text())["rows"]
            assert len(first) == 2
            # Both begin at once where there are two GPUs: the other process finds nothing yet.
            saved.rename(tmp_path / "aside.json")
    (tmp_path / "aside.json").rename(saved.with_name("fbfft_figures-0.json"))
    assert len(json.loads(saved.read_text())["rows"]) == 1
    done = run("fbfft_figures", *options, "--json", cache=cache)
    assert "3 configurations, 0 to measure" in done.stderr
    document = json.loads(done.stdout)
    assert document["summary"]["facts"]["left"] == 0
    assert [row for row in document["rows"] if row in first] == first
    wrong = run("fbfft_figures", *options, "--set", "part=2/2", cache=cache)
    assert wrong.returncode == 2
    assert "part='2/2': 0/2 for the first of two processes" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("large_kernels", ("passes=fprop,dgrad,wgrad",)), ("fbfft_table4", ("layers=L4", "passes=fprop,dgrad"))],
)
def test_a_run_that_is_ended_keeps_its_rows(name: str, options: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    given = [word for option in options for word in ("--set", option)]
    begun = begin(name, "--quick", "--device", "cpu", "--out", str(tmp_path), *given, cache=cache)
    end = time.monotonic() + 120
    while begun.poll() is None and not list(tmp_path.rglob("*.json")) and time.monotonic() < end:
        time.sleep(0.01)
    begun.kill()
    (saved,) = tmp_path.rglob("*.json")
    document = json.loads(saved.read_text())
    assert document["rows"]
    assert document["summary"]["notes"] == [
        f"ended after {document['rows'][-1]['group']} {document['rows'][-1]['name']}"
    ]


@pytest.mark.skipif(not EVERY, reason="runs a benchmark once more: in make test-all")
def test_a_picture_is_drawn_from_a_saved_result(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("fft1d_speed", "--quick", "--device", "cpu", "--out", str(tmp_path), cache=cache)
    assert done.returncode == 0, done.stderr
    (saved,), (picture,) = tmp_path.rglob("*.json"), tmp_path.rglob("*.png")
    before = picture.read_bytes()
    picture.unlink()
    assert run("--draw", str(saved), cache=cache).returncode == 0
    assert picture.read_bytes() == before
    wrong = run("--draw", str(tmp_path / "none.json"), cache=cache)
    assert wrong.returncode == 2
    assert "none.json" in wrong.stderr


@pytest.mark.skipif(not EVERY, reason="runs a benchmark once more: in make test-all")
def test_table_names_what_ran(cache: Path) -> None:
    done = run("mucudnn_fig9", "--quick", "--device", "cpu", cache=cache)
    assert done.returncode == 0, done.stderr
    assert "mu-cuDNN Figure 9" in done.stdout
    assert "conv2 fprop" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("no_such_benchmark",), "fbfft_table4"),
        (("mucudnn_fig9", "--set", "limit=64 MB?"), "limit='64 MB?'"),
        (("mucudnn_fig9", "--set", "colour=red"), "colour=red"),
        (("mucudnn_fig9", "--set", "batch=-3"), "batch='-3'"),
        (("mucudnn_fig9", "--set", "layer=conv9"), "conv9"),
        (("mucudnn_fig9", "--device", "tpu"), "--device=tpu"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(arguments: tuple[str, ...], names: str, cache: Path) -> None:
    device = () if "--device" in arguments else ("--device", "cpu")
    done = run(*arguments, "--quick", *device, cache=cache)
    assert done.returncode == 2
    assert names in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1


def test_list_names_every_benchmark(cache: Path) -> None:
    done = run("--list", cache=cache)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == NAMES
