"""Layers and networks made from short texts, with blobs of random numbers, and the means to compare them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.frontends.caffe.files import read_net
from tilewise.frontends.caffe.layers.base import Layer, Phase, Shape
from tilewise.frontends.caffe.layers.registry import maker
from tilewise.frontends.caffe.net import Net

__all__ = ["Float64", "gradients_agree", "layer", "net", "numbers", "tops"]

Float64 = NDArray[np.float64]


def layer(kind: str, fields: str, *shapes: Shape, tops: int = 1, phase: Phase = "test", random: bool = True) -> Layer:
    """A layer in float64 for bottoms of ``shapes``. Its blobs are random, or with ``random=False`` as filled."""
    bottoms = " ".join(f'bottom: "b{place}"' for place in range(len(shapes)))
    made_tops = " ".join(f'top: "t{place}"' for place in range(tops))
    parameter: Any = read_net(f'layer {{ name: "it" type: "{kind}" {bottoms} {made_tops} {fields} }}').layer[0]
    make = maker(kind)
    assert make is not None
    made = make(parameter, list(shapes), phase).double()
    if random:
        with torch.no_grad():
            for blob in made.blobs:
                blob.uniform_(-1, 1)
    return made


def tops(made: Layer, *bottoms: Tensor) -> list[Tensor]:
    """The tops for some bottoms, after a check that they have the shapes that the layer says."""
    found = made(*bottoms)
    found = list(found) if isinstance(found, tuple) else [found]
    assert made.output_shapes([tuple(x.shape) for x in bottoms]) == [tuple(y.shape) for y in found]
    return found


def numbers(*shape: int, least: float = -1.0, most: float = 1.0, grad: bool = True) -> Tensor:
    """Random numbers in float64, all different and none close to another, so that no maximum is a tie."""
    count = math.prod(shape)
    steps = torch.randperm(count, dtype=torch.int64, device="cpu").to(torch.float64)
    return (least + (steps + 0.5) * ((most - least) / count)).reshape(shape).requires_grad_(grad)


def gradients_agree(made: Layer, bottoms: Sequence[Tensor]) -> bool:
    """Whether the gradients of bottoms and blobs are what differences of values say."""
    wanted = [*(x for x in bottoms if x.requires_grad), *(blob for blob in made.blobs if blob.requires_grad)]

    def run(*_: Tensor) -> tuple[Tensor, ...]:
        found = made(*bottoms)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(y for y in found if y.requires_grad)

    return torch.autograd.gradcheck(run, wanted, fast_mode=True)


def net(text: str, phase: Phase = "test", **kwargs: Any) -> Net:
    """A network of a text."""
    return Net(read_net(text), phase, **kwargs)
