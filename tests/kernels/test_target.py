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
    """First for a GPU that is not here, and into a pack. It is imported into an empty cache. Then Triton has a driver
    of such a GPU, and solvers compile as before a launch.
    """
    import torch
    import triton
    from tests.kernels.recorded import Recorded
    from tests.kernels.test_compile_workers import H100
    from triton.runtime import driver

    from tilewise import execute
    from tilewise.kernels.building.noted import noted
    from tilewise.kernels.building.target import sought
    from tilewise.kernels.packs import carry
    from tilewise.planner import Options
    from tilewise.planner.search.foreseen import compile_all, to_compile

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
    found = to_compile([problem()], Options(batch_sizes="undivided"), Architecture(9, 0))
    found = [(part, plan) for part, plan in found if plan.solver == "depthwise"]  # its kernel takes but a second
    told: list[str] = []
    lost = compile_all(found, Architecture(9, 0), told.append)
    left = sought() is None and driver._active is None
    left = left and (torch.cuda.is_available() or not torch.cuda.is_initialized())
    ahead, noted_ahead = hits.copy(), noted()
    carry.export(Path(sys.argv[1]), carry.used(), ("sm_90",))
    os.environ["TRITON_CACHE_DIR"] += " of another machine"
    imported = carry.import_pack(Path(sys.argv[1]), trust=True, architectures=("sm_90",))
    hits.clear()
    driver.set_active(H100())  # type: ignore[arg-type]
    Recorded.begin()
    for part, plan in found:
        execute.compile_only(plan, part)
    for launch, alignment in Recorded.made:
        launch.compile(alignment)
    print(json.dumps({"lost": lost, "told": told, "noted": noted_ahead, "left": left, "ahead": ahead,
                      "imported": imported.written, "hits": hits}))  # fmt: skip


@pytest.mark.slow
@needs_triton
def test_what_is_compiled_ahead_is_what_a_machine_with_the_gpu_asks_for(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TILEWISE_COMPILE_WORKERS": "0"}
    command = [sys.executable, "-c", "from tests.kernels.test_target import compiled_ahead; compiled_ahead()"]
    command.append(str(tmp_path / "kernels.pack"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["lost"] == {}
    assert made["told"]
    assert made["left"], "the process is as it was"
    assert {name.partition("/")[0] for name in made["noted"]} == {"triton"}
    assert made["ahead"] == [False] * len(made["noted"])
    assert made["imported"] == len(made["noted"])
    assert made["hits"] == [True] * len(made["noted"])


@needs_triton
def test_cuda_kernels_are_kept_under_the_key_of_their_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cuda-core and NVRTC are installed, with or without a GPU."""
    from tilewise.kernels.building import cubins
    from tilewise.kernels.building.noted import noted
    from tilewise.kernels.cuda import launch
    from tilewise.kernels.packs import here
    from tilewise.planner import Options
    from tilewise.planner.search.foreseen import compile_all, to_compile

    if not here.nvrtc():
        pytest.skip("cuda-core or NVRTC is not installed")
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: tmp_path)
    asked: list[str] = []
    path_of = cubins.path_of
    monkeypatch.setattr(
        cubins, "path_of", lambda text, name, compiler: asked.append(name) or path_of(text, name, compiler)
    )
    found = to_compile([problem()], Options(batch_sizes="undivided"), Architecture(9, 0))
    found = [(part, plan) for part, plan in found if plan.solver == "depthwise_fft"]
    assert compile_all(found, Architecture(9, 0)) == {}
    assert set(asked) == {"sm_90a"}, "as a GPU's own kernels are asked for"
    codes = [cubins.load(path) for path in (tmp_path / "cuda").iterdir()]
    assert codes
    assert {here.architecture_of(code or b"") for code in codes} == {"sm_90"}
    assert {f"cuda/{path.name}" for path in (tmp_path / "cuda").iterdir()} <= set(noted())
    assert launch.sought() is None


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

    others = ("depthwise_fft", "fused_lowering", "winograd")
    found = to_compile([parse_layer("g4mb2ic4ih6oc4oh4kh3")], Options(exclude=others), None)
    assert len({part.key for part, _ in found}) > 1, "parts of the batch are problems of their own"
    assert {"aten", "depthwise", "fft"} <= {plan.solver for _, plan in found}
    assert compile_all(found, None) == {}
    assert any(name.startswith("cpu/direct_4-") for name in noted())
