"""Kernels that run all steps of a recurrent layer: every index on a CPU by emulation, and what fits on the chip."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulate, emulated
from tests.sampling import some

from tilewise.kernels.cuda.launch import read_source
from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.recurrent.checks import dense_operands
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.recurrent.tensors import GATES
from tilewise.solvers import get
from tilewise.solvers.recurrent._folded import Folded
from tilewise.solvers.recurrent._grid_recurrence import GridRecurrence, Shape, program
from tilewise.solvers.recurrent._grid_shapes import Asked, shapes
from tilewise.solvers.recurrent._layers import StackedLayers
from tilewise.solvers.recurrent.persistent_grid import CYCLES_A_MICROSECOND, _asked

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MOST_BLOCKS = 8
"""Blocks that are emulated at a time: all of a launch, as they wait for each other."""


class Emulated(GridRecurrence):
    """The steps by kernels that run on the CPU, their threads in ascending or descending order."""

    backwards = False

    def _launch(self, backward: bool, time: int, batch: int, *scalars: int) -> Callable[..., None]:
        p = program(self.cell, self.hidden, self.dtype, self.shapes[backward], self.precise, backward)
        assert not p.problems()
        grid = p.slices * -(-batch // (p.rows * p.tiles))
        assert grid <= MOST_BLOCKS

        def run(*addresses: int) -> None:
            whole = [time, batch, *map(int, scalars)]
            emulate(p.source(), p.name, grid, p.threads, addresses, whole, self.backwards, cluster=grid)

        return run


def states(
    cell: str, gx: Any, u: Any, bias: Any, h: Any, c: Any, reverse: bool, above: Any = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """All states, the last one and the last cell, step by step in float64; ``above`` says where ReLU passes a value."""
    found: list[Any] = [None] * len(gx)
    for t in range(len(gx) - 1, -1, -1) if reverse else range(len(gx)):
        z = h @ u.T
        if cell == "lstm":
            i, f, g, o = (gx[t] + z).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        elif cell == "gru":
            (xr, xz, xn), (hr, hz, hn) = gx[t].chunk(3, 1), z.chunk(3, 1)
            update = (xz + hz).sigmoid()
            fresh = (xn + (xr + hr).sigmoid() * (hn + (0 if bias is None else bias))).tanh()
            h = (1 - update) * fresh + update * h
        else:
            z = gx[t] + z
            h = z.tanh() if cell == "rnn_tanh" else z.relu() if above is None else z * above[t]
        found[t] = h
    return torch.stack(found), h, c


def check(
    cell: str, dtype: torch.dtype, time: int, batch: int, hidden: int, shape: Shape, flags: dict[str, bool]
) -> None:
    """Forward and backward against float64 and its autograd."""
    made = torch.Generator().manual_seed(hidden + 100 * batch)

    def data(*sizes: int, scale: float = 0.8) -> torch.Tensor:
        return (torch.randn(*sizes, generator=made, dtype=torch.float32, device="cpu") * scale).to(dtype)

    gx, u = data(time, batch, GATES[cell] * hidden), data(GATES[cell] * hidden, hidden, scale=hidden**-0.5)
    bias = data(hidden) if cell == "gru" and flags["bias"] else None
    h0, c0 = data(batch, hidden), data(batch, hidden) if cell == "lstm" else None
    both = torch.full((time, batch, 2 * hidden), float("nan"), dtype=dtype, device="cpu")
    y = both[..., :hidden] if flags["half"] else both.view(-1)[: time * batch * hidden].view(time, batch, hidden)
    recurrence = Emulated(cell, hidden, dtype, 0, (shape, shape))
    recurrence.backwards = flags["backwards"]
    given = gx.clone()
    hn, cn, saved = recurrence.forward(given, u, bias, h0, c0, y, reverse=flags["reverse"], keep=True)

    wide = [t if t is None else t.double().requires_grad_() for t in (gx, u, bias, h0, c0)]
    want, last, last_cell = states(cell, *wide, flags["reverse"])
    pairs = [(y, want), (hn, last), *([] if cn is None else [(cn, last_cell)])]
    dy, dhn, dcn = (
        data(time, batch, 2 * hidden)[..., hidden:],
        data(batch, hidden),
        None if cn is None else data(batch, hidden),
    )
    # Where a sum is 0 but for its rounding, ReLU has the slope of the side it was rounded to.
    *ends, last_cell = states(cell, *wide, flags["reverse"], above=y.detach() > 0)
    ends += [] if last_cell is None else [last_cell]
    starts = [dy.double(), dhn.double(), *([] if dcn is None else [dcn.double()])]
    leaves = [wide[0], wide[3], *([] if c0 is None else [wide[4]])]
    gradients = torch.autograd.grad(ends, leaves, starts)
    for _ in range(2):  # what is kept serves a second backward as well
        dgates, own, dh0, dc0 = recurrence.backward(saved, u, bias, h0, c0, y, dy, dhn, dcn, reverse=flags["reverse"])
    assert (own is None) == (cell != "gru")
    pairs += [(dgates, gradients[0]), (dh0, gradients[1]), *([] if dc0 is None else [(dc0, gradients[2])])]
    for number, (got, expected) in enumerate(pairs):
        expected = expected.detach()
        gap = float((got.double() - expected).norm() / (expected.norm() + 1e-3))
        assert gap <= TOLERANCE[dtype], f"result {number}: {gap:.1e}"


@emulated
@settings(max_examples=some(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_kernels_compute_recurrent_layers(draw: st.DataObject) -> None:
    cell, dtype = draw.draw(st.sampled_from(sorted(GATES))), draw.draw(st.sampled_from(list(TOLERANCE)))
    hidden, batch = draw.draw(st.integers(1, 64)), draw.draw(st.sampled_from((1, 3, 16, 17, 33, 48, 70)))
    cluster, rows = draw.draw(st.sampled_from((1, 2, 4))), draw.draw(st.sampled_from((16, 32, 64)))
    team = 1 if dtype is torch.float32 else draw.draw(st.sampled_from((1, 4)))
    fits = []
    for _, shape in shapes(Asked(cell, hidden, dtype, batch, True, False, MOST_BLOCKS, True)):
        ok = not program(cell, hidden, dtype, shape, True, True).problems()
        fits += [shape] if ok and shape[2] == cluster and shape[4:] == (rows, team) else []
    if not fits:
        return
    flags = {name: draw.draw(st.booleans(), name) for name in ("bias", "half", "reverse", "backwards")}
    check(cell, dtype, draw.draw(st.integers(1, 4)), batch, hidden, draw.draw(st.sampled_from(fits)), flags)


@emulated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("block", "on_host"), [(0, False), (2, False), (2, True)])
def test_projections_fold_into_the_weights(dtype: str, block: int, on_host: bool) -> None:
    p = RecurrentProblem("lstm", 5, 3, 4, 9, directions=2, projection=4, dtype=dtype, precision="ieee", task="training")
    shape = (16, 1, 1, 1, 16, 1)
    layer = StackedLayers(
        p, Folded(Emulated("lstm", 9, p.torch_dtype("x"), 0, (shape, shape))), block=block, on_host=on_host
    )
    named = dict(zip(p.operands, dense_operands(p, 3), strict=True))
    weights = [named[role] for role in p.weights]
    with torch.no_grad():
        *results, saved = layer.forward(named["x"], named["h0"], named["c0"], weights, keep=True)
        ends = named["dy"], named["dhn"], named["dcn"]
        results += layer.backward(saved, weights, *ends, [True] * (3 + len(weights)))
    want = p.reference(*named.values())
    for role, got, expected in zip(p.results, results, want, strict=True):
        gap = float((got.double() - expected).norm() / (expected.norm() + 1e-3))
        assert gap <= TOLERANCE[p.torch_dtype("x")], f"{role}: {gap:.1e}"


@pytest.mark.slow
@emulated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", sorted(GATES))
def test_weights_that_registers_do_not_hold_lie_in_shared_memory(cell: str) -> None:
    hidden = 200
    fits = []
    for units in range(32, 201, 8):
        both = [
            program(cell, hidden, torch.float32, (units, 1, 1, 4, 16, 1), True, backward) for backward in (False, True)
        ]
        if not any(p.problems() for p in both) and any(p.words > p.held for p in both):
            fits.append(units)
    flags = {"bias": True, "half": False, "reverse": False, "backwards": False}
    check(cell, torch.float32, 2, 2, hidden, (fits[0], 1, 1, 4, 16, 1), flags)


@emulated
def test_a_nan_passes_through_and_ends_no_wait() -> None:
    """A state's bits are all ones where it is not yet written. No NaN, of whatever bits, may be taken for that."""
    time, batch, hidden = 3, 2, 24
    for dtype, whole in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        gx = torch.zeros(time, batch, hidden, dtype=dtype, device="cpu")
        gx.view(whole)[0, 1] = -1
        u = torch.eye(hidden, dtype=dtype, device="cpu")
        h0 = torch.zeros(batch, hidden, dtype=dtype, device="cpu")
        h0.view(whole)[0, 3] = -1
        y = torch.empty(time, batch, hidden, dtype=dtype, device="cpu")
        recurrence = Emulated("rnn_relu", hidden, dtype, 0, ((8, 1, 1, 1, 16, 1),) * 2)
        recurrence.forward(gx, u, None, h0, None, y, reverse=False, keep=False)
        assert bool(y.isnan().all())  # the product of a NaN and 0 is one


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("cell", "dtype", "shape", "architecture"),
    [
        ("lstm", torch.bfloat16, (16, 2, 4, 8, 32, 1), "sm_90"),
        ("gru", torch.float32, (8, 1, 1, 1, 16, 1), "sm_80"),
        ("rnn_relu", torch.float16, (24, 1, 2, 4, 64, 1), "sm_90"),
        ("lstm", torch.bfloat16, (16, 1, 4, 2, 32, 4), "sm_90a"),
    ],
    ids=("lstm", "gru", "rnn_relu", "warpgroups"),
)
def test_a_gpus_own_compiler_takes_them(
    cell: str, dtype: torch.dtype, shape: Shape, architecture: str, tmp_path: Path
) -> None:
    for backward in (False, True):
        p = program(cell, 256, dtype, shape, True, backward)
        (tmp_path / "kernel.cu").write_text(read_source("ptx.cu") + p.source())
        command = ["nvcc", f"-arch={architecture}", "-std=c++17", "-cubin", "-Xptxas", "-v", "kernel.cu"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        registers = re.search(r"Used (\d+) registers", done.stderr)
        assert registers is not None
        assert int(registers[1]) <= 255
        spilled = re.search(r"(\d+) bytes spill stores", done.stderr)
        assert spilled is not None
        assert int(spilled[1]) == 0


def test_shapes_fit_on_the_chip() -> None:
    for cell, hidden, batch, dtype in (
        ("lstm", 768, 16, torch.bfloat16), ("gru", 1024, 64, torch.float16), ("rnn_tanh", 2560, 32, torch.bfloat16),
        ("lstm", 512, 1, torch.float32),
    ):  # fmt: skip
        for backward in (False, True):
            found = shapes(Asked(cell, hidden, dtype, batch, dtype is torch.float32, backward, 132, True))
            assert found, (cell, hidden)
            for _, shape in found:
                p = program(cell, hidden, dtype, shape, dtype is torch.float32, backward)
                assert not p.problems()
                assert p.slices * p.units >= hidden
                assert p.slices % p.cluster == 0
                assert p.slices * -(-batch // (p.rows * p.tiles)) <= 132


def test_an_estimate_counts_each_kernel_by_its_own_direction() -> None:
    solver, trains = (
        get("persistent_grid"),
        RecurrentProblem("lstm", 500, 16, 64, 768, task="training", device="cuda:a"),
    )
    forward = replace(trains, task="inference")
    shape = (16, 1, 1, 1, 16, 1)
    alone = Config(forward=shape)
    cycles = {}
    for backward in (False, True):
        found = shapes(_asked(trains, backward))
        cycles[backward] = {each: count for count, each in found}[shape]
    assert cycles[True] != cycles[False]
    assert solver.cost(forward, alone).serial_us == 500 * cycles[False] / CYCLES_A_MICROSECOND
    both = 500 * (cycles[False] + cycles[True]) / CYCLES_A_MICROSECOND
    assert abs(solver.cost(trains, Config(forward=shape, backward=shape)).serial_us - both) < 1e-6


def test_what_does_not_fit_says_by_how_much() -> None:
    p = RecurrentProblem("lstm", 10, 16, 64, 8192, dtype="bf16", device="cuda:any")
    (reason,) = [r for r in get("persistent_grid").unsupported(p) if "too large" in r]
    over = int(reason.split("weights is ")[1].split(" ")[0])
    whole = 4 * 8192 * 8192 * 2 / 132
    assert whole - 500e3 < over < 3 * whole


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_launches_that_share_a_gpu_end() -> None:
    """Two layers on two streams whose blocks cannot all run at a time, beside products and a kernel of a second."""
    device = torch.device("cuda")
    p = RecurrentProblem("lstm", 64, 16, 512, 1024, dtype="bf16", task="training", device=device_name(device))
    solver = get("persistent_grid")
    layer = solver.layer(p, next(iter(solver.configs(p))))
    operands = [t.to(device) for t in dense_operands(p.on("cpu"), 3)]
    x, h0, c0, *weights = operands[: 3 + len(p.weights)]
    dy = torch.randn_like(layer.forward(x, h0, c0, weights, keep=False)[0])
    needs = (True,) * (3 + len(weights))

    def step() -> torch.Tensor:
        y, _, _, saved = layer.forward(x, h0, c0, weights, keep=True)
        gradients = layer.backward(saved, weights, dy, None, None, needs)
        return torch.cat([y.flatten(), *(g.flatten() for g in gradients if g is not None)])

    with torch.no_grad():
        alone = step()
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        large = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
        with torch.cuda.stream(streams[2]):
            torch.cuda._sleep(1_500_000_000)
        found = []
        for _ in range(8):
            for stream in streams[:2]:
                with torch.cuda.stream(stream):
                    found.append(step())
            with torch.cuda.stream(streams[3]):
                large @ large
        torch.cuda.synchronize()
    assert all(torch.equal(each, alone) for each in found)


@pytest.mark.gpu
def test_a_graph_replays_what_the_launch_computes() -> None:
    device = torch.device("cuda")
    p = RecurrentProblem("gru", 20, 5, 24, 72, dtype="fp16", device=device_name(device))
    solver = get("persistent_grid")
    layer = solver.layer(p, next(iter(solver.configs(p))))
    x, h0, *weights = [t.to(device) for t in dense_operands(p.on("cpu"), 3)]
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
