"""The CPU kernel of recurrent steps against a loop over steps in float64, with autograd for the gradients."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba")

from tests.sampling import some

from tilewise.problems.recurrent.packing import Packing
from tilewise.solvers.common.cpu_run import vector_lanes
from tilewise.solvers.recurrent._cpu_recurrence import CpuRecurrence, Shares

FEW = 16
GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


@dataclass
class Case:
    """The tensors of a layer: ``y`` and ``dy`` are every other part of rows that have NaN between."""

    cell: str
    reverse: bool
    gx: Tensor
    u: Tensor
    bias_n: Tensor | None
    h0: Tensor
    c0: Tensor | None
    y: Tensor
    dy: Tensor
    dhn: Tensor | None
    dcn: Tensor | None

    @classmethod
    def of(cls, cell: str, time: int, batch: int, hidden: int, *, seed: int = 0, **given: Any) -> Case:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=generator)

        def apart(values: Tensor | None) -> Tensor:
            base = torch.full((time, batch, 2 * hidden + 3), math.nan, dtype=torch.float32, device="cpu")
            if values is not None:
                base[..., 1 : 1 + hidden] = values
            return base[..., 1 : 1 + hidden]

        lstm, gates = cell == "lstm", GATES[cell]
        tensors = {
            "gx": drawn(time, batch, gates * hidden), "u": drawn(gates * hidden, hidden) / math.sqrt(hidden),
            "bias_n": drawn(hidden) if cell == "gru" else None, "h0": drawn(batch, hidden),
            "c0": drawn(batch, hidden) if lstm else None, "y": apart(None), "dy": apart(drawn(time, batch, hidden)),
            "dhn": drawn(batch, hidden), "dcn": drawn(batch, hidden) if lstm else None,
        }  # fmt: skip
        return cls(cell, **{"reverse": False, **tensors, **given})

    @property
    def sizes(self) -> tuple[int, int, int]:
        time, batch, hidden = self.y.shape
        return time, batch, hidden

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        """y, hn, cn, and the gradients of gx, h0 and c0, in float64."""
        leaves = [t.double().requires_grad_() for t in (self.gx, self.h0, self.c0) if t is not None]
        gx, h, *c = leaves
        u, steps = self.u.double(), range(len(gx))
        bias = torch.zeros((), dtype=torch.float64) if self.bias_n is None else self.bias_n.double()
        outputs = list(steps)
        for t in reversed(steps) if self.reverse else steps:
            product = h @ u.T
            if self.cell == "lstm":
                i, f, g, o = (gx[t] + product).chunk(4, 1)
                c = [f.sigmoid() * c[0] + i.sigmoid() * g.tanh()]
                h = o.sigmoid() * c[0].tanh()
            elif self.cell == "gru":
                (r, z, n), (of_r, of_z, of_n) = gx[t].chunk(3, 1), product.chunk(3, 1)
                z = (z + of_z).sigmoid()
                h = (1 - z) * (n + (r + of_r).sigmoid() * (of_n + bias)).tanh() + z * h
            else:
                h = (gx[t] + product).tanh() if self.cell == "rnn_tanh" else (gx[t] + product).relu()
            outputs[t] = h
        y = torch.stack(outputs)  # type: ignore[arg-type]
        results = [y, h, *c]
        starts = [self.dy, self.dhn, self.dcn]
        ends = [(r, d.double()) for r, d in zip(results, starts, strict=False) if d is not None]
        gradients = torch.autograd.grad([r for r, _ in ends], leaves, [d for _, d in ends])
        return [r.detach() for r in results], list(gradients)

    def made(self, **options: Any) -> CpuRecurrence:
        return CpuRecurrence(
            self.cell, *self.sizes[1:], **{"lanes": vector_lanes(), "threads": 2, "openmp": True, **options}
        )

    def forward(self, recurrence: CpuRecurrence, *, keep: bool) -> tuple[list[Tensor], Any]:
        hn, cn, saved = recurrence.forward(
            self.gx.clone(), self.u, self.bias_n, self.h0, self.c0, self.y, reverse=self.reverse, keep=keep
        )
        return [t for t in (self.y, hn, cn) if t is not None], saved

    def backward(self, recurrence: CpuRecurrence, saved: Any) -> tuple[list[Tensor], Tensor | None]:
        dgates, of_n, dh0, dc0 = recurrence.backward(
            saved, self.u, self.bias_n, self.h0, self.c0, self.y, self.dy, self.dhn, self.dcn, reverse=self.reverse
        )
        return [t for t in (dgates, dh0, dc0) if t is not None], of_n


def close(found: list[Tensor], wanted: list[Tensor], bound: float = 5e-6) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
        assert error < bound, error


@settings(max_examples=some(40), deadline=None)
@given(
    cell=st.sampled_from(tuple(GATES)), time=st.integers(1, 12), batch=st.integers(1, 20),
    hidden=st.one_of(st.integers(1, 40), st.sampled_from((64, 65, 100, 130))), reverse=st.booleans(),
    bias=st.booleans(), ends=st.booleans(), threads=st.sampled_from((1, 2)), openmp=st.booleans(),
)  # fmt: skip
@example(cell="rnn_tanh", time=12, batch=1, hidden=1, reverse=False, bias=False, ends=False, threads=1, openmp=False)
def test_steps_and_their_gradients(
    cell: str, time: int, batch: int, hidden: int, reverse: bool, bias: bool, ends: bool, threads: int, openmp: bool
) -> None:
    without: dict[str, Any] = {} if bias else {"bias_n": None}
    if not ends:
        without |= {"dhn": None, "dcn": None}
    case = Case.of(cell, time, batch, hidden, seed=time + 13 * hidden, reverse=reverse, **without)
    recurrence = case.made(threads=threads, openmp=openmp)
    results, gradients = case.expected()
    # Of a few numbers all may be near 0, or near 1 or -1, where 1 - h^2 has few digits in fp32.
    few = batch * hidden < FEW
    found, _ = case.forward(recurrence, keep=False)
    close(found, results, 1e-4 if few else 5e-6)
    case.y.fill_(math.nan)
    found, saved = case.forward(recurrence, keep=True)
    close(found, results, 1e-4 if few else 5e-6)
    base = case.y._base
    assert base is not None
    assert int(base.isnan().sum()) == base.numel() - case.y.numel()
    first, of_n = case.backward(recurrence, saved)
    close(first, gradients, 1e-4 if cell == "rnn_relu" or few else 2e-5)
    again, _ = case.backward(recurrence, saved)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert (of_n is not None) == (cell == "gru")


@settings(max_examples=some(30), deadline=None)
@given(
    cell=st.sampled_from(tuple(GATES)), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=17),
    hidden=st.sampled_from((1, 7, 16, 33)), reverse=st.booleans(), threads=st.sampled_from((1, 2)),
)  # fmt: skip
def test_each_sequence_of_a_packed_batch_is_as_alone(
    cell: str, lengths: list[int], hidden: int, reverse: bool, threads: int
) -> None:
    lengths.sort(reverse=True)
    time, batch = lengths[0], len(lengths)
    whole = Case.of(cell, time, batch, hidden, seed=sum(lengths), reverse=reverse)
    packing = Packing(torch.tensor([sum(n > t for n in lengths) for t in range(time)], dtype=torch.int64))
    rows = [(t, i) for t in range(time) for i in range(batch) if t < lengths[i]]
    steps, sequences = (torch.tensor(column, dtype=torch.int64) for column in zip(*rows, strict=True))
    y = torch.full((len(rows), hidden + 2), math.nan, dtype=torch.float32, device="cpu")[:, 1:-1]
    packed = replace(whole, gx=whole.gx[steps, sequences], dy=whole.dy[steps, sequences], y=y)
    recurrence = whole.made(threads=threads, packed=True).of(packing)
    packed.forward(recurrence, keep=False)
    found, saved = packed.forward(recurrence, keep=True)
    gradients, _ = packed.backward(recurrence, saved)
    for i, length in enumerate(lengths):
        one = slice(i, i + 1)
        alone = {
            name: None if t is None else (t[:length, one] if t.dim() == 3 else t[one])
            for name in ("gx", "dy", "h0", "c0", "dhn", "dcn") for t in [getattr(whole, name)]
        }  # fmt: skip
        results, slopes = replace(whole, **alone, y=whole.y[:length, one]).expected()
        own = sequences == i
        got = [found[0][own][:, None], *(t[one] for t in found[1:])]
        got += [gradients[0][own][:, None], *(t[one] for t in gradients[1:])]
        for a, b in zip(got, [*results, *slopes], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


def test_rows_that_lie_unequally_far_apart_are_refused() -> None:
    case = Case.of("gru", 3, 2, 4)
    case.y = torch.empty((3, 5, 4), dtype=torch.float32, device="cpu")[:, :2]
    with pytest.raises(ValueError, match="equally far apart"):
        case.forward(case.made(), keep=False)
    with pytest.raises(ValueError, match="packing: has 3 sequences; at most 2 would do"):
        case.made(packed=True).of(Packing(torch.tensor([3], dtype=torch.int64)))


def test_the_gradient_of_the_inner_product() -> None:
    case = Case.of("gru", 3, 2, 5)
    recurrence = case.made()
    _, saved = case.forward(recurrence, keep=True)
    (dgates, _), of_n = case.backward(recurrence, saved)
    r = saved[0][..., :5]
    assert of_n is not None
    torch.testing.assert_close(of_n, dgates[..., 10:] * r)


@pytest.mark.parametrize("cell", list(GATES))
def test_threads_change_no_bit(cell: str) -> None:
    case = Case.of(cell, 5, 7, 150)
    found = []
    for threads in (1, 2):
        recurrence = case.made(threads=threads)
        results, saved = case.forward(recurrence, keep=True)
        found.append([t.clone() for t in (*results, *case.backward(recurrence, saved)[0])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_fewer_lanes() -> None:
    for cell in ("gru", "lstm"):
        case = Case.of(cell, 3, 5, 21)
        recurrence = case.made(lanes=4)
        results, gradients = case.expected()
        found, saved = case.forward(recurrence, keep=True)
        close(found, results)
        close(case.backward(recurrence, saved)[0], gradients, 2e-5)


@pytest.mark.parametrize("cell", ["rnn_tanh", "lstm"])
def test_activations_of_any_size(cell: str) -> None:
    """Each lane is an activation alone: tanh of rnn_tanh, and of an LSTM the sigmoid of its first gate."""
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.logspace(-37, 38, 400), -torch.logspace(-37, 38, 400)])
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40])]).float()
    gates = GATES[cell]
    zeros = torch.zeros((len(x), 1), dtype=torch.float32, device="cpu")
    gx = torch.zeros((1, len(x), gates), dtype=torch.float32, device="cpu")
    gx[0, :, 0] = x
    y = torch.empty((1, len(x), 1), dtype=torch.float32, device="cpu")
    recurrence = CpuRecurrence(cell, len(x), 1, lanes=vector_lanes(), threads=1, openmp=False)
    c0 = zeros if cell == "lstm" else None
    _, _, saved = recurrence.forward(gx, zeros[:gates], None, zeros, c0, y, reverse=False, keep=True)
    found, wanted = (saved[0], x.double().sigmoid()) if cell == "lstm" else (y, x.double().tanh())
    gap = (found[0, :, 0].double() - wanted).abs()
    assert bool((gap <= 3e-7 * wanted.abs() + 2e-38).all())
    assert float(found.abs().max()) <= 1


@pytest.mark.parametrize("cell", list(GATES))
def test_nan_and_infinity_stay_in_their_row(cell: str) -> None:
    case = Case.of(cell, 4, 9, 20)
    results, gradients = case.expected()
    others = torch.arange(9) != 5
    for value in (math.nan, math.inf):
        case.gx[1, 5, 3] = value
        recurrence = case.made()
        found, saved = case.forward(recurrence, keep=True)
        close([t[..., others, :] for t in found], [t[..., others, :] for t in results])
        if math.isnan(value):
            assert bool(found[0][1, 5, 3].isnan())
            assert bool(found[0][2:, 5].isnan().all())
        backward, _ = case.backward(recurrence, saved)
        close([t[..., others, :] for t in backward], [t[..., others, :] for t in gradients], 1e-4)


@pytest.mark.parametrize("openmp", [True, False])
def test_calls_at_once(openmp: bool) -> None:
    cases = [Case.of("lstm", 10, 4, 70, seed=seed) for seed in range(6)]
    recurrence = cases[0].made(openmp=openmp)

    def run(case: Case) -> None:
        results, gradients = case.expected()
        for _ in range(20):
            case.y.fill_(math.nan)
            found, saved = case.forward(recurrence, keep=True)
            close(found, results)
            close(case.backward(recurrence, saved)[0], gradients, 2e-5)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, cases))


OVERSUBSCRIBED = """
import os, torch
from tests.kernels.test_recurrent_cpu import Case, close
torch.set_num_threads(4)
case = Case.of("gru", 12, 3, 90)
results, gradients = case.expected()  # in a forked process neither autograd nor torch's threads would work
def check(openmp):
    recurrence = case.made(threads=4, openmp=openmp)
    for _ in range(3):
        found, saved = case.forward(recurrence, keep=True)
        close(found, results)
        close(case.backward(recurrence, saved)[0], gradients, 2e-5)
check(False)
check(True)
child = os.fork()
if not child:
    try:
        check(True)
    except BaseException:
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_more_threads_than_cores_and_forks_end() -> None:
    subprocess.run([sys.executable, "-c", OVERSUBSCRIBED], check=True, timeout=120)


@settings(max_examples=some(200))
@given(
    lanes=st.sampled_from((4, 8, 16)), gates=st.sampled_from((1, 3, 4)), batch=st.integers(1, 300),
    hidden=st.integers(1, 3000), threads=st.integers(1, 64), back=st.booleans(),
)  # fmt: skip
def test_shares_cover_all(lanes: int, gates: int, batch: int, hidden: int, threads: int, back: bool) -> None:
    s = Shares(lanes, gates, batch, hidden, threads, back)
    assert (s.panels - 1) * s.blocks * lanes < hidden <= s.panels * s.blocks * lanes
    count, rows, last = s.tiles
    assert (count - 1) * rows + last == batch
    assert 0 < last <= rows
    assert s.part >= 1
    assert s.scratch >= 4 * gates * hidden * hidden
