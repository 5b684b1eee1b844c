"""Devices by name, and the environment that wisdom is keyed by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tilewise.machine.device import (
    Environment,
    conv_precision,
    cpu_count,
    device_name,
    environment,
    is_capturing,
    torch_device,
)


def test_the_cpu_by_name() -> None:
    assert device_name("cpu") == device_name(torch.device("cpu")) == "cpu"
    assert torch_device("cpu") == torch.device("cpu")
    assert not is_capturing(torch.device("cpu"))


@pytest.mark.parametrize("device", ["meta", "xpu", "mps", torch.device("meta")])
def test_other_accelerators_are_refused(device: str | torch.device) -> None:
    with pytest.raises(ValueError, match=r"device=.*cpu and cuda"):
        device_name(device)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:x", None])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"device=.*cpu or cuda would do"):
        device_name(device)


@pytest.mark.parametrize("name", ["cuda:NVIDIA Nothing 9000", "meta", "", "cpu:0", "cuda:0:1"])
def test_names_of_no_device_here_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"device=.*no such device here"):
        torch_device(name)


def test_an_environment_is_one_line_of_what_is_known() -> None:
    known = Environment("cpu", "Some_CPU/6", "2.13", threads=4)
    assert known.key == "device=cpu hardware=Some_CPU/6 torch=2.13 threads=4"


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
def test_each_number_of_threads_is_an_environment() -> None:
    torch.set_num_threads(1)
    one = environment("cpu")
    assert one == environment("cpu")
    assert one.threads == 1
    assert one.torch == torch.__version__
    assert one.hardware
    assert "\n" not in one.key
    torch.set_num_threads(2)
    assert environment("cpu").key != one.key


def test_cores_are_counted() -> None:
    assert cpu_count() >= 1


PRECISION = ("cuda", "conv"), ("cuda", "matmul"), ("cuda", "all"), ("generic", "all")


@pytest.fixture
def _precision() -> Iterator[None]:
    saved = [torch._C._get_fp32_precision_getter(*where) for where in PRECISION]
    yield
    for where, value in zip(PRECISION, saved, strict=True):
        torch._C._set_fp32_precision_setter(*where, value)


@pytest.mark.usefixtures("_precision")
def test_precision_is_that_of_convolutions() -> None:
    """Not that of matrix products, and inherited where it is not set."""
    for where in PRECISION:
        torch._C._set_fp32_precision_setter(*where, "none")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert conv_precision() == "ieee"
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert conv_precision() == "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch._C._set_fp32_precision_setter("generic", "all", "tf32")
    assert conv_precision() == "ieee"
    torch.backends.cudnn.conv.fp32_precision = "none"
    assert conv_precision() == "tf32"


@pytest.mark.gpu
def test_gpus_are_known_by_name() -> None:
    name = device_name("cuda")
    assert name == f"cuda:{torch.cuda.get_device_name()}"
    assert torch_device(name) == torch_device("cuda") == torch.device("cuda", torch.cuda.current_device())
    known = environment(name)
    assert known.device == name
    assert all((known.hardware, known.driver, known.cuda, known.cudnn, known.triton))
    assert known.threads == 0


@pytest.mark.gpu
def test_a_capture_is_noticed() -> None:
    device = torch.device("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        during = is_capturing(device)
    assert during
    assert not is_capturing(device)
