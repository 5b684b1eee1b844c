"""A shared model is a module like the one inside: names, states, modes, copies, pickles, buffers and changes."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.nn.shared.nets import F64, assert_alike, convolutional, images, loss_of, normed, twins
from torch import nn

import tilewise


@pytest.fixture(autouse=True)
def _said_elsewhere() -> Iterator[None]:
    """What is said of batch norms has a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model has batch norms")
        yield


def test_names_and_states_are_those_of_the_model() -> None:
    model, twin = twins(normed())
    shared = tilewise.shared(model, parts=2)
    assert [n for n, _ in shared.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert [n for n, _ in shared.named_buffers()] == [n for n, _ in twin.named_buffers()]
    assert [n for n, _ in shared.named_modules()] == [n for n, _ in twin.named_modules()]
    assert list(shared.state_dict()) == list(twin.state_dict())
    assert all(a is b for a, b in zip(shared.parameters(), model.parameters(), strict=True))
    assert shared.in_channels is model.in_channels if hasattr(model, "in_channels") else True
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = shared.nothing_of_this_name


def test_a_state_is_loaded_into_the_model_and_seen_by_all_parts() -> None:
    shared, source = tilewise.shared(normed(), parts=2), normed()
    shared(images(3))
    for assign in (False, True):
        state = copy.deepcopy(source).state_dict()
        shared.load_state_dict(state, assign=assign)
        shared.eval()
        source.eval()
        x = images(4)
        torch.testing.assert_close(shared(x), source(x))
        with torch.no_grad():
            for each in source.state_dict().values():
                each.add_(1)
    with pytest.raises(RuntimeError, match="Missing key"):
        shared.load_state_dict({})


def test_it_may_be_part_of_another_module() -> None:
    inner = normed()
    outer = nn.Sequential(tilewise.shared(inner, parts=2), nn.ReLU())
    plain = nn.Sequential(copy.deepcopy(inner), nn.ReLU())
    assert list(outer.state_dict()) == list(plain.state_dict())
    for each in plain.parameters():
        each.data.mul_(2)
    outer.load_state_dict(plain.state_dict())
    x = images(5)
    torch.testing.assert_close(outer.eval()(x), plain.eval()(x))


def test_a_pickle_has_the_model_and_how_it_is_shared() -> None:
    shared = tilewise.shared(convolutional(), parts=2, shares=(1, 3))
    x = images(8)
    wanted = shared(x)
    file = io.BytesIO()
    torch.save(shared, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(x), wanted)
    assert loaded.report().sizes == (2, 6)


def test_weights_written_by_hand_are_seen() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    x = images(4)
    shared(x)
    for each in (model, twin):
        with torch.no_grad():
            each[0].weight.mul_(2)  # type: ignore[index, operator]
        each[0].bias.data.add_(1)  # type: ignore[index, union-attr, operator]
    torch.testing.assert_close(shared(x), twin(x))
    for each in (model, twin):
        each[5].weight.data = each[5].weight.data * 3  # type: ignore[index, union-attr]
    torch.testing.assert_close(shared(x), twin(x))
    assert sum(shared.report().rebuilt.values()) == 1


def test_changes_of_the_model_are_seen() -> None:
    model, twin = twins(nn.Sequential(convolutional(), nn.Dropout(0.0)))
    shared = tilewise.shared(model, parts=2)
    x = images(4)
    shared(x)
    for each in (model, twin):
        each[0][2] = nn.Tanh()  # type: ignore[index, operator]
    torch.testing.assert_close(shared(x), twin(x))
    model[1].p = 1.0  # type: ignore[index]
    assert not shared(x).any()
    assert len(shared.report().rebuilt) == 2
    shared.to(torch.float32)
    assert shared(x.float()).dtype is torch.float32


def test_hooks_on_parts_run_for_each_part_of_the_batch() -> None:
    shared = tilewise.shared(convolutional(), parts=2, shares=(1, 1))
    seen: list[int] = []
    shared.module[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    shared(images(6))
    assert seen == [3, 3]


@pytest.mark.parametrize("shares", [(1, 1), (1, 2), (1, 0)])
def test_running_statistics_are_the_mean_of_all_parts_weighted_by_samples(shares: tuple[int, int]) -> None:
    model = normed()
    own = [copy.deepcopy(model) for _ in shares]
    shared = tilewise.shared(model, parts=2, shares=shares)
    for _ in range(3):
        x = images(6)
        shared(x)
        sizes = [6 * share // sum(shares) for share in shares]
        for each, part in zip(own, x.split(sizes), strict=True):
            if len(part):
                each(part)
        first = own[0][1]  # type: ignore[index]
        with torch.no_grad():
            for name in ("running_mean", "running_var"):
                values = [getattr(each[1], name) for each in own]  # type: ignore[index]
                mean = sum(v * size / 6 for v, size in zip(values, sizes, strict=True))
                for value in values:
                    value.copy_(mean)
        assert_same_norm(model[1], first)  # type: ignore[index, arg-type]


def assert_same_norm(got: nn.Module, wanted: nn.Module) -> None:
    for name, value in wanted.named_buffers():
        torch.testing.assert_close(got.get_buffer(name), value)


def test_statistics_that_are_set_by_hand_reach_all_parts() -> None:
    model, twin = twins(normed())
    shared = tilewise.shared(model, parts=2)
    shared(images(4))
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        each[1].running_mean.add_(3)  # type: ignore[index, operator]
        each.eval()
    x = images(4)
    torch.testing.assert_close(shared(x), twin(x))
    assert_alike(shared, twin)


def test_batch_norms_in_training_are_told_of_once() -> None:
    shared = tilewise.shared(normed(), parts=2)
    with pytest.warns(UserWarning, match="statistics of its own part"):
        shared(images(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared(images(4))
        loss_of(shared(images(4))).backward()
        tilewise.shared(normed(), parts=1)(images(4))
        tilewise.shared(normed().eval(), parts=2)(images(4))
    assert issubclass(UserWarning, Warning)


class Counting(nn.Module):
    """Exchanges its buffer for another tensor in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=F64, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.sum()
        return x


def test_a_buffer_that_a_forward_exchanges_is_kept() -> None:
    model = Counting()
    shared = tilewise.shared(model, parts=2, shares=(1, 1))
    for _ in range(2):
        shared(torch.ones(4, 1, dtype=F64, device="cpu"))
    assert model.seen.tolist() == [4.0, 4.0]


def test_the_report_and_the_text_of_the_module_say_how_it_is_shared() -> None:
    shared = tilewise.shared(convolutional(), devices=("cpu", "cpu"), shares=(1, 0))
    assert "devices=(cpu, cpu)" in repr(shared)
    shared(images(5))
    report = shared.report()
    assert report.sizes == (5, 0)
    assert report.shares == (1, 0)
    text = str(report)
    assert "cpu: share 1.000, 5 samples of the last call" in text
    assert "0 samples of the last call (left out)" in text
    assert "shares as given" in text
    assert "left out" in repr(shared)
    assert "Conv2d" in repr(shared)
