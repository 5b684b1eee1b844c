"""What tests of launches from C get: the module, and a driver without a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.kernels.native.standin import COMPILER, Standin, build
from tests.solvers.test_cublas import CUDA, Stand

from tilewise.kernels.native import building, extension
from tilewise.solvers.common import cublas as _cublas
from tilewise.solvers.common.matmul import straight
from tilewise.solvers.lowering import _lowering, _patches, _weight_gradient

STREAM = 0x5713EA


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """The driver without a GPU."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    return Standin(build(tmp_path_factory.mktemp("driver")))


@pytest.fixture(scope="session")
def native(standin: Standin) -> building.Native:
    """The module with that driver."""
    module = extension._loaded(building.EXTENSION, extension._compiled(building.EXTENSION))
    return building.Native(module, module.Driver(str(standin.path)))


@pytest.fixture
def on_standin(native: building.Native, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Standin:
    """Have launches of this process go to the driver without a GPU, on stream :data:`STREAM`."""
    monkeypatch.setattr(building, "_native", lambda: (native, ""))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    standin.begin()
    return standin


@pytest.fixture
def blas(on_standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """The stand-in for cuBLAS, which also gets products of tensors on the CPU; no GPU need be made current."""
    found = Stand()
    monkeypatch.setattr(_cublas, "_load", lambda: (found.library, ""))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    for module in (_lowering, _patches, _weight_gradient):
        monkeypatch.setattr(module, "straight", lambda *args: straight(*args[:-1], CUDA))
    return found
