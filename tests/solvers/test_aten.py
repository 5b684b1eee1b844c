"""torch's own choice is timed as it runs in a network: nothing of ours may make it slower or larger."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests import toys

from tilewise import solvers
from tilewise.execute import bind
from tilewise.machine.torch_state import framework_flags
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with toys.one_thread():
        yield


def allocated(call: Callable[[], torch.Tensor]) -> int:
    """Bytes of every tensor that torch makes on the way."""
    call()
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


@pytest.mark.parametrize("pass_", [Pass.DGRAD, Pass.WGRAD])
@pytest.mark.parametrize("images", FORMATS)
@pytest.mark.parametrize("filters", FORMATS)
def test_gradients_take_torchs_memory_and_layout(pass_: Pass, images: str, filters: str) -> None:
    """The operator wants the tensor whose gradient it computes; what stands in for it is not copied or converted."""
    axis = Axis(40, 3, before=1, after=1)
    problem = ConvProblem(pass_, 8, 32, 32, (axis, axis), layouts=(images, filters, images))
    x, w, dy = (toys.filled(problem, role) for role in ("x", "w", "y"))
    mask = [pass_ is Pass.DGRAD, pass_ is Pass.WGRAD, False]

    def torchs() -> torch.Tensor:
        return torch.ops.aten.convolution_backward(dy, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)[
            mask.index(True)
        ]

    a, b = (dy, w) if pass_ is Pass.DGRAD else (x, dy)
    bound = bind(toys.leaf("aten", problem), problem, a, b)
    want, got = torchs(), bound(a, b)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()
    assert allocated(lambda: bound(a, b)) == allocated(torchs)


def test_padding_that_torch_does_not_have_is_a_reason() -> None:
    aten = solvers.baseline(ConvProblem)
    for padding in ((1, 0), (0, 2), (-1, -1)):
        assert aten.why_not(ConvProblem(Pass.FPROP, 1, 1, 1, (Axis(8, 3, 1, 1, *padding),)))
    assert not aten.why_not(toys.small())


def test_gradients_on_a_gpu_may_not_be_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    aten, config = solvers.baseline(ConvProblem), toys.leaf("aten", toys.small()).config
    for pass_ in Pass:
        on_gpu = toys.small(pass_, device="cuda:any")
        assert aten.is_deterministic(toys.small(pass_), config)
        assert aten.is_deterministic(on_gpu, config) is (pass_ is Pass.FPROP)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
            assert aten.is_deterministic(on_gpu, config)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", [Pass.DGRAD, Pass.WGRAD])
@pytest.mark.parametrize("images", FORMATS)
@pytest.mark.parametrize("filters", FORMATS)
def test_gradients_on_a_gpu_have_torchs_layout(pass_: Pass, images: str, filters: str) -> None:
    from tilewise.machine.device import device_name

    axis = Axis(16, 3, before=1, after=1)
    problem = ConvProblem(
        pass_, 4, 32, 32, (axis, axis), layouts=(images, filters, images), dtype="fp16", device=device_name("cuda")
    )
    x, w, dy = (toys.filled(problem, role).cuda() for role in ("x", "w", "y"))
    mask = [pass_ is Pass.DGRAD, pass_ is Pass.WGRAD, False]
    want = torch.ops.aten.convolution_backward(dy, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    a, b = (dy, w) if pass_ is Pass.DGRAD else (x, dy)
    got = bind(toys.leaf("aten", problem), problem, a, b)(a, b)
    assert got.stride() == want[mask.index(True)].stride()
    torch.testing.assert_close(got, want[mask.index(True)], rtol=1e-2, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", [Pass.DGRAD, Pass.WGRAD])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_on_a_gpu_run_the_kernels_of_a_steps_backward(pass_: Pass, layout: str, kernel: int) -> None:
    """One conversion more, and torch would seem slower than it is in a step."""
    from tilewise.machine.device import device_name

    axis = Axis(28, kernel, before=kernel // 2, after=kernel // 2)
    problem = ConvProblem(
        pass_, 16, 64, 64, (axis, axis), layouts=(layout, layout, layout), dtype="bf16", device=device_name("cuda")
    )
    x, w, dy = (toys.filled(problem, role).cuda() for role in ("x", "w", "y"))
    mask = [pass_ is Pass.DGRAD, pass_ is Pass.WGRAD, False]
    options = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1, mask)
    a, b = (dy, w) if pass_ is Pass.DGRAD else (x, dy)
    bound = bind(toys.leaf("aten", problem), problem, a, b)
    with framework_flags("cuda", "ieee", deterministic=False):  # benchmark mode: both take the same choice
        bound(a, b)
        ours = kernels_of(lambda: bound(a, b))
        torchs = kernels_of(lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *options))
    assert ours == torchs


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The kernels that ``call`` launches, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type is torch.autograd.DeviceType.CUDA]
