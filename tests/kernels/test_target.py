"""Compiling for a GPU that is not here: what a machine with one finds afterwards, and that nothing is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise.kernels.building.target import Architecture

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def problem() -> Any:
    from tilewise.problems.conv.notation import parse_layer

    return parse_layer("g8mb2ic8ih12oc8oh12kh3ph1", device="cuda:sm_90")


def compiled_ahead() -> None:
    """First for a GPU that is not here. Then Triton has a driver of one, and solvers compile as before a launch."""
    import torch
    import triton
    from tests.kernels.recorded import Recorded
    from tests.kernels.test_compile_workers import H100
    from triton.runtime import driver

    from tilewise import execute
    from tilewise.kernels.building.noted import noted
    from tilewise.kernels.building.target import sought
    from tilewise.planner import Options
    from tilewise.planner.search.foreseen import compile_all, to_compile

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
    found = to_compile([problem()], Options(batch_sizes="undivided"), Architecture(9, 0))
    found = [(part, plan) for part, plan in found if plan.solver == "depthwise"]  # its kernel takes but a second
    told: list[str] = []
    lost = compile_all(found, Architecture(9, 0), told.append)
    left = sought() is None and driver._active is None and not torch.cuda.is_initialized()
    ahead, noted_ahead = hits.copy(), noted()
    hits.clear()
    driver.set_active(H100())  # type: ignore[arg-type]
    Recorded.begin()
    for part, plan in found:
        execute.compile_only(plan, part)
    for launch, alignment in Recorded.made:
        launch.compile(alignment)
    print(json.dumps({"lost": lost, "told": told, "noted": noted_ahead, "left": left, "ahead": ahead, "hits": hits}))


@needs_triton
def test_what_is_compiled_ahead_is_what_a_machine_with_the_gpu_asks_for(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TILEWISE_COMPILE_WORKERS": "0"}
    command = [sys.executable, "-c", "from tests.kernels.test_target import compiled_ahead; compiled_ahead()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["lost"] == {}
    assert made["told"]
    assert made["left"], "the process is as it was"
    assert {name.partition("/")[0] for name in made["noted"]} == {"triton"}
    assert made["ahead"] == [False] * len(made["noted"])
    assert made["hits"] == [True] * len(made["noted"])


def test_architectures_have_names() -> None:
    for name, major, minor in (("sm_90", 9, 0), ("sm_89", 8, 9), ("sm_120", 12, 0)):
        assert Architecture.named(name) == Architecture(major, minor)
        assert Architecture(major, minor).name == name
    assert Architecture(8, 9).instructions == "sm_89"
    assert Architecture(10, 0).instructions == "sm_100a"
    for wrong in ("sm_", "sm_9", "sm_90a", "sm_9000", "90", "cuda", "sm_9²", "sm_-9"):
        with pytest.raises(ValueError, match="such as sm_90, would do"):
            Architecture.named(wrong)


def test_kernels_of_a_cpu_are_compiled_from_tensors_without_memory() -> None:
    """Every candidate, and nothing is run: tensors on the device ``meta`` have no data that could be."""
    pytest.importorskip("numba")
    from tilewise.kernels.building.noted import noted
    from tilewise.planner import Options
    from tilewise.planner.search.foreseen import compile_all, to_compile
    from tilewise.problems.conv.notation import parse_layer

    found = to_compile([parse_layer("mb2ic3ih6oc4oh4kh3")], Options(exclude=("winograd",)), None)
    assert len({part.key for part, _ in found}) > 1, "parts of the batch are problems of their own"
    assert {"aten", "fused_lowering", "fft"} <= {plan.solver for _, plan in found}
    assert compile_all(found, None) == {}
    assert any(name.startswith("cpu/correlations_") for name in noted())
