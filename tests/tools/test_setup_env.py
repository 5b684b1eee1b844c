"""The set-up never brings CUDA to a machine without a GPU."""

from __future__ import annotations

import importlib.util
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup_env.py"
CUDA_BUILD = ["torch", "sympy", "nvidia-cublas", "cuda-bindings", "triton"]
CPU_BUILD = ["torch", "sympy", "filelock"]


@pytest.fixture
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installs(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip would have been told, one line a call; nothing is run."""
    lines: list[str] = []
    monkeypatch.setattr(setup_env, "pip", lambda _, *words: lines.append(" ".join(map(str, words))))
    monkeypatch.setattr(setup_env, "make_venv", lambda path: path / "bin" / "python")
    return lines


def index_of_torch(lines: list[str]) -> str | None:
    found = [line for line in lines if "--index-url" in line]
    assert len(found) <= 1
    return found[0].split("--index-url ")[1].split()[0] if found else None


@pytest.mark.parametrize(
    ("gpu", "would", "index"),
    [
        ("no", CUDA_BUILD, "https://download.pytorch.org/whl/cpu"),
        ("no", CPU_BUILD, None),
        ("yes", CUDA_BUILD, None),
    ],
)
def test_torch_comes_from_the_cpu_index_only_where_cuda_would_come_unasked(
    setup_env: ModuleType,
    installs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    gpu: str,
    would: list[str],
    index: str | None,
) -> None:
    monkeypatch.setattr(setup_env, "would_install", lambda *_: would)
    assert setup_env.main(["--gpu", gpu]) == 0
    assert index_of_torch(installs) == index
    assert ("gpu" in installs[-1].split("[")[1]) == (gpu == "yes")
    assert all("-c" in line or "--no-deps" in line for line in installs)
    assert [line for line in installs if "constraints-cpu.txt" in line] == ([] if gpu == "yes" else installs[-1:])


def test_what_torchs_cuda_build_pins_itself_is_pinned_for_its_cpu_build_alone(setup_env: ModuleType) -> None:
    """torch of the usual index asks for one version of triton: a pin of another one beside it cannot be installed."""
    pinned = {
        path: [line.partition("==")[0] for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
        for path in (setup_env.CONSTRAINTS, setup_env.CPU_CONSTRAINTS)
    }
    assert "triton" not in pinned[setup_env.CONSTRAINTS]
    assert pinned[setup_env.CPU_CONSTRAINTS] == ["triton"]


def test_another_index_can_be_named(
    setup_env: ModuleType, installs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "would_install", lambda *_: CUDA_BUILD)
    assert setup_env.main(["--gpu", "no", "--torch-index", "https://mirror.example/cpu"]) == 0
    assert index_of_torch(installs) == "https://mirror.example/cpu"


@pytest.mark.parametrize(
    ("gpu", "would", "said"),
    [
        ("no", ["torch", "numpy"], "no NVIDIA GPU; torch from the usual index, whose build here has no CUDA\n"),
        ("no", CUDA_BUILD, "no NVIDIA GPU; torch from https://download.pytorch.org/whl/cpu\n"),
        ("yes", CUDA_BUILD, "an NVIDIA GPU; torch from the usual index\n"),
    ],
)
def test_it_says_which_torch_comes(
    setup_env: ModuleType,
    installs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: str,
    would: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(setup_env, "would_install", lambda *_: would)
    assert setup_env.main(["--gpu", gpu, "--dry-run"]) == 0
    assert said in capsys.readouterr().err
    assert len(installs) == 1  # of pip itself


def test_dry_run_installs_nothing(setup_env: ModuleType, installs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "would_install", lambda *_: CUDA_BUILD)
    assert setup_env.main(["--gpu", "no", "--dry-run"]) == 0
    assert [line for line in installs if not line.endswith(" pip")] == []


@pytest.mark.parametrize("name", ["nvidia-cublas", "nvidia_nvtx", "NVIDIA-cudnn-cu13", "cuda-toolkit", "triton"])
def test_cuda_packages_are_recognised(setup_env: ModuleType, name: str) -> None:
    assert setup_env.brings_cuda(["torch", name])


@pytest.mark.parametrize("name", ["torch", "cudagraph", "tritonclient2", "numpy"])
def test_other_packages_are_not(setup_env: ModuleType, name: str) -> None:
    assert not setup_env.brings_cuda([name])


@pytest.mark.parametrize(
    ("script", "found"), [("echo 'GPU 0: Some GPU'", True), ("echo 'No devices found.'", False), ("exit 9", False)]
)
def test_a_gpu_is_found_through_the_driver_tool(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, found: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(setup_env.glob, "glob", lambda _: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.has_nvidia_gpu() is found


def test_an_unreachable_cpu_index_says_what_to_do(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_on_index(_: Path, *words: object) -> None:
        if "--index-url" in words:
            raise setup_env.SetupError("failed: pip install")

    monkeypatch.setattr(setup_env, "pip", fail_on_index)
    monkeypatch.setattr(setup_env, "make_venv", lambda path: path / "bin" / "python")
    monkeypatch.setattr(setup_env, "would_install", lambda *_: CUDA_BUILD)
    assert setup_env.main(["--gpu", "no"]) == 1
    assert "TORCH_INDEX" in capsys.readouterr().err


def test_bad_arguments_are_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--gpu", "maybe"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--gpu" in done.stderr
