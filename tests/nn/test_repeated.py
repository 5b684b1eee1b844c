"""Repeated calls of a module, recognised in C++: whatever differs from the call before is noticed.

The module is for GPUs; here it is switched on for a CPU.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.kernels.native.standin import COMPILER
from tests.nn.dividing import Dividing, assert_same
from tests.nn.test_native_calls import _on_a_cpu  # noqa: F401  (a fixture)
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise.nn.layers.layer import Layer
from tilewise.nn.layers.repeated import Repeated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


class Conv(nn.Conv2d):
    """A class of its own, which tests may change."""


class Seen(Exception):
    """A call came to Python's table of calls."""


def module(planned: bool, **options: Any) -> Conv:
    """A convolution that C++ has seen a call of, if it is ``planned``."""
    torch.manual_seed(0)
    made = Conv(4, 6, 3, **{"padding": 1, **options})
    if planned:
        tilewise.optimize(made, image(), planner=Dividing(), unplanned="torch")
        with contextlib.suppress(Exception):
            made(image())
    return made


def image(*sizes: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*(sizes or (3, 4, 7, 9))).requires_grad_()


def repeated_of(planned: nn.Module) -> Repeated:
    found = inspect.getclosurevars(planned.forward.__func__).nonlocals["repeated"]  # type: ignore[union-attr]
    assert isinstance(found, Repeated)
    return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that come to Python's table of calls from now on."""
    calls, original = list[object](), Layer.__call__

    def call(self: Layer, *tensors: Any) -> Any:
        calls.append(tensors)
        return original(self, *tensors)

    monkeypatch.setattr(Layer, "__call__", call)
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_repeated_call_needs_no_python(bias: bool, needs_grad: bool, autocast: bool, watched: list[object]) -> None:
    with torch.set_grad_enabled(needs_grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, want, x = module(True, bias=bias), module(False, bias=bias), image()
        got(x), got(x)
        watched.clear()
        y = got(x)
        assert not watched
        expected = want(x)
        assert_same(y, expected)
        assert y.requires_grad is needs_grad
    if needs_grad:
        mine, its = (torch.autograd.grad(each.sum(), x)[0] for each in (y, expected))
        assert_same(mine.to(y.dtype), its.to(y.dtype))


def test_what_torch_computes_needs_no_python_either(watched: list[object]) -> None:
    got, want = module(True), module(False)
    layer = repeated_of(got)._layer
    x = image(2, 4, 5, 5)
    with torch.no_grad():
        got(x), got(x)
        assert layer.latest is not None
        assert layer.latest.run is None  # no plan for this shape
        watched.clear()
        assert torch.equal(got(x), want(x))
    assert not watched


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if getattr(func, "__name__", "") == "conv2d" else found


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if "conv" in str(func) else found


class Marked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if getattr(func, "__name__", "") == "conv2d" else found


def doubled(self: Any, input: torch.Tensor) -> torch.Tensor:
    return 2 * nn.Conv2d._conv_forward(self, input, self.weight, self.bias)


def set_parameter(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def changed(m: nn.Module) -> None:
        setattr(m, name, nn.Parameter(change(getattr(m, name).detach())))

    return changed


def plain_weight(m: nn.Module) -> None:
    weight = m.weight
    del m.weight
    m.weight = (weight.detach() * 2).requires_grad_()


def hidden_weight(m: nn.Module) -> None:
    m.__dict__["weight"] = (m.weight.detach() * 2).requires_grad_()


def parametrized(m: nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(m, "weight", nn.Tanh())


CHANGES: dict[str, Callable[[Any], object]] = {
    "stride": lambda m: setattr(m, "stride", (2, 1)),
    "padding": lambda m: setattr(m, "padding", (0, 2)),
    "padding by name": lambda m: setattr(m, "padding", "valid"),
    "dilation": lambda m: setattr(m, "dilation", (2, 2)),
    "padding mode": lambda m: setattr(m, "padding_mode", "circular"),
    "equal stride": lambda m: setattr(m, "stride", (*m.stride,)),
    "forward of the instance": lambda m: m.__dict__.__setitem__("forward", lambda x: x * 2),
    "helper of the instance": lambda m: setattr(m, "_conv_forward", lambda x, w, b: 2 * nn.functional.conv2d(x, w, b)),
    "no bias": lambda m: setattr(m, "bias", None),
    "doubled weight": set_parameter("weight", lambda w: w * 2),
    "weight of another size": set_parameter("weight", lambda w: w[..., :2].contiguous()),
    "weight in channels_last": set_parameter("weight", lambda w: w.to(memory_format=torch.channels_last)),
    "weight misaligned": set_parameter("weight", lambda w: torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape)),
    "frozen weight": lambda m: m.weight.requires_grad_(False),
    "weight without a parameter": plain_weight,
    "weight before the parameter": hidden_weight,
    "parametrized": parametrized,
    "double": lambda m: m.double(),
    "half": lambda m: m.bfloat16(),
    "conjugate": lambda m: m.to(torch.complex64),
}
INPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "other sizes": lambda x: image(2, 4, 6, 6),
    "other strides": lambda x: x.detach().to(memory_format=torch.channels_last).requires_grad_(),
    "unbatched": lambda x: x.detach()[0].requires_grad_(),
    "no gradient": lambda x: x.detach(),
    "misaligned": lambda x: (
        torch.cat([x.detach().new_zeros(1), x.detach().flatten()])[1:].view(x.shape).requires_grad_()
    ),
    "double": lambda x: x.detach().double().requires_grad_(),
    "bf16": lambda x: x.detach().bfloat16().requires_grad_(),
    "complex": lambda x: x.detach().to(torch.complex64),
    "negated": lambda x: torch._neg_view(x.detach()),
    "subclass": lambda x: x.detach().as_subclass(Marked),
    "expanded": lambda x: x.detach()[:1].expand(3, -1, -1, -1).requires_grad_(),
    "meta": lambda x: x.detach().to("meta"),
    "nothing": lambda x: None,
    "a number": lambda x: 3,
    "wrong channels": lambda x: x.detach()[:, :3],
    "empty": lambda x: x.detach()[:0],
}
STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "function mode": Watching,
    "dispatch mode": Dispatching,
    "default device": lambda: torch.device("cpu"),
    "forward mode": forward_ad.dual_level,
}


def told(run: Callable[[], Any]) -> tuple[str, Any]:
    """What a call gives, or the kind of error that it raises."""
    try:
        return "", run()
    except Exception as error:
        return type(error).__name__, None


def assert_alike(got: Callable[[], Any], want: Callable[[], Any]) -> None:
    (mine, y), (its, expected) = told(got), told(want)
    assert mine == its
    if not its:
        assert type(y) is type(expected)
        assert y.requires_grad is expected.requires_grad
        assert y.stride() == expected.stride()
        if expected.device.type != "meta":
            assert_same(torch.Tensor(y.detach().resolve_neg()) if isinstance(y, Marked) else y,
                        torch.Tensor(expected.detach()) if isinstance(expected, Marked) else expected)  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_module_is_noticed(name: str) -> None:
    got, want, x = module(True), module(False), image()
    got(x)
    assert repeated_of(got).call is not None
    for each in (got, want):
        CHANGES[name](each)
    for _ in range(3):
        assert_alike(lambda: got(x), lambda: want(x))


@pytest.mark.parametrize("name", INPUTS)
def test_another_input_is_noticed(name: str) -> None:
    got, want, x = module(True), module(False), image()
    other = INPUTS[name](x)
    got(x)
    for _ in range(3):
        assert_alike(lambda: got(other), lambda: want(other))
    assert_alike(lambda: got(x), lambda: want(x))


@pytest.mark.parametrize("name", STATES)
def test_another_state_of_torch_is_noticed(name: str) -> None:
    got, want, x = module(True), module(False), image()
    got(x)
    for _ in range(3):
        with STATES[name]():
            assert_alike(lambda: got(x), lambda: want(x))
        assert_alike(lambda: got(x), lambda: want(x))


def test_determinism_is_noticed(watched: list[object]) -> None:
    got, x = module(True), image()
    got(x)
    watched.clear()
    torch.use_deterministic_algorithms(True)
    try:
        got(x)
        assert len(watched) == 1
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("where", ["forward", "_conv_forward", "conv2d", "code", "weight", "getattr"])
def test_changed_code_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the class, the class above it, torch's function, or the very function."""
    got, want, x = module(True), module(False), image()
    got(x)
    before = want(x).detach()
    if where == "conv2d":
        original = nn.functional.conv2d
        monkeypatch.setattr(nn.functional, "conv2d", lambda *a, **k: 2 * original(*a, **k))
    elif where == "forward":
        monkeypatch.setattr(Conv, "forward", doubled)
    elif where == "_conv_forward":
        inner = nn.Conv2d._conv_forward
        monkeypatch.setattr(nn.Conv2d, where, lambda self, x, w, b: 2 * inner(self, x, w, b))
    elif where == "code":
        monkeypatch.setattr(nn.Conv2d._conv_forward, "__code__", code_of_double.__code__)
    elif where == "weight":
        monkeypatch.setattr(Conv, "bias", property(lambda self: self._parameters["bias"] * 2), raising=False)
    else:
        getter = nn.Module.__getattr__
        monkeypatch.setattr(Conv, "__getattr__", lambda self, name: getter(self, name) * 2, raising=False)
    assert not torch.equal(want(x), before)
    for _ in range(3):
        assert_alike(lambda: got(x), lambda: want(x))
    monkeypatch.undo()
    for _ in range(3):
        assert_alike(lambda: got(x), lambda: want(x))


def code_of_double(self: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input * 2


def test_transforms_see_torchs_operators() -> None:
    got, want, x = module(True), module(False), image().detach()
    got(x)
    for m in (got, want):
        m.requires_grad_(False)
    for transform in (lambda m: torch.func.grad(lambda t: m(t).sum()), lambda m: torch.func.vmap(m)):
        given = x if "grad" in str(transform(got)) else x[None]
        assert_alike(lambda given=given, t=transform: t(got)(given), lambda given=given, t=transform: t(want)(given))
    traced = torch.jit.trace(got, x, check_trace=False)
    assert "aten::_convolution" in str(traced.inlined_graph)


def test_plans_that_change_are_noticed() -> None:
    got, want, x = module(True), module(False), image()
    got(x)
    layer = repeated_of(got)._layer
    old = repeated_of(got).entry
    layer.forget()
    assert_alike(lambda: got(x), lambda: want(x))
    assert layer.latest is not old
    tilewise.restore(got)
    assert_alike(lambda: got(x), lambda: want(x))


def test_calls_that_alternate_do_not_teach_each_time() -> None:
    got = module(True)
    made: list[object] = []
    repeated = repeated_of(got)
    for step in range(200):
        got(image(2 + step % 2, 4, 5, 5))
        if not any(call is repeated.call for call in made):
            made.append(repeated.call)
    assert 2 < len(made) < 12


def test_copies_have_their_own_numbers() -> None:
    got, x = module(True), image()
    got(x)
    other = copy.deepcopy(got)
    with torch.no_grad():
        other.weight.mul_(2)
        other.bias.mul_(2)
    assert_same(other(x), 2 * got(x))


def test_a_module_goes_when_nobody_holds_it() -> None:
    got = module(True)
    for _ in range(3):
        got(image()).sum().backward()
    call = weakref.ref(repeated_of(got)._layer)
    del got
    gc.collect()
    assert call() is None


def test_wrong_arguments_are_errors() -> None:
    got, x = module(True), image()
    got(x)
    call: Any = repeated_of(got).call
    for arguments in ((), (got,), (got, x, x)):
        with pytest.raises(TypeError, match="takes the module and its input"):
            call(*arguments)
    assert call(3, x) is None
    assert call(got, 3) is None
    kind = type(call)
    with pytest.raises(TypeError):
        kind(3)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    yield
    torch._dynamo.reset()
