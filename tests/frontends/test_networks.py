"""Loading networks by name, and the clear errors for names that do not load."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tilewise.frontends.networks import Network, NetworkError, builtin_networks, load_network

Package = Callable[[str, str], None]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Writes an importable file; the real torchvision and timm are out of sight and back afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in list(sys.modules):
        if name.split(".")[0] in ("torchvision", "timm"):
            monkeypatch.delitem(sys.modules, name)

    def write(path: str, source: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        # Registers the name for removal after the test, whether or not the import works.
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)

    return write


TORCHVISION = """
    import sys, warnings
    from torch import nn

    def list_models(module=None):
        assert module is sys.modules[__name__]
        return ["alexnet", "inception_v3", "resnet18", "strange"]

    def get_model(name, weights="must be given"):
        assert weights is None
        warnings.warn("starting weights will change", FutureWarning)
        if name == "strange":
            raise RuntimeError("no such thing\\nsecond line")
        return nn.Conv2d(3, 4, 3)
"""

TIMM = """
    from torch import nn

    def list_models():
        return [f"net{i}" for i in range(40)] + ["resnet18"]

    def is_model(name):
        return name.split(".")[0] in list_models() or name.startswith("hf-hub:")

    def create_model(name, pretrained=True):
        assert not pretrained
        if name.endswith(".nope"):
            raise RuntimeError("Invalid pretrained tag")
        module = nn.Conv2d(3, 4, 3)
        if name == "net1":
            module.default_cfg = {"input_size": (3, 192, 160)}
        return module
"""

FACTORIES = """
    import torch
    from torch import nn

    instance = nn.ReLU()
    number = 3

    def alone():
        return nn.Conv2d(3, 4, 3)

    def audio():
        return nn.Conv1d(2, 4, 3), (2, 1000)

    def with_attribute():
        module = nn.Conv2d(5, 4, 3)
        module.input_shape = (5, 20, 30)
        return module

    def size():
        return nn.Conv2d(1, 4, 3), torch.Size([1, 8, 8])

    def words():
        return "a network"

    def negative():
        return nn.Conv2d(3, 4, 3), (3, -1, 8)

    def fraction():
        return nn.Conv2d(3, 4, 3), (3, 8.5, 8)

    def nothing():
        return nn.Conv2d(3, 4, 3), ()

    def fails():
        raise KeyError("weights.bin")

    class Holder:
        @staticmethod
        def build():
            return nn.Conv2d(3, 4, 3)
"""


def error_of(spec: str) -> str:
    with pytest.raises(NetworkError) as caught:
        load_network(spec)
    message = str(caught.value)
    assert repr(spec) in message
    assert "\n" not in message
    return message


def test_builtin_network() -> None:
    net = load_network("photonet")
    assert net.name == "photonet"
    assert net.input_shape == (3, 96, 96)
    assert net.module(net.example_inputs(2)).shape == (2, 2)


@pytest.mark.parametrize(
    ("factory", "assumed"), [("alone", True), ("audio", False), ("with_attribute", False), ("size", False)]
)
def test_a_shape_that_nobody_gave_is_marked(factory: str, assumed: bool, package: Package) -> None:
    package("nets/small.py", FACTORIES)
    assert load_network(f"nets.small:{factory}").assumed is assumed
    assert not load_network("photonet").assumed


def test_builtin_names() -> None:
    assert set(builtin_networks()) >= {
        "alexnet",
        "overfeat_fast",
        "vgg16",
        "resnet18",
        "resnet50",
        "densenet40",
        "googlenet",
        "replknet31_stage",
    }


def test_network_is_frozen() -> None:
    net = Network("n", nn.ReLU(), (3,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        net.name = "m"  # type: ignore[misc]


def test_networks_follow_the_default_device() -> None:
    with torch.device("meta"):
        net = load_network("vgg16")
    assert {p.device.type for p in net.module.parameters()} == {"meta"}
    assert net.example_inputs(2, "meta").shape == (2, 3, 224, 224)


def test_example_inputs_are_the_same_for_the_same_seed() -> None:
    net = Network("n", nn.ReLU(), (3, 8, 8))
    state = torch.get_rng_state()
    first, again, other = net.example_inputs(2), net.example_inputs(2), net.example_inputs(2, seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_example_inputs_sizes_and_types() -> None:
    net = Network("n", nn.ReLU(), (2, 5))
    assert net.example_inputs(0).shape == (0, 2, 5)
    assert net.example_inputs(3, dtype=torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="batch is -1"):
        net.example_inputs(-1)


def test_loss_without_targets_reaches_every_output() -> None:
    net = Network("n", nn.ReLU(), (3,))
    a, b = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    loss = net.loss({"main": (a, None), "rest": [b * 2], "index": torch.arange(2)})
    assert loss.item() == pytest.approx(1 + 4)
    grads = torch.autograd.grad(loss, (a, b))
    assert all(grad.abs().min() > 0 for grad in grads)


def test_loss_with_targets_is_cross_entropy_of_every_score() -> None:
    net = Network("n", nn.ReLU(), (3,))
    scores, targets = torch.randn(4, 10), torch.arange(4)
    want = nn.functional.cross_entropy(scores, targets)
    assert net.loss(scores, targets) == pytest.approx(want)
    assert net.loss((scores, scores, torch.randn(4, 7, 7)), targets) == pytest.approx(2 * want)


def test_loss_of_half_precision_is_in_fp32() -> None:
    assert Network("n", nn.ReLU(), (3,)).loss(torch.full((2, 3), 300.0, dtype=torch.float16)).item() == 90_000


def test_loss_needs_a_floating_point_output() -> None:
    with pytest.raises(ValueError, match="no floating-point tensor: list"):
        Network("n", nn.ReLU(), (3,)).loss([torch.arange(3)])


def test_unknown_builtin_network() -> None:
    message = error_of("ResNet19")
    assert "did you mean 'resnet18'" in message
    for word in ("alexnet", "photonet", "torchvision:NAME", "timm:NAME", "module.path:factory"):
        assert word in message
    assert "did you mean" not in error_of("")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_absent_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # As if it were not installed.
    assert f"pip install {name}" in error_of(f"{name}:resnet18")


def test_broken_package(package: Package) -> None:
    package("timm/__init__.py", "raise RuntimeError('operator torchvision::nms does not exist')")
    message = error_of("timm:resnet18")
    assert "timm is installed but cannot be imported" in message
    assert "operator torchvision::nms does not exist" in message
    assert torch.__version__ in message


def test_torchvision_network(package: Package, recwarn: pytest.WarningsRecorder) -> None:
    package("torchvision/__init__.py", "")
    package("torchvision/models.py", TORCHVISION)
    assert load_network("torchvision:resnet18").input_shape == (3, 224, 224)
    assert load_network("torchvision:inception_v3").input_shape == (3, 299, 299)
    assert not recwarn.list
    message = error_of("torchvision:resnet19")
    assert "no classifier 'resnet19'; did you mean 'resnet18'?" in message
    assert "known: alexnet, inception_v3, resnet18" in message
    assert "no classifier ''" in error_of("torchvision:")
    assert error_of("torchvision:strange").endswith("RuntimeError: no such thing")


def test_timm_network(package: Package) -> None:
    package("timm/__init__.py", TIMM)
    assert load_network("timm:resnet18").input_shape == (3, 224, 224)
    assert load_network("timm:net1").input_shape == (3, 192, 160)
    message = error_of("timm:resnet19")
    assert "did you mean 'resnet18'" in message
    assert "and 29 more" in message
    assert "Invalid pretrained tag" in error_of("timm:resnet18.nope")


def test_timm_names_that_would_download_are_unknown(package: Package) -> None:
    package("timm/__init__.py", TIMM)
    assert "timm has no network 'hf-hub:someone/net'" in error_of("timm:hf-hub:someone/net")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("alone", (3, 224, 224)),
        ("audio", (2, 1000)),
        ("with_attribute", (5, 20, 30)),
        ("size", (1, 8, 8)),
        ("Holder.build", (3, 224, 224)),
    ],
)
def test_factory(name: str, shape: tuple[int, ...], package: Package) -> None:
    package("nets/small.py", FACTORIES)
    net = load_network(f"nets.small:{name}")
    assert net.name == f"nets.small:{name}"
    assert net.input_shape == shape


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("words", "built a str"),
        ("negative", "input shape (3, -1, 8)"),
        ("fraction", "input shape (3, 8.5, 8)"),
        ("nothing", "input shape ()"),
        ("fails", "fails() raised KeyError: 'weights.bin'"),
        ("instance", "is of type ReLU"),
        ("number", "is of type int"),
        ("alune", "has no 'alune'; did you mean 'alone'"),
        ("Holder.nope", "has no 'Holder.nope'"),
    ],
)
def test_bad_factory(name: str, says: str, package: Package) -> None:
    package("nets/small.py", FACTORIES)
    assert says in error_of(f"nets.small:{name}")


def test_factory_module_that_cannot_be_imported(package: Package) -> None:
    package("broken_net.py", "import tilewise_has_no_such_package")
    package("raising_net.py", "1 / 0")
    assert "there is no module 'tilewise_nowhere'" in error_of("tilewise_nowhere.nets:build")
    assert "importing broken_net raised ModuleNotFoundError" in error_of("broken_net:build")
    assert "importing raising_net raised ZeroDivisionError" in error_of("raising_net:build")


@pytest.mark.parametrize("spec", [":", "a:", ":b", "a b:c", "a:b()", "a..b:c", "../a:b", "a:b:c", "__import__('os'):x"])
def test_spec_that_is_no_path(spec: str) -> None:
    assert "does not read as module.path:factory" in error_of(spec)
