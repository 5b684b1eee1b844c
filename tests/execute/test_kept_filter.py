"""Filters that are prepared once: as right as ever when the weight changes, in whatever way that is done."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.execute.kept_filters import FFT, KEPT, LAYERS, bound, check, frozen
from tests.reference import convolve
from tests.sampling import EVERY, some
from torch import nn

from tilewise import execute
from tilewise.execute import kept_filter
from tilewise.execute.kept_filter import ALONE, CheckedFilter, KeptFilter, kept_bytes, same_bits
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import all_solvers, get


@pytest.mark.parametrize("kind", [replace, frozen])
@pytest.mark.parametrize("name", LAYERS)
def test_a_filter_is_prepared_once(
    name: str, kind: Callable[[ConvProblem], ConvProblem], prepared: list[object]
) -> None:
    p = kind(LAYERS[name])
    run, a, w = bound(p)
    for _ in range(3):
        check(run, p, torch.randn_like(a), w)
    assert len(prepared) == 1


@pytest.mark.parametrize("kind", [replace, frozen])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_version_tells_is_seen(
    name: str, kind: Callable[[ConvProblem], ConvProblem], prepared: list[object]
) -> None:
    p = kind(LAYERS[name])
    run, a, w = bound(p)
    check(run, p, a, w)
    w.mul_(2)
    check(run, p, a, w)
    w[0] = 1
    check(run, p, a, w)
    w.data = torch.randn_like(w)
    check(run, p, a, w)
    whole = torch.randn(2, *w.shape)
    for part in (whole[0], whole[1], whole[0]):
        check(run, p, a, part)
    assert len(prepared) == 6  # both parts of the whole are still there


def by_numpy(w: torch.Tensor, at: tuple[int, ...], bits: int) -> None:
    w.detach().numpy().view(np.int32)[at] = bits


def by_dlpack(w: torch.Tensor, at: tuple[int, ...], bits: int) -> None:
    torch.from_dlpack(w.detach()).view(torch.int32)[at] = bits


def by_data(w: torch.Tensor, at: tuple[int, ...], bits: int) -> None:
    w.data.view(torch.int32)[at] = bits


def by_operator(w: torch.Tensor, at: tuple[int, ...], bits: int) -> None:
    with torch.no_grad():
        w[at] = float(np.int32(bits).view(np.float32))


def by_another_storage(w: torch.Tensor, at: tuple[int, ...], bits: int) -> None:
    other = w.detach().clone(memory_format=torch.preserve_format)
    by_data(other, at, bits)
    w.data = other


def by_setting(w: torch.Tensor, at: tuple[int, ...], bits: int) -> None:
    other = w.detach().clone(memory_format=torch.preserve_format)
    by_data(other, at, bits)
    with torch.no_grad():
        w.set_(other)


def by_another_process(w: torch.Tensor, at: tuple[int, ...], bits: int) -> None:
    values = w.detach().numpy().view(np.int32)
    child = os.fork()
    if not child:
        values[at] = bits
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


WAYS = [by_numpy, by_dlpack, by_data, by_operator, by_another_storage, by_setting, by_another_process]
SPECIAL = [0, 1, -(2**31), 0x7FC00000, 0x7FC00001, -0x400000, 0x7F800000]
"""Bits of 0.0, of the least number, of -0.0, of NaNs with several payloads and of infinity."""


def weight_like(p: ConvProblem, form: str) -> torch.Tensor:
    """A weight that may be shared with another process; as a parameter holds it, or a part of a larger tensor."""
    shape = p.shape("w")
    if form == "part":
        whole = torch.randn(shape[0], 2 * shape[1] + 1, *shape[2:]).share_memory_()
        return whole[:, 1 : 1 + shape[1]]
    w = torch.randn(shape)
    if form == "channels_last" and len(shape) == 4:
        w = w.to(memory_format=torch.channels_last)
    return nn.Parameter(w).share_memory_()


def bits_of(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(torch.int32)


@settings(max_examples=some(75))
@given(data=st.data())
def test_any_change_of_any_element_is_seen(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(LAYERS)), "layer")
    form = data.draw(st.sampled_from(["parameter", "channels_last", "part"]), "form")
    p = LAYERS[name]
    if form == "part":
        p = replace(p, layouts=("contiguous", "view", "contiguous"), alignment=(16, 4, 16))
    elif form == "channels_last" and p.dims == 2:
        p = replace(p, layouts=("contiguous", "channels_last", "contiguous"))
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    a, w = torch.randn(p.shape(p.operands[0])), weight_like(p, form)
    config = next(iter(FFT.configs(p)))
    plan = Plan(p.key, FFT.name, FFT.version, config)
    run = execute.bind(plan, p, a, w)
    with torch.no_grad():
        run(a, w)
        for _ in range(data.draw(st.integers(1, 4), "writes")):
            at = tuple(data.draw(st.integers(0, n - 1)) for n in w.shape)
            way = data.draw(st.sampled_from(WAYS if form == "parameter" else WAYS[2:4] + WAYS[6:]), "way")
            way(w, at, data.draw(st.sampled_from(SPECIAL) | st.integers(-(2**31), 2**31 - 1), "bits"))
            found, anew = run(a, w), execute.bind(plan, p, a, w)(a, w)
            assert torch.equal(bits_of(found), bits_of(anew))


@settings(max_examples=some(150))
@given(data=st.data())
def test_weights_are_compared_bit_by_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "dtype")
    size = dtype.itemsize
    count = data.draw(st.integers(1, 40) | st.integers(ALONE // size - 9, ALONE // size + 9), "count")
    start = data.draw(st.integers(0, 9), "start")
    step = data.draw(st.sampled_from([1, 1, 2]), "step")
    integers = {2: torch.int16, 4: torch.int32}[size]
    memory = torch.randint(-(2**15), 2**15, (start + step * count,), dtype=integers)
    weight = memory[start::step][:count].view(dtype)
    copy = CheckedFilter(lambda weight, workspace: weight, (1,))._copy(weight)
    assert same_bits(weight, copy)
    at = data.draw(st.integers(0, count - 1), "at")
    memory[start + step * at] ^= 1 << data.draw(st.integers(0, 8 * size - 2), "bit")
    assert not same_bits(weight, copy)
    assert same_bits(weight, CheckedFilter(lambda weight, workspace: weight, (1,))._copy(weight))


KEEPING = {
    "dense": ConvProblem(Pass.FPROP, 2, 16, 16, (Axis(12, 3, 1, 1, 1, 1),) * 2, **KEPT),
    "depthwise": ConvProblem(Pass.FPROP, 2, 16, 16, (Axis(20, 9, 1, 1, 4, 4),) * 2, groups=16, **KEPT),
    "signals": ConvProblem(Pass.FPROP, 2, 16, 16, (Axis(200, 65, 1, 1, 32, 32),), groups=16, **KEPT),
    "half": ConvProblem(Pass.FPROP, 2, 16, 16, (Axis(12, 3, 1, 1, 1, 1),) * 2, dtype="bf16", **KEPT),
}


SOON = ("half", "signals")
"""The others compile several kernels."""


@pytest.mark.parametrize("name", [name for name in KEEPING if EVERY or name in SOON])
def test_every_solver_that_keeps_filters_sees_changes(name: str) -> None:
    p = KEEPING[name]
    met = []
    for solver in all_solvers():
        if solver.why_not(p):
            continue
        config = next((c for c, _ in solver.offers(p, None) if solver.constant(p, c)), None)
        if config is None:
            continue
        met.append(solver.name)
        a, w = (torch.randn(p.shape(role)).to(p.torch_dtype(role)) for role in p.operands)
        plan = Plan(p.key, solver.name, solver.version, config)
        run = execute.bind(plan, p, a, w)
        run(a, w)
        w.data[-1] += 1
        assert torch.equal(run(a, w), execute.bind(plan, p, a, w)(a, w)), solver.name
        w.data.zero_()
        assert not run(a, w).count_nonzero(), solver.name
    assert met, "no solver keeps a filter of this layer: choose another"


def test_a_weight_without_a_version_is_checked_like_any(prepared: list[object]) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    with torch.inference_mode():
        w = torch.randn(p.shape("w"))
        for _ in range(2):
            check(run, p, a, w)
        assert len(prepared) == 1
        w.mul_(2)
        check(run, p, a, w)
    assert len(prepared) == 2
    check(run, p, a, w)
    assert len(prepared) == 2


def test_a_filter_comes_from_the_copy_that_is_compared() -> None:
    """A weight that is written while its filter is prepared gives the filter of no weight that ever was: it is new."""
    p = LAYERS["dense"]
    run, a, w = bound(p)
    node = run._run._node  # type: ignore[attr-defined]
    inner = node._filter._make

    def disturbed(weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        made = inner(weight, workspace)
        w.data.mul_(2)
        return made

    node._filter._make = disturbed
    run(a, w)
    node._filter._make = inner
    check(run, p, a, w)


def test_on_a_gpu_nothing_is_kept_that_would_have_to_be_compared() -> None:
    p = LAYERS["dense"]
    assert replace(p, device="cuda:Some GPU") == replace(p, constant_weight=False, device="cuda:Some GPU")
    assert replace(frozen(p), device="cuda:Some GPU").constant_weight
    assert replace(p, constant_weight=False).checked_weight is False


def test_a_measurement_with_the_comparison_is_none_without() -> None:
    """Keys of frozen weights are those of before there was a comparison."""
    p = LAYERS["dense"]
    assert frozen(p).key.endswith(" constant_weight cpu")
    assert p.key.endswith(" constant_weight checked_weight cpu")
    assert ConvProblem.from_key(p.key) == p
    assert ConvProblem.from_key(frozen(p).key) == frozen(p)
    with pytest.raises(ValueError, match="not as tilewise writes"):
        ConvProblem.from_key(p.key.replace(" constant_weight", ""))
    assert kept_bytes(FFT, p, next(iter(FFT.configs(p)))) == p.nbytes("w") + kept_bytes(
        FFT, frozen(p), next(iter(FFT.configs(p)))
    )


def test_layers_that_share_a_plan_keep_a_filter_each(prepared: list[object]) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    weights = [torch.randn(p.shape("w")) for _ in range(3)]
    for _ in range(3):
        for w in weights:
            check(run, p, a, w)
    assert len(prepared) == 3
    weights[1].mul_(2)
    for w in weights:
        check(run, p, a, w)
    assert len(prepared) == 4


def test_what_came_of_a_weight_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    kept: list[weakref.ref[torch.Tensor]] = []
    original = KeptFilter._prepared

    def prepare(self: KeptFilter, w: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        found = original(self, w, workspace)
        kept.append(weakref.ref(found))
        return found

    monkeypatch.setattr(KeptFilter, "_prepared", prepare)
    weights = [torch.randn(p.shape("w")) for _ in range(3)]
    for w in weights:
        run(a, w)
    del w, weights[1:]
    run(a, torch.randn(p.shape("w")))
    assert [found() is not None for found in kept] == [True, False, False, True]


def test_an_address_used_again_is_another_weight(prepared: list[object]) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    for _ in range(20):
        check(run, p, a, torch.randn(p.shape("w")))  # each is gone before the next is made
    assert len(prepared) == 20


def test_a_frozen_weight_without_a_version_is_prepared_every_time(prepared: list[object]) -> None:
    p = frozen(LAYERS["dense"])
    run, a, _ = bound(p)
    with torch.inference_mode():
        w = torch.randn(p.shape("w"))
        for _ in range(3):
            w.mul_(2)
            check(run, p, a, w)
    assert len(prepared) == 3
    check(run, p, a, torch.randn(p.shape("w")))


def test_a_captured_call_neither_takes_nor_leaves_a_filter(
    prepared: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = frozen(LAYERS["dense"])
    run, a, w = bound(p)
    check(run, p, a, w)
    with monkeypatch.context() as patch:
        patch.setattr(kept_filter, "is_capturing", lambda device: True)
        check(run, p, a, w)
        check(run, p, a, w)
        assert len(prepared) == 3
    check(run, p, a, w)
    assert len(prepared) == 3


@pytest.mark.gpu
def test_a_graph_follows_the_weight_and_streams_have_their_own() -> None:
    p = replace(frozen(LAYERS["dense"]), device=device_name("cuda"))
    config = next(c for c in FFT.configs(p) if c.get("transform") != "own")
    a, w = (torch.randn(p.shape(role), device="cuda") for role in p.operands)
    run = execute.bind(Plan(p.key, FFT.name, FFT.version, config), p, a, w)
    for _ in range(2):
        check(run, p, a, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check(run, p, a, w)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(a, w)
    check(run, p, a, w)
    for factor in (1, 3):
        w.mul_(factor)
        graph.replay()
        torch.testing.assert_close(out.double(), convolve(p, a, w), rtol=1e-4, atol=1e-4)
        check(run, p, a, w)


def test_threads_with_weights_of_their_own() -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    wrong: list[float] = []

    def work(w: torch.Tensor) -> None:
        want = convolve(p, a, w)
        for _ in range(30):
            error = float((run(a, w) - want).abs().max())
            if not error < 1e-4:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(torch.randn(p.shape("w")),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_micro_batch_keeps_one_filter_for_equal_parts(prepared: list[object]) -> None:
    p = ConvProblem(Pass.FPROP, 4, 4, 6, (Axis(9, 3), Axis(8, 3)), **KEPT)
    split = get("micro_batch")
    child = split.child(p, 2)  # type: ignore[attr-defined]
    part = Plan(child.key, FFT.name, FFT.version, next(iter(FFT.configs(child))))
    plan = Plan(p.key, split.name, split.version, Config(sizes=(2, 2)), (part,), (2,))
    a, w = torch.randn(p.shape("x")), torch.randn(p.shape("w"))
    run = execute.bind(plan, p, a, w)
    check(run, p, a, w)
    check(run, p, a, w)
    assert len(prepared) == 1
