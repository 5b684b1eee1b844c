"""How each type of layer is written in plain torch: what makes its module, and what computes its tops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.frontends.caffe.layers.base import Layer, Shape

__all__ = ["EMITTERS", "Call", "Piece", "emits"]


@dataclass(frozen=True, slots=True)
class Call:
    """A layer in its network: the expressions of its bottoms ``x``, of its module ``m``, and its bottoms' shapes."""

    layer: Any
    x: tuple[str, ...]
    m: str
    shapes: tuple[Shape, ...]
    tops: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A layer in Python: the expression that makes its module, empty for none, and those of its tops.

    One expression for several tops gives a tuple. ``missing`` says what plain torch has no word for; then the rest is
    empty.
    """

    values: tuple[str, ...] = ()
    init: str = ""
    missing: str = ""


Emitter = Callable[[Call], Piece]
EMITTERS: dict[type[Layer] | str, Emitter] = {}
"""Emitters by the name of the layer's class."""


def emits(*names: str) -> Callable[[Emitter], Emitter]:
    """Let layers of the classes of these names be written by the function below."""

    def add(emitter: Emitter) -> Emitter:
        EMITTERS.update(dict.fromkeys(names, emitter))
        return emitter

    return add


def simple(text: str) -> Emitter:
    """An emitter whose expression is ``text``, with ``{x}`` for the bottom and ``{l.field}`` for the layer's."""

    def emit(c: Call) -> Piece:
        return Piece((text.format(x=c.x[0], l=c.layer, m=c.m),))

    return emit


EMITTERS.update(
    {
        "ELU": simple("F.elu({x}, {l.alpha!r})"),
        "Sigmoid": simple("{x}.sigmoid()"),
        "TanH": simple("{x}.tanh()"),
        "Swish": simple("{x} * ({l.beta!r} * {x}).sigmoid()"),
        "AbsVal": simple("{x}.abs()"),
        "BNLL": simple("F.softplus({x}, threshold=50)"),
        "Exp": simple("({x} * {l.scale!r} + {l.shift!r}).exp()"),
        "Log": simple("({x} * {l.scale!r} + {l.shift!r}).log() * {l.factor!r}"),
        "Threshold": simple("({x} > {l.threshold!r}).to({x}.dtype)"),
        "Clip": simple("{x}.clamp({l.least!r}, {l.most!r})"),
        "Softmax": simple("{x}.softmax({l.along})"),
        "Flatten": simple("{x}.flatten({l.first}, {l.last})"),
        "Permute": simple("{x}.permute{l.order}.contiguous()"),
        "Tile": simple("torch.cat([{x}] * {l.tiles}, {l.along})"),
        "Reshape": simple("reshaped({x}, {l.dims}, {l.first}, {l.axes})"),
        "SpatialPyramid": simple("pyramid({x}, {l.height}, {l.method!r})"),
        "MVN": simple("mean_and_variance({x}, {l.first}, {l.divide}, {l.eps!r})"),
    }
)


def made(kind: str, *given: Any, **named: Any) -> str:
    """The call of a torch class: ``made("Conv2d", 3, 8, stride=(2, 2))``."""
    words = [*map(repr, given), *(f"{name}={value!r}" for name, value in named.items())]
    return f"nn.{kind}({', '.join(words)})"


def blobs(layer: Layer) -> str:
    """The expression that makes a holder of a layer's parameters."""
    shapes = (
        f"{name.rpartition('.')[2]}={tuple(blob.shape)}"
        for name, blob in zip(layer.blob_names, layer.blobs, strict=True)
    )
    return f"Blobs({', '.join(shapes)})"


def behind(expression: str, axes: int) -> str:
    """An expression with so many axes of size 1 behind its own."""
    return f"{expression}[{', '.join(['...', *['None'] * axes])}]" if axes else expression


@emits("Convolution", "Deconvolution")
def convolution(c: Call) -> Piece:
    conv, axis = c.layer.conv, c.layer.channel_axis
    options = {
        name: value
        for name, value, usual in (
            ("stride", conv.stride, 1), ("padding", conv.padding, 0), ("dilation", conv.dilation, 1),
        )
        if any(each != usual for each in value)
    }  # fmt: skip
    options |= {"groups": conv.groups} if conv.groups > 1 else {}
    options |= {"bias": False} if conv.bias is None else {}
    init = made(type(conv).__name__, conv.in_channels, conv.out_channels, tuple(conv.kernel_size), **options)
    if axis == 1:
        return Piece(tuple(f"{c.m}({x})" for x in c.x), init)
    if axis == 0:
        return Piece(tuple(f"{c.m}({x}[None])[0]" for x in c.x), init)
    return Piece(
        tuple(f"{c.m}({x}.flatten(0, {axis - 1})).unflatten(0, {x}.shape[:{axis}])" for x in c.x), init
    )  # fmt: skip


@emits("Im2col")
def im2col(c: Call) -> Piece:
    return Piece((f"columns({c.x[0]}, {c.layer.kernel}, {c.layer.dilation}, {c.layer.pad}, {c.layer.stride})",))


@emits("InnerProduct")
def inner_product(c: Call) -> Piece:
    layer = c.layer
    rows = f"{c.x[0]}.flatten({layer.first})" if layer.first < len(c.shapes[0]) - 1 else c.x[0]
    if layer.transpose:
        bias = f", {c.m}.bias" if layer.has_bias else ""
        return Piece((f"F.linear({rows}, {c.m}.weight.t(){bias})",), blobs(layer))
    options = {} if layer.has_bias else {"bias": False}
    return Piece((f"{c.m}({rows})",), made("Linear", layer.inputs, layer.num_output, **options))


@emits("Embed")
def embed(c: Call) -> Piece:
    bias = f" + {c.m}.bias" if c.layer.has_bias else ""
    return Piece((f"F.embedding({c.x[0]}.to(torch.int64), {c.m}.weight){bias}",), blobs(c.layer))


@emits("ReLU")
def relu(c: Call) -> Piece:
    slope = c.layer.slope
    return Piece((f"F.leaky_relu({c.x[0]}, {slope!r})" if slope else f"F.relu({c.x[0]})",))


@emits("ReLU6")
def relu6(c: Call) -> Piece:
    slope = c.layer.slope
    return Piece((f"F.relu6({c.x[0]})" + (f" + {slope!r} * {c.x[0]}.clamp_max(0)" if slope else ""),))


@emits("PReLU")
def prelu(c: Call) -> Piece:
    return Piece((f"{c.m}({c.x[0]})",), made("PReLU", c.layer.weight.numel()))


@emits("Power")
def power(c: Call) -> Piece:
    layer, x = c.layer, c.x[0]
    if layer.power * layer.scale == 0:
        return Piece((f"{x} * 0 + {1.0 if layer.power == 0 else layer.shift**layer.power!r}",))
    inner = x if layer.scale == 1 else f"{x} * {layer.scale!r}"
    inner = f"{inner} + {layer.shift!r}" if layer.shift else inner
    return Piece((inner if layer.power == 1 else f"({inner}).pow({layer.power!r})",))


@emits("Dropout")
def dropout(c: Call) -> Piece:
    layer, x = c.layer, c.x[0]
    if layer.scale_train:
        if layer.always:
            return Piece((f"F.dropout({x}, {layer.ratio!r})",))
        return Piece((f"{c.m}({x})",), made("Dropout", layer.ratio))
    kept = f"{x} * torch.rand_like({x}).ge({layer.ratio!r})"
    return Piece((kept if layer.always else f"{kept} if self.training else {x} * {1 - layer.ratio!r}",))


@emits("LRN")
def lrn(c: Call) -> Piece:
    layer = c.layer
    if layer.across:
        return Piece(
            (f"{c.m}({c.x[0]})",),
            made("LocalResponseNorm", layer.size, alpha=layer.alpha, beta=layer.beta, k=layer.k),
        )
    return Piece((f"within_channel({c.x[0]}, {layer.size}, {layer.alpha!r}, {layer.beta!r})",))


@emits("BatchNorm")
def batch_norm(c: Call) -> Piece:
    layer, axes = c.layer, len(c.shapes[0])
    kind = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d", 5: "BatchNorm3d"}.get(axes)
    if kind is None:
        return Piece(missing=f"a batch normalisation of {axes} axes")
    init = made(kind, layer.channels, eps=layer.eps, momentum=1 - layer.fraction, affine=False)
    if layer.use_global is None and layer.update:
        return Piece((f"{c.m}({c.x[0]})",), init)
    if layer.use_global is None:
        return Piece(missing="update_global_stats = false")
    if not layer.use_global:
        return Piece((f"batch_norm_of_batch({c.x[0]}, None, {layer.eps!r})",), init)
    running = f"{c.m}.running_mean, {c.m}.running_var"
    return Piece((f"F.batch_norm({c.x[0]}, {running}, eps={layer.eps!r})",), init)


@emits("BN")
def bn(c: Call) -> Piece:
    layer, (x,), m = c.layer, c.x, c.m
    axes = len(c.shapes[0]) - 2
    if layer.merged:
        words = (behind(f"{m}.{name}.flatten()", axes) for name in ("weight", "bias"))
        return Piece((" + ".join([f"{x} * {next(words)}", *words]),), blobs(layer))
    if layer.segnet:
        return Piece((f"batch_norm_of_batch({x}, {m}, {layer.eps!r})",), blobs(layer))
    training = "False" if layer.frozen else "self.training"
    return Piece((f"batch_norm_of_fork({x}, {m}, {training}, {layer.momentum!r}, {layer.eps!r})",), blobs(layer))


@emits("Scale")
def scale(c: Call) -> Piece:
    layer = c.layer
    axes = len(c.shapes[0]) - layer.first - layer.axes
    factor = f"{c.m}.weight" if layer.learned else c.x[1]
    bias = f" + {behind(f'{c.m}.bias', axes)}" if layer.has_bias else ""
    return Piece((f"{c.x[0]} * {behind(factor, axes)}{bias}",), blobs(layer) if layer.blob_names else "")


@emits("Bias")
def bias(c: Call) -> Piece:
    layer = c.layer
    term = behind(c.x[1] if len(c.x) == 2 else f"{c.m}.bias", len(c.shapes[0]) - layer.first - layer.axes)
    return Piece((f"{c.x[0]} + {term}",), blobs(layer) if layer.blob_names else "")


@emits("Normalize")
def normalize(c: Call) -> Piece:
    axes = (1, 2, 3) if c.layer.everywhere else (1,)
    length = f"({c.x[0]}.square().sum({axes}, keepdim=True) + {c.layer.eps!r}).sqrt()"
    return Piece((f"{c.x[0]} / {length} * {c.m}.weight.reshape(1, -1, 1, 1)",), blobs(c.layer))


@emits("Pooling")
def pooling(c: Call) -> Piece:
    layer, (x,), windows = c.layer, c.x, c.layer.windows
    kernel, stride, pad, ceil = windows
    if layer.everywhere:
        kernel = tuple(c.shapes[0][2:])
    where = f"{f'{x}.shape[2:]' if layer.everywhere else kernel}, {stride}"
    if layer.method == "STOCHASTIC":
        return Piece((f"drawn({x}, {where}, {ceil}, self.training)",))
    if c.tops == 2:
        return Piece((f"places_of({x}, {where}, {pad}, {ceil})",))
    if layer.everywhere:
        return Piece((f"F.{'max' if layer.method == 'MAX' else 'avg'}_pool2d({x}, {x}.shape[2:])",))
    # torch's windows are the same for any size of image where none can begin beyond it.
    few = all(2 * p <= k for p, k in zip(pad, kernel, strict=True))
    if few and (max(pad) > 0 or all(s <= k for s, k in zip(stride, kernel, strict=True))):
        options: dict[str, Any] = {"padding": pad} if max(pad) else {}
        options |= {"ceil_mode": True} if ceil else {}
        kind = "MaxPool2d" if layer.method == "MAX" else "AvgPool2d"
        return Piece((f"{c.m}({x})",), made(kind, kernel, stride, **options))
    return Piece((f"pooled({x}, {where}, {pad}, {ceil}, {layer.method!r})",))


@emits("Upsample")
def upsample(c: Call) -> Piece:
    (shape,) = c.layer.output_shapes(list(c.shapes))
    sizes = []
    for axis in (0, 1):
        asked, factor, less = c.layer.sizes[axis], c.layer.scale[axis], int(c.layer.pad_out[axis])
        size = f"{c.x[0]}.shape[{axis + 2}] * {factor}" + (f" - {less}" if less else "")
        sizes.append(str(shape[axis + 2]) if asked else size)
    return Piece((f"upsampled({c.x[0]}, {c.x[1]}, ({', '.join(sizes)}))",))


@emits("Interp")
def interp(c: Call) -> Piece:
    layer, x = c.layer, c.x[0]
    if any(layer.cut):
        begin, end = -layer.cut[0] or "", layer.cut[1] or ""
        x = f"{x}[:, :, {begin}:{end}, {begin}:{end}]"
    if len(c.x) == 1 and (layer.shrink is not None or layer.zoom is not None):
        return Piece((f"zoomed({x}, {layer.shrink or 1}, {layer.zoom or 1})",))
    size = f"{c.x[1]}.shape[2:]" if len(c.x) == 2 else str(layer.sizes)
    return Piece((f'F.interpolate({x}, {size}, mode="bilinear", align_corners=True)',))


@emits("Concat")
def concat(c: Call) -> Piece:
    return Piece((f"torch.cat([{', '.join(c.x)}], {c.layer.along})",))


@emits("Slice")
def slices(c: Call) -> Piece:
    if c.tops == 1:
        return Piece((c.x[0],))
    if not c.layer.points:
        return Piece((f"{c.x[0]}.chunk({c.tops}, {c.layer.along})",))
    return Piece((f"{c.x[0]}.tensor_split({c.layer.points}, {c.layer.along})",))


@emits("Split")
def split(c: Call) -> Piece:
    return Piece((c.x[0],) * c.tops)


@emits("Silence")
def silence(c: Call) -> Piece:
    return Piece()


@emits("Crop")
def crop(c: Call) -> Piece:
    found = c.x[0]
    for axis, offset in enumerate(c.layer.offsets, c.layer.first):
        found = f"{found}.narrow({axis}, {offset}, {c.x[1]}.shape[{axis}])"
    return Piece((found,))


@emits("Filter")
def chosen(c: Call) -> Piece:
    *found, selector = c.x
    return Piece(tuple(f"{x}[{selector}.flatten() != 0]" for x in found))


@emits("BatchReindex")
def reindex(c: Call) -> Piece:
    return Piece((f"{c.x[0]}[{c.x[1]}.flatten().to(torch.int64)]",))


@emits("ShuffleChannel")
def shuffle(c: Call) -> Piece:
    return Piece((f"{c.x[0]}.unflatten(1, ({c.layer.group}, -1)).transpose(1, 2).flatten(1, 2)",))


@emits("Eltwise")
def eltwise(c: Call) -> Piece:
    layer = c.layer
    if layer.operation == "SUM":
        factors: Sequence[float] = layer.coefficients or [1.0] * len(c.x)
        return Piece((" + ".join(x if f == 1 else f"{x} * {f!r}" for x, f in zip(c.x, factors, strict=True)),))
    if layer.operation == "PROD":
        return Piece((" * ".join(c.x),))
    found = c.x[0]
    for x in c.x[1:]:
        found = f"torch.maximum({found}, {x})"
    return Piece((found,))


@emits("Axpy")
def axpy(c: Call) -> Piece:
    return Piece((f"torch.addcmul({c.x[2]}, {c.x[0]}.flatten(2)[..., None], {c.x[1]})",))


@emits("Reduction")
def reduction(c: Call) -> Piece:
    layer = c.layer
    rows = f"{c.x[0]}.reshape(*{c.x[0]}.shape[:{layer.first}], -1)"
    rows += {"ASUM": ".abs()", "SUMSQ": ".square()"}.get(layer.operation, "")
    return Piece((f"{rows}.{'mean' if layer.operation == 'MEAN' else 'sum'}(-1) * {layer.coefficient!r}",))


@emits("ArgMax")
def places(c: Call) -> Piece:
    layer = c.layer
    return Piece((f"largest({c.x[0]}, {layer.along}, {layer.top_k}, {layer.values})",))


@emits("Accuracy")
def accuracies(c: Call) -> Piece:
    layer = c.layer
    found = f"accuracy({c.x[0]}, {c.x[1]}, {layer.along}, {layer.top_k}, {layer.ignored})"
    return Piece((found if c.tops == 2 else f"{found}[0]",))


@emits("SoftmaxWithLoss")
def softmax_losses(c: Call) -> Piece:
    layer = c.layer
    if layer.weighted:
        return Piece(missing="weight_by_label_freqs")
    found = f"softmax_loss({c.x[0]}, {c.x[1]}, {layer.along}, {layer.ignored}, {layer.normalization!r})"
    return Piece((found if c.tops == 2 else f"{found}[0]",))


@emits("SigmoidCrossEntropyLoss")
def sigmoid_losses(c: Call) -> Piece:
    layer = c.layer
    loss = f"sigmoid_loss({c.x[0]}, {c.x[1]}, {layer.ignored}, {layer.normalization!r})"
    return Piece((loss, f"{c.x[0]}.sigmoid()")[: c.tops])


@emits("EuclideanLoss")
def euclidean(c: Call) -> Piece:
    difference = f"({c.x[0]} - {c.x[1]}.reshape({c.x[0]}.shape))"
    return Piece((f"{difference}.square().sum() / (2 * {c.x[0]}.shape[0])",))


@emits("HingeLoss")
def hinge(c: Call) -> Piece:
    return Piece((f"hinge_loss({c.x[0]}, {c.x[1]}, {c.layer.squared})",))


@emits("MultinomialLogisticLoss")
def multinomial(c: Call) -> Piece:
    return Piece((f"logistic_loss({c.x[0]}, {c.x[1]})",))


@emits("ContrastiveLoss")
def contrastive(c: Call) -> Piece:
    return Piece((f"contrastive_loss({', '.join(c.x)}, {c.layer.margin!r}, {c.layer.legacy})",))


@emits("SmoothL1Loss")
def smooth_l1(c: Call) -> Piece:
    x, y, *more = c.x
    return Piece((f"smooth_l1_loss({', '.join([x, y, repr(c.layer.squared), *more])})",))


@emits("LSTM", "RNN")
def recurrent(c: Call) -> Piece:
    layer, name = c.layer, type(c.layer).__name__.lower()
    x, cont, *more = c.x
    words = [x, cont, c.m, *([more.pop(0)] if layer.static else [])]
    if layer.exposed:
        words.append(f"first=({', '.join(f'{state}[0]' for state in more)},)")
        states = tuple(f"{c.m}.last[{place}][None]" for place in range(len(more)))
        return Piece((f"{name}({', '.join(words)})", *states), blobs(layer))
    words.append(f"first={c.m}.kept")
    return Piece((f"{name}({', '.join(words)})",), blobs(layer))


@emits("Parameter")
def parameter(c: Call) -> Piece:
    return Piece((f"{c.m}.weight",), blobs(c.layer))


@emits("PriorBox")
def priors(c: Call) -> Piece:
    layer = c.layer
    layout = (*layer.image, *layer.step, layer.offset)
    return Piece((f"prior_boxes({c.x[0]}, {c.x[1]}, {layer.boxes}, {layer.variances}, {layout}, {layer.clip})",))


@emits("MarginInnerProduct")
def margin_inner_product(c: Call) -> Piece:
    layer = c.layer
    if c.tops == 2:
        return Piece(missing="a second top with lambda, which changes with each iteration")
    if layer.margin > 1 and layer.phase == "train":
        return Piece(missing="a margin whose weight changes with each iteration; the phase test would do")
    share = max(layer.base * (1 + layer.gamma * layer.iteration) ** -layer.power, layer.least)
    rows = f"{c.x[0]}.flatten({layer.first})"
    words = f"{rows}, {c.x[1]}, {c.m}, {layer.margin}, {share!r}, self.training"
    return Piece((f"margin_products({words})",), blobs(layer))


@emits("DetectionOutput")
def detection_output(c: Call) -> Piece:
    layer = c.layer
    options = {
        "classes": layer.classes,
        "share_location": layer.shared,
        "background": layer.background,
        "code": layer.code,
        "variance_encoded_in_target": layer.encoded,
        "confidence_threshold": max(layer.least, -3.4e38),
        "suppression": (layer.overlap, layer.top_k, layer.eta),
        "keep_top_k": layer.keep,
    }
    return Piece((f"detections({', '.join(c.x)}, {options})",))
