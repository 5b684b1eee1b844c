"""The check in native code that a call is like the last one: such a call runs by the program at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from tests.nn.regions.kept import Net, assert_by_program, images, keep, net
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.kernels.native.programs import loading, usual_call, why_never
from tilewise.nn.regions.forward import regional_of

pytestmark = pytest.mark.skipif(bool(why_never()), reason=why_never())


class Seen(TorchDispatchMode):
    """A mode that watches operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """A mode that watches functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def in_device_and_mode() -> Iterator[None]:
    """A mode that need not see calls, and one inside that must."""
    with torch.device("cpu"), Called():
        yield


def hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network whose calls are told by native code."""
    if not loading().finished() or loading().module is None:
        pytest.skip(loading().reason)
    kept = keep(monkeypatch, net(), images(), unplanned="torch")
    assert_by_program(kept, images())
    regional = regional_of(kept)
    assert regional is not None
    assert regional._usual is not None
    assert regional._usual[0].fits((images(),)) is False  # with autograd on
    with torch.no_grad():
        assert regional._usual[0].fits((images(),)) is True
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu"), hooks, Seen, Called, in_device_and_mode, forward_ad.dual_level,
        torch.autograd.detect_anomaly, deterministic, torch.enable_grad,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_watches_is_seen(around: Callable[[], Any], model: nn.Module) -> None:
    """Torch's operators run under it, whatever ran before; afterwards the program runs again."""
    x = images(seed=1)
    with torch.no_grad():
        want = model(x)
        before = Net.ran
        with around():
            again = model(x)
        assert Net.ran == before + 1
        assert torch.equal(model(x), want)
        assert Net.ran == before + 1
    torch.testing.assert_close(again.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_a_transform_is_seen(model: nn.Module) -> None:
    x = images()
    with torch.no_grad():
        model(x)
        before = Net.ran
        torch.func.vmap(model)(x[None])
        assert Net.ran == before + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda x: (images(3),), lambda x: (x.to(memory_format=torch.channels_last),), lambda x: (x.double(),),
        lambda x: (nn.Parameter(x),), lambda x: (x, 2.0),
    ],
    ids=["size", "strides", "dtype", "class", "more"],
)  # fmt: skip
def test_other_arguments_are_seen(change: Callable[[Tensor], tuple[Any, ...]], model: nn.Module) -> None:
    regional = regional_of(model)
    assert regional is not None
    x = images(seed=2)
    told = regional._usual
    assert told is not None
    with torch.no_grad():
        assert not told[0].fits(change(x))
        want = model(x)
        if change(x)[0].dtype is torch.float32:
            model(*change(x))
        assert torch.equal(model(x), want)


@pytest.mark.slow
def test_a_changed_module_is_seen(model: nn.Module) -> None:
    with torch.no_grad():
        model.norm.weight.mul_(2.0)
    assert_by_program(model, images())
    model.norm.eps = 0.5
    before = Net.ran
    with torch.no_grad():
        model(images())
    assert Net.ran > before


@pytest.mark.slow
def test_an_error_of_a_reading_is_raised() -> None:
    """And what makes no sense is refused."""
    if not loading().finished() or loading().module is None:
        pytest.skip(loading().reason)
    x = torch.zeros(2, dtype=torch.float32, device="cpu")

    def broken() -> object:
        raise OSError("no reading")

    told = usual_call([broken], [None], [x])
    with pytest.raises(OSError, match="no reading"):
        told.fits((x,))
    assert told.fits(()) is False
    assert told.fits((3,)) is False
    assert usual_call([], [], [x.to_sparse()]) is None
    for wrong in (lambda: usual_call([broken], [], [x]), lambda: told.fits([x]), lambda: usual_call([], [], [3])):  # type: ignore[list-item]
        with pytest.raises((TypeError, ValueError, AttributeError), match=r"would do|layout"):
            wrong()
