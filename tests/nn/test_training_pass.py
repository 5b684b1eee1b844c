"""Norms and gates of ReLU in the graphs of compiled training steps: what is rewritten, and that gradients stay."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.nn.dividing import Dividing
from tests.nn.fresh_dynamo import fresh_dynamo as fresh_dynamo
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.nn.layers.inductor import channel_sums
from tilewise.nn.layers.inductor.channel_sums import GRADIENT_TILE, MOMENTS_TILE, Division
from tilewise.nn.layers.inductor.norm_sums import sum_by_kernels
from tilewise.nn.layers.inductor.relu_gates import compute_gates_anew

aten = torch.ops.aten
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
LAST = torch.channels_last


class Residual(nn.Module):
    """Norms with a ReLU behind them, with a sum before it, and two that share a gate."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.beside = nn.Conv2d(3, 8, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8, affine=affine) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.norms[2](self.beside(x)))


def model(affine: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = Residual(affine).to(memory_format=LAST)
    for each in made.parameters():
        nn.init.normal_(each, 0.5, 0.5)
    return made


def images(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, 7, 5, generator=generator).contiguous(memory_format=LAST)


def backend(rewrite: Callable[[Graph], None]) -> Any:
    """A compiler that rewrites the joint graph as Inductor would, and runs both of its parts operator by operator."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.pattern_matcher import stable_topological_sort

    def divided(graph: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
        joint_graph_passes(graph)
        rewrite(graph.graph)
        stable_topological_sort(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return min_cut_rematerialization_partition(graph, inputs, **more)

    from functorch.compile import make_boxed_func

    def as_it_is(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=divided, decompositions=select_decomp_table()
    )


def trained(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype | None = None) -> Any:
    """The result of a step, all gradients and all running statistics."""
    module.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = call(x)
    y.double().square().sum().backward()
    return [t.detach().double() for t in (y, *(p.grad for p in module.parameters()), *module.buffers())]  # type: ignore[union-attr]


def assert_close(got: list[Tensor], want: list[Tensor], limit: float) -> None:
    for mine, its in zip(got, want, strict=True):
        assert (mine - its).norm() <= limit * its.norm().clamp(min=1.0)


class Counting:
    """Both rewritings, and how often each found something."""

    def __init__(self, least: int = 1) -> None:
        self.least, self.gates, self.sums = least, 0, 0

    def __call__(self, graph: Graph) -> None:
        self.gates += compute_gates_anew(graph)
        self.sums += sum_by_kernels(graph, self.least)


@pytest.mark.parametrize(("affine", "gates"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rewritten_steps_are_torchs(affine: bool, gates: int, dtype: torch.dtype | None) -> None:
    x, module = images(), model(affine)
    exact, plain = copy.deepcopy(module).double(), copy.deepcopy(module)
    counting = Counting()
    got = trained(module, torch.compile(module, backend=backend(counting)), x, dtype)
    # Three norms' moments, and their gradients' sums: where a ReLU follows at once, only with a gate that is known.
    assert (counting.gates, counting.sums) == (gates, 5 + gates)
    want = trained(exact, exact, x.double())
    if dtype is None:
        assert_close(got, want, 1e-5)
        return
    theirs = trained(plain, torch.compile(plain, backend=backend(lambda graph: None)), x, dtype)
    for mine, its, true in zip(got, theirs, want, strict=True):
        assert (mine - true).norm() <= 2 * (its - true).norm() + 1e-2 * true.norm()


def test_checkpointing() -> None:
    """What is computed again in backward has the same sums and gates, and moves running statistics once."""
    module, x, counting = model(), images(), Counting()
    exact = copy.deepcopy(module).double()

    def call(t: Tensor) -> Any:
        return checkpoint(module, t, use_reentrant=False)

    got = trained(module, torch.compile(call, backend=backend(counting)), x)
    assert (counting.gates, counting.sums) == (1, 6)
    assert_close(got, trained(exact, exact, x.double()), 1e-5)


def test_what_is_left_alone() -> None:
    x = images()
    small, contiguous, evaluating = Counting(least=10**6), Counting(), Counting()
    module = model()
    trained(module, torch.compile(module, backend=backend(small)), x)
    assert (small.gates, small.sums) == (1, 0)
    torch._dynamo.reset()
    module = model().to(memory_format=torch.contiguous_format)
    trained(module, torch.compile(module, backend=backend(contiguous)), x.contiguous())
    assert contiguous.sums == 0
    torch._dynamo.reset()
    module = model().eval()
    want = trained(exact := copy.deepcopy(module).double(), exact, x.double())
    # Running statistics are no reason for backward to read a norm's input; sums there may be by kernels all the same.
    assert_close(trained(module, torch.compile(module, backend=backend(evaluating)), x), want, 1e-5)
    assert evaluating.gates == 0


def saved_elements(rewrite: Callable[[Graph], None]) -> int:
    """Elements of the images that a step keeps for backward."""
    module, x, sizes = model(), images(), list[int]()

    def note(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        torch.compile(module, backend=backend(rewrite))(x)
    return sum(n for n in sizes if n > x.shape[1] * 64)


def test_a_gate_saves_no_more_for_backward() -> None:
    assert 0 < saved_elements(Counting()) <= saved_elements(lambda graph: None)


@COMPILER
def test_a_planned_model_in_training() -> None:
    """The pass runs where a layer of ours is in the graph, behind passes of the user's."""
    import torch._inductor.config as inductor

    x, module = images(), model()
    exact, alone = copy.deepcopy(module).double(), copy.deepcopy(module)
    seen: list[Any] = []
    gates: list[Any] = []

    def joint(graph: Graph) -> None:
        seen.append(graph)

    def afterwards(graph: Graph) -> None:
        gates.extend(node.args[0].target for node in graph.find_nodes(op="call_function", target=aten.le.Scalar))

    with inductor.patch(joint_custom_post_pass=joint, post_grad_custom_post_pass=afterwards, force_disable_caches=True):
        trained(alone, torch.compile(alone), x)
        before = list(gates)
        gates.clear()
        planned = tilewise.optimize(module, x, planner=Dividing())
        got = trained(planned, torch.compile(planned), x)
    assert len(seen) == 2
    assert sum(target is aten.add.Tensor for target in gates) == 1
    assert not any(target is aten.add.Tensor for target in before)
    assert_close(got, trained(exact, exact, x.double()), 1e-5)


def test_the_digest_tells_passes_apart() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from tilewise.nn.layers.inductor.training_pass import TrainingPass, install

    class Named(CustomGraphPass):
        def __call__(self, graph: Graph) -> None: ...

        def uuid(self) -> str:
            return "named"

    names = [TrainingPass().uuid(), TrainingPass(sums=True).uuid(), TrainingPass(Named()).uuid()]
    assert None not in names
    assert len(set(names)) == 3
    assert TrainingPass([Named(), lambda graph: None]).uuid() is None
    compiler = torch._TorchCompileInductorWrapper("reduce-overhead", None, False)
    assert install(compiler)
    installed = compiler.config["joint_custom_post_pass"]
    assert installed.sums
    assert install(compiler)
    assert compiler.config["joint_custom_post_pass"] is installed
    assert not install(lambda graph, inputs: graph)


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator) + 30 * torch.randn(1, shape[1], 1, 1, generator=generator)
    return made.to(dtype).contiguous(memory_format=LAST)


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 3), st.integers(2, 70), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float16]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_kernels(n: int, c: int, h: int, w: int, dtype: torch.dtype, gated: bool, seed: int) -> None:
    x, dy = numbers(seed, (n, c, h, w), dtype), numbers(seed + 1, (n, c, h, w), dtype)
    division = Division.of(x, MOMENTS_TILE)
    parts = torch.full((division.splits, 2, c), float("nan"))
    channel_sums.run("moments", division, [x], parts)
    less = x.double() - x[:1, :, :1, :1].double()
    want = torch.stack([less.sum((0, 2, 3)), (less * less).sum((0, 2, 3))])
    scale = torch.stack([less.abs().sum((0, 2, 3)), want[1]])
    assert ((parts.double().sum(0) - want).abs() <= 1e-5 * scale).all()

    rows = [torch.randn(c, generator=torch.Generator().manual_seed(seed + k)) for k in range(5)]
    gate = rows[1:] if gated else []
    division = Division.of(x, GRADIENT_TILE)
    parts = torch.full((division.splits, 2, c), float("nan"))
    channel_sums.run("gradient_sums", division, [dy, x, rows[0], *(gate or [rows[0]] * 4)], parts, GATED=gated)
    want = torch.ops.tilewise.channel_gradient_sums(dy, x, rows[0], gate).double().sum(0)
    apart = (x.double() - rows[0].double().view(1, -1, 1, 1)).abs()
    scale = torch.stack([dy.double().abs().sum((0, 2, 3)), (dy.double().abs() * apart).sum((0, 2, 3))])
    assert ((parts.double().sum(0) - want).abs() <= 1e-5 * scale).all()


def test_gated_sums_are_those_of_a_relu() -> None:
    """The operator beside autograd's own gradients of a norm and a ReLU."""
    x, dy = (torch.randn(2, 5, 4, 3, dtype=torch.float32, device="cpu").contiguous(memory_format=LAST) for _ in "xy")
    mean, scale = x.mean((0, 2, 3)), x.var((0, 2, 3)).rsqrt()
    weight, bias = torch.randn(5).requires_grad_(), torch.randn(5).requires_grad_()
    centred = (x - mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1)
    torch.relu(centred * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)).backward(dy)
    gate = [mean, scale, weight.detach(), bias.detach()]
    first, second = torch.ops.tilewise.channel_gradient_sums(dy, x, mean, gate).sum(0)
    torch.testing.assert_close(first, bias.grad)
    torch.testing.assert_close(second * scale, weight.grad)


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated: bool) -> None:
    x, mean = numbers(1, (2, 3, 4, 5), torch.float32), torch.randn(3)
    gate = [torch.randn(3) for _ in range(4)] if gated else []
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewise.channel_moments.default, (x,), test_utils=tests)
    torch.library.opcheck(torch.ops.tilewise.channel_gradient_sums.default, (x, x, mean, gate), test_utils=tests)


def test_operators_refuse_what_kernels_cannot_read() -> None:
    x = numbers(1, (2, 3, 4, 5), torch.float32)
    with pytest.raises(ValueError, match="dense images in channels_last, all alike, would do"):
        torch.ops.tilewise.channel_moments(x.contiguous())
    with pytest.raises(ValueError, match="all alike, would do"):
        torch.ops.tilewise.channel_gradient_sums(x.half(), x, torch.zeros(3), [])
    with pytest.raises(ValueError, match="3 each would do"):
        torch.ops.tilewise.channel_gradient_sums(x, x, torch.zeros(2), [])
