"""What exported files need beside torch's own modules. An exported file has the source of those that it uses.

So each of these uses nothing but ``torch``, ``F``, ``nn``, ``math``, others of this file, and what
:mod:`~tilewise.frontends.caffe.layers.detection` has for overlapping boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.frontends.caffe.layers.detection import suppressed

__all__ = [
    "Blobs", "accuracy", "at_least", "batch_norm_of_batch", "batch_norm_of_fork", "columns", "contrastive_loss",
    "counts_of", "decoded_boxes", "detections", "drawn", "hinge_loss", "largest", "logistic_loss", "lstm",
    "margin_products", "mean_and_variance", "padded", "places_of", "pooled", "prior_boxes", "pyramid", "reshaped",
    "rnn", "sigmoid_loss", "smooth_l1_loss", "softmax_loss", "states_of", "upsampled", "within_channel", "zoomed",
]  # fmt: skip


class Blobs(nn.Module):
    """The parameters of a layer that is no module of torch's: ``Blobs(weight=(3, 4))`` has a ``weight``."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.kept: Any = None  # a recurrent layer's last states
        self.last: Any = None
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu")))


def counts_of(
    sizes: Sequence[int], kernel: tuple[int, ...], stride: tuple[int, ...], pad: tuple[int, ...], ceil: bool
) -> list[int]:
    """How many windows lie along each axis: rounded up, without a last one that begins beyond the padding."""
    found = []
    for n, k, s, p in zip(sizes, kernel, stride, pad, strict=True):
        count = (n + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        found.append(count - 1 if max(pad) > 0 and (count - 1) * s >= n + p else count)
    return found


def padded(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], pad: tuple[int, ...], ceil: bool, value: float
) -> Tensor:
    """(N, C, H, W) with as much padding as the windows reach."""
    sides: list[int] = []
    counts = counts_of(x.shape[2:], kernel, stride, pad, ceil)
    for n, m, k, s, p in reversed(list(zip(x.shape[2:], counts, kernel, stride, pad, strict=True))):
        sides += [p, (m - 1) * s + k - p - n]
    return F.pad(x, sides, value=value)


def pooled(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], pad: tuple[int, ...], ceil: bool, method: str
) -> Tensor:
    """The maximum or the mean of each window. A mean's divisor counts the padding, but nothing beyond it."""
    if method == "MAX":
        return F.max_pool2d(padded(x, kernel, stride, pad, ceil, torch.finfo(x.dtype).min), kernel, stride)
    sums = F.avg_pool2d(padded(x, kernel, stride, pad, ceil, 0.0), kernel, stride, divisor_override=1)
    spans = []
    counts = counts_of(x.shape[2:], kernel, stride, pad, ceil)
    for n, m, k, s, p in zip(x.shape[2:], counts, kernel, stride, pad, strict=True):
        starts = torch.arange(m, dtype=torch.int64, device=x.device) * s - p
        spans.append(((starts + k).clamp_max(n + p) - starts).clamp_min(1))
    return sums / (spans[0][:, None] * spans[1]).to(x.dtype)


def places_of(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], pad: tuple[int, ...], ceil: bool
) -> tuple[Tensor, Tensor]:
    """The maximum of each window, and its place in the plane: row times width plus column."""
    wide = padded(x, kernel, stride, pad, ceil, torch.finfo(x.dtype).min)
    found, places = F.max_pool2d(wide, kernel, stride, return_indices=True)
    rows, columns = places // wide.shape[3] - pad[0], places % wide.shape[3] - pad[1]
    return found, (rows * x.shape[3] + columns).to(x.dtype)


def drawn(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], ceil: bool, training: bool) -> Tensor:
    """A value of each window, drawn in proportion to it; in evaluation the mean weighted by the values."""
    wide = padded(x, kernel, stride, (0, 0), ceil, 0.0)
    windows = wide.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1]).flatten(4)
    if not training:
        return windows.square().sum(-1) / windows.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    sums = windows.detach().cumsum(-1)
    places = (sums < torch.rand_like(sums[..., :1]) * sums[..., -1:]).sum(-1, keepdim=True)
    return windows.gather(-1, places.clamp_max(windows.shape[-1] - 1)).squeeze(-1)


def pyramid(x: Tensor, height: int, method: str) -> Tensor:
    """Pooling over 1, 2 x 2, 4 x 4 ... windows that cover the image, one row for each image."""
    levels = []
    for level in range(height):
        kernel = tuple(math.ceil(n / 2**level) for n in x.shape[2:])
        pad = tuple((k * 2**level - n + 1) // 2 for k, n in zip(kernel, x.shape[2:], strict=True))
        levels.append(pooled(x, kernel, kernel, pad, True, method))
    return torch.cat([level.flatten(1) for level in levels], 1) if height > 1 else levels[0]


def upsampled(x: Tensor, places: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Values put back to the places where pooling found them, zeros elsewhere."""
    planes = x.new_zeros((*x.shape[:2], sizes[0] * sizes[1]))
    return planes.scatter(2, places.flatten(2).to(torch.int64), x.flatten(2)).reshape(*x.shape[:2], *sizes)


def within_channel(x: Tensor, size: int, alpha: float, beta: float) -> Tensor:
    """Local response normalisation over squares of side ``size`` of each channel."""
    means = pooled(x.square(), (size, size), (1, 1), (size // 2, size // 2), True, "AVE")
    return x * (1 + alpha * means).pow(-beta)


def mean_and_variance(x: Tensor, first: int, divide: bool, eps: float) -> Tensor:
    """x minus its mean over all axes from ``first`` on, divided by its standard deviation plus eps."""
    rows = x.reshape(math.prod(x.shape[:first]), -1)
    rows = rows - rows.mean(1, keepdim=True)
    if divide:
        variance = rows.square().mean(1, keepdim=True)
        flat = variance == 0
        rows = rows / (torch.where(flat, torch.ones_like(variance), variance).sqrt() * ~flat + eps)
    return rows.reshape(x.shape)


def batch_norm_of_batch(x: Tensor, p: Any, eps: float) -> Tensor:
    """Batch normalisation by the batch's own statistics, with a scale and a shift where ``p`` has them."""
    scale, shift = (None, None) if p is None else (p.weight.flatten(), p.bias.flatten())
    return F.batch_norm(x, None, None, scale, shift, True, 0.0, eps)


def batch_norm_of_fork(x: Tensor, p: Any, training: bool, momentum: float, eps: float) -> Tensor:
    """Batch normalisation with running statistics that are not corrected for the size of the batch."""
    running = p.mean.detach().flatten(), p.variance.detach().flatten()
    if not training:
        return F.batch_norm(x, *running, p.weight.flatten(), p.bias.flatten(), False, 0.0, eps)
    y = batch_norm_of_batch(x, p, eps)
    with torch.no_grad():
        axes = (0, *range(2, x.dim()))
        for kept, batch in ((p.mean, x.mean(axes)), (p.variance, x.var(axes, correction=0))):
            kept.mul_(momentum).add_(batch.reshape(kept.shape), alpha=1 - momentum)
    return y


def columns(
    x: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...], pad: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """The windows of (N, C, H, W) as columns: (N, C * window, rows of windows, columns of windows)."""
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    counts = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], pad, spans, stride, strict=True)]
    found: Tensor = F.unfold(x, kernel, dilation, pad, stride).unflatten(2, counts)
    return found


def zoomed(x: Tensor, shrink: int, zoom: int) -> Tensor:
    """(N, C, H, W) resized by linear interpolation, corners onto corners."""
    sizes = [(n - 1) // shrink + 1 for n in x.shape[2:]]
    return F.interpolate(x, [n + (n - 1) * (zoom - 1) for n in sizes], mode="bilinear", align_corners=True)


def largest(x: Tensor, axis: int | None, top_k: int, values: bool) -> Tensor:
    """The places or values of the largest elements along an axis, the later of equal ones first.

    Without an axis those of each image: (N, 1, top_k), or (N, 2, top_k) with places and values.
    """
    along, rows = (1, x.detach().flatten(1)) if axis is None else (axis, x.detach())
    found, places = rows.flip(along).sort(dim=along, descending=True, stable=True)
    found = found.narrow(along, 0, top_k)
    places = (rows.shape[along] - 1 - places.narrow(along, 0, top_k)).to(x.dtype)
    if axis is not None:
        return found if values else places
    both = torch.stack([places, found], 1) if values else places[:, None]
    return both.reshape(*both.shape, *(1,) * (x.dim() - 3))


def reshaped(x: Tensor, dims: Sequence[int], first: int, axes: int) -> Tensor:
    """``axes`` axes from ``first`` on replaced by ``dims``: 0 keeps a size, -1 takes what is left."""
    found = [x.shape[first + place] if size == 0 else size for place, size in enumerate(dims)]
    return x.reshape(*x.shape[:first], *found, *x.shape[first + axes :])


def states_of(x: Tensor, p: Any, first: Any, count: int) -> tuple[Tensor, ...]:
    """The states (N, H) that a recurrent layer begins with: ``first`` where it fits, else zeros."""
    zeros = x.new_zeros((x.shape[1], p.weight_h.shape[1]))
    fits = first is not None and all((s.shape, s.dtype, s.device) == (zeros.shape, x.dtype, x.device) for s in first)
    return tuple(first) if fits else (zeros,) * count


def lstm(x: Tensor, cont: Tensor, p: Any, static: Tensor | None = None, first: Any = None) -> Tensor:
    """(T, N, H) outputs; gates are i, f, o and g, and ``cont`` is 0 where a sequence begins.

    ``first`` are the states (N, H) to begin with, zeros for ``None`` or other sizes. ``p.last`` has the last ones, and
    ``p.kept`` the same without a gradient.
    """
    rows = F.linear(x.reshape(*x.shape[:2], -1), p.weight_x, p.bias)
    if static is not None:
        rows = rows + F.linear(static.flatten(1), p.weight_static)
    hidden, cell = states_of(x, p, first, 2)
    outputs = []
    for step, go_on in zip(rows, cont.detach().to(x.dtype)[..., None], strict=True):
        i, f, o, g = (step + F.linear(hidden * go_on, p.weight_h)).chunk(4, 1)
        cell = go_on * f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    p.last, p.kept = (hidden, cell), (hidden.detach(), cell.detach())
    return torch.stack(outputs)


def rnn(x: Tensor, cont: Tensor, p: Any, static: Tensor | None = None, first: Any = None) -> Tensor:
    """(T, N, H) outputs tanh(U h + c) of h = tanh(W h + V x + b); states are as in an LSTM."""
    rows = F.linear(x.reshape(*x.shape[:2], -1), p.weight_x, p.bias)
    if static is not None:
        rows = rows + F.linear(static.flatten(1), p.weight_static)
    (state,) = states_of(x, p, first, 1)
    outputs = []
    for step, go_on in zip(rows, cont.detach().to(x.dtype)[..., None], strict=True):
        state = (step + F.linear(state * go_on, p.weight_h)).tanh()
        outputs.append(F.linear(state, p.weight_o, p.bias_o).tanh())
    p.last, p.kept = (state,), (state.detach(),)
    return torch.stack(outputs)


def at_least(x: Tensor, least: float) -> Tensor:
    """``x``, but at least ``least``; the gradient is that of ``x`` everywhere."""
    return x + (x.clamp_min(least) - x).detach()


def softmax_loss(scores: Tensor, labels: Tensor, axis: int, ignored: int | None, mode: str) -> tuple[Tensor, Tensor]:
    """-log of the softmax of each label's score, summed and divided as ``mode`` says, and the softmax."""
    logs = scores.log_softmax(axis)
    places = labels.detach().flatten().to(torch.int64)
    counted = torch.ones_like(places, dtype=torch.bool) if ignored is None else places != ignored
    rows = logs.movedim(axis, -1).reshape(-1, scores.shape[axis])
    own = rows.gather(1, torch.where(counted, places, torch.zeros_like(places))[:, None])[:, 0]
    losses = -at_least(own, math.log(torch.finfo(torch.float32).tiny))
    total = torch.where(counted, losses, torch.zeros_like(losses)).sum()
    divisors = {"FULL": places.numel(), "BATCH_SIZE": math.prod(scores.shape[:axis]), "NONE": 1}
    return total / (counted.sum().clamp_min(1) if mode == "VALID" else max(1, divisors[mode])), logs.exp()


def sigmoid_loss(scores: Tensor, targets: Tensor, ignored: int | None, mode: str) -> Tensor:
    """The cross entropy of sigmoids and their targets, summed and divided as ``mode`` says."""
    targets = targets.detach().to(scores.dtype).reshape(scores.shape)
    counted = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
    losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
    total = torch.where(counted, losses, torch.zeros_like(losses)).sum()
    divisors = {"FULL": targets.numel(), "BATCH_SIZE": scores.shape[0], "NONE": 1}
    return total / (counted.sum().clamp_min(1) if mode == "VALID" else max(1, divisors[mode]))


def hinge_loss(scores: Tensor, labels: Tensor, squared: bool) -> Tensor:
    """max(0, 1 - t x), or its square, over all scores x; t is 1 at the label and -1 elsewhere."""
    rows = scores.reshape(scores.shape[0], -1)
    signs = torch.ones_like(rows).scatter(1, labels.reshape(-1, 1).to(torch.int64), -1.0)
    margins = F.relu(1 + rows * signs)
    return (margins.square() if squared else margins).sum() / rows.shape[0]


def logistic_loss(probabilities: Tensor, labels: Tensor) -> Tensor:
    """-log of each label's probability, 1e-20 or more, over the number of images."""
    rows = probabilities.reshape(probabilities.shape[0], -1)
    return -at_least(rows.gather(1, labels.reshape(-1, 1).to(torch.int64)), 1e-20).log().sum() / rows.shape[0]


def contrastive_loss(x: Tensor, y: Tensor, similar: Tensor, margin: float, legacy: bool) -> Tensor:
    """d^2 of similar pairs and max(margin - d, 0)^2, or max(margin - d^2, 0), of others, over twice their number."""
    squares = (x - y).flatten(1).square().sum(1)
    if legacy:
        apart = F.relu(margin - squares)
    else:
        # Caffe adds 0.0001 to the distance by which the gradient is divided.
        with torch.no_grad():
            missing = F.relu(margin - squares.sqrt())
            slopes = -missing / (squares.sqrt() + 1e-4)
        apart = missing.square() + slopes * (squares - squares.detach())
    return torch.where(similar.flatten() != 0, squares, apart).sum() / (2 * x.shape[0])


def smooth_l1_loss(x: Tensor, y: Tensor, squared: float, inside: Any = None, outside: Any = None) -> Tensor:
    """The sum of d^2 sigma^2 / 2 near 0 and |d| - 0.5 / sigma^2 elsewhere, over the number of images."""
    d = x - y if inside is None else (x - y) * inside
    losses = torch.where(d.abs() < 1 / squared, 0.5 * squared * d.square(), d.abs() - 0.5 / squared)
    return (losses if outside is None else losses * outside).sum() / x.shape[0]


def accuracy(scores: Tensor, labels: Tensor, axis: int, top_k: int, ignored: int | None) -> tuple[Tensor, Tensor]:
    """The share of labels among the ``top_k`` largest scores, in all and of each class."""
    rows = scores.detach().movedim(axis, -1).reshape(-1, scores.shape[axis])
    places = labels.detach().flatten().to(torch.int64)
    counted = torch.ones_like(places, dtype=torch.bool) if ignored is None else places != ignored
    places = torch.where(counted, places, torch.zeros_like(places))
    hits = ((rows >= rows.gather(1, places[:, None])).sum(1) <= top_k) & counted
    zeros = rows.new_zeros(rows.shape[1])
    seen = zeros.index_add(0, places, counted.to(rows.dtype))
    right = zeros.index_add(0, places, hits.to(rows.dtype))
    return hits.sum().to(rows.dtype) / counted.sum().clamp_min(1), right / seen.clamp_min(1)


def prior_boxes(
    x: Tensor, image: Tensor, boxes: Sequence[Any], variances: Sequence[float], layout: Sequence[Any], clip: bool
) -> Tensor:
    """(1, 2, H * W * boxes * 4): corners of boxes around each place as shares of the image, and their variances.

    ``layout`` is the height, the width and both steps that the network gives, 0 where it gives none, and the offset.
    """
    height, width = layout[0] or image.shape[2], layout[1] or image.shape[3]
    down, across = (
        (torch.arange(count, dtype=x.dtype, device=x.device) + layout[4]) * (step or size / count)
        for count, step, size in zip(x.shape[2:], layout[2:4], (height, width), strict=True)
    )
    halves = torch.tensor(boxes, dtype=x.dtype, device=x.device) / 2
    down, across = down[:, None, None], across[:, None]
    sides = [across - halves[:, 0], down - halves[:, 1], across + halves[:, 0], down + halves[:, 1]]
    corners = torch.stack(torch.broadcast_tensors(*sides), -1) / halves.new_tensor([width, height, width, height])
    corners = corners.clamp(0, 1) if clip else corners
    spread = torch.tensor(variances, dtype=x.dtype, device=x.device).expand(corners.shape)
    return torch.stack([corners.flatten(), spread.flatten()])[None]


def margin_products(x: Tensor, labels: Tensor, p: Any, margin: int, share: float, training: bool) -> Tensor:
    """Products with rows of length 1, where the angle to a sample's own class counts ``margin`` times.

    ``share`` is the weight of the plain product beside it. In training the rows themselves are made of length 1.
    """
    lengths = p.weight.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)
    with torch.no_grad():
        p.weight.div_(lengths if training else 1)
    products = F.linear(x, p.weight if training else p.weight / lengths)
    if margin == 1:
        return products
    places, sizes = labels.reshape(-1, 1).to(torch.int64), x.norm(dim=1, keepdim=True)
    cosines = (products.gather(1, places) / sizes.clamp_min(1e-12)).clamp(-1, 1)
    squares = cosines * cosines
    with torch.no_grad():
        k = (margin * cosines.acos() / math.pi).floor().clamp(0, margin - 1)
    multiples = {2: 2 * squares - 1, 3: (4 * squares - 3) * cosines, 4: 8 * squares * (squares - 1) + 1}
    own = (share * cosines + (1 - 2 * (k % 2)) * multiples[margin] - 2 * k) / (1 + share) * sizes
    return products.scatter(1, places, own)


def decoded_boxes(boxes: Tensor, variances: Tensor, offsets: Tensor, code: str) -> Tensor:
    """Corners of (N, priors, classes, 4) offsets from prior boxes (priors, 1, 4)."""
    moves = variances * offsets
    if code == "CORNER":
        return boxes + moves
    sizes = boxes[..., 2:] - boxes[..., :2]
    if code == "CORNER_SIZE":
        return boxes + moves * torch.cat([sizes, sizes], -1)
    centres = (boxes[..., 2:] + boxes[..., :2]) / 2 + moves[..., :2] * sizes
    halves = moves[..., 2:].exp() * sizes / 2
    return torch.cat([centres - halves, centres + halves], -1)


@torch.no_grad()
def detections(offsets: Tensor, scores: Tensor, priors: Tensor, options: dict[str, Any]) -> Tensor:
    """(1, 1, boxes, 7): image, class, score and corners of the boxes that are left after the suppression of others."""
    images, classes, shared = offsets.shape[0], options["classes"], options["share_location"]
    offsets, scores = offsets.reshape(images, -1, 1 if shared else classes, 4), scores.reshape(images, -1, classes)
    boxes, variances = priors[0].reshape(2, -1, 1, 4)
    variances = torch.ones_like(variances) if options["variance_encoded_in_target"] else variances
    decoded = decoded_boxes(boxes, variances, offsets, options["code"])
    rows = []
    for image in range(images):
        found = []
        for label in range(classes):
            if label == options["background"]:
                continue
            own = decoded[image, :, 0 if shared else label]
            places = (scores[image, :, label] > options["confidence_threshold"]).nonzero().flatten()
            kept = places[suppressed(own[places], scores[image, places, label], *options["suppression"])]
            heads = own.new_tensor([float(image), float(label)]).expand(len(kept), 2)
            found.append(torch.cat([heads, scores[image, kept, label][:, None], own[kept]], 1))
        every = torch.cat(found)
        if -1 < options["keep_top_k"] < len(every):
            best = every[:, 2].argsort(descending=True, stable=True)[: options["keep_top_k"]]
            every = every[best.sort().values]
        rows.append(every)
    if not any(map(len, rows)):
        numbers = torch.arange(images, dtype=offsets.dtype, device=offsets.device)
        return torch.cat([numbers[:, None], offsets.new_full((images, 6), -1)], 1)[None, None]
    return torch.cat(rows)[None, None]
