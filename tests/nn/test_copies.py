"""Copies, pickles, scripts and other tools' versions of planned models: nothing bound to one module reaches another."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing, assert_same
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.layers.kinds import is_planned


class Kept(nn.Conv2d):
    """A convolution with a state of its own making."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "told": 1}


class Doubled(nn.Conv2d):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = type(self).__new__(type(self))
        twin.__dict__ = self.__dict__.copy()
        twin._parameters = {name: nn.Parameter(2 * p.detach()) for name, p in self._parameters.items() if p is not None}
        return twin


class Reduced(nn.Conv2d):
    def __copy__(self) -> nn.Module:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.ConvTranspose2d(4, 3, 3, stride=2),
    )


def example() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def planned(model: Any, x: torch.Tensor) -> Any:
    tilewise.optimize(model, x, planner=Dividing())
    assert any(is_planned(m) for m in model.modules())
    return model


def reweighted(module: Any) -> Any:
    """The same module with weights of its own, all twice as large."""
    module._parameters = {name: nn.Parameter(2 * p.detach()) for name, p in module._parameters.items()}
    return module


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d, Kept])
def test_a_shallow_copy_computes_with_its_own_weights(kind: Any) -> None:
    x = torch.randn(3, 3, 7, 7)
    conv = planned(kind(3, 3, 3), x)
    before = conv(x)
    for twin in (copy.copy(conv), copy.copy(copy.copy(conv)), copy.copy(copy.deepcopy(conv))):
        assert not is_planned(twin)
        assert set(twin.__dict__) - {"told"} == set(kind(3, 3, 3).__dict__)
        plain = reweighted(twin)
        assert_same(plain(x), 2 * before)
    assert copy.copy(conv).weight is conv.weight
    assert is_planned(conv)


def test_a_copy_of_a_network_shares_what_torchs_shares() -> None:
    model = planned(network(), example())
    twin = copy.copy(model)
    assert twin[0] is model[0]  # as of any module: children are shared
    assert_same(twin.eval()(example()), model.eval()(example()))


def test_deep_copies_follow_their_class_and_cycles() -> None:
    x = torch.randn(3, 3, 7, 7)
    conv = planned(Doubled(3, 3, 3), x)
    twin = copy.deepcopy(conv)
    assert is_planned(twin)
    assert twin.forward.__self__ is twin
    assert_same(twin(x), 2 * conv(x))
    conv = planned(nn.Conv2d(3, 3, 3), x)
    conv.register_forward_hook(lambda module, *_: None)
    conv.itself = [conv.forward]  # a list that leads back to the module
    twin = reweighted(copy.deepcopy(conv))
    assert twin.itself[0].__self__ is twin
    assert_same(twin(x), 2 * conv(x))
    assert all(getattr(v, "__self__", twin) is twin for v in twin.__dict__.values())
    pair = copy.deepcopy([conv, conv])
    assert pair[0] is pair[1]


def test_a_class_that_copies_its_dictionary_is_left_alone() -> None:
    x = torch.randn(3, 3, 7, 7)
    conv = Reduced(3, 3, 3)
    tilewise.optimize(conv, x, planner=Dividing())
    assert "__copy__" in report(conv).layers[0].reason
    assert_same(reweighted(copy.copy(conv))(x), 2 * conv(x))


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_is_that_of_the_plain_model(protocol: int) -> None:
    model = network()
    want = pickle.dumps(model, protocol)
    planned(model, example())
    assert pickle.dumps(model, protocol) == want
    assert all(is_planned(model[i]) for i in (0, 2, 3))
    assert_same(pickle.loads(want).eval()(example()), model.eval()(example()))


def test_torch_loads_with_the_classes_it_needs_anyway() -> None:
    allowed = [nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.ConvTranspose2d, set]
    plain = network()
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    want = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getvalue()))
    buffer = io.BytesIO()
    torch.save(planned(plain, example()), buffer)
    got = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getvalue()))
    assert sorted(got) == sorted(want)
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert_same(loaded.eval()(example()), plain.eval()(example()))
    assert not any(is_planned(m) for m in loaded.modules())


def test_a_pickle_keeps_what_the_user_set() -> None:
    conv = planned(nn.Conv2d(3, 3, 3), torch.randn(3, 3, 7, 7))
    conv.forward = len  # pickled by name
    loaded = pickle.loads(pickle.dumps(conv))
    assert loaded.forward is len
    assert copy.deepcopy(conv).forward is len


def test_script_says_restore_first() -> None:
    model = planned(network(), example())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (model, model[2], nn.ModuleList([model])):
            with pytest.raises(RuntimeError, match=r"tilewise\.restore"):
                torch.jit.script(one)
        want = model.eval()(example())
        scripted = torch.jit.script(tilewise.restore(model))
    assert_same(scripted(example()), want)


def test_other_tools_see_a_plain_model() -> None:
    model = planned(network(), example()).eval()
    want = network().eval()
    want.load_state_dict(model.state_dict())
    expected = want(example())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(torch.fx.symbolic_trace(model)(example()), expected)
        assert_same(torch.jit.trace(model, example())(example()), expected)
        program = torch.export.export(model, (example(),))
        assert "tilewise" not in str(program.graph)
        assert_same(program.module()(example()), expected)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        assert_same(averaged(example()), expected)
        model.qconfig = torch.ao.quantization.default_qconfig
        prepared = torch.ao.quantization.prepare(model)
    assert prepared[0] is not model[0]
    assert_same(prepared(example()), expected)
    assert all(getattr(m.forward, "__self__", m) is m for m in prepared.modules())
    assert all(is_planned(model[i]) for i in (0, 2, 3))


def test_fused_modules_compute_with_the_fused_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model(torch.randn(8, 3, 9, 9))
    model.eval()
    x = torch.randn(3, 3, 9, 9)
    want = model(x)
    planned(model, x)
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    assert_same(fused(x), want)


def _child(model: Any, x: torch.Tensor, pipe: Any) -> None:
    pipe.send((model(x).detach().numpy(), "tilewise" in str(model.__dict__)))


def test_another_process_gets_a_plain_model() -> None:
    x = torch.randn(3, 3, 7, 7)
    conv = planned(nn.Conv2d(3, 3, 3), x)
    here, there = multiprocessing.Pipe()
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=_child, args=(conv, x, there))
    process.start()
    assert here.poll(120)
    result, bound = here.recv()
    process.join(60)
    assert not bound
    assert_same(torch.from_numpy(result), conv(x).detach())


def test_the_report_of_a_deep_copy_is_that_of_its_original(tmp_path: Any) -> None:
    model = planned(network(), example())
    twin = copy.deepcopy(model)
    assert str(report(twin)) == str(report(model))
    assert tilewise.schedule(twin).layers == tilewise.schedule(model).layers
    tilewise.restore(twin[2])
    twin[2].forward = lambda x: x
    (changed,) = [layer for layer in report(twin).layers if layer.name == "2"]
    assert not changed.replaced
    assert changed.reason
    assert report(model).layers[1].replaced


def test_the_time_line_of_a_deep_copy_is_of_the_copy(tmp_path: Any) -> None:
    model = planned(network(), example())
    twin = copy.deepcopy(model)
    ran: list[nn.Module] = []
    twin.register_forward_hook(lambda module, *_: ran.append(module))
    report(twin).trace(tmp_path / "step.json", example())
    assert set(ran) == {twin}


def test_a_copy_without_its_original_and_a_part_say_where_the_report_is() -> None:
    model = planned(nn.Sequential(network()), example())
    with pytest.raises(ValueError, match="a part of a planned model, or a copy of one that is gone"):
        report(model[0])
    twin = copy.deepcopy(model)
    assert report(twin).layers
    del model
    gc.collect()
    with pytest.raises(ValueError, match="a part of a planned model, or a copy of one that is gone"):
        report(twin)
    with pytest.raises(ValueError, match="has not been called on it"):
        report(network())
