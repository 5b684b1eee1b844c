"""Traces of steps: memory against what torch's allocator really handed out, kernels against the layers there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewise.distributed.mesh.cost import Cluster, MeshShape, Timed, step_cost
from tilewise.distributed.mesh.events import Freed, Gradient, Kernel, StepTrace
from tilewise.distributed.mesh.trace import trace_step
from tilewise.frontends.layers import convolution_layers
from tilewise.nn.memory.meter import CpuMeter
from tilewise.nn.step.step import Step
from tilewise.problems.conv.problem import ConvProblem, Pass


class Free:
    """Everything at once and for nothing."""

    launch_ms = 0.0

    def problem(self, problem: ConvProblem, whole: ConvProblem) -> Timed:
        return Timed(0.0)

    def other_ms(self, nbytes: float, flops: float, dtype: str) -> float:
        return 0.0


class Net(nn.Module):
    """What segmentation and classification networks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 24, 3, padding=2, dilation=2, bias=False)
        self.group = nn.GroupNorm(4, 24)
        self.up = nn.ConvTranspose2d(24, 8, 2, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = self.group(self.down(F.max_pool2d(x, 2)))
        y = F.interpolate(y, scale_factor=2.0, mode="bilinear")
        y = self.up(y)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Flat(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 3))


def kernels(trace: StepTrace) -> Iterator[Kernel]:
    return (event for event in trace.events if isinstance(event, Kernel))


def first() -> nn.Module:
    return nn.PReLU(16)


NETS = [
    nn.Sequential(first(), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
    nn.Sequential(first(), nn.GroupNorm(4, 16), nn.SiLU()),
    nn.Sequential(first(), nn.MaxPool2d(3, 2), nn.AvgPool2d(2)),
    nn.Sequential(first(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(2)),
    nn.Sequential(first(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", NETS, ids=lambda m: type(m[1]).__name__)
def test_memory_on_one_device_is_what_the_allocator_hands_out(model: nn.Module, training: bool) -> None:
    predicted, measured = peaks(model, training)
    assert predicted == pytest.approx(measured, rel=0.01)


def test_memory_with_convolutions_is_no_more_than_measured() -> None:
    for layer in (
        nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ConvTranspose2d(16, 8, 2, 2)
    ):  # fmt: skip
        predicted, measured = peaks(nn.Sequential(layer, nn.ReLU()), True)
        assert 0.8 * measured <= predicted <= 1.01 * measured  # torch's CPU library has memory of its own


def peaks(model: nn.Module, training: bool) -> tuple[int, int]:
    """A step's peak by the model and as measured."""
    x = torch.randn(4, 16, 48, 48)
    trace = trace_step(model, x, device="cpu", training=training)
    cost = step_cost(trace, MeshShape(1, (("h", 1), ("w", 1))), Cluster(), Free(), 4)
    assert cost.memory.gradients == (sum(p.nbytes for p in model.parameters()) if training else 0)
    step = Step(model, [x], None, training=training)
    return cost.memory.total, CpuMeter(step.held).traced(step, step).peak


def test_every_convolution_is_there_with_its_passes() -> None:
    model, x = Net(), torch.randn(4, 3, 64, 64)
    trace = trace_step(model, x, device="cpu")
    forward = [k for k in kernels(trace) if k.problems and not k.backward]
    layers = convolution_layers(model, x)
    assert [k.layer for k in forward] == [call.name for call in layers] == ["stem", "down", "up"]
    assert [k.problems[0].pass_ for k in forward] == [Pass.FPROP, Pass.FPROP, Pass.DGRAD]
    backward = {k.layer: [p.pass_ for p in k.problems] for k in kernels(trace) if k.problems and k.backward}
    assert backward == {
        "up": [Pass.FPROP, Pass.WGRAD], "down": [Pass.DGRAD, Pass.WGRAD], "stem": [Pass.WGRAD],
    }  # fmt: skip
    assert [k.operator for k in kernels(trace) if k.readers and not k.problems] == [
        "max_pool2d_with_indices", "upsample_bilinear2d", "upsample_bilinear2d_backward",
        "max_pool2d_with_indices_backward",
    ]  # fmt: skip
    graded = sum(event.nbytes for event in trace.events if isinstance(event, Gradient))
    assert graded == trace.gradients == sum(p.nbytes for p in model.parameters())
    assert any(isinstance(event, Freed) for event in trace.events)
    assert trace.parameters == trace.gradients + sum(b.nbytes for b in model.buffers())


def test_sums_over_space_and_gathers_are_found() -> None:
    trace = trace_step(Net(), torch.empty(4, 3, 64, 64, device="meta"), device="cpu")
    sums = {k.operator: k.sums for k in kernels(trace) if k.sums}
    assert sums["native_batch_norm"] == sums["native_batch_norm_backward"] == 2 * 16 * 4
    assert sums["native_group_norm"] == sums["native_group_norm_backward"] == 2 * 4 * 4 * 4
    assert sums["mean"] == 4 * 8 * 4
    assert not [k for k in kernels(trace) if k.gathered]
    flat = trace_step(Flat(), torch.empty(2, 3, 8, 8, device="meta"), device="cpu")
    assert [k.gathered.shape for k in kernels(flat) if k.gathered] == [(2, 4, 8, 8)]


def test_a_model_keeps_its_state() -> None:
    model = Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    trace_step(model, torch.empty(2, 3, 32, 32), device="cpu")
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (nn.Conv2d(3, 4, 3), torch.empty(2, 3), "example"),
        (nn.LazyConv2d(4, 3), torch.empty(2, 3, 8, 8), "lazy"),
        (nn.Conv2d(3, 4, 3).double(), torch.empty(2, 3, 8, 8, dtype=torch.float64), "float64"),
        (Reads(), torch.empty(2, 3, 8, 8), "without data"),
        (nn.Conv2d(5, 4, 3), torch.empty(2, 3, 8, 8), "does not run"),
    ],
)
def test_what_cannot_be_traced_is_said(model: nn.Module, example: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trace_step(model, example, device="cpu")
