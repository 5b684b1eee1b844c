"""Regions within ``torch.compile``: one operator each, for the program or for what the compiler made of the region."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from tests.nn.fresh_dynamo import fresh_dynamo as fresh_dynamo
from tests.nn.regions.kept import First, images, keep
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise
import tilewise.nn
from tilewise.nn.regions.compiled import contest, operator
from tilewise.nn.regions.forward import regional_of


class Net(nn.Module):
    """Two convolutions with a norm and a residual; a program runs no code of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        return self.drop(self.second(x) + x)


class Several(Net):
    """Results in a structure."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x = torch.relu(self.norm(self.first(x + y)))
        return {"out": self.second(x), "aux": [x, (x.mean((2, 3)), "pooled")]}


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(5)
    model = kind().eval()
    nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
    return model


@pytest.fixture(params=["program", "compiler"])
def wins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the operator runs: which is faster on so small a network is a matter of the machine."""
    monkeypatch.setattr(contest, "LEAST_SPEEDUP", 0.0 if request.param == "program" else 1e9)
    return str(request.param)


def operators(graphs: list[torch.fx.GraphModule]) -> Counter[str]:
    """The operators and functions that Dynamo's graphs call, by name."""
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    return Counter(str(node.target) for node in nodes if node.op == "call_function" and "getitem" not in str(node))


def test_a_region_is_one_operator(wins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), images()
    keep(monkeypatch, model, x)
    want = tilewise.restore(copy.deepcopy(model))
    seen = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=seen, fullgraph=True)
    with torch.no_grad():
        for seed in range(3):
            x = images(seed=seed)
            torch.testing.assert_close(compiled(x), want(x), rtol=1e-4, atol=1e-5)
    assert len(seen.graphs) == 2, "the compiler's try is a graph of its own, whoever wins"
    assert operators(seen.graphs[:1]) == {"tilewise.region": 1}
    (told,) = tilewise.nn.report(model).facts["compiled"]
    assert (told["region"], told["runs"]) == ("", wins)
    assert told["program_ms"] > 0 < told["compiled_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [False, True])
def test_behind_inductor(wins: str, freezing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), images()
    keep(monkeypatch, model, x)
    want = tilewise.restore(copy.deepcopy(model))
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad(), torch._inductor.config.patch(freezing=freezing):
        torch.testing.assert_close(compiled(x), want(x), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():  # compiled anew or not: the same results
        torch.testing.assert_close(compiled(x), want(x), rtol=1e-4, atol=1e-5)
    assert {told["runs"] for told in tilewise.nn.report(model).facts["compiled"]} == {wins}


@pytest.mark.parametrize("freezing", [False, True])
def test_later_calls_compile_nothing(monkeypatch: pytest.MonkeyPatch, freezing: bool) -> None:
    """Not what the compiler made of the region either, which would lose its frozen weights then."""
    monkeypatch.setattr(contest, "LEAST_SPEEDUP", 1e9)
    model, x = net(), images()
    keep(monkeypatch, model, x)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        with torch._inductor.config.patch(freezing=freezing):
            want = compiled(x).clone()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                torch.testing.assert_close(compiled(x), want)
    (told,) = tilewise.nn.report(model).facts["compiled"]
    assert told["runs"] == "compiler"


def test_results_keep_their_structure(wins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = net(Several), images(), images(seed=1)
    keep(monkeypatch, model, [(x, y)])
    want = tilewise.restore(copy.deepcopy(model))
    seen = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=seen, fullgraph=True)
    with torch.no_grad():
        got, wanted = compiled(x, y), want(x, y)
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(wanted)
    leaves, wanted_leaves = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted)
    assert leaves.pop() == wanted_leaves.pop() == "pooled"
    torch.testing.assert_close(leaves, wanted_leaves, rtol=1e-4, atol=1e-5)
    assert operators(seen.graphs[:1]) == {"tilewise.region": 1}


def test_parts_of_a_model(wins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x if x.sum().item() > 1e9 else x + 1.0

    model, x = Parts().eval(), images()
    monkeypatch.setattr("tilewise.nn.regions.choose.LEAST_SPEEDUP", 0.0)
    tilewise.optimize(model, x, training=False, planner=First())
    assert all(regional_of(part) is not None for part in model.parts)
    want = tilewise.restore(copy.deepcopy(model))
    seen = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=seen)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), want(x), rtol=1e-4, atol=1e-5)
    assert operators(seen.graphs)["tilewise.region"] == 10
    assert len(tilewise.nn.report(model).facts["compiled"]) == 10, "more than Dynamo keeps for one code"


def test_calls_that_are_traced_as_the_class_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), images()
    keep(monkeypatch, model, x)
    want = tilewise.restore(copy.deepcopy(model))

    def regions_in(*args: Any, **kwargs: Any) -> int:
        torch._dynamo.reset()
        seen = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=seen, fullgraph=True)
        torch.testing.assert_close(compiled(*args, **kwargs), want(*args, **kwargs), rtol=1e-4, atol=1e-5)
        return operators(seen.graphs[:1])["tilewise.region"]

    assert regions_in(x) == 0, "with autograd"
    with torch.no_grad():
        assert regions_in(x) == 1
        assert regions_in(x=x) == 0
        assert regions_in(images(count=3)) == 0, "a size that was not planned"
        assert regions_in(x.to(memory_format=torch.channels_last)) == 0, "a layout that was not planned"
        with torch.autocast("cpu", torch.bfloat16):
            assert regions_in(x) == 0
        program = torch.export.export(model, (x,))
        assert not any("region" in str(node.target) for node in program.graph.nodes)
        model.norm.register_forward_hook(lambda *_: None)
        want.norm.register_forward_hook(lambda *_: None)
        assert regions_in(x) == 0, "a hook came"


def test_what_changes_after_compiling(monkeypatch: pytest.MonkeyPatch, wins: str) -> None:
    model, x = net(), images()
    keep(monkeypatch, model, x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def check() -> None:
        want = tilewise.restore(copy.deepcopy(model))
        torch.testing.assert_close(compiled(x), want(x), rtol=1e-4, atol=1e-5)

    with torch.no_grad():
        check()
        model.first.weight.mul_(2.0)
        check()
        model.second.weight = nn.Parameter(torch.randn_like(model.second.weight))
        check()
        model.norm.eps = 0.5
        check()
        model.drop.train()
        model.drop.p = 1.0
        check()
        model.drop.eval()
        tilewise.restore(model)
        check()


def test_a_copy_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "LEAST_SPEEDUP", 0.0)
    model, x = net(), images()
    keep(monkeypatch, model, x)
    with torch.no_grad():
        torch.compile(model, backend="eager")(x)
        other = copy.deepcopy(model)
        other.first.weight.mul_(-1.0)
        want = tilewise.restore(copy.deepcopy(other))(x)
        torch.testing.assert_close(torch.compile(other, backend="eager")(x), want, rtol=1e-4, atol=1e-5)
        other(x)  # now the copy has a program
        torch._dynamo.reset()
        seen = CompileCounterWithBackend("eager")
        torch.testing.assert_close(torch.compile(other, backend=seen)(x), want, rtol=1e-4, atol=1e-5)
        assert operators(seen.graphs[:1]) == {"tilewise.region": 1}


def test_a_compiler_that_fails_leaves_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), images()
    keep(monkeypatch, model, x)
    want = tilewise.restore(copy.deepcopy(model))

    def only_regions(graph: torch.fx.GraphModule, inputs: object) -> Any:
        if not operators([graph])["tilewise.region"]:
            raise ValueError("convolutions are too hard")
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(model, backend=only_regions)
        torch.testing.assert_close(compiled(x), want(x), rtol=1e-4, atol=1e-5)
    (told,) = tilewise.nn.report(model).facts["compiled"]
    assert told["runs"] == "program"
    assert "convolutions are too hard" in told["reason"]


def test_a_model_is_forgotten_with_its_operators(monkeypatch: pytest.MonkeyPatch, wins: str) -> None:
    gc.collect()
    before = len(operator._published)
    model, x = net(), images()
    keep(monkeypatch, model, x)
    with torch.no_grad():
        torch.compile(model, backend="eager")(x)
        twin = copy.deepcopy(model)
        twin(x)  # has a program of its own from now on
    assert len(operator._published) == before + 1
    gone, twin_gone = weakref.ref(model), weakref.ref(twin)
    del model, twin
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    assert twin_gone() is None
    assert len(operator._published) == before


def test_names_and_shapes_are_checked() -> None:
    with pytest.raises(RuntimeError, match="name='nothing' is no region of this process"):
        torch.ops.tilewise.region([images()], "nothing")
