"""Recurrent modules under autocast: planned in the type in which torch computes them, with its types of gradients."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.recurrent_plans import CLASSES, flat, forced, with_gradients
from tests.sampling import some
from torch import Tensor, nn

import tilewise
from tilewise.planner import Planner
from tilewise.wisdom import Wisdom

ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="torch computes an LSTM in bf16 by oneDNN alone",
)
KINDS = [pytest.param(nn.LSTM, marks=ONEDNN), nn.RNN]


def under(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.autocast:
    return torch.autocast(device, dtype, **options)


def like(got: list[Any], want: list[Any]) -> None:
    """The same types, and values as close as bf16 allows."""
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("traced", [False, True])
def test_a_projection_is_torchs_where_it_computes_in_several_types(traced: bool) -> None:
    """As on a CPU, where c stays fp32."""
    module = nn.LSTM(3, 5, proj_size=2)
    twin, table = forced(module)
    called = torch.compile(twin, backend="eager") if traced else twin
    x = torch.randn(4, 3, 3)
    with under():
        got, want = flat(called(x)), flat(module(x))
    assert [t.dtype for t in got] == [t.dtype for t in want] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert all(map(torch.equal, got, want))
    assert not table.asked


@ONEDNN
@settings(max_examples=some(20), deadline=None)
@given(data=st.data())
def test_types_and_values_are_torchs(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from((nn.LSTM, nn.RNN)))
    options = {name: data.draw(st.booleans(), name) for name in ("bias", "batch_first", "bidirectional")}
    module = kind(3, 5, data.draw(st.integers(1, 2)), **options)
    twin, table = forced(module)
    x = torch.randn(4, 3, 3, dtype=data.draw(st.sampled_from((torch.float32, torch.bfloat16))), requires_grad=True)
    hx: Any = None
    if data.draw(st.booleans(), "states"):
        n = x.shape[0 if module.batch_first else 1]
        state = [torch.randn(module.num_layers * (1 + module.bidirectional), n, 5) for _ in range(2)]
        hx = tuple(s.requires_grad_() for s in state) if kind is nn.LSTM else state[0].requires_grad_()
    with under():
        for _ in range(2):
            like(with_gradients(twin, x, hx), with_gradients(module, x, hx))
        with torch.no_grad():
            like(flat(twin(x, hx)), flat(module(x, hx)))
    assert [(p.task, p.dtype) for p in table.asked] == [("training", "bf16"), ("inference", "bf16")]


@settings(max_examples=some(20), deadline=None)
@given(data=st.data())
def test_tensors_of_the_lower_type_are_planned_on_every_processor(data: st.DataObject) -> None:
    """torch computes their LSTM also where oneDNN cannot, in the one type that they have."""
    kind, dtype = data.draw(st.sampled_from((nn.LSTM, nn.RNN))), torch.bfloat16
    options = {name: data.draw(st.booleans(), name) for name in ("bias", "batch_first", "bidirectional")}
    module = kind(3, 5, data.draw(st.integers(1, 2)), **options)
    twin, table = forced(module)
    x = torch.randn(4, 3, 3, dtype=dtype, requires_grad=data.draw(st.booleans(), "input's gradient"))
    hx: Any = None
    if data.draw(st.booleans(), "states"):
        n = x.shape[0 if module.batch_first else 1]
        state = [torch.randn(module.num_layers * (1 + module.bidirectional), n, 5, dtype=dtype) for _ in range(2)]
        hx = tuple(state) if kind is nn.LSTM else state[0]
    with under():
        for _ in range(2):
            like(with_gradients(twin, x, hx), with_gradients(module, x, hx))
        with torch.no_grad():
            like(flat(twin(x, hx)), flat(module(x, hx)))
    assert [(p.task, p.dtype) for p in table.asked] == [("training", "bf16"), ("inference", "bf16")]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_tensors_of_the_lower_type_are_compiled_without_gradients(kind: Any) -> None:
    """There AOTAutograd would give an LSTM to oneDNN, which some processors lack for this type."""
    module, x = kind(3, 5, 2), torch.randn(4, 2, 3, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(forced(module)[0], backend="aot_eager", fullgraph=True)
    with under(), torch.no_grad():
        like(flat(compiled(x)), flat(module(x)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_what_torch_refuses_is_refused_in_its_words(kind: Any, compiled: bool) -> None:
    """An LSTM of fp32 tensors in fp16 or bf16, where oneDNN has none: torch raises, and so do we."""
    module, x = kind(3, 5), torch.randn(4, 2, 3)
    for dtype in (torch.bfloat16, torch.float16):
        twin, table = forced(module)
        torch._dynamo.reset()
        called = torch.compile(twin, backend="eager") if compiled else twin
        with under(dtype=dtype):
            try:
                want = flat(module(x))
            except RuntimeError as error:
                with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                    called(x)
                assert not table.asked
            else:
                like(flat(called(x)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_layer_of_cast_tensors(kind: Any) -> None:
    module, x = kind(3, 5, 2), torch.randn(4, 2, 3)
    twin, table = forced(module)
    cast, its_table = forced(copy.deepcopy(module).bfloat16())
    with under(cache_enabled=False), torch.no_grad():
        got = flat(twin(x))
    with torch.no_grad():
        want = flat(cast(x.bfloat16()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert table.asked == its_table.asked


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_calls_add_up_in_the_parameters(kind: Any) -> None:
    module, x = kind(3, 5), torch.randn(4, 2, 3)
    twin, _ = forced(module)
    for each in (twin, module):
        with under():
            loss = sum(each(x * scale)[0].float().sum() for scale in (1, 2))
        loss.backward()  # type: ignore[union-attr]
    for mine, its in zip(twin.parameters(), module.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype is torch.float32
        torch.testing.assert_close(mine.grad, its.grad, rtol=0.1, atol=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_are_torchs(kind: Any) -> None:
    module, x = kind(3, 5), torch.randn(4, 2, 3, requires_grad=True)
    found = []
    for each in (forced(module)[0], module):
        with under():
            y = each(x)[0].float().square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), each.weight_hh_l0)[0])  # type: ignore[arg-type]
    assert found[0].dtype is torch.float32
    torch.testing.assert_close(*found, rtol=0.2, atol=0.2)


def test_what_torch_computes_in_several_types_is_left_to_it() -> None:
    for kind, dtype in ((nn.GRU, torch.float32), (nn.LSTM, torch.float64), (nn.RNN, torch.float16)):
        module = kind(3, 5).to(dtype if dtype is torch.float64 else torch.float32)
        twin, table = forced(module)
        x = torch.randn(4, 2, 3, dtype=dtype)
        with under():
            got, want = flat(twin(x)), flat(module(x))
        assert [t.dtype for t in got] == [t.dtype for t in want]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert not table.asked


@pytest.mark.parametrize("kind", CLASSES)
def test_autocast_of_another_device_changes_nothing(kind: Any) -> None:
    module, x = kind(3, 5), torch.randn(4, 2, 3, requires_grad=True)
    twin, table = forced(module)
    with under("cuda", torch.float16) if torch.cuda.is_available() else under("xpu"):
        torch.testing.assert_close(with_gradients(twin, x), with_gradients(module, x))
    assert [p.dtype for p in table.asked] == ["fp32"]


@ONEDNN
def test_a_model_that_casts_is_planned_in_the_lower_type(tmp_path: Path) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            with under():
                y: Tensor = self.rnn(x)[0]
            return y

    net, x = Casting(), torch.randn(4, 2, 3)
    want = net(x)
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    tilewise.optimize(net, x, planner=planner, goal="passes", rigor="estimate", exclude=("aten_rnn",))
    (layer,) = tilewise.nn.report(net).layers
    assert [each.problem.dtype for each in layer.passes()] == ["bf16"]
    assert layer.replaced
    like([net(x)], [want])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", CLASSES)
def test_types_are_cudnns(kind: Any, dtype: torch.dtype) -> None:
    module = kind(24, 48, 2).cuda()
    twin, table = forced(module)
    x = torch.randn(5, 7, 24, device="cuda", requires_grad=True)
    with under("cuda", dtype):
        like(with_gradients(twin, x), with_gradients(module, x))
    assert len(table.asked) == 1
