"""Kernels that run both directions of a layer in clusters: every index on a CPU by emulation, and results on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulate, emulated
from tests.recurrent import module_of
from tests.sampling import EVERY

from tilewise.kernels.cuda.launch import Kernel, read_source
from tilewise.machine.device import device_name
from tilewise.notation import parse_recurrent
from tilewise.plan import Config
from tilewise.problems.recurrent.checks import dense_operands
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import GATES
from tilewise.solvers import get
from tilewise.solvers.recurrent._cluster_layers import ClusterLayers
from tilewise.solvers.recurrent._cluster_recurrence import (
    WAVE_POINTERS,
    ClusterKept,
    ClusterRecurrence,
    ClusterShape,
    cluster_program,
    wave_clusters,
)
from tilewise.solvers.recurrent._cluster_shapes import Wanted, cluster_shapes
from tilewise.solvers.recurrent._grid_recurrence import WHOLE

# torch lays the weights of its bf16 layers in one piece nowhere, and warns of that once.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
TOLERANCE = {"fp32": 3e-6, "fp16": 4e-3, "bf16": 3e-2}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_BLOCKS = 16
"""Blocks that are emulated at a time."""
EMULATED_BLOCKS = 4
"""Blocks of a cluster that generated tests emulate: each is 256 coroutines."""


class Emulated(ClusterRecurrence):
    """The steps by kernels that run on the CPU, their threads in ascending or descending order.

    Clusters of a wave run all at a time, others one after the other.
    """

    backwards = False

    def _launch(self, backward: bool, directions: int, time: int, batch: int, *scalars: int) -> Callable[..., None]:
        p = cluster_program(self.cell, self.hidden, self.dtype, self.shapes[backward], self.precise, backward)
        assert not p.problems()
        grid = p.cluster * -(-batch // p.rows) * directions

        def run(*addresses: int) -> None:
            whole = [time, batch, *map(int, scalars)]
            emulate(p.source(), p.name, grid, p.threads, addresses, whole, self.backwards, cluster=p.cluster)

        return run

    def _wave(self, backward: bool, layers: int, time: int, batch: int, scalar: int) -> Callable[..., None]:
        p = cluster_program(self.cell, self.hidden, self.dtype, self.shapes[backward], self.precise, backward, True)
        assert not p.problems()
        grid = p.cluster * wave_clusters(layers, batch, p.rows)
        assert grid <= MOST_BLOCKS

        def run(*addresses: int) -> None:
            assert len(addresses) == WAVE_POINTERS[backward]
            whole = [time, batch, layers, int(scalar)]
            emulate(p.source(), p.name, grid, p.threads, addresses, whole, self.backwards, cluster=grid)

        return run


def fitting(p: RecurrentProblem, backward: bool, most: int = EMULATED_BLOCKS) -> list[ClusterShape]:
    """Shapes of small clusters that hold a layer."""
    wanted = Wanted(p.cell, p.hidden, p.torch_dtype("x"), p.batch, p.directions, p.precision == "ieee", backward, 132)
    return [shape for _, shape in cluster_shapes(wanted) if shape[0] <= most]


def distances(got: Any, want: Any) -> list[float]:
    """How far results are from what is expected, relative to its norm."""
    return [
        float((a.double().cpu() - b.double().cpu()).norm() / (b.double().cpu().norm() + 1e-3))
        for a, b in zip(got, want, strict=True)
    ]


def by_autograd(p: RecurrentProblem, operands: Any) -> list[torch.Tensor]:
    """All results of ``p`` in float64 by torch's own layer and autograd."""
    inner = 1 + (2 if p.cell == "lstm" else 1)
    wide = [t.detach().cpu().double() for t in operands]
    states, weights = [t.requires_grad_() for t in wide[:inner]], wide[inner : inner + len(p.weights)]
    module = module_of(p, tuple(weights))
    given = (states[1], states[2]) if p.cell == "lstm" else states[1]
    y, last = module(states[0], given)
    results = [y, *(last if p.cell == "lstm" else (last,))]
    leaves = [*states, *module._flat_weights]
    return [*(t.detach() for t in results), *torch.autograd.grad(results, leaves, wide[inner + len(p.weights) :])]


def by_layer(layer: Any, p: RecurrentProblem, operands: Any) -> list[torch.Tensor]:
    """All results of ``p`` by a layer, of which the second backward by what is kept has to give what the first gave."""
    lstm, count = p.cell == "lstm", len(p.weights)
    x, h0, c0, *rest = operands if lstm else (*operands[:2], None, *operands[2:])
    weights, (dy, dhn, *dcn) = rest[:count], rest[count:]
    with torch.no_grad():
        y, hn, cn, saved = layer.forward(x, h0, c0, weights, keep=True)
        for _ in range(2):
            dx, dh0, dc0, *gradients = layer.backward(
                saved, weights, dy, dhn, dcn[0] if lstm else None, (True, True, lstm, *(True for _ in weights))
            )
    return [y, hn, *((cn,) if lstm else ()), dx, dh0, *((dc0,) if lstm else ()), *gradients]


@emulated
@settings(max_examples=12 if EVERY else 1, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_clusters_compute_recurrent_layers(draw: st.DataObject) -> None:
    p = RecurrentProblem(
        draw.draw(st.sampled_from(sorted(GATES)), "cell"), draw.draw(st.integers(1, 5), "time"),
        draw.draw(st.sampled_from((1, 3, 6, 9, 17, 33)), "batch"), draw.draw(st.integers(1, 5), "inputs"),
        draw.draw(st.integers(9, 64), "hidden"), draw.draw(st.integers(1, 2), "layers"),
        draw.draw(st.integers(1, 2), "directions"), task="training",
        dtype=draw.draw(st.sampled_from(list(TOLERANCE)), "dtype"), biases=draw.draw(st.booleans(), "biases"),
    )  # fmt: skip
    shapes = tuple(draw.draw(st.sampled_from(fitting(p, backward)), "shape") for backward in (False, True))
    recurrence = Emulated(p.cell, p.hidden, p.torch_dtype("x"), 0, shapes)  # type: ignore[arg-type]
    recurrence.backwards = draw.draw(st.booleans(), "threads in descending order")
    operands = dense_operands(p, 7)
    got = by_layer(ClusterLayers(p, recurrence), p, operands)
    bound = 0.5 if p.cell == "rnn_relu" and p.dtype != "fp32" else TOLERANCE[p.dtype]
    for number, gap in enumerate(distances(got, by_autograd(p, operands))):
        assert gap <= bound, f"result {number}: {gap:.1e}"


@emulated
@settings(max_examples=8 if EVERY else 1, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_layers_run_behind_each_other(draw: st.DataObject) -> None:
    p = RecurrentProblem(
        draw.draw(st.sampled_from(sorted(GATES)), "cell"), draw.draw(st.integers(1, 5), "time"),
        draw.draw(st.sampled_from((1, 3, 8, 11)), "batch"), draw.draw(st.integers(1, 5), "inputs"),
        8 * draw.draw(st.integers(2, 6), "hidden"), draw.draw(st.integers(2, 4), "layers"), task="training",
        dtype=draw.draw(st.sampled_from(list(TOLERANCE)), "dtype"), biases=draw.draw(st.booleans(), "biases"),
    )  # fmt: skip
    both = [
        [s for s in fitting(p, backward) if s[0] * wave_clusters(p.layers, p.batch, s[1]) <= MOST_BLOCKS]
        for backward in (False, True)
    ]
    if not all(both):
        return
    shapes = draw.draw(st.sampled_from(both[0]), "forward"), draw.draw(st.sampled_from(both[1]), "backward")
    recurrence = Emulated(p.cell, p.hidden, p.torch_dtype("x"), 0, shapes)
    recurrence.backwards = draw.draw(st.booleans(), "threads in descending order")
    operands = dense_operands(p, 7)
    got = by_layer(ClusterLayers(p, recurrence, wave=True), p, operands)
    bound = 0.5 if p.cell == "rnn_relu" and p.dtype != "fp32" else TOLERANCE[p.dtype]
    for number, gap in enumerate(distances(got, by_autograd(p, operands))):
        assert gap <= bound, f"result {number}: {gap:.1e}"


@emulated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_a_nan_passes_from_layer_to_layer(dtype: str) -> None:
    """What is not yet written is told by its bits. No NaN, of whatever bits, may be taken for that."""
    time, batch, hidden, real = 3, 2, 16, DTYPES[dtype]
    gx = torch.zeros(2, time, batch, hidden, dtype=real, device="cpu")
    gx.view(WHOLE[real.itemsize])[0, 0, 1] = -1
    u = torch.eye(hidden, dtype=real, device="cpu")
    h0 = torch.zeros(2, batch, hidden, dtype=real, device="cpu")
    h0.view(WHOLE[real.itemsize])[0, 0, 3] = -1
    y = torch.zeros(time, batch, hidden, dtype=real, device="cpu")
    recurrence = Emulated("rnn_relu", hidden, real, 0, ((2, 8, 8), (2, 8, 8)))
    recurrence.wave(gx, [u, u], [u], [None, None], [None], h0, None, y, keep=False)
    assert bool(y.isnan().all())  # the product of a NaN and 0 is one
    y.zero_()
    dy = torch.full_like(y, float("nan"))
    made = torch.ones(2, time, batch, hidden, dtype=real, device="cpu")
    saved = ClusterKept(made, None, None, made[:1, ...].clone())
    changes, _, dh0, _ = recurrence.wave_backward(saved, made[0], [u, u], [u], h0, None, dy, None, None)
    assert bool(changes.isnan().all())
    assert bool(dh0.isnan().all())


@pytest.mark.slow
@emulated
@pytest.mark.parametrize(
    ("cell", "dtype", "hidden", "cluster", "columns"),
    [("lstm", "fp32", 125, 16, 2), ("gru", "bf16", 123, 8, 4), ("rnn_tanh", "fp16", 123, 16, 8)],
)
def test_large_clusters(cell: str, dtype: str, hidden: int, cluster: int, columns: int) -> None:
    p = RecurrentProblem(cell, 2, 3, 5, hidden, directions=2, task="training", dtype=dtype)
    recurrence = Emulated(cell, hidden, DTYPES[dtype], 0, ((cluster, 8, columns), (cluster, 8, 8)))
    operands = dense_operands(p, 7)
    got = by_layer(ClusterLayers(p, recurrence), p, operands)
    assert max(distances(got, by_autograd(p, operands))) <= TOLERANCE[dtype]


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_weights_that_registers_do_not_hold_lie_in_shared_memory(cell: str) -> None:
    hidden, shapes = 232, ((4, 8, 8), (4, 8, 8))
    for backward in (False, True):
        made = cluster_program(cell, hidden, torch.float32, shapes[backward], True, backward)
        assert made.words > made.held
    p = RecurrentProblem(cell, 2, 2, 3, hidden, task="training")
    operands = dense_operands(p, 7)
    got = by_layer(ClusterLayers(p, Emulated(cell, hidden, torch.float32, 0, shapes)), p, operands)
    assert max(distances(got, by_autograd(p, operands))) <= TOLERANCE["fp32"]


@emulated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", sorted(GATES))
def test_no_steps_end_in_the_first_states(cell: str) -> None:
    made = torch.Generator().manual_seed(3)
    hidden, gates = 20, GATES[cell]
    recurrence = Emulated(cell, hidden, torch.float32, 0, ((2, 8, 8), (2, 8, 8)))

    def data(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=made, dtype=torch.float32, device="cpu")

    h0, c0 = data(2, 3, hidden), data(2, 3, hidden) if cell == "lstm" else None
    us = [data(gates * hidden, hidden) for _ in range(2)]
    y, gx = data(0, 3, 2 * hidden), data(2, 0, 3, gates * hidden)
    hn, cn, saved = recurrence.forward(gx, us, [None, None], h0, c0, y, keep=True)
    assert torch.equal(hn, h0)
    assert cn is c0 or torch.equal(cn, c0)  # type: ignore[arg-type]
    dhn, dcn = data(2, 3, hidden), data(2, 3, hidden) if cell == "lstm" else None
    _, _, dh0, dc0 = recurrence.backward(saved, us, h0, c0, y, dhn, dcn)
    assert torch.equal(dh0, dhn)
    assert dc0 is dcn or torch.equal(dc0, dcn)  # type: ignore[arg-type]


@pytest.mark.slow
@emulated
def test_one_direction_may_run_backwards_in_time() -> None:
    made = torch.Generator().manual_seed(4)

    def data(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=made, dtype=torch.float32, device="cpu")

    time, batch, hidden = 4, 3, 24
    gx, u, h0 = data(1, time, batch, hidden), data(hidden, hidden) / 5, data(1, batch, hidden)
    dy, dhn = data(time, batch, hidden), data(1, batch, hidden)
    recurrence = Emulated("rnn_tanh", hidden, torch.float32, 0, ((2, 8, 8), (2, 8, 8)))
    found = []
    for reverse in (False, True):
        y = torch.empty(time, batch, hidden, dtype=torch.float32, device="cpu")
        turned, dy_turned = (gx.flip(1), dy.flip(0)) if reverse else (gx, dy)
        hn, _, saved = recurrence.forward(turned.clone(), [u], [None], h0, None, y, reverse=reverse, keep=True)
        changes, _, dh0, _ = recurrence.backward(saved, [u], h0, None, dy_turned, dhn, None, reverse=reverse)
        found.append((hn, y.flip(0) if reverse else y, changes.flip(1) if reverse else changes, dh0))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("cell", "dtype", "hidden", "shapes"),
    [
        ("lstm", "bf16", 512, ((16, 8, 4), (16, 8, 8))),
        ("gru", "fp32", 256, ((16, 16, 2), (8, 8, 8))),
        ("rnn_relu", "fp16", 512, ((8, 16, 4), (16, 32, 8))),
    ],
    ids=("lstm", "gru", "rnn_relu"),
)
def test_a_gpus_own_compiler_takes_them(
    cell: str, dtype: str, hidden: int, shapes: tuple[ClusterShape, ClusterShape], tmp_path: Path
) -> None:
    for backward, wave in ((False, True), (True, True)):  # waves have all code of the others
        p = cluster_program(cell, hidden, DTYPES[dtype], shapes[backward], True, backward, wave)
        assert not p.problems()
        (tmp_path / "kernel.cu").write_text(read_source("ptx.cu") + p.source())
        command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", "kernel.cu"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        assert "before its value is set" not in done.stderr, done.stderr[:4000]
        assert max(map(int, re.findall(r"Used (\d+) registers", done.stderr))) <= 255
        assert set(re.findall(r"(\d+) bytes spill stores", done.stderr)) == {"0"}


def test_what_does_not_fit_says_by_how_much() -> None:
    solver = get("persistent_cluster")
    p = RecurrentProblem("lstm", 10, 16, 64, 1024, dtype="bf16", device="cuda:any")
    (reason,) = [r for r in solver.unsupported(p) if "too large" in r]
    over = int(reason.split("weights is ")[1].split(" ")[0])
    whole = 4 * 1024 * 1024 * 2 / 16
    assert whole - 500e3 < over < whole
    few = RecurrentProblem("lstm", 10, 16, 64, 8, device="cuda:any")
    assert any("too few" in r for r in solver.unsupported(few))


@pytest.mark.parametrize(
    ("layer", "cluster_is_faster"),
    [
        ("lstm:t500n16i256h256d2", True),
        ("gru:t500n1i512h512d2", True),
        ("lstm:t500n16i128h128l3", True),
        ("lstm:t500n64i512h512", False),
    ],
)
def test_estimates_tell_it_from_the_whole_grid(layer: str, cluster_is_faster: bool) -> None:
    """Layers of which one is far faster than the other on an H100."""
    for task in ("inference", "training"):
        p = parse_recurrent(layer, task=task, dtype="bf16", device="cuda:any")
        clusters, grid = (
            min(2.0 * cost.kernels + cost.serial_us for cost in (solver.cost(p, c) for c in solver.configs(p)))
            for solver in (get("persistent_cluster"), get("persistent_grid"))
        )  # microseconds: a launch takes some two
        assert (clusters < grid) == cluster_is_faster, (clusters, grid)


def test_packed_batches_are_left_to_others() -> None:
    p = RecurrentProblem("lstm", 10, 4, 8, 64, packed=20, device="cuda:any")
    assert any("packed" in r for r in get("persistent_cluster").unsupported(p))


def test_a_shape_that_is_none_is_refused() -> None:
    p = RecurrentProblem("lstm", 10, 4, 8, 64, device="cuda:any")
    with pytest.raises(ValueError, match="three whole numbers would do"):
        get("persistent_cluster").layer(p, Config(forward=(16, 8)))


def on_gpu(p: RecurrentProblem, c: Config, operands: Any) -> list[torch.Tensor]:
    """Results on a GPU by a config, after memory that new tensors get has been filled with NaN."""
    layer = get("persistent_cluster").layer(p, c)
    poison = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(10, 24) for _ in range(4)]
    del poison
    return by_layer(layer, p, [t.cuda() for t in operands])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("cell", sorted(GATES))
def test_every_config_computes_the_layer_on_a_gpu(cell: str, dtype: str) -> None:
    name = device_name(torch.device("cuda"))
    for batch, hidden, layers, directions in ((1, 129, 1, 2), (16, 256, 2, 1), (33, 100, 2, 2), (64, 72, 1, 1)):
        p = RecurrentProblem(
            cell, 7, batch, 20, hidden, layers=layers, directions=directions, task="training", dtype=dtype, device=name
        )
        operands = dense_operands(p.on("cpu"), 7)
        want = by_autograd(p, operands)
        bound = 0.5 if cell == "rnn_relu" and dtype != "fp32" else TOLERANCE[dtype]
        solver = get("persistent_cluster")
        assert not solver.unsupported(p)
        for c in solver.configs(p):
            gaps = distances(on_gpu(p, c, operands), want)
            assert max(gaps) <= bound, f"{p.key} {c}: {gaps}"


@pytest.mark.gpu
def test_large_layers_fill_clusters_of_16_blocks() -> None:
    name = device_name(torch.device("cuda"))
    for cell, dtype, hidden in (("lstm", "bf16", 512), ("lstm", "fp32", 512), ("gru", "fp16", 640)):
        p = RecurrentProblem(cell, 9, 16, 64, hidden, directions=2, task="training", dtype=dtype, device=name)
        operands = dense_operands(p.on("cpu"), 7)
        c = next(iter(get("persistent_cluster").configs(p)))
        assert c["forward"][0] == 16  # type: ignore[index]
        assert max(distances(on_gpu(p, c, operands), by_autograd(p, operands))) <= TOLERANCE[dtype]


@pytest.mark.gpu
def test_the_driver_tells_how_many_clusters_run_at_a_time() -> None:
    for cluster in (2, 4, 8, 16):
        p = cluster_program("lstm", 256, torch.bfloat16, (cluster, 8, 8), True, False)
        made = Kernel(p.source(), p.name, 0)
        made.reserve(p.shared)
        blocks = torch.cuda.get_device_properties(0).multi_processor_count * made.resident(p.threads, p.shared)
        assert 1 <= made.clusters(p.cluster, p.threads, p.shared) <= blocks // cluster


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_layers_on_two_streams_compute_the_same() -> None:
    """More clusters than run at a time, beside products on a third stream."""
    p = RecurrentProblem(
        "lstm", 64, 40, 64, 512, directions=2, dtype="bf16", task="training", device=device_name(torch.device("cuda"))
    )
    solver = get("persistent_cluster")
    layer, operands = solver.layer(p, next(iter(solver.configs(p)))), [t.cuda() for t in dense_operands(p.on("cpu"), 3)]

    def step() -> torch.Tensor:
        return torch.cat([t.flatten() for t in by_layer(layer, p, operands)])

    alone = step()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    large = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    found = []
    for _ in range(6):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                found.append(step())
        with torch.cuda.stream(streams[2]):
            large @ large
    torch.cuda.synchronize()
    assert all(torch.equal(each, alone) for each in found)


@pytest.mark.gpu
def test_a_graph_replays_what_the_launch_computes() -> None:
    p = RecurrentProblem("gru", 20, 5, 24, 72, directions=2, dtype="fp16", device=device_name(torch.device("cuda")))
    solver = get("persistent_cluster")
    layer = solver.layer(p, next(iter(solver.configs(p))))
    x, h0, *weights = [t.cuda() for t in dense_operands(p.on("cpu"), 3)]
    with torch.no_grad():
        want = layer.forward(x, h0, None, weights, keep=False)[0].clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer.forward(x, h0, None, weights, keep=False)[0]
        for _ in range(3):
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("cell", sorted(GATES))
def test_layers_run_behind_each_other_on_a_gpu(cell: str, dtype: str) -> None:
    name, solver = device_name(torch.device("cuda")), get("persistent_cluster")
    for batch, hidden, layers in ((1, 128, 2), (16, 256, 3), (24, 96, 4)):
        p = RecurrentProblem(cell, 50, batch, 20, hidden, layers=layers, task="training", dtype=dtype, device=name)
        waves = [c for c in solver.configs(p) if "wave" in c]
        assert waves
        operands = dense_operands(p.on("cpu"), 7)
        want = by_autograd(p, operands)
        bound = 0.5 if cell == "rnn_relu" and dtype != "fp32" else 2 * TOLERANCE[dtype]
        for c in waves:
            gaps = distances(on_gpu(p, c, operands), want)
            assert max(gaps) <= bound, f"{p.key} {c}: {gaps}"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_waves_on_two_streams_compute_the_same() -> None:
    """Clusters that wait for each other, of two launches that have no room at a time, beside products."""
    device = device_name(torch.device("cuda"))
    p = RecurrentProblem("lstm", 64, 8, 64, 512, layers=4, dtype="bf16", device=device)
    solver = get("persistent_cluster")
    c = next(c for c in solver.configs(p) if "wave" in c)
    layer = solver.layer(p, c)
    x, h0, c0, *weights = [t.cuda() for t in dense_operands(p.on("cpu"), 3)]

    def step() -> torch.Tensor:
        with torch.no_grad():
            return layer.forward(x, h0, c0, weights, keep=False)[0]

    alone = step()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    large = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    found = []
    for _ in range(8):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                found.append(step())
        with torch.cuda.stream(streams[2]):
            large @ large
    torch.cuda.synchronize()
    assert all(torch.equal(each, alone) for each in found)
