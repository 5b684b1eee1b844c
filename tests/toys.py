"""Small convolution problems for hypothesis to draw, tensors for them, and toy solvers whose traits a test chooses."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch

from tilewise import solvers
from tilewise.execute import bind
from tilewise.plan import Config, Plan
from tilewise.problems.base import Part, Problem, dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers import Cost, Run, Solver
from tilewise.solvers.conv import ConvSolver, ConvSplit

DTYPE_ERROR = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}
"""Relative L2 error of one rounding of the result, with room."""


def in_fresh_process(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of a module in a process of its own, and raise here what it raises.

    Once an allocation failed, glibc serves a process's main thread from another arena, where blocks that nobody writes
    do not show as resident. Tests that need them seen must not depend on what ran before in their process.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(function, *arguments).result()


@st.composite
def axes(draw: st.DrawFn, crops: bool = False) -> Axis:
    """A small axis, padding unlike before and after; with ``crops`` it may be negative."""
    kernel, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    least = -1 if crops else 0
    before, after = draw(st.integers(least, 2)), draw(st.integers(least, 2))
    reach = (kernel - 1) * dilation + 1
    size = draw(st.integers(max(1, reach - before - after, 1 - min(before, 0) - min(after, 0)), 9))
    return Axis(size, kernel, draw(st.integers(1, 3)), dilation, before, after)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    passes: Sequence[Pass] = tuple(Pass),
    dtypes: Sequence[str] = ("fp32",),
    batch: tuple[int, int] = (1, 6),
    crops: bool = True,
) -> ConvProblem:
    """A problem of a few thousand elements in any dimension, layout and grouping."""
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    pass_ = draw(st.sampled_from(passes))
    layouts = st.sampled_from(("contiguous", "channels_last", "view"))
    return ConvProblem(
        pass_,
        draw(st.integers(*batch)),
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
        tuple(draw(axes(crops)) for _ in range(dims)),
        groups=groups,
        dtype=draw(st.sampled_from(dtypes)),
        bias=pass_ is not Pass.WGRAD and draw(st.booleans()),
        accumulate=draw(st.booleans()),
        layouts=(draw(layouts), draw(layouts), draw(layouts)),
    )


def small(pass_: Pass = Pass.FPROP, batch: int = 8, channels: int = 4, size: int = 8, **changes: Any) -> ConvProblem:
    """A 3x3 layer on small square images, which ATen can do."""
    axis = Axis(size, 3, before=1, after=1)
    return ConvProblem(pass_, batch, channels, channels, (axis, axis), **changes)


def filled(problem: ConvProblem, role: str, value: float | None = None, seed: int = 0) -> torch.Tensor:
    """A tensor for ``role`` in its layout, standard normal or full of ``value``; a view lies in a larger tensor."""
    shape, layout, dtype = problem.shape(role), problem.layout(role), problem.torch_dtype(role)
    if layout == "view":
        start = 16 // dtype.itemsize
        tensor = torch.full((*shape[:-1], start + shape[-1] + 3), 7.0, dtype=dtype)[..., start:-3]
    else:
        tensor = torch.empty_strided(shape, dense_strides(shape, layout), dtype=dtype)
    if value is not None:
        return tensor.fill_(value)
    return tensor.normal_(generator=torch.Generator().manual_seed(seed))


def operands(problem: ConvProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal operands in the order of ``problem.operands``."""
    first, second = (filled(problem, role, seed=seed) for seed, role in enumerate(problem.operands))
    return first, second


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error."""
    norm = float(want.norm())
    return float((got.double() - want).norm()) / norm if norm else float(got.double().norm())


class Plain(ConvSolver):
    """Every problem through the reference, rounded once. Its traits are a test's to change, on a subclass.

    Writes all of its workspace, so that what it holds is destroyed, and checks what it was promised.
    """

    name, version = "plain", 1
    exact_memory = True
    scratch: ClassVar[int] = 0

    def unsupported(self, p: ConvProblem) -> list[str]:
        return []

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return (Config(),)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        return self.scratch

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        return Cost(p.flops, p.bytes)

    def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The value before it is rounded to the result's type."""
        return p.reference(a, b)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        assert (out is None) is self.own_output
        strides = a.stride(), b.stride(), None if out is None else out.stride()
        adds = p.accumulate
        assert not (adds and not self.accumulates)
        assert not (p.bias and not self.adds_bias)
        if out is not None and not self.writes_views:
            assert strides[2] == dense_strides(out.shape, p.layout(p.result))

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            out: torch.Tensor | None,
            workspace: torch.Tensor | None,
            *bias: torch.Tensor,
        ) -> torch.Tensor:
            assert len(bias) == p.bias
            assert (a.stride(), b.stride()) == strides[:2]
            for role, tensor in zip((*p.operands, p.result), (a, b, out), strict=True):
                assert tensor is None or tensor.data_ptr() % p.alignment[ROLES.index(role)] == 0
            if self.scratch:
                assert workspace is not None
                assert workspace.numel() >= self.scratch
                assert workspace.data_ptr() % 256 == 0
                workspace[: self.scratch].fill_(0xFF)
            value = self.compute(p, a, b)
            for vector in bias:
                assert vector.is_contiguous()
                assert vector.dtype is p.torch_dtype(p.result)
                assert vector.shape == p.shape(p.result)[1:2]
                value = value + vector.double().view(-1, *[1] * p.dims)
            if self.own_output:
                return value.to(p.torch_dtype(p.result))
            assert out is not None
            assert out.stride() == strides[2]
            return out.add_(value) if adds else out.copy_(value)

        return run


class Addressed(Plain):
    """Runs over addresses too, as a library does that was bound to shapes and strides."""

    name, version = "addressed", 1
    accumulates = True
    scratch = 300

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        assert out is not None
        return _AddressedRun(super().bind(p, c, a, b, out), p, a, b, out, self.scratch)


class _AddressedRun:
    def __init__(
        self, run: Run, p: ConvProblem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scratch: int
    ) -> None:
        self._run, self._scratch = run, scratch
        self._like = [(t.shape, t.stride(), t.dtype) for t in (a, b, out)]
        self._bias = p.shape(p.result)[1:2], (1,), p.torch_dtype(p.result)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        return self._run(a, b, out, workspace, *bias)

    def run_pointers(self, a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        tensors = [_at(address, *like) for address, like in zip((a, b, out), self._like, strict=True)]
        vectors = [_at(address, *self._bias) for address in bias]
        self._run(*tensors, _at(workspace, (self._scratch,), (1,), torch.uint8), *vectors)


def _at(address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies at ``address``."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def toy(**traits: Any) -> Solver:
    """A :class:`Plain` solver with other class attributes or methods."""
    made: type[Solver] = type("Toy", (Plain,), traits)
    return made()


class Cut(ConvSplit):
    """Cuts along any axis: configs hold ``axis``, ``sizes`` and perhaps ``scatter``. For plans that tests write."""

    name, version = "cut", 1
    axis, level = "any", 3

    def unsupported(self, p: ConvProblem) -> list[str]:
        return []

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        return ()

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        raise NotImplementedError

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        return Cost(0, 0)

    def children(self, p: ConvProblem, c: Config) -> tuple[Part, ...]:
        sizes = c["sizes"]
        assert isinstance(sizes, tuple)
        return p.split(str(c["axis"]), sizes, scatter=bool(c.get("scatter", False)))


def leaf(solver: str, problem: ConvProblem, config: Config | None = None) -> Plan:
    """A plan of one solver."""
    return Plan(problem.key, solver, solvers.get(solver).version, config or Config())


@contextmanager
def installed(*extra: Solver, without: Sequence[str] = ()) -> Iterator[None]:
    """The package's solvers and ``extra``, which take the place of any of the same name, and not ``without``.

    A framework's own choice stays what plans are held against, also where it may not be used.
    """
    everything = {solver.name: solver for solver in (*solvers.all_solvers(), *extra)}
    ordered = tuple(everything[name] for name in sorted(everything) if name not in without)

    outer = solvers.baseline

    def baseline(problem: Problem | type[Problem]) -> Solver:
        kind = problem if isinstance(problem, type) else type(problem)
        named = (solver for solver in everything.values() if solver.baseline and issubclass(kind, solver.solves))
        return next(named, None) or outer(problem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solvers, "all_solvers", functools.cache(lambda: ordered))
        patch.setattr(solvers, "baseline", baseline)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """For a few numbers two threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def counting(call: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """``call``, adding one to ``counts[0]`` each time."""

    @functools.wraps(call)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        return call(*args, **kwargs)

    return counted


def cuts(whole: int, most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes that sum to ``whole``, in any order, at most ``most`` of them."""
    marks = st.sets(st.integers(1, whole - 1), max_size=most - 1) if whole > 1 else st.just(set())
    return marks.map(lambda inner: _differences([0, *sorted(inner), whole]))


def _differences(marks: list[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in itertools.pairwise(marks))


def reference(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor, start: float, bias: bool = False) -> torch.Tensor:
    """What an executed plan gives in float64: added to ``start`` where it accumulates, a bias of 1, 2, ... added."""
    want = problem.reference(a, b) + (start if problem.accumulate else 0.0)
    return want + bias_of(problem).double().view(1, -1, *[1] * problem.dims) if bias else want


def bias_of(problem: ConvProblem) -> torch.Tensor:
    """1, 2, ... over the result's channels."""
    channels = problem.shape(problem.result)[1]
    return torch.arange(1, channels + 1, dtype=problem.torch_dtype(problem.result))


def check_bound(
    plan: Plan, problem: ConvProblem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, want: torch.Tensor,
    limit: float,
) -> None:  # fmt: skip
    """Bind a plan and compare: into memory with a guard around it, and into memory of its own."""
    out = poison(problem)
    surroundings = out.untyped_storage()
    bound = bind(plan, problem, a, b, out)
    assert bound(a, b, bias, out) is out
    assert distance(out, want) <= limit
    if problem.layout(problem.result) == "view":
        flat = torch.empty(0, dtype=out.dtype).set_(surroundings)  # type: ignore[call-overload]
        assert int((flat == 7.0).sum()) >= 3 * math.prod(out.shape[:-1])
    if not problem.accumulate:
        assert distance(bind(plan, problem, a, b)(a, b, bias), want) <= limit


def poison(problem: ConvProblem) -> torch.Tensor:
    """A result full of NaN, or of 1 where it is accumulated into."""
    return filled(problem, problem.result, 1.0 if problem.accumulate else math.nan)
