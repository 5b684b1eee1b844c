"""What becomes of a kept region while its module is copied, changed, trained and called in other ways."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from tests.nn.regions.kept import Net, assert_by_program, assert_by_torch, images, keep, net, plain
from torch import nn

import tilewise
from tilewise.nn.regions import forward
from tilewise.nn.regions.forward import regional_of

pytestmark = pytest.mark.slow  # each plans a network


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return keep(monkeypatch, net(), images())


def test_a_kept_region_runs_none_of_the_models_python(model: nn.Module) -> None:
    assert_by_program(model, images(seed=1))
    (told,) = tilewise.nn.report(model).regions
    assert told.kept
    assert told.fused >= 4


def test_a_deep_copy_has_programs_and_weights_of_its_own(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    model(images())
    with torch.no_grad():
        twin.first.weight.mul_(2)
        assert_by_program(twin, images())  # the first call plans what the original had planned
        assert_by_program(twin, images(seed=1))
        assert_by_program(model, images())


def test_a_shallow_copy_and_a_pickle_compute_as_their_class_does(model: nn.Module) -> None:
    shallow = copy.copy(model)
    loaded = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    for twin in (shallow, loaded, saved):
        assert regional_of(twin) is None
        assert_by_torch(twin, images())


def test_a_loaded_state_dict_is_folded_anew(model: nn.Module) -> None:
    assert list(model.state_dict()) == list(net().state_dict())
    other = net()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    model.load_state_dict(other.state_dict())
    assert_by_program(model, images())
    with torch.no_grad():
        torch.testing.assert_close(model(images()), other(images()), rtol=1e-4, atol=1e-5)


def test_parameters_that_are_assigned_are_folded_anew(model: nn.Module) -> None:
    other = {name: t * 0.5 if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    assert_by_program(model, images())
    assert_by_program(model, images(seed=1))


@pytest.mark.parametrize("frozen", [False, True])
def test_changes_of_weights_and_statistics_are_seen(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = keep(monkeypatch, net(), images(), frozen=frozen)

    def step() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(images()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def replace_data() -> None:
        model.second.weight.data = model.second.weight.data * 3

    def move_statistics() -> None:
        model.norm.running_var.mul_(4)
        model.again.running_mean.add_(1)

    def zero() -> None:
        model.first.weight.zero_()

    for change in (step, replace_data, move_statistics, zero):
        with torch.set_grad_enabled(change is step):
            change()
        assert_by_program(model, images(seed=1))


def test_changes_that_no_version_counter_shows_are_seen_without_frozen(model: nn.Module) -> None:
    model.first.weight.detach().numpy()[0] = 7
    model.second.weight.data += 1
    assert_by_program(model, images())


def test_other_dtypes_run_by_torch_until_the_old_one_is_back(model: nn.Module) -> None:
    model.double()
    assert_by_torch(model, images().double())
    model.float()
    assert model(images()).dtype is torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model(images()), plain(model)(images()), rtol=1e-4, atol=1e-5)


def test_training_and_back(model: nn.Module) -> None:
    model.train()
    with torch.no_grad():
        before, mean = Net.ran, model.norm.running_mean.clone()
        for _ in range(3):
            model(images())
    assert Net.ran == before + 3
    assert not torch.equal(model.norm.running_mean, mean), "norms in training follow the batch"
    model.eval()
    assert_by_program(model, images())


def test_gradients_are_torchs(model: nn.Module) -> None:
    want, x = plain(model), images().requires_grad_()
    before = Net.ran
    model(x).square().sum().backward()
    assert Net.ran == before + 1
    grads = [p.grad for p in (x, *model.parameters())]
    x.grad = None
    want(x).square().sum().backward()
    torch.testing.assert_close(grads, [p.grad for p in (x, *want.parameters())], rtol=1e-3, atol=1e-4)


def test_autocast_is_torchs_and_inference_mode_is_not(model: nn.Module) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = Net.ran
        assert model(images()).dtype is torch.bfloat16
    assert Net.ran == before + 1
    with torch.inference_mode():
        assert_by_program(model, images())


def test_restore_gives_torchs_computation_back(model: nn.Module) -> None:
    tilewise.restore(model)
    assert regional_of(model) is None
    assert vars(model).keys() == vars(net()).keys()
    assert_by_torch(model, images())


@pytest.mark.parametrize("name", ["first", "norm"])
def test_a_hook_that_is_added_later_is_called(name: str, model: nn.Module) -> None:
    seen: list[object] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, __, y: seen.append(y))
    with torch.no_grad():
        for _ in range(3):
            model(images())
    assert len(seen) == 3
    handle.remove()
    assert_by_program(model, images())
    assert len(seen) == 3
    assert any("hook" in reason for reason in regional_of(model).without)


def test_hooks_around_the_region_itself_run(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.register_forward_hook(lambda _, __, y: y + 1)
    assert_by_program(model, images())


def test_a_part_that_is_replaced_is_called(model: nn.Module) -> None:
    model.second = nn.Identity()
    assert_by_torch(model, images())
    assert any("second" in reason for reason in regional_of(model).without)


def test_other_sizes_run_by_torch_where_they_are_not_to_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keep(monkeypatch, net(), images(), unplanned="torch")
    assert_by_torch(model, images(3))
    assert_by_torch(model, images(2, 11))
    assert any("(2, 3, 11, 11)" in reason for reason in regional_of(model).without)
    assert_by_program(model, images())


def test_other_sizes_get_programs_of_their_own_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MOST_ON_SIGHT", 2)
    model = keep(monkeypatch, net(), images())
    for x in (images(1), images(2, 11)):
        assert_by_program(model, x)
    assert_by_torch(model, images(3))
    assert any("more than 2 ways" in reason for reason in regional_of(model).without)


def test_inputs_that_lie_otherwise(model: nn.Module) -> None:
    wide = images(2, 10)[:, :, 1:, :9]
    turned = images().to(memory_format=torch.channels_last)
    expanded = images(1).expand(2, -1, -1, -1)
    for x in (wide, turned, expanded):
        assert_by_program(model, x)
    flat = torch.cat([torch.zeros(1, dtype=torch.float32, device="cpu"), images().flatten()])
    assert_by_program(model, flat[1:].view(2, 3, 9, 9))  # begins between two multiples of 16 bytes


def test_keywords_and_constants_are_part_of_a_kind_of_call(model: nn.Module) -> None:
    for scale in (2.0, 3.0):
        assert_by_program(model, images(), scale)
    assert_by_program(model, x=images())
    assert_by_program(model, images())


def test_an_example_by_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keep(monkeypatch, net(), {"x": images(), "scale": 2.0})
    assert_by_program(model, x=images(seed=1), scale=2.0)
    assert_by_program(model, x=images(), scale=3.0)


def test_threads_share_a_region(model: nn.Module) -> None:
    given = [images(seed=seed) for seed in range(8)]
    with torch.no_grad():
        want = [plain(model)(x) for x in given]
    wrong: list[Any] = []

    def run(number: int) -> None:
        with torch.no_grad():
            for index in range(40):
                which = (number + index) % len(given)
                if not torch.allclose(model(given[which]), want[which], rtol=1e-4, atol=1e-5):
                    wrong.append(which)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    before = Net.ran
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert Net.ran == before


def test_results_are_not_overwritten_by_later_calls(model: nn.Module) -> None:
    with torch.no_grad():
        first = model(images())
        kept = first.clone()
        model(images(seed=1))
    assert torch.equal(first, kept)


def test_transforms_and_traces_see_torchs_operators(model: nn.Module) -> None:
    x, want = images(), plain(model)
    with torch.no_grad():
        wanted = want(x)
        mapped = torch.vmap(model)(x[None])
        torch.testing.assert_close(mapped[0], torch.vmap(want)(x[None])[0], rtol=1e-4, atol=1e-5)
        traced = torch.jit.trace(model, (x,))
        torch.testing.assert_close(traced(images(seed=1)), want(images(seed=1)), rtol=1e-4, atol=1e-5)
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), wanted, rtol=1e-4, atol=1e-5)
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-5)
    _, product = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    _, wanted_product = torch.func.jvp(want, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(product, wanted_product, rtol=1e-3, atol=1e-4)
    with pytest.raises(RuntimeError, match="restore"):
        torch.jit.script(model)
    assert_by_program(model, x)


class Timed(nn.Module):
    """Images and a number for each, as a diffusion model takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)) * t[:, None, None, None])


def test_one_number_expanded_for_all_images_is_a_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its elements lie in one place, which is no format that a vector is converted into."""
    times = torch.linspace(0.5, 1.0, 2, dtype=torch.float32, device="cpu")
    timed = keep(monkeypatch, Timed().eval(), (images(), times))
    for t in (times, times[1].expand(2), times[:1].expand(2)):
        with torch.no_grad():
            torch.testing.assert_close(timed(images(), t), plain(timed)(images(), t), rtol=1e-4, atol=1e-5)
