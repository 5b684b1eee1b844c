"""Bound plans whose kernels are queued by one call from C, against a driver without a GPU."""

from __future__ import annotations

import gc
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests import toys
from tests.kernels.native.conftest import STREAM
from tests.kernels.native.standin import Standin, words

from tilewise import execute
from tilewise.execute import bind
from tilewise.kernels.native import building
from tilewise.kernels.native.sequence import Address, KernelLaunch, LaunchSequence
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

FIRST, SECOND, OUT, WORKSPACE, BIAS = range(5)
CALLS: list[Any] = []
"""The functions that a hook of the launches holds; anything in it has plans called from Python."""


class Watcher:
    """An owner of one hook."""

    def __init__(self) -> None:
        self.chain = type("Chain", (), {"calls": CALLS})()


WATCHER = Watcher()


class Run:
    """A solver's run that is said to be two kernels."""

    def __init__(self, standin: Standin, p: ConvProblem, run: Any) -> None:
        self._run, self._bias = run, p.bias
        tensors = [Address(FIRST, 4), Address(OUT, 0), struct.pack("=i", p.in_channels), Address(SECOND, 0)]
        function = standin.function([8, 8, 4, 8])
        first = KernelLaunch(function, (1, 1, 1), (32, 1, 1), 0, (), tuple(tensors))
        more = [Address(WORKSPACE, 256), *([Address(BIAS, 0)] if p.bias else [])]
        second = first._replace(function=standin.function([8] * len(more)), parameters=tuple(more))
        self.sequence = LaunchSequence((first, second), -1, ((WATCHER, "chain"),))
        self.run_pointers = run.run_pointers

    def __call__(self, *tensors: Any) -> Any:
        return self._run(*tensors)


class Launching(toys.Addressed):
    """A toy that computes from Python and, from C, tells the driver of two kernels."""

    name = "launching"
    standin: Standin

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Any:
        return Run(self.standin, p, super().bind(p, c, a, b, out))


class LaunchingBiased(Launching):
    """The same, adding the bias itself."""

    name = "launching_biased"
    adds_bias = True


@pytest.fixture(autouse=True)
def _toys(on_standin: Standin) -> Iterator[None]:
    Launching.standin = on_standin
    with toys.installed(toys.Cut(), toys.Addressed(), Launching(), LaunchingBiased()), toys.one_thread():
        yield
    CALLS.clear()


def problem(pass_: Pass = Pass.FPROP, **changes: Any) -> ConvProblem:
    return ConvProblem(pass_, 6, 3, 5, (Axis(7, 3, 1, 1), Axis(6, 3)), **changes)


def leaf(p: ConvProblem, name: str = "launching") -> Plan:
    return Plan(p.key, name, 1)


def cut(p: ConvProblem, names: Sequence[str], axis: str = "batch") -> Plan:
    """A plan that cuts ``p`` in equal parts, one a leaf."""
    sizes = (p.extent(axis) // len(names),) * len(names)
    parts = p.split(axis, sizes)
    children = tuple(leaf(part.problem, name) for part, name in zip(parts, names, strict=True) if part.problem)
    return Plan(p.key, "cut", 1, Config(axis=axis, sizes=sizes), children, (1,) * len(names))


def tensors(p: ConvProblem) -> list[torch.Tensor]:
    return [torch.randn(p.shape(role), dtype=p.torch_dtype(role), device="cpu") for role in (*p.operands, p.result)]


def told_tensors(standin: Standin) -> list[tuple[int, ...]]:
    """Of each pair of launches, where it was told that the first operand, the result and the second operand are."""
    found = []
    for told in standin.told()[::2]:
        assert told.stream == STREAM
        first, out, _, second = struct.unpack("=QQiQ", told.parameters)
        found.append((first - 4, out, second))
    return found


def test_a_pass_is_one_call_over_its_tensors(on_standin: Standin) -> None:
    p = problem()
    a, b, given = tensors(p)
    bound = bind(leaf(p), p, a, b)
    assert type(bound.call).__name__ == "PassCall"
    for call in (bound, bound.call):
        assert call(a, b, None, given) is given
        assert call(a, b, out=given, bias=None) is given
        made = call(a, b)
        assert made.shape == given.shape
        assert made.stride() == given.stride()
        assert made.dtype is given.dtype
    told = told_tensors(on_standin)
    assert told[0] == (a.data_ptr(), given.data_ptr(), b.data_ptr())
    assert len(told) == 6
    assert told[2][1] not in (0, given.data_ptr())
    spaces = [struct.unpack("=Q", one.parameters)[0] - 256 for one in on_standin.told()[1::2]]
    assert all(space % 64 == 0 and space > 0 for space in spaces), "each call had a workspace"


def test_results_have_the_type_and_strides_of_the_problem(on_standin: Standin) -> None:
    p = problem(dtype="bf16", out_dtype="fp32", layouts=("contiguous", "contiguous", "channels_last"))
    a, b, _ = tensors(p)
    made = bind(leaf(p), p, a, b).call(a, b)
    assert made.dtype is torch.float32
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert not made.is_contiguous()


@pytest.mark.parametrize("pass_", list(Pass))
def test_parts_are_queued_by_one_call(on_standin: Standin, pass_: Pass) -> None:
    """Parts of the result, and terms of a sum, of which the first sets it."""
    p = problem(pass_)
    a, b, out = tensors(p)
    bind(cut(p, ("launching",) * 3), p, a, b).call(a, b, None, out)
    told = told_tensors(on_standin)
    assert len(told) == 3
    for index, found in enumerate(told):
        images = (role in "xy" for role in (p.operands[0], p.result, p.operands[1]))
        given = zip((a, out, b), images, strict=True)
        assert found == tuple((t[2 * index :] if image else t).data_ptr() for t, image in given)


def test_a_plan_with_a_part_that_is_no_launch_is_called_from_python(on_standin: Standin) -> None:
    p = problem()
    a, b, _ = tensors(p)
    for plan in (leaf(p, "addressed"), cut(p, ("launching", "addressed"))):
        bound = bind(plan, p, a, b)
        assert bound.call.__func__ is execute.Bound._from_python
    want = p.reference(a, b)
    torch.testing.assert_close(bind(leaf(p, "addressed"), p, a, b)(a, b).double(), want, rtol=1e-5, atol=1e-5)
    assert on_standin.launched == 0


def test_zeroed_and_temporary_results_stay_in_python(on_standin: Standin) -> None:
    """Something else than launches is to be done there."""
    p = problem(out_dtype="bf16", dtype="bf16")
    a, b, _ = tensors(p)
    assert bind(cut(p, ("launching",) * 3), p, a, b)._native is not None
    assert bind(cut(p, ("launching",) * 3, "in_channels"), p, a, b)._native is None, "sums are kept apart"
    p = problem()
    a, b, _ = tensors(p)
    zeroed = bind(cut(p, ("launching",) * 3, "in_channels"), p, a, b)
    torch.testing.assert_close(zeroed(a, b).double(), p.reference(a, b), rtol=1e-5, atol=1e-5)


def test_biases(on_standin: Standin) -> None:
    p = problem(bias=True)
    a, b, out = tensors(p)
    bias = torch.randn(p.shape(p.result)[1], dtype=torch.float64, device="cpu")
    adding = bind(leaf(p, "launching_biased"), p, a, b)
    adding.call(a, b, bias.float(), out)
    assert on_standin.told()[-1].parameters[8:] != words(0)
    contiguous = bias.float()
    on_standin.begin()
    adding.call(a, b, contiguous, out)
    assert on_standin.told()[-1].parameters[8:] == words(contiguous.data_ptr())
    adding.call(a, b, None, out)
    with pytest.raises(ValueError, match="would do"):
        adding.call(a, b, contiguous[:2], out)
    plain = bind(leaf(p), p, a, b)
    out.zero_()
    plain.call(a, b, contiguous, out)
    assert torch.equal(out, contiguous.view(1, -1, 1, 1).expand_as(out)), "the kernels add none, so it is added after"


def test_wrong_calls_are_refused(on_standin: Standin) -> None:
    p = problem()
    a, b, out = tensors(p)
    call = bind(leaf(p), p, a, b).call
    for given, named in (
        ((a,), {}),
        ((a, b, None, out, a), {}),
        ((a, b), {"result": out}),
        ((a, b, None), {"bias": None}),
    ):
        with pytest.raises(TypeError, match="would do"):
            call(*given, **named)
    with pytest.raises(TypeError):
        call(a, "no tensor", None, out)
    on_standin.fail(700, after=0)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        call(a, b)


def test_a_hook_has_the_pass_called_from_python(on_standin: Standin) -> None:
    p = problem()
    a, b, _ = tensors(p)
    call = bind(leaf(p), p, a, b).call
    CALLS.append(print)
    torch.testing.assert_close(call(a, b).double(), p.reference(a, b), rtol=1e-5, atol=1e-5)
    assert on_standin.launched == 0
    CALLS.clear()
    call(a, b)
    assert on_standin.launched == 2


def test_switched_off_is_the_python_path(on_standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_native", lambda: (None, "for a test"))
    p = problem()
    a, b, _ = tensors(p)
    bound = bind(cut(p, ("launching",) * 3), p, a, b)
    torch.testing.assert_close(bound.call(a, b).double(), p.reference(a, b), rtol=1e-5, atol=1e-5)
    assert on_standin.launched == 0


def test_launches_that_disagree_with_their_kernels_stay_in_python(on_standin: Standin) -> None:
    wrong = KernelLaunch(on_standin.function([8]), (1, 1, 1), (32, 1, 1), 0, (), (b"1234",))

    class Wrong(Launching):
        name = "wrong"

        def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Any:
            run = super().bind(p, c, a, b, out)
            run.sequence = LaunchSequence((wrong,), -1)
            return run

    p = problem()
    a, b, _ = tensors(p)
    with toys.installed(Wrong()), pytest.warns(RuntimeWarning, match="has 4 bytes, in the kernel 8"):
        bound = bind(leaf(p, "wrong"), p, a, b)
    torch.testing.assert_close(bound(a, b).double(), p.reference(a, b), rtol=1e-5, atol=1e-5)


def test_thousands_of_passes_leave_nothing(on_standin: Standin) -> None:
    p = problem()
    a, b, out = tensors(p)
    call = bind(leaf(p), p, a, b).call
    on_standin.begin(record=False)
    for _ in range(3):
        before = [sys.getrefcount(one) for one in (a, b, out)], len(gc.get_objects())
        for _ in range(10_000):
            call(a, b)
            call(a, b, None, out)
        after = [sys.getrefcount(one) for one in (a, b, out)], len(gc.get_objects())
    assert before[0] == after[0]
    assert abs(after[1] - before[1]) < 100


def test_nothing_is_warned_of(on_standin: Standin) -> None:
    p = problem()
    a, b, _ = tensors(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(cut(p, ("launching",) * 2), p, a, b).call(a, b)
