"""What surrounds a captured model: copies, pickles, compilers, optimize and restore, wrappers, several ranks."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked import ForkedScript
from tests.nn.dividing import Dividing
from tests.nn.graphs.models import Residual, assert_alike, assert_same_steps, images, network, step, twins
from tests.nn.graphs.tape import TapeRecorder
from torch import nn

import tilewise
from tilewise.nn import CannotCapture, graph_report, report, ungraphed
from tilewise.nn.graphs import choose
from tilewise.nn.graphs.choose import choose_graphs
from tilewise.nn.graphs.graphed import captured
from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs, Side


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def pair() -> tuple[nn.Module, nn.Module]:
    model, twin = twins(network())
    captured(model, [images()], TapeRecorder)
    return model, twin


def test_a_deep_copy_has_no_graph_and_may_get_its_own() -> None:
    model, twin = pair()
    other = copy.deepcopy(model)
    assert vars(other).keys() == vars(twin).keys()
    with pytest.raises(ValueError, match="graphed has not been called"):
        graph_report(other)
    captured(other, [images()], TapeRecorder)
    with torch.no_grad():
        other[0].weight.mul_(2)
    assert_same_steps(model, twin, [images()])
    assert (graph_report(model).replayed, graph_report(other).replayed) == (1, 0)
    assert not torch.equal(other(images())[0], model(images())[0])


def test_a_copy_of_a_part_that_holds_the_model() -> None:
    model, _ = pair()
    holder = nn.ModuleList([model, model])
    other = copy.deepcopy(holder)
    assert other[0] is other[1]
    assert "forward" not in vars(other[0])
    assert "forward" in vars(model)


def test_a_shallow_copy_shares_weights_and_runs_without() -> None:
    model, _ = pair()
    other = copy.copy(model)
    assert "forward" not in vars(other)
    assert other[0].weight is model[0].weight
    other(images())
    assert graph_report(model).replayed == 0


def test_pickles_are_the_models() -> None:
    model = network()
    twin, before = copy.deepcopy(model), pickle.dumps(model)
    captured(model, [images()], TapeRecorder)
    assert pickle.dumps(model) == before
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    safe = [nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Dropout, nn.Flatten, nn.Linear, Residual]
    with torch.serialization.safe_globals(safe):
        loaded = torch.load(file, weights_only=True)
    assert_same_steps(loaded, twin, [images()])
    assert [*model.state_dict()] == [*twin.state_dict()]
    step(model, images())
    assert graph_report(model).replayed == 1


def test_what_others_set_before_is_kept() -> None:
    model = network()
    plain = model.forward
    model.forward = lambda x: plain(x) * 2  # type: ignore[method-assign]
    before = model.forward
    captured(model, [images()], TapeRecorder)
    x = images()
    assert_alike([model(x)], [before(x)])
    assert graph_report(model).replayed == 1
    assert vars(copy.copy(model))["forward"] is before
    ungraphed(model)
    assert model.forward is before


def test_what_others_set_since_stays() -> None:
    model, _ = pair()
    model.forward = torch.sigmoid  # type: ignore[assignment,method-assign]
    ungraphed(model)
    assert model.forward is torch.sigmoid


def test_undone() -> None:
    model, twin = pair()
    assert ungraphed(model) is model
    assert vars(model).keys() == vars(twin).keys()
    ungraphed(model)
    captured(model, [images()], TapeRecorder)
    tilewise.restore(model)
    assert vars(model).keys() == vars(twin).keys()
    with pytest.raises(ValueError, match="was undone"):
        graph_report(model)


def test_a_model_that_is_no_longer_used_is_freed() -> None:
    model, _ = pair()
    step(model, images())
    alive = weakref.ref(model)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert alive() is None
    assert weight() is None


def test_captured_again_in_place_of_before() -> None:
    model, twin = pair()
    captured(model, [images(), images(batch=2)], TapeRecorder)
    assert len(graph_report(model).captures) == 2
    assert_same_steps(model, twin, [images(), images(batch=2), images(batch=3), images()])
    assert graph_report(model).replayed == 3
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(CannotCapture, match="forward hooks on 1"):
        captured(model, [images()], TapeRecorder)
    assert "forward" not in vars(model)


def test_compiled_code_runs_without() -> None:
    model, twin = pair()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same_steps(compiled, twin, [images()])
    found = graph_report(model)
    assert found.replayed == 0
    assert "torch.compile traced" in found.reason
    assert_same_steps(model, twin, [images()])
    assert graph_report(model).replayed == 1


def test_exported_and_scripted() -> None:
    model, twin = pair()
    x = images()
    program = torch.export.export(model.eval(), (x,))
    assert_alike([program.module()(x)], [twin.eval()(x)])
    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(3, 3, dtype=torch.float32, device="cpu")))
    plain = nn.Sequential(nn.Linear(3, 3, dtype=torch.float32, device="cpu"))
    value = torch.randn(2, 3, dtype=torch.float32, device="cpu")
    captured(plain, [value], TapeRecorder)
    scripted = torch.jit.script(plain)
    assert_alike([scripted(value)], [plain(value)])


def test_an_optimized_model_is_captured_with_its_plans() -> None:
    model, twin = twins(network())
    planner = Dividing()
    tilewise.optimize(model, images(), planner=planner)
    assert report(model).layers[0].replaced
    captured(model, [images()], TapeRecorder)
    assert_same_steps(model, twin, [images(), images()], tolerance=1e-4)
    assert graph_report(model).replayed == 2
    assert report(model).layers[0].replaced
    x = images(batch=2)
    assert_same_steps(model, twin, [x], tolerance=1e-4)
    # The layers of a captured model are seen when it is optimized again.
    tilewise.optimize(model, images(), planner=planner)
    assert len(report(model).layers[0].calls) == 1
    with pytest.raises(ValueError, match="graphed has not been called"):
        graph_report(model)


def test_auto_on_a_cpu_says_why() -> None:
    model = network()
    tilewise.optimize(model, images(), planner=Dividing(), graphs="auto")
    assert report(model).facts["graphs"] == {
        "kept": False,
        "reason": "the example is on cpu: CUDA graphs need tensors on a CUDA device",
    }
    assert "CUDA graphs: none (the example is on cpu" in str(report(model))
    assert "forward" not in vars(model)


def test_auto_and_a_limit_of_memory() -> None:
    with pytest.raises(ValueError, match="graphs='auto': memory_limit is of a step without graphs; workspace would do"):
        tilewise.optimize(network(), images(), graphs="auto", memory_limit="1GiB")


class Timed:
    """Times that a test sets: a step with graphs takes ``graph`` ms, one without ``plain``. Both sides run."""

    def __init__(self, plain: float, graph: float, recorders: list[TapeRecorder]) -> None:
        self.plain, self.graph, self.recorders = plain, graph, recorders

    def __call__(self, first: Side, second: Side, device: torch.device) -> Pairs:
        for side, replays in ((first, False), (second, True)):
            before = self.replays()
            side.use()
            side.run()
            assert (self.replays() > before) is replays
        return Pairs((self.plain,) * LEAST_PAIRS, (self.graph,) * LEAST_PAIRS)

    def replays(self) -> int:
        return sum(recorder.log.count("replay") for recorder in self.recorders)


@pytest.mark.parametrize(
    ("plain", "graph", "training"), [(2.0, 1.0, True), (1.0, 2.0, True), (1.0, 1.0, True), (2.0, 1.0, False)]
)
def test_auto_keeps_what_wins(plain: float, graph: float, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = twins(network(dropout=0.5))
    step(model, images())
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    twin = copy.deepcopy(model)
    recorders: list[TapeRecorder] = []

    def recorder(device: torch.device) -> TapeRecorder:
        recorders.append(TapeRecorder(device))
        return recorders[-1]

    monkeypatch.setattr(choose, "time_pairs", Timed(plain, graph, recorders))
    x = images()
    state = torch.get_rng_state()
    found = choose_graphs(model, [x], training=training, recorder=recorder)
    assert torch.equal(state, torch.get_rng_state())
    assert_alike([p.grad for p in model.parameters() if p.grad is not None], before, 0.0)
    assert_alike([*model.buffers()], [*twin.buffers()], 0.0)
    assert found["kept"] == (graph < plain)
    assert (found["plain_ms"], found["graph_ms"]) == (plain, graph)
    assert found["least"] == found["speedup"] == found["most"] == plain / graph
    assert found["pairs"] == LEAST_PAIRS
    assert (found["reason"] == "") == found["kept"]
    if found["kept"]:
        assert (graph_report(model).replayed, graph_report(model).without) == (0, {})
        assert ("with gradients" in graph_report(model).captures[0]) == training
    model.zero_grad()
    with torch.set_grad_enabled(training):
        assert_same_steps(model, twin, [images()])
    assert ("forward" in vars(model)) == found["kept"]


def test_auto_leaves_what_cannot_be_captured() -> None:
    model = network()
    model[1].register_forward_hook(lambda *_: None)
    found = choose_graphs(model, [images()], training=True, recorder=TapeRecorder)
    assert found["kept"] is False
    assert "forward hooks on 1" in found["reason"]


def test_a_replay_that_fails_is_no_error_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(dropout=0.5)  # which is not compared when it is captured

    class Failing(TapeRecorder):
        def record(self, run: Callable[[], Any]) -> Any:
            def fail() -> None:
                raise RuntimeError("a kernel failed")

            return fail, super().record(run)[1]

    found = choose_graphs(model, [images()], training=True, recorder=Failing)
    assert found == {"kept": False, "reason": "a replay failed: RuntimeError: a kernel failed"}
    assert "forward" not in vars(model)


RANKS = """
import sys
import torch, torch.distributed as dist
from torch import nn
from tests.nn.graphs.models import assert_alike, images, network, step, twins
from tests.nn.graphs.tape import TapeRecorder
from tilewise.nn import graph_report
from tilewise.nn.graphs.graphed import captured
from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs, Side
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
for wrapped_first in (False, True):
    model, twin = twins(network())
    if wrapped_first:
        ddp = nn.parallel.DistributedDataParallel(model)
        captured(model, [images()], TapeRecorder)
    else:
        captured(model, [images()], TapeRecorder)
        ddp = nn.parallel.DistributedDataParallel(model)
    want = nn.parallel.DistributedDataParallel(twin)
    for number in range(3):
        x = images() + rank
        for each in (ddp, want):
            if number == 0:
                with each.no_sync():
                    step(each, x)
            step(each, x)
        assert_alike([p.grad for p in ddp.parameters()], [p.grad for p in want.parameters()], 1e-4)
    assert graph_report(ddp).replayed == 4, graph_report(ddp)
    model[1].eval()
norm = nn.Sequential(nn.SyncBatchNorm(3))
try:
    captured(norm, [images()], TapeRecorder)
except RuntimeError as error:
    print(error)
ddp = want = each = None
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    begun = [
        ForkedScript("-c", RANKS, str(rank), str(tmp_path / "store"), environment=environment) for rank in range(2)
    ]
    try:
        results = [process.finished(timeout=120) for process in begun]
    finally:
        for process in begun:
            process.kill()
    for result in results:
        assert result.returncode == 0, result.stderr
        assert "SyncBatchNorm" in result.stdout
