"""Which sizes to pick: neighbouring sizes of a layer that give more samples a second, by measurement."""

from tilewise.advice.advise import Advice, NoAdviceError, advise
from tilewise.advice.axes import Axis
from tilewise.advice.points import Part, Point
from tilewise.advice.sweep import Sweep, convolution, product, recurrent_layer

__all__ = [
    "Advice",
    "Axis",
    "NoAdviceError",
    "Part",
    "Point",
    "Sweep",
    "advise",
    "convolution",
    "product",
    "recurrent_layer",
]
