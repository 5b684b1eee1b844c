"""Results and gradients have torch's own strides, whatever the layouts of the operands and whoever computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, settings
from tests.nn.test_ranks import run
from tests.sampling import EVERY, some
from torch import nn

import tilewise
from tilewise.nn.layers.geometry import Geometry
from tilewise.nn.layers.strides import torch_strides
from tilewise.plan import Config, Plan
from tilewise.planner import Planner
from tilewise.planner.options import Options
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Split, all_solvers, get

QUICK = frozenset({"fft", "gemm", "lowering_type1", "lowering_type2", "lowering_type3", "micro_batch"})
"""Solvers that compile nothing; ``make test-all`` takes all."""
FORMS = ["contiguous", "channels_last", "permuted", "part", "expanded", "loose"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CUDA = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


@dataclass
class Drawn(Planner):
    """Plans every problem by a solver that ``choose`` picks of those that can, cut in micro-batches or whole."""

    choose: Callable[[int], int]
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        able = [s for s in all_solvers() if (EVERY or s.name in QUICK) and not s.baseline and not s.why_not(problem)]
        found = [self._leaf(problem, s.name) for s in able if not isinstance(s, Split)]
        split = get("micro_batch")
        if isinstance(split, Split) and split in able and problem.batch % 2 == 0:
            child = split.child(problem, problem.batch // 2)
            part = Plan(child.key, "aten", get("aten").version)
            sizes = Config(sizes=(problem.batch // 2,) * 2)
            found.append(Plan(problem.key, split.name, split.version, sizes, (part,), (2,)))
        known = [plan for plan in found if plan is not None]
        plan = known[self.choose(len(known))] if known else Plan(problem.key, "aten", get("aten").version)
        self.names.append(plan.solver)
        return plan

    @staticmethod
    def _leaf(problem: ConvProblem, name: str) -> Plan | None:
        solver = get(name)
        config = next((c for c, _ in solver.offers(problem, None)), None)
        return None if config is None else Plan(problem.key, name, solver.version, config)


@dataclass
class Layer:
    """A drawn convolution with its operands."""

    dims: int
    transposed: bool
    options: dict[str, Any]
    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor | None

    @property
    def function(self) -> str:
        return f"conv_transpose{self.dims}d" if self.transposed else f"conv{self.dims}d"

    def module(self) -> nn.Module:
        channels = (self.x.shape[1], self.w.shape[1] * self.options["groups"])
        if not self.transposed:
            channels = (self.x.shape[1], self.w.shape[0])
        kind = getattr(nn, f"{'ConvTranspose' if self.transposed else 'Conv'}{self.dims}d")
        made: nn.Module = kind(
            *channels, tuple(self.w.shape[2:]), bias=self.b is not None, dtype=self.w.dtype, **self.options
        )
        made.weight = nn.Parameter(self.w)
        if self.b is not None:
            made.bias = nn.Parameter(self.b)
        return made


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers only: a team would take longer to come together than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def formed(draw: Callable[..., Any], shape: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of ``shape`` in a drawn layout; a ``loose`` one has any strides along axes of size 1."""
    form, dims = draw(st.sampled_from(FORMS)), len(shape)
    t = torch.randn(shape, device=device).to(dtype)
    if form == "channels_last":
        order = [0, *range(2, dims), 1]
        return t.permute(order).contiguous().permute([order.index(d) for d in range(dims)])
    if form == "permuted":
        order = draw(st.permutations(range(dims)))
        return t.permute(order).contiguous().permute([order.index(d) for d in range(dims)])
    if form == "part":
        whole = [n + draw(st.integers(0, 2)) for n in shape]
        return torch.randn(whole, device=device).to(dtype)[tuple(slice(n) for n in shape)]
    if form == "expanded":
        axis = draw(st.integers(0, dims - 1))
        return t.narrow(axis, 0, 1).expand(shape)
    if form == "loose":
        strides = [draw(st.sampled_from((s, 1, 2, 7))) if n == 1 else s for n, s in zip(shape, t.stride(), strict=True)]
        return t.as_strided(shape, strides)
    return t


@st.composite
def layers(draw: st.DrawFn, device: str = "cpu") -> Layer:
    dims, transposed = draw(st.sampled_from((1, 2, 2, 3))), draw(st.booleans())
    groups, into, outof = draw(st.sampled_from((1, 1, 2, 3))), draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 3))
    each = lambda *values: [draw(st.sampled_from(values)) for _ in range(dims)]  # noqa: E731
    kernel, stride, dilation, sizes = each(1, 1, 2, 3), each(1, 1, 2), each(1, 1, 2), each(1, 1, 2, 5, 6)
    dilation = [1 if k == 1 else d for k, d in zip(kernel, dilation, strict=True)]  # oneDNN crashes on others
    padding = [min(k - 1, p) for k, p in zip(kernel, each(0, 1), strict=True)]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    # Every one has a result.
    sizes = [max(n, r) for n, r in zip(sizes, reach, strict=True)] if not transposed else sizes
    padding = [p if r > 2 * p else 0 for p, r in zip(padding, reach, strict=True)] if transposed else padding
    dtype = draw(st.sampled_from(DTYPES))
    if transposed and dtype is torch.bfloat16:  # oneDNN crashes where a tap of these meets nothing but padding
        padding = [p if d == 1 else 0 for p, d in zip(padding, dilation, strict=True)]
    weight = [into * groups, outof, *kernel] if transposed else [outof * groups, into, *kernel]
    torch.manual_seed(draw(st.integers(0, 9)))
    x = formed(draw, [draw(st.sampled_from((1, 2, 4))), into * groups, *sizes], dtype, device)
    w = formed(draw, weight, dtype, device)
    b = torch.randn(outof * groups, device=device).to(dtype) if draw(st.booleans()) else None
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return Layer(dims, transposed, {k: v if k == "groups" else tuple(v) for k, v in options.items()}, x, w, b)


def strides_of(compute: Callable[..., torch.Tensor], *operands: torch.Tensor | None) -> list[tuple[int, ...]]:
    """Of the result and the gradients of the operands."""
    inputs = [t for t in operands if t is not None]
    y = compute(*operands)
    found = torch.autograd.grad(y, inputs, torch.randn_like(y))
    return [y.stride(), *(t.stride() for t in found)]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=some(300))
@given(data=st.data())
def test_the_rule_is_torchs(device: str, data: st.DataObject) -> None:
    layer = data.draw(layers(device))
    x, w, options = layer.x, layer.w, layer.options
    none = (0,) * layer.dims
    numbers = (options["stride"], options["padding"], options["dilation"], layer.transposed, none, options["groups"])
    y = torch.convolution(x, w, None, *numbers)
    # On a CPU torch's own backward pass fails for some of the others.
    dy = formed(data.draw, list(y.shape), x.dtype, device) if device == "cuda" else torch.ones_like(y)
    try:
        dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, w, None, *numbers, [True, True, False])
    except RuntimeError as error:
        assert "needs to be contiguous" in str(error)  # noqa: PT017  # torch has no gradients here itself
        reject()
    pads = tuple((p, p) for p in options["padding"])
    geometry = Geometry(layer.dims, numbers[0], pads, numbers[2], numbers[5], layer.transposed, none)
    operands = (tuple(x.shape), x.stride()), (tuple(w.shape), w.stride())
    found = torch_strides(geometry, *operands, tuple(y.shape), x.dtype, x.device)
    found = found if found.given is None else found.given(dy.stride())
    assert (found.result, found.grad_input, found.grad_weight) == (y.stride(), dx.stride(), dw.stride())


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=some(75))
@given(data=st.data())
def test_planned_modules_have_torchs_strides(device: str, data: st.DataObject) -> None:
    layer = data.draw(layers(device))
    plain = layer.module()
    x = layer.x.requires_grad_()
    planner = Drawn(lambda count: data.draw(st.integers(0, count - 1), "solver"))
    model = tilewise.optimize(layer.module(), x, planner=planner)
    assert model.weight.stride() == plain.weight.stride()
    for one in (x, x.detach()):
        with torch.no_grad():
            assert model(one).stride() == plain(one).stride()
    want = strides_of(lambda x, *_: plain(x), x, *plain.parameters())
    assert strides_of(lambda x, *_: model(x), x, *model.parameters()) == want


@pytest.fixture
def in_turns() -> Iterator[Drawn]:
    """The functional operators' planner, which takes one solver after the other."""
    count = iter(range(10**9))
    drawn = Drawn(lambda able: next(count) % able)
    tilewise.nn.set_defaults(planner=drawn)
    yield drawn
    tilewise.nn.set_defaults()


AMBIGUOUS = {
    "a depthwise weight in channels_last": ((2, 32, 12, 12), (32, 1, 9, 9), {"groups": 32}),
    "a weight in channels_last alone": ((2, 4, 6, 6), (6, 4, 3, 3), {"padding": 1}),
    "squeezed planes": ((4, 8, 1, 1), (4, 8, 1, 1), {}),
    "one channel": ((2, 1, 8, 8), (4, 1, 3, 3), {}),
    "one image": ((1, 3, 8, 8), (1, 3, 3, 3), {}),
    "volumes": ((2, 4, 1, 6, 6), (4, 1, 1, 3, 3), {"groups": 4}),
}


def operands_of(name: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    image, weight, options = AMBIGUOUS[name]
    last = torch.channels_last if len(image) == 4 else torch.channels_last_3d
    x, w = torch.randn(image), torch.randn(weight).to(memory_format=last)
    return x.requires_grad_(), w.requires_grad_(), options


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_operators_have_torchs_strides(name: str, in_turns: Drawn) -> None:
    x, w, options = operands_of(name)
    function = f"conv{x.dim() - 2}d"
    want = strides_of(lambda x, w: getattr(F, function)(x, w, **options), x, w)
    for _ in range(3):
        assert strides_of(lambda x, w: getattr(tilewise.nn, function)(x, w, **options), x, w) == want
    session = tilewise.enabled(wait=True, planner=in_turns)
    with session:
        for _ in range(4):
            assert strides_of(lambda x, w: getattr(F, function)(x, w, **options), x, w) == want
    assert set(in_turns.names) - {"aten"}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("flag", ["onednn", "onednn in bf16", "threads"])
def test_strides_follow_the_library_that_torch_would_take_now(flag: str, first: bool, in_turns: Drawn) -> None:
    """Whether oneDNN is on, and there are threads for it, changes from one call to the next.

    For bf16 one thread is enough, and there is oneDNN on some processors only.
    """
    dtype = torch.bfloat16 if flag == "onednn in bf16" else torch.float32
    taken = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    x = torch.randn(2, 6, 3, 6).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(4, 3, 1, 1).to(dtype).as_strided((4, 3, 1, 1), (3, 1, 7, 1)).requires_grad_()
    wants = []
    for on in (first, not first, first):
        torch.set_num_threads(2 if flag == "onednn" or (flag == "threads" and on) else 1)
        with torch.backends.mkldnn.flags(enabled=on or flag == "threads"):  # type: ignore[no-untyped-call]
            wants.append(strides_of(lambda x, w: F.conv2d(x, w, groups=2), x, w))
            for _ in range(2):
                assert strides_of(lambda x, w: tilewise.nn.conv2d(x, w, groups=2), x, w) == wants[-1]
    assert wants[0] == wants[2]
    assert (wants[0] != wants[1]) == taken
    assert set(in_turns.names) - {"aten"}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_compiled_models_have_torchs_strides(name: str, in_turns: Drawn) -> None:
    x, w, options = operands_of(name)
    kind = nn.Conv2d if x.dim() == 4 else nn.Conv3d
    plain = kind(x.shape[1], w.shape[0], tuple(w.shape[2:]), bias=False, **options)
    plain.weight = nn.Parameter(w.detach())
    model = tilewise.optimize(copy.deepcopy(plain), x, planner=in_turns)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    want = strides_of(lambda x, *_: plain(x), x, *plain.parameters())
    assert strides_of(lambda x, *_: compiled(x), x, *model.parameters()) == want
    torch._dynamo.reset()


def test_gradients_match_the_buckets_of_distributed_data_parallel(tmp_path: Path) -> None:
    outputs = run(
        """
import warnings
from tests.nn.test_strides import Drawn
count = iter(range(10**9))
model = nn.Sequential(nn.Conv2d(32, 32, 9, groups=32), nn.Conv2d(32, 4, 1), nn.Conv2d(4, 1, 3))
model = model.to(memory_format=torch.channels_last)
x = torch.randn(2, 32, 14, 14).to(memory_format=torch.channels_last)
ddp = nn.parallel.DistributedDataParallel(model)
tilewise.optimize(ddp, x, planner=Drawn(lambda able: next(count) % able))
replaced = [one.replaced for _, _, one in report(ddp).passes()]
assert sum(replaced) > 4, replaced
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        ddp(x).square().sum().backward()
print([str(one.message) for one in caught if "strides" in str(one.message)])
""",
        tmp_path,
    )
    assert outputs == ["[]\n"] * 2
