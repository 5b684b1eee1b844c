"""What becomes of a model that runs as a region: changed weights, copies, threads, other calls, and torch's modes."""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise
from tilewise import solvers
from tilewise.nn.regions import choose
from tilewise.nn.regions.forward import regional_of
from tilewise.planner import Planner
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.wisdom import Wisdom

pytestmark = pytest.mark.slow  # each plans a network

_planner: Planner
FEW = ("aten", "onednn_fused", "aten_gemm")
OTHERS = tuple(s.name for kind in (ConvProblem, GemmProblem) for s in solvers.solving(kind) if s.name not in FEW)
"""Solvers that are left out, as what plans there are does not matter here."""


class Network(nn.Module):
    """A residual block whose class also waits, so that a region of it is faster whatever else this machine does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0, named: bool = False) -> Tensor | dict[str, Tensor]:
        time.sleep(0.02)
        x = functional.relu(self.norm(self.first(x)))
        y = self.last(functional.relu(self.second(x) + x).mean((2, 3))) * scale
        return {"y": y} if named else y


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    """One for all tests, which then measure each problem once."""
    global _planner
    _planner = Planner(Wisdom(tmp_path_factory.mktemp("wisdom") / "wisdom.sqlite3"))
    yield _planner
    _planner.close()


def made(*, frozen: bool = False, unplanned: str = "plan") -> tuple[Network, Tensor]:
    """A network whose whole forward is a region, and its input."""
    torch.manual_seed(7)
    model, x = Network().eval(), numbers(2, 3, 9, 7)
    model.norm.running_mean.copy_(numbers(8, seed=2))
    model.norm.running_var.copy_(numbers(8, seed=3).abs() + 0.5)
    tilewise.optimize(model, x, training=False, frozen=frozen, planner=_planner, unplanned=unplanned, exclude=OTHERS)
    assert regional_of(model) is not None, str(tilewise.nn.report(model).regions)
    return model, x


def by_class(model: nn.Module, *args: object, **kwargs: object) -> Tensor:
    """What the model's class computes, in float64."""
    twin = Network().eval().double()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        return twin(*[a.double() if isinstance(a, Tensor) else a for a in args], **kwargs)


def check(model: nn.Module, x: Tensor, *, by_program: bool = True) -> None:
    """One call without gradients computes what the class does, by program or not."""
    regional = regional_of(model)
    before = 0 if regional is None else sum(regional.without.values())
    with torch.no_grad():
        y = model(x)
    torch.testing.assert_close(y.double(), by_class(model, x), rtol=1e-4, atol=1e-5, equal_nan=True)
    regional = regional_of(model)
    assert (regional is not None and sum(regional.without.values()) == before) == by_program


def changed_in_place(model: Network) -> None:
    with torch.no_grad():
        model.first.weight.mul_(1.5)
        model.second.bias.add_(0.25)


def changed_statistics(model: Network) -> None:
    model.norm.running_mean.add_(0.5)
    model.norm.running_var.mul_(2.0)


def loaded(model: Network) -> None:
    torch.manual_seed(11)
    other = Network()
    other.norm.running_var.mul_(3.0)
    model.load_state_dict(other.state_dict())


def behind_autograd(model: Network) -> None:
    """Nothing but the numbers themselves tells this change."""
    model.first.weight.data.mul_(0.5)


def nan_in_statistics(model: Network) -> None:
    model.norm.running_mean[3] = math.nan


def filter_of_zeros(model: Network) -> None:
    with torch.no_grad():
        model.first.weight.zero_()


def replaced(model: Network) -> None:
    model.second.weight = nn.Parameter(numbers(8, 8, 3, 3, seed=5))


CHANGES = [changed_in_place, changed_statistics, loaded, nan_in_statistics, filter_of_zeros, replaced]


@pytest.mark.parametrize("change", [*CHANGES, behind_autograd], ids=lambda change: change.__name__)
def test_a_change_of_weights_or_statistics_is_seen(change: Callable[[Network], None]) -> None:
    model, x = made()
    check(model, x)
    change(model)
    check(model, x)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_frozen_weights_are_followed_where_torch_counts_the_change(change: Callable[[Network], None]) -> None:
    model, x = made(frozen=True)
    change(model)
    check(model, x)


def test_folding_leaves_the_state_as_it_is_and_restore_undoes_it() -> None:
    model, x = made()
    names = set(Network().state_dict())
    assert set(model.state_dict()) == names
    assert isinstance(model.norm, nn.BatchNorm2d)
    check(model, x)
    tilewise.nn.restore(model)
    assert regional_of(model) is None
    assert "forward" not in model.__dict__
    check(model, x, by_program=False)


def test_the_report_says_that_layers_run_in_the_region() -> None:
    model, _ = made()
    told = str(tilewise.nn.report(model))
    assert "region (runs within the whole model)" in told
    assert "torch (" not in told
    assert "not compared" not in told
    assert "operators fused into others" in told


def test_where_one_of_the_examples_is_not_kept_none_is_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "LEAST_SPEEDUP", 0.0)  # which side of so small a network is faster is not asked
    torch.manual_seed(7)
    model, x = Network().eval(), numbers(2, 3, 9, 7)
    overflows = {"x": x * 1e30, "scale": 1e38}  # finite in float64 alone
    tilewise.optimize(model, [{"x": x}, overflows], training=False, planner=_planner, exclude=OTHERS, error_limit=1e-2)
    assert regional_of(model) is None
    first, second = tilewise.nn.report(model).regions
    assert (first.kept, first.reason) == (False, "another of the examples is not kept")
    assert not second.kept
    assert "away from float64" in second.reason


def test_training_and_back() -> None:
    model, x = made()
    model.train()
    before = model.norm.running_mean.clone()
    model(x).sum().backward()
    assert not torch.equal(model.norm.running_mean, before)
    assert model.first.weight.grad is not None
    model.eval()
    check(model, x)


def test_gradients_flow_where_they_are_on() -> None:
    model, x = made()
    given = x.clone().requires_grad_()
    model(given).square().sum().backward()
    assert given.grad is not None
    assert float(given.grad.abs().sum()) > 0


def test_copies_run_by_programs_of_their_own() -> None:
    model, x = made()
    twin = copy.deepcopy(model)
    changed_in_place(model)
    check(model, x)
    check(twin, x)
    with torch.no_grad():
        assert not torch.allclose(model(x), twin(x))


def test_a_pickled_model_computes_the_same() -> None:
    model, x = made()
    twin = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    check(model, x)


def test_a_hook_that_is_added_later_is_called() -> None:
    model, x = made()
    seen = []
    handle = model.second.register_forward_hook(lambda *_: seen.append(1))
    check(model, x, by_program=False)
    assert seen == [1]
    handle.remove()
    check(model, x)


def test_threads_share_one_model() -> None:
    model, _ = made()
    inputs = [numbers(2, 3, 9, 7, seed=seed) for seed in range(8)]
    wanted = [by_class(model, x) for x in inputs]
    wrong = []

    def called(x: Tensor, want: Tensor) -> None:
        for _ in range(30):
            with torch.no_grad():
                if not torch.allclose(model(x).double(), want, rtol=1e-4, atol=1e-5):
                    wrong.append(1)

    threads = [threading.Thread(target=called, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_sizes_are_planned_when_they_come_or_computed_by_the_class() -> None:
    model, _ = made()
    check(model, numbers(1, 3, 12, 5))
    check(model, numbers(2, 3, 9, 7).contiguous(memory_format=torch.channels_last))
    model, _ = made(unplanned="torch")
    check(model, numbers(1, 3, 12, 5), by_program=False)


def test_other_arguments_and_structures_of_results() -> None:
    model, x = made()
    with torch.no_grad():
        torch.testing.assert_close(model(x, scale=2.0).double(), by_class(model, x, scale=2.0), rtol=1e-4, atol=1e-5)
        found = model(x=x, named=True)
    assert list(found) == ["y"]
    torch.testing.assert_close(found["y"].double(), by_class(model, x), rtol=1e-4, atol=1e-5)


def test_autocast_and_other_modes_compute_as_the_class() -> None:
    model, x = made()
    twin = tilewise.nn.restore(copy.deepcopy(model))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), twin(x))
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(lambda one: model(one[None])[0])(x), twin(x), rtol=1e-4, atol=1e-5)
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(exported(x), twin(x), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-5)


def test_torchs_own_tracers_see_the_class() -> None:
    model, x = made()
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        torch.testing.assert_close(traced(2 * x).double(), by_class(model, 2 * x), rtol=1e-4, atol=1e-4)
    assert not any("tilewise" in str(node.kind()) for node in traced.inlined_graph.nodes())
    given = dict(model.named_parameters())
    found = torch.func.jacrev(lambda parameters: torch.func.functional_call(model, parameters, (x,)))(given)
    assert found["last.bias"].shape == (2, 4, 4)
    check(model, x)


def test_a_hook_on_the_whole_model_is_called() -> None:
    model, x = made()
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    check(model, x)
    assert seen == [1]


def test_shallow_copies_and_pickles_are_plain_and_another_type_and_back_is_planned() -> None:
    model, x = made()
    check(copy.copy(model), x, by_program=False)
    check(pickle.loads(pickle.dumps(model)), x, by_program=False)
    model.double().float()
    check(model, x)


def test_float64_models_are_computed_in_float64() -> None:
    model, x = made()
    model.double()
    with torch.no_grad():
        torch.testing.assert_close(model(x.double()), by_class(model, x))
