"""Loading compilers ahead: what they keep is then found without reading them."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from tilewise.kernels import compilers
from tilewise.kernels.cuda import launch


def test_what_is_installed_is_loaded_and_no_gpu_is_touched() -> None:
    before = torch.cuda.is_initialized()
    compilers.load()
    assert torch.cuda.is_initialized() == before
    assert ("triton.compiler" in sys.modules) == (importlib.util.find_spec("triton") is not None)


def test_the_names_of_kernels_are_known_then() -> None:
    pytest.importorskip("triton")
    from triton.runtime.cache import triton_key

    compilers.load()
    known = triton_key.cache_info().misses
    triton_key()
    assert triton_key.cache_info().misses == known
    if not launch.unavailable():
        assert launch.compiler.cache_info().currsize == 1


def test_a_compiler_that_is_not_there_is_left_to_those_who_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that plans goes on with what needs no compiling."""
    asked: list[str] = []

    def fails(name: str) -> None:
        asked.append(name)
        raise RuntimeError("no library")

    monkeypatch.setattr(launch, "unavailable", lambda: "")
    monkeypatch.setattr(launch, "compiler", lambda: fails("CUDA C++"))
    if importlib.util.find_spec("triton") is not None:
        monkeypatch.setattr("tilewise.kernels.building.jobs.read_compiler", lambda: fails("Triton"))
    compilers.load()
    assert asked[-1] == "CUDA C++"
