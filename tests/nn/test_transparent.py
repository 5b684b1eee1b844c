"""Planning while enabled: what is recorded and when it is planned, and that models neither know nor mind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from tests.nn.dividing import Dividing, assert_same
from tests.nn.test_functional import by_torch, layers, tensors
from torch import nn
from torch.nn.functional import conv2d as bound_before
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.nn.script import recorder
from tilewise.plan import Plan
from tilewise.planner import Options
from tilewise.problems.conv.problem import ConvProblem, Pass

NAMES = [f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)]
TORCHS_OWN = {name: getattr(F, name) for name in NAMES}


@pytest.fixture(autouse=True)
def _puts_everything_back() -> Iterator[None]:
    yield
    tilewise.disable()
    assert {name: getattr(F, name) for name in NAMES} == TORCHS_OWN


class Block(nn.Module):
    """A residual block in the style of torchvision's, with one convolution called as a function."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3) / 10)
        self.down = nn.Conv2d(channels, channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(F.relu(self.bn(self.conv1(x))), self.weight, None, padding="same")
        return F.relu(y + self.down(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.blocks = nn.Sequential(Block(4), Block(4, 2))
        self.up = nn.ConvTranspose2d(4, 2, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.blocks(self.stem(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor = IMAGES) -> torch.Tensor:
    """Loss of a training step by plain gradient descent."""
    loss = model(x).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
    return loss.detach()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def planned(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__.startswith("PlannedConv")


def test_three_steps_as_torch_in_float64() -> None:
    plain, model = net().double(), net()
    planner = Dividing()
    with tilewise.enabled(wait=True, planner=planner) as session:
        first = copy.deepcopy(model)
        for index in range(3):
            loss = step(model)
            close(loss.double(), step(plain, IMAGES.double()))
            assert bool(planner.planned) is (index > 0)
    with torch.no_grad():
        assert_same(first(IMAGES), net()(IMAGES))
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        close(mine.double(), its)
    found = session.report()
    assert {one.role for _, _, one in found.passes() if one.replaced} == {"forward", "grad_input", "grad_weight"}
    assert "micro_batch" in str(session)
    assert sum("x2" in layer.name for layer in found.layers) == 1  # the first block has two equal layers


def test_the_first_step_is_torchs_bit_for_bit() -> None:
    plain, model = net(), net()
    want = step(plain)
    with tilewise.enabled(wait=True, planner=Dividing()):
        got = step(model)
    assert torch.equal(got, want)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_every_layer_is_planned_once_at_the_second_steps_first_call() -> None:
    planner = Dividing()
    model = net()
    with tilewise.enabled(wait=True, planner=planner):
        step(model)
        assert not planner.planned
        model.stem(IMAGES)
        everything = list(planner.planned)
        step(model)
        step(model)
    assert planner.planned == everything
    assert len(set(everything)) == len(everything)
    # stem: 2 passes; a block: 3 passes each of conv1, weight, down, some of them equal; up: 3.
    twin, other = net(), Dividing()
    tilewise.optimize(twin, IMAGES, planner=other)
    assert {p for p in other.planned if p.pass_ is not Pass.WGRAD} <= set(everything)


@settings(max_examples=25)
@given(st.booleans().flatmap(lambda t: st.tuples(st.just(t), layers(transposed=t))))
def test_any_layer_as_torch(drawn: tuple[bool, dict[str, Any]]) -> None:
    transposed, c = drawn
    function = f"conv{'_transpose' if transposed else ''}{len(c['size'])}d"
    options = {name: c[name] for name in ("stride", "padding", "dilation", "groups")}
    if transposed:
        options["output_padding"] = c["extra"]
    inputs = [t.requires_grad_() for t in tensors(c, transposed) if t is not None]
    want = TORCHS_OWN[function](*inputs, **options)
    dy = torch.randn_like(want)
    gradients = torch.autograd.grad(want, inputs, dy)
    planner = Dividing()
    with tilewise.enabled(wait=True, planner=planner):
        assert torch.equal(getattr(F, function)(*inputs, **options), want)
        for _ in range(2):
            got = getattr(F, function)(*inputs, **options)
            assert_same(got, want)
            for mine, its in zip(torch.autograd.grad(got, inputs, dy), gradients, strict=True):
                assert_same(mine, its)


def test_what_stood_there_comes_back() -> None:
    outer, inner = tilewise.enabled(wait=True, planner=Dividing()), tilewise.enabled(wait=True, planner=Dividing())

    def body() -> None:
        with outer:
            assert all(getattr(F, name) is not TORCHS_OWN[name] for name in NAMES)
            with inner:
                pass
            assert all(getattr(F, name) is not TORCHS_OWN[name] for name in NAMES)
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        body()
    assert all(getattr(F, name) is TORCHS_OWN[name] for name in NAMES)
    assert torch.conv2d is TORCHS_OWN["conv2d"]


def test_the_innermost_block_counts_and_a_session_may_be_entered_again() -> None:
    x, w = torch.randn(3, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)
    first, second = Dividing(), Dividing()
    outer, inner = tilewise.enabled(wait=True, planner=first), tilewise.enabled(wait=True, planner=second)
    for index in range(2):
        with outer:
            F.conv2d(x, w)
            with inner:
                assert planned(F.conv2d(x, w)) is (index == 1)
    assert len(first.planned) == len(second.planned) == 2


def test_enable_and_disable() -> None:
    x, w = torch.randn(3, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)
    first, second = Dividing(), Dividing()
    tilewise.enable(wait=True, planner=first)
    kept = F.conv2d
    F.conv2d(x, w)
    session = tilewise.enable(wait=True, planner=second)  # in place of the first
    F.conv2d(x, w)
    assert planned(F.conv2d(x, w))
    assert not first.planned
    tilewise.disable()
    tilewise.disable()
    assert F.conv2d is TORCHS_OWN["conv2d"]
    assert not planned(kept(x, w))  # a name bound meanwhile is torch's again
    assert len(session.report().layers) == 1


def test_blocks_of_threads_end_in_any_order() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with tilewise.enabled(wait=True, planner=Dividing()):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with tilewise.enabled(wait=True, planner=Dividing()):
        thread.start()
        assert entered.wait(30)
    assert F.conv2d is not TORCHS_OWN["conv2d"]
    leave.set()
    thread.join()
    assert F.conv2d is TORCHS_OWN["conv2d"]


def test_what_others_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any, **kwargs: Any) -> torch.Tensor:
        return TORCHS_OWN["conv2d"](*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "conv2d", theirs)
        with pytest.warns(UserWarning, match=r"functional\.conv2d is not torch's own"), tilewise.enabled():
            assert F.conv2d is theirs
        assert F.conv2d is theirs
    with tilewise.enabled():  # replaced while enabled: not ours to take away
        ours = F.conv2d
        F.conv2d = theirs
    assert F.conv2d is theirs
    F.conv2d = ours
    with tilewise.enabled():
        pass


def test_a_name_bound_before_stays_torchs() -> None:
    x, w = torch.randn(3, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)
    with tilewise.enabled(wait=True, planner=Dividing()):
        for _ in range(3):
            assert not planned(bound_before(x, w))


def test_a_step_that_raises_midway() -> None:
    plain, model = net(), net()
    with tilewise.enabled(wait=True, planner=Dividing()) as session:
        with pytest.raises(RuntimeError, match="shapes"):
            model.up(model.blocks(model.stem(IMAGES)) @ torch.randn(1, 1))
        for _ in range(3):
            close(step(model), step(plain))
        assert planned(model.up(torch.randn(3, 4, 4, 4, requires_grad=True)))
    assert not [layer for layer in session.report().layers if not layer.replaced and layer.calls[0].shape[0] > 1]


def test_evaluation_accumulation_and_other_shapes_between_steps() -> None:
    plain, model, planner = net(), net(), Dividing()
    with tilewise.enabled(wait=True, planner=planner):
        for _ in range(3):
            for part in (IMAGES, IMAGES[:2]):
                close(step(model, part), step(plain, part))
            with torch.no_grad():
                model.eval(), plain.eval()
                assert_same(model(IMAGES), plain(IMAGES))
                model.train(), plain.train()
        count = len(planner.planned)
        close(step(model), step(plain))
    assert len(planner.planned) == len(set(planner.planned)) == count


def test_weights_made_anew_and_weights_shared() -> None:
    w, planner = torch.randn(2, 2, 3, 3, requires_grad=True), Dividing()
    with tilewise.enabled(wait=True, planner=planner):
        x = torch.randn(3, 2, 5, 5)
        for _ in range(2 * recorder.OFTEN):
            y = F.conv2d(x, w / w.norm(), padding=1)
            assert_same(y, TORCHS_OWN["conv2d"](x, w / w.norm(), padding=1))
        assert planned(y)
        for _ in range(2):
            F.conv2d(F.conv2d(torch.randn(3, 2, 4, 4), w, padding=1), w, padding=1)
    assert len(planner.planned) == len(set(planner.planned))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    plain, model = net(), net()

    def run(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.up(checkpoint(m.blocks, m.stem(x), use_reentrant=reentrant))

    with tilewise.enabled(wait=True, planner=Dividing()) as session:
        for _ in range(3):
            for m in (plain, model):
                m.zero_grad()
                run(m, IMAGES).square().mean().backward()
            for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
                close(mine.grad, its.grad)
    assert any(layer.replaced for layer in session.report().layers)


def test_autocast_channels_last_and_one_image() -> None:
    model = nn.Conv2d(4, 4, 3, padding=1)
    x = torch.randn(3, 4, 6, 6).to(memory_format=torch.channels_last)
    planner = Dividing()
    with tilewise.enabled(wait=True, planner=planner):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
        assert y.dtype is torch.bfloat16
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert {p.dtype for p in planner.planned} == {"bf16"}
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(y, TORCHS_OWN["conv2d"](x, model.weight, model.bias, padding=1))
        for _ in range(3):
            assert_same(model(x[0]), TORCHS_OWN["conv2d"](x[0], model.weight, model.bias, padding=1))


def test_second_derivatives_and_transforms() -> None:
    x, w = torch.randn(3, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)

    def penalty(conv: Callable[..., torch.Tensor]) -> torch.Tensor:
        (g,) = torch.autograd.grad(conv(x, w).square().sum(), w, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)[0]

    def mapped(conv: Callable[..., torch.Tensor]) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda v, one: conv(one, v).square().sum()), (None, 0))(w, x)

    planner = Dividing()
    want = penalty(F.conv2d), mapped(F.conv2d)
    with tilewise.enabled(wait=True, planner=planner):
        for _ in range(3):
            assert_same(mapped(F.conv2d), want[1])
        assert not planner.planned
        for _ in range(3):
            assert_same(penalty(F.conv2d), want[0])
        assert planner.planned


class Logged(torch.Tensor):
    """A subclass that sees every function called with it."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_others_tensors_are_torchs() -> None:
    from torch._subclasses import FakeTensorMode

    w = torch.randn(2, 2, 3, 3)
    with tilewise.enabled(wait=True, planner=Dividing()) as session:
        for _ in range(3):
            assert F.conv2d(torch.empty(3, 2, 5, 5, device="meta"), w.to("meta")).shape == (3, 2, 3, 3)
            with FakeTensorMode() as mode:
                assert F.conv2d(torch.empty(3, 2, 5, 5), mode.from_tensor(w)).shape == (3, 2, 3, 3)
            F.conv2d(torch.randn(3, 2, 5, 5).as_subclass(Logged), w)
            F.conv2d(torch.randn(3, 2, 5, 5).double(), w.double())
            graph = torch.fx.symbolic_trace(lambda x: F.conv2d(x, w))
            assert any(node.target is TORCHS_OWN["conv2d"] for node in graph.graph.nodes)
        assert TORCHS_OWN["conv2d"] in Logged.seen
        layers = session.report().layers
        assert [layer.replaced for layer in layers] == [True, False]  # what only logs is planned, and sees it all
        assert "FakeTensor" in layers[1].reason
        for wrong in ((None, w), (w, None), (torch.randn(3, 5, 5, 5), w), (w, w, None, "two"), (w, w, w)):
            with pytest.raises((RuntimeError, TypeError)) as ours:
                F.conv2d(*wrong)
            with pytest.raises((RuntimeError, TypeError)) as theirs:
                TORCHS_OWN["conv2d"](*wrong)
            assert type(ours.value) is type(theirs.value)


class Failing(Dividing):
    """Raises the first time, as Ctrl-C would."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        if not self.planned:
            self.planned.append(problem)
            raise KeyboardInterrupt
        return super().plan(problem, options)


def test_planning_that_is_interrupted_is_done_at_the_next_call() -> None:
    x, w = torch.randn(3, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)
    with tilewise.enabled(wait=True, planner=Failing()):
        F.conv2d(x, w)
        with pytest.raises(KeyboardInterrupt):
            F.conv2d(x, w)
        assert planned(F.conv2d(x, w))


def test_two_models_in_two_threads() -> None:
    models = [net() for _ in range(4)]
    losses: list[list[torch.Tensor]] = [[] for _ in models]
    want = [step(plain) for plain in [net()] for _ in range(6)]
    planner = Dividing()

    def train(index: int) -> None:
        for _ in range(6):
            losses[index].append(step(models[index], IMAGES.clone()))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(models))]
    with tilewise.enabled(wait=True, planner=planner) as session:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not session.waiting
    for found in losses:
        close(torch.stack(found), torch.stack(want))
    assert len(planner.planned) == len(set(planner.planned)) > 0


def test_optimized_modules_are_left_alone() -> None:
    model, own, other = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)), Dividing(), Dividing()
    x = torch.randn(3, 2, 7, 7)
    tilewise.optimize(model, x, planner=own, filter_fn=lambda name, _: name == "0")
    with tilewise.enabled(wait=True, planner=other):
        for _ in range(3):
            y = model(x)
    assert planned(y)
    assert {p.axes[0].size for p in other.planned} == {5}


def test_compiled_and_scripted_models() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))
    x = torch.randn(3, 2, 7, 7)
    want = model(x)
    with tilewise.enabled(wait=True, planner=Dividing()):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_same(compiled(x), want)
        assert not planned(compiled(x))  # nothing is recorded or planned while tracing
        for _ in range(2):
            model(x)
        torch._dynamo.reset()
        names: list[Any] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            names.extend(node.target for node in graph.graph.nodes)
            return graph.forward

        assert_same(torch.compile(model, backend=backend, fullgraph=True)(x), want)
        assert names.count(torch.ops.tilewise.conv) + names.count(torch.ops.tilewise.conv.default) == 2
        torch._dynamo.reset()
        traced = torch.jit.trace(model, x)
        assert "tilewise::" not in str(traced.inlined_graph)
        scripted = torch.jit.script(model)
        assert_same(scripted(x), want)
        assert "aten::conv2d" in str(scripted.inlined_graph)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Using padding")
def test_nothing_of_the_first_call_sticks_to_the_weights_place() -> None:
    """A weight's ``id`` may come again with another weight, padding named, kernels of other sizes."""
    x = torch.randn(3, 2, 6, 6)
    with tilewise.enabled(wait=True, planner=Dividing()):
        for k in (1, 3, 5, 3, 1, 2, 4):
            for _ in range(3):
                w = torch.randn(2, 2, k, k)
                assert_same(F.conv2d(x, w, padding="same"), by_torch(F.conv2d)(x, w, padding="same"))
                assert_same(F.conv2d(x, w, padding="same"), TORCHS_OWN["conv2d"](x, w, padding="same"))
                del w
