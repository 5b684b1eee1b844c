"""Networks by name: the built-in ones, torchvision's and timm's, and whatever a Python factory builds."""

from __future__ import annotations

import importlib
import operator
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.frontends.names import NetworkError, check_name, known
from tilewise.frontends.zoo import BUILDERS

__all__ = ["Network", "NetworkError", "builtin_networks", "load_network"]

IMAGE = (3, 224, 224)
"""Input shape of an image network that does not say otherwise."""
TORCHVISION_SIZES = {"inception_v3": 299}
"""Networks of torchvision that a 224x224 image is too small for."""


@dataclass(frozen=True, slots=True)
class Network:
    """A module and what it takes to run it.

    ``name`` is the text that :func:`load_network` was given. ``input_shape`` is the shape of one input without the
    batch: (C, H, W) for images. ``assumed`` says that nobody gave that shape.

    >>> network = load_network("alexnet")
    >>> network.input_shape
    (3, 224, 224)
    >>> network.example_inputs(2).shape
    torch.Size([2, 3, 224, 224])
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    assumed: bool = False

    def example_inputs(
        self,
        batch: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Tensor:
        """Normally distributed input of shape (``batch``, *``input_shape``), the same for the same seed and device.

        ``dtype`` must be a floating-point type. On the meta device the tensor has a shape but no data. Raises
        ``ValueError`` for a negative batch.
        """
        if batch < 0:
            raise ValueError(f"batch is {batch}: zero or more would do")
        device = torch.device(device)
        shape = (batch, *self.input_shape)
        if device.type == "meta":
            return torch.empty(shape, device=device, dtype=dtype)
        generator = torch.Generator(device=device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def loss(self, outputs: object, targets: Tensor | None = None) -> Tensor:
        """A scalar to call ``backward`` on, from the module's ``outputs``.

        With ``targets``, class indices (N,), it is the cross entropy of scores (N, classes), summed over all outputs
        that have the first one's shape (auxiliary classifiers). Without, it is the mean square of every floating-point
        output, summed: it reaches every layer of any network, which is all that timing needs. Raises ``ValueError``
        where ``outputs`` holds no floating-point tensor.
        """
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]
        if not tensors:
            raise ValueError(
                f"outputs of network {self.name!r} hold no floating-point tensor: {type(outputs).__name__}"
            )
        if targets is None:
            terms = [tensor.float().square().mean() for tensor in tensors]
        else:
            scores = [tensor for tensor in tensors if tensor.shape == tensors[0].shape]
            terms = [nn.functional.cross_entropy(tensor.float(), targets) for tensor in scores]
        return torch.stack(terms).sum()


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def builtin_networks() -> tuple[str, ...]:
    """Names of the built-in networks.

    >>> builtin_networks()[:2]
    ('alexnet', 'overfeat_fast')
    """
    return tuple(BUILDERS)


def load_network(spec: str) -> Network:
    """The network that ``spec`` names, with random weights, on the current default device.

    ``spec`` is a built-in name (:func:`builtin_networks`), ``torchvision:NAME`` (classifiers only), ``timm:NAME``, or
    ``module.path:factory``. There ``factory()`` returns a module, or a pair of a module and the shape of one input
    without the batch. A module alone gives its shape in an attribute ``input_shape``; without one it is taken to be (3,
    224, 224).

    A path that ends in ``.prototxt`` is a Caffe network, of its layers for tests.

    Naming a factory imports and runs its code. Weights are never downloaded or loaded.

    Raises :class:`NetworkError` for an unknown name, a package that is not installed, and a factory that cannot be
    imported, fails, or returns something else.

    >>> load_network("densenet40").input_shape
    (3, 32, 32)
    """
    check_name(spec)
    if spec.endswith(".prototxt"):
        return load_caffe(spec)
    source, colon, name = spec.partition(":")
    if not colon:
        return load_builtin(spec)
    if source == "torchvision":
        return load_torchvision(spec, name)
    if source == "timm":
        return load_timm(spec, name)
    return load_factory(spec, source, name)


def load_caffe(spec: str) -> Network:
    """The Caffe network of the file ``spec``, with its fillers' weights. Raises :class:`NetworkError`."""
    try:
        from tilewise.frontends.caffe import load

        net = load(spec)
    except (ImportError, OSError, ValueError) as error:
        raise NetworkError(f"network {spec!r}: {brief(error)}") from error
    shapes = [shape for source in net.sources.values() for shape in source.shapes]
    if len(shapes) != 1 or len(shapes[0]) < 2:
        raise NetworkError(f"network {spec!r} has inputs of shapes {shapes}: one input with a batch would do")
    return network_of(spec, (net, shapes[0][1:]))


def load_builtin(spec: str) -> Network:
    """The built-in network ``spec``."""
    return network_of(spec, BUILDERS[spec]())


def load_torchvision(spec: str, name: str) -> Network:
    """torchvision's classifier ``name``. Raises :class:`NetworkError` as :func:`load_network` says."""
    models = library(spec, "torchvision", "torchvision.models")
    names = models.list_models(module=models)
    if name not in names:
        raise NetworkError(f"network {spec!r}: torchvision has no classifier {name!r}; {known(name, names)}")
    try:
        with warnings.catch_warnings():
            # Two networks announce a coming change of their starting weights.
            warnings.simplefilter("ignore", FutureWarning)
            module = models.get_model(name, weights=None)
    except Exception as error:
        raise NetworkError(f"network {spec!r}: torchvision could not build it: {brief(error)}") from error
    size = TORCHVISION_SIZES.get(name, IMAGE[1])
    return network_of(spec, (module, (IMAGE[0], size, size)))


def load_timm(spec: str, name: str) -> Network:
    """timm's network ``name``. Raises :class:`NetworkError` as :func:`load_network` says."""
    timm = library(spec, "timm", "timm")
    # A name with a scheme (hf-hub:, local-dir:) would fetch or read files.
    if ":" in name or not timm.is_model(name):
        raise NetworkError(f"network {spec!r}: timm has no network {name!r}; {known(name, timm.list_models())}")
    try:
        module = timm.create_model(name, pretrained=False)
    except Exception as error:
        raise NetworkError(f"network {spec!r}: timm could not build it: {brief(error)}") from error
    config = getattr(module, "default_cfg", None)
    shape = config.get("input_size") if isinstance(config, Mapping) else None
    return network_of(spec, (module, shape or IMAGE))


def load_factory(spec: str, path: str, attribute: str) -> Network:
    """The network that ``attribute`` of module ``path`` builds.

    Raises :class:`NetworkError` as :func:`load_network`.
    """
    try:
        module = importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{path}.".startswith(f"{error.name}."):
            raise NetworkError(f"network {spec!r}: there is no module {error.name!r} to import") from error
        raise NetworkError(f"network {spec!r}: importing {path} raised {brief(error)}") from error
    factory: Any = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise NetworkError(f"network {spec!r}: {path} has no {attribute!r}; {known(attribute, names)}")
        factory = getattr(factory, part)
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = type(factory).__name__
        raise NetworkError(f"network {spec!r} is of type {kind}: a function that returns a torch module would do")
    try:
        built = factory()
    except Exception as error:
        raise NetworkError(f"network {spec!r}: {attribute}() raised {brief(error)}") from error
    return network_of(spec, built)


def network_of(spec: str, built: object) -> Network:
    """A :class:`Network` from a module or a pair (module, input shape).

    Raises :class:`NetworkError` where ``built`` is neither, or the shape is not one of positive integers.
    """
    module: object = built
    shape: Any = None
    if isinstance(built, (tuple, list)) and len(built) == 2:
        module, shape = built
    if not isinstance(module, nn.Module):
        kind = type(built).__name__
        raise NetworkError(f"network {spec!r} built a {kind}: a torch.nn.Module or (module, input_shape) would do")
    assumed = shape is None and not hasattr(module, "input_shape")
    if shape is None:
        shape = getattr(module, "input_shape", IMAGE)
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise NetworkError(
            f"network {spec!r} has input shape {shape!r}: positive integers without the batch, like {IMAGE}, would do"
        )
    return Network(spec, module, sizes, assumed)


def library(spec: str, package: str, path: str) -> Any:
    """Module ``path`` of an optional package. Raises :class:`NetworkError` where it is missing or broken."""
    try:
        importlib.import_module(package)
        module: ModuleType = importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise NetworkError(
                f"network {spec!r} needs {package}, which is not installed: pip install {package}"
            ) from error
        raise NetworkError(
            f"network {spec!r}: {package} is installed but cannot be imported ({brief(error)}); "
            f"it may lack a requirement or be made for another torch than {torch.__version__}"
        ) from error
    return module


def brief(error: BaseException) -> str:
    """One line for an error: its type and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
