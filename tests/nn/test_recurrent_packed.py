"""Packed sequences in recurrent modules: as torch computes them, by plans that serve any lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.recurrent_plans import CLASSES, forced
from tests.sampling import some
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import tilewise
from tilewise.planner import Planner
from tilewise.solvers import get
from tilewise.wisdom import Wisdom

SMALL = tilewise.RecurrentProblem("gru", 2, 2, 2, 2)
SOLVERS = [name for name in ("stepped", "resident_rnn", "aten_rnn") if not get(name).why_not(SMALL)]


def trained(module: nn.RNNBase, x: Tensor, lengths: list[int], hx: Any, *, first: bool) -> list[Any]:
    """Padded results, last states and all gradients of a call with sequences of these lengths, in any order."""
    module.zero_grad()
    states = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    leaves = [t.detach().requires_grad_() for t in (x, *states)]
    given: Any = None if hx is None else tuple(leaves[1:]) if isinstance(hx, tuple) else leaves[1]
    packed, last = module(pack_padded_sequence(leaves[0], lengths, batch_first=first, enforce_sorted=False), given)
    assert isinstance(packed, PackedSequence)
    y, of = pad_packed_sequence(packed, batch_first=first)
    assert of.tolist() == lengths
    results = [y, *(last if isinstance(last, tuple) else (last,))]
    loss = sum((r * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() for r in results)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*(r.detach() for r in results), *(t.grad for t in (*leaves, *module.parameters()))]


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=some(40), deadline=None)
@given(
    kind=st.sampled_from(CLASSES), layers=st.integers(1, 2), both=st.booleans(), first=st.booleans(),
    bias=st.booleans(), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), states=st.booleans(),
    dropout=st.sampled_from((0.0, 0.4)), projection=st.integers(0, 3),
)  # fmt: skip
def test_packed_sequences_are_torchs(
    solver: str, kind: Any, layers: int, both: bool, first: bool, bias: bool, lengths: list[int], states: bool,
    dropout: float, projection: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    projected = {"proj_size": projection} if projection and kind is nn.LSTM else {}
    dropout = dropout if layers > 1 else 0.0
    module = kind(3, 4, layers, bias=bias, bidirectional=both, batch_first=first, dropout=dropout, **projected)
    twin, table = forced(module, solver)
    shape = (len(lengths), max(lengths), 3) if first else (max(lengths), len(lengths), 3)
    x, hx = torch.randn(shape), None
    if states:
        widths = projected.get("proj_size", 4), 4
        state = [torch.randn(layers * (1 + both), len(lengths), width) for width in widths]
        hx = tuple(state) if kind is nn.LSTM else state[0]
    found = []
    for each in (module, twin):
        torch.manual_seed(1)
        found.append(trained(each, x, lengths, hx, first=first))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert [p.packed for p in table.asked] == [sum(lengths)]
    with torch.no_grad():
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        module.eval()
        twin.eval()
        for a, b in zip(twin(packed, hx)[0], module(packed, hx)[0], strict=True):
            torch.testing.assert_close(a, b)


def test_plans_serve_other_lengths() -> None:
    module = nn.GRU(3, 4)
    twin, table = forced(module)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(20, 25, (6,), generator=generator).tolist()
        x = [torch.randn(length, 3, generator=generator) for length in lengths]
        packed = pack_sequence(x, enforce_sorted=False)
        torch.testing.assert_close(twin(packed)[0].data, module(packed)[0].data)
    assert len(table.asked) <= 4


def test_gradients_of_gradients() -> None:
    module = nn.LSTM(3, 4)
    twin, _ = forced(module)
    found = []
    for each in (module, twin):
        x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = each(pack_padded_sequence(x, [5, 2]))[0].data
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *each.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_a_packed_sequence_that_is_none_is_torchs_to_judge() -> None:
    module = nn.RNN(3, 4)
    twin, table = forced(module)
    wrong = [
        PackedSequence(torch.randn(5, 3), torch.tensor([2, 1])),
        PackedSequence(torch.randn(5, 3), torch.tensor([2, 3])),
        PackedSequence(torch.randn(4, 2), torch.tensor([2, 2])),
    ]
    for packed in wrong:
        outcomes = []
        for each in (module, twin):
            try:
                outcomes.append(str(each(packed)[0].data.shape))
            except Exception as error:  # whatever torch raises
                outcomes.append(f"{type(error).__name__}: {error}")
        assert outcomes[0] == outcomes[1]
    assert not table.asked


def test_a_model_is_planned_and_reported(tmp_path: Path) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.rnn(pack_padded_sequence(x, [5, 3]))[0].data
            return y

    net, x = Packed(), torch.randn(5, 2, 3)
    want = net(x)
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    others = ("aten_rnn", "resident_rnn", "persistent_grid")
    tilewise.optimize(net, x, planner=planner, goal="passes", rigor="estimate", exclude=others)
    (each,) = tilewise.nn.report(net).layers[0].passes()
    assert each.problem.packed == 8
    assert each.replaced
    torch.testing.assert_close(net(x), want)


def test_autocast_casts_as_torch() -> None:
    module = nn.RNN(3, 4)
    twin, _ = forced(module)
    packed = pack_padded_sequence(torch.randn(5, 2, 3), [5, 2])
    found = []
    for each in (module, twin):
        with torch.autocast("cpu", torch.bfloat16):
            y, last = each(packed)
        found.append((y.data, last))
    assert found[0][0].dtype == found[1][0].dtype
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)
