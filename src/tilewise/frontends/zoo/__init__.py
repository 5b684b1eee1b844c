"""Networks that come with tilewise: one file per family, weights drawn at random.

Each builder takes no argument and returns a module whose ``input_shape`` is one input's shape, without the batch.

>>> from tilewise.frontends.zoo import BUILDERS
>>> sorted(BUILDERS)[:3]
['alexnet', 'densenet40', 'googlenet']
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tilewise.frontends.zoo.alexnet import build_alexnet
from tilewise.frontends.zoo.densenet import build_densenet40
from tilewise.frontends.zoo.googlenet import build_googlenet
from tilewise.frontends.zoo.overfeat import build_overfeat_fast
from tilewise.frontends.zoo.photonet import build_photonet
from tilewise.frontends.zoo.replknet import build_replknet31_stage
from tilewise.frontends.zoo.resnet import build_resnet18, build_resnet50
from tilewise.frontends.zoo.vgg import build_vgg16

__all__ = [
    "BUILDERS",
    "build_alexnet",
    "build_densenet40",
    "build_googlenet",
    "build_overfeat_fast",
    "build_photonet",
    "build_replknet31_stage",
    "build_resnet18",
    "build_resnet50",
    "build_vgg16",
]

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": build_alexnet,
    "overfeat_fast": build_overfeat_fast,
    "vgg16": build_vgg16,
    "resnet18": build_resnet18,
    "resnet50": build_resnet50,
    "densenet40": build_densenet40,
    "googlenet": build_googlenet,
    "replknet31_stage": build_replknet31_stage,
    "photonet": build_photonet,
}
"""Built-in networks by the name the command line knows them by."""
