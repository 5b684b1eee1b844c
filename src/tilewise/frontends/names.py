"""Names of networks, and what can be said of one before anything is imported: torch takes a second or more."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["BUILTIN", "CHECKPOINTS", "LIBRARIES", "NetworkError", "check_name", "is_factory", "known"]

BUILTIN = (
    "alexnet",
    "overfeat_fast",
    "vgg16",
    "resnet18",
    "resnet50",
    "densenet40",
    "googlenet",
    "replknet31_stage",
    "photonet",
)
"""The built-in networks, as :data:`tilewise.frontends.zoo.BUILDERS` has them; a test holds both equal."""
LIBRARIES = ("torchvision", "timm")
CHECKPOINTS = {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".onnx", ".caffemodel"}
"""Ends of the names of files that hold weights."""
SHAPE = re.compile(r"[(\[]?\d+(?:\s*[,x]\s*\d+)+,?[)\]]?")
SHOWN = 12
"""Names that an error message lists before it only counts the rest."""


class NetworkError(ValueError):
    """A network cannot be loaded. The message names what was asked for and what would do.

    >>> try:
    ...     load_network("alexnett")
    ... except NetworkError as error:
    ...     print(str(error).partition("? ")[0])
    network 'alexnett' is not built in; did you mean 'alexnet'
    """


def is_factory(spec: str) -> bool:
    """Whether ``spec`` is meant as ``module.path:factory``, a function that makes a network.

    >>> is_factory("net:Net"), is_factory("timm:resnet18"), is_factory("alexnet")
    (True, False, False)
    """
    source, colon, _ = spec.partition(":")
    return bool(colon) and source not in LIBRARIES and not spec.endswith(".prototxt")


def check_name(spec: str) -> None:
    """Raise :class:`NetworkError` where the network ``spec`` cannot be loaded, as far as can be told without torch."""
    source, colon, name = spec.partition(":")
    if spec.endswith(".prototxt"):
        if not Path(spec).is_file():
            raise NetworkError(f"network {spec!r}: there is no such file")
    elif not colon:
        if spec not in BUILTIN:
            if meant := _in_place_of_a_name(spec):
                raise NetworkError(f"network {spec!r} {meant}")
            hint = "other networks: torchvision:NAME, timm:NAME, module.path:factory"
            raise NetworkError(f"network {spec!r} is not built in; {known(spec, BUILTIN)}; {hint}")
    elif source in LIBRARIES:
        if not _is_there(source):
            raise NetworkError(f"network {spec!r} needs {source}, which is not installed: pip install {source}")
    elif not all(part.isidentifier() for part in (*source.split("."), *name.split("."))):
        raise NetworkError(f"network {spec!r} does not read as module.path:factory")
    elif not _is_there(package := source.partition(".")[0]):
        hint = f"is {package}.py in another folder? There this would do"
        raise NetworkError(f"network {spec!r}: there is no module {package!r} to import; {hint}")


def _in_place_of_a_name(spec: str) -> str:
    """What was given in place of a network's name, and what would do; empty for what is a name."""
    if Path(spec).suffix.lower() in CHECKPOINTS:
        return (
            "is a file of weights, which does not say what computes with them: "
            "module.path:factory would do, a function that makes the model"
        )
    path = Path(spec)
    if path.suffix == ".py":
        return f"is a file of Python: {path.stem}:NAME would do, a class or function in it that makes the model"
    source, _, name = spec.rpartition(".")
    if source in ("torchvision.models", "timm.models", "timm"):
        return f"is a path in Python: '{source.partition('.')[0]}:{name}' would do"
    if SHAPE.fullmatch(spec):
        return "is a shape, and no network or layer: a layer as text would do, such as mb1ic3ih224oc64kh7sh2ph3"
    return ""


def _is_there(package: str) -> bool:
    """Whether a package or module of this name can be found. It is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # one that is imported already, and was not found in the usual way
        return True


def known(name: str, names: Iterable[str]) -> str:
    """Part of an error message: of ``names`` those closest to ``name``, then the first of them."""
    names = list(names)
    close = " or ".join(map(repr, difflib.get_close_matches(name.lower(), names, n=3)))
    shown = ", ".join(names[:SHOWN]) or "none"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (f"did you mean {close}? " if close else "") + f"known: {shown}{more}"
