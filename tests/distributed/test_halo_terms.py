"""What halos add, by fused kernels in Triton's interpreter and on a GPU, against float64 by torch."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from tests.interpreter import interpreted

from tilewise.distributed.parts.layout import Grid, Layout, even_cuts
from tilewise.distributed.passes import halo_choice
from tilewise.distributed.passes import halo_kernels as halo_terms
from tilewise.distributed.passes.halo_choice import Call, choose
from tilewise.distributed.passes.halo_kernels import BLOCKS, Blocks, HaloTerms, Kernels, nearest, why_not
from tilewise.distributed.passes.share import Share, share_of
from tilewise.distributed.passes.terms import LoopedTerms
from tilewise.distributed.passes.torch_passes import TorchPasses
from tilewise.planner.options import Options
from tilewise.problems.conv.axis import Axis

DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = {1: (-1,), 2: (-2, -1), 3: (-3, -2, -1)}


def shares_of(axes: tuple[Axis, ...], transposed: bool, ranks: tuple[int, ...]) -> list[Share]:
    """Every rank's share of a convolution whose leading spatial axes are cut."""
    dims = NAMES[len(axes)][: len(ranks)]
    sizes = [a.out if transposed else a.size for a in axes]
    cuts = tuple(even_cuts(size, n) for size, n in zip(sizes, ranks, strict=False))
    found = []
    for coords in itertools.product(*map(range, ranks)):
        layout = Layout(Grid(dims, ranks, coords), cuts)
        found.append(share_of(layout, axes, transposed, "terms"))
    return found


def by_torch(share: Share, boxes: list[torch.Tensor], w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y`` and what the terms add to it, each by itself."""
    passes = TorchPasses()
    y = y.clone()
    for term, box in zip(share.boxes, boxes, strict=True):
        if term is None:
            continue
        taps = w[(slice(None), slice(None), *(slice(*t) for t in term.taps))]
        run = passes.dgrad if share.transposed else passes.fprop
        part = run(box, taps, term.axes, 1)
        y[(slice(None), slice(None), *(slice(*t) for t in term.target))] += part
    return y


def drawn(draw: random.Random) -> tuple[tuple[Axis, ...], bool, tuple[int, ...]]:
    dims = draw.choice((1, 2, 2, 3))
    while True:
        axes = []
        for _ in range(dims):
            kernel, dilation = draw.randint(1, 3 if dims == 3 else 4), draw.choice((1, 1, 2, 3))
            pad = draw.randint(0, (kernel - 1) * dilation)
            size = draw.randint(4, 7 if dims == 3 else 13)
            if size + 2 * pad > (kernel - 1) * dilation:
                axes.append(Axis(size, kernel, draw.choice((1, 1, 2, 3)), dilation, pad, pad))
        ranks = draw.choice([(2,), (3,), (4,)] if dims == 1 else [(2,), (3,), (4,), (2, 2), (3, 2)])
        if len(axes) == dims:
            return tuple(axes), draw.random() < 0.3, ranks


def checked(device: str, seed: int, dtype: torch.dtype, precision: str, bound: float) -> int:
    """Compares every rank's three passes; how many boxes there were."""
    draw = random.Random(seed)
    axes, transposed, ranks = drawn(draw)
    images, channels, outputs = draw.randint(1, 3), draw.choice((1, 3, 17, 40)), draw.choice((2, 20, 70))
    orders = (torch.contiguous_format, torch.channels_last) if len(axes) == 2 else (torch.contiguous_format,)
    order, order_of_boxes, blocks = draw.choice(orders), draw.choice(orders), draw.choice(BLOCKS)
    sizes = images, channels, outputs
    packed = draw.random() < 0.5
    return compared(
        device, seed, axes, transposed, ranks, sizes, (order, order_of_boxes), blocks, dtype, precision, bound,
        packed=packed,
    )  # fmt: skip


def compared(
    device: str, seed: int, axes: tuple[Axis, ...], transposed: bool, ranks: tuple[int, ...],
    sizes: tuple[int, int, int], orders: tuple[torch.memory_format, torch.memory_format], blocks: Blocks,
    dtype: torch.dtype, precision: str, bound: float, shift: int = 0, packed: bool = True,
) -> int:  # fmt: skip
    """As :func:`checked`; tensors begin ``shift`` elements into their memory, those of products are ``packed``."""
    torch.manual_seed(seed)
    (images, channels, outputs), (order, order_of_boxes) = sizes, orders

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.new_empty(tensor.numel() + shift)
        return memory.as_strided(tensor.shape, tensor.stride(), shift).copy_(tensor)

    w = placed(made(outputs, channels, *(a.kernel for a in axes)).contiguous(memory_format=order))
    ins, outs = (outputs, channels) if transposed else (channels, outputs)
    count = 0
    for share in shares_of(axes, transposed, ranks):
        terms = HaloTerms(share, precision, Kernels.alike(blocks))
        if not any(share.boxes) or not all(share.sizes):
            continue
        whole = [(0, a.out if transposed else a.size) for a in axes]
        boxes = []
        for _, box in share.transfer.receives:
            sides = [*box, *whole[len(box) :]]
            box_of = made(images, ins, *(stop - start for start, stop in sides))
            boxes.append(placed(box_of.contiguous(memory_format=order_of_boxes)))
        y = placed(made(images, outs, *share.sizes).contiguous(memory_format=order))
        dy = placed(made(images, outs, *share.sizes).contiguous(memory_format=order))
        assert not why_not(1, y, w, *boxes)
        exact = [t.double().cpu() for t in (y, w, *boxes)]
        leaves = [t.requires_grad_() for t in exact[1:]]
        expected = by_torch(share, leaves[1:], leaves[0], exact[0])
        gradients = torch.autograd.grad(expected, leaves, dy.double().cpu(), allow_unused=True)
        found = placed(y)
        terms.add(found, terms.results(boxes, w) if packed else boxes, terms.filters(w, back=False) if packed else w)
        close(found, expected.detach(), bound)
        homes = terms.home(dy, terms.filters(w, back=True) if packed else w, boxes)
        for got, want in zip(homes, gradients[1:], strict=True):
            close(got, torch.zeros_like(got, dtype=torch.float64, device="cpu") if want is None else want, bound)
        dw = placed(made(*w.shape).contiguous(memory_format=order))
        before = dw.double().cpu()
        terms.add_sums(dw, terms.sums(boxes, w, dy))
        close(dw, before if gradients[0] is None else before + gradients[0], bound)
        count += len(boxes)
    return count


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    assert (found.double().cpu() - expected).norm() <= bound * expected.norm() + 1e-30


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(10))
def test_terms_are_those_of_float64(device: str, seed: int) -> None:
    checked(device, seed, torch.float32, "ieee", 3e-6)


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        pytest.param(
            "cpu", torch.float16, 1e-3, marks=(interpreted, pytest.mark.slow)
        ),  # the interpreter has no products of bfloat16
        pytest.param("cuda", torch.float16, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 6e-3, marks=pytest.mark.gpu),
    ],
)
def test_half_precision(device: str, dtype: torch.dtype, bound: float) -> None:
    assert sum(checked(device, 100 + n, dtype, "ieee", bound) for n in range(1 if device == "cpu" else 4))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_tf32(seed: int) -> None:
    checked("cuda", seed, torch.float32, "tf32", 2e-3)


ORDERS = list(itertools.product((torch.contiguous_format, torch.channels_last), repeat=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("orders", "blocks", "stride", "shift", "far"),
    [
        *((orders, blocks, 1, 0, False) for orders in ORDERS for blocks in BLOCKS),
        *((orders, BLOCKS[0], 2, 0, False) for orders in ORDERS),
        *((orders, BLOCKS[0], 1, 1, False) for orders in ORDERS),
        *((orders, BLOCKS[2], 1, 0, True) for orders in ORDERS),
    ],
)
def test_sizes_of_whole_blocks(
    device: str, orders: tuple[torch.memory_format, torch.memory_format], blocks: Blocks, stride: int, shift: int,
    far: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Channels and rows for which kernels have no masks, by words where memory is aligned; 64-bit offsets likewise."""
    if far:
        monkeypatch.setattr(halo_terms, "FAR", 1)
    row = Axis(max(32, blocks.rows) * stride, 3, stride, before=1, after=1)
    axes = (Axis(8, 3, stride, before=1, after=1), row)
    sizes = (2, 64, 64) if device == "cuda" else (1, 16, 32)
    for transposed, packed in ((False, True), (True, True), (False, False)):
        assert compared(
            device, 7, axes, transposed, (2,), sizes, orders, blocks, torch.float32, "ieee", 3e-6, shift, packed
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("back", [False, True])
def test_tensors_beyond_32_bits(back: bool) -> None:
    """Images so far from each other that only 64-bit offsets reach the second."""
    (share, *_) = shares_of((Axis(8, 3, before=1, after=1), Axis(32, 3, before=1, after=1)), False, (2,))
    w = torch.randn(64, 64, 3, 3, device="cuda").bfloat16()
    memory = torch.full((2**31 + 2**20,), math.nan, dtype=torch.bfloat16, device="cuda")

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return memory.as_strided(tensor.shape, (2**31, *tensor.stride()[1:])).copy_(tensor)

    box, y = (torch.randn(2, 64, rows, 32, device="cuda").bfloat16() for rows in (1, 4))
    terms, near = (HaloTerms(share, "ieee", Kernels.alike(BLOCKS[0])) for _ in range(2))
    if back:
        expected, found = (t.home(dy, w, [box]) for t, dy in ((near, y), (terms, apart(y))))
        assert torch.equal(found[0], expected[0])
    else:
        near.add(expected := y.clone(), [box], w)
        terms.add(y, [apart(box)], w)
        assert torch.equal(y, expected)


def a_call(groups: int = 1) -> Call:
    (share, *_) = shares_of((Axis(8, 3, before=1, after=1), Axis(5, 3, before=1, after=1)), False, (2,))
    return Call.of(share, groups, torch.ones(2, 4, 4, 5), torch.ones(6, 4 // groups, 3, 3))


@pytest.mark.slow
@interpreted
def test_what_is_right_and_faster_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    call, state = a_call(), torch.get_rng_state()
    monkeypatch.setattr(halo_choice, "BLOCKS", BLOCKS[:2])
    slow = choose(call, TorchPasses(), Options())
    assert slow.terms is None, "the interpreter is slower than anything"
    assert slow.fused_ms is not None
    assert slow.looped_ms is not None
    assert f"{slow.fused_ms:.4f} ms" in slow.reason
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(halo_choice, "GAIN", float("inf"))
    monkeypatch.setattr(halo_choice, "BLOCKS", BLOCKS[1:2])
    terms = choose(call, TorchPasses(), Options()).terms
    assert terms is not None
    assert terms.kernels == Kernels.alike(BLOCKS[1])
    assert "the limit is 100" in choose(call, TorchPasses(), Options(workspace=100)).reason
    assert choose(a_call(groups=2), TorchPasses(), Options()).reason == "2 groups"


@interpreted
def test_each_kernel_has_the_blocks_that_it_is_fastest_with(monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call()
    kernels = [HaloTerms(call.share, "ieee", Kernels.alike(blocks)) for blocks in BLOCKS[:3]]
    times = [[5.0, 1.0, 3.0], [4.0, 2.0, 9.0], [9.0, 3.0, 2.0]]  # adding, the filter's gradient, the boxes'
    monkeypatch.setattr(halo_choice, "_timed", lambda calls, *_: [ms for row in times for ms in row])
    assert halo_choice._fastest(kernels, halo_choice._random_operands(call), False) == Kernels(
        BLOCKS[1], BLOCKS[2], BLOCKS[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1, 50_000, 200_000, 10**6, None])
@pytest.mark.parametrize("device", DEVICES)
def test_shares_of_a_gradient_keep_a_limit(device: str, limit: int | None) -> None:
    (_, share, *_) = shares_of((Axis(16, 3, before=1, after=1), Axis(32, 3, before=1, after=1)), False, (4,))
    terms = HaloTerms(share, "ieee", Kernels.alike(BLOCKS[0]), limit)
    w, dy = torch.randn(32, 32, 3, 3, device=device), torch.randn(8, 32, 4, 32, device=device)
    boxes = [torch.randn(8, 32, 1, 32, device=device) for _ in share.boxes]
    least = 4 * 6 * 32 * 32
    assert terms.scratch(w, dy) <= max(limit or 10**9, w.nbytes, least)
    sums = terms.sums(boxes, w, dy)
    assert sum(t.nbytes for t in sums) == (
        2 * least if limit is None else max(least, min(2 * least, limit // least * least))
    )
    terms.add_sums(dw := torch.zeros_like(w), sums)
    leaf = w.double().cpu().requires_grad_()
    y = by_torch(share, [b.double().cpu() for b in boxes], leaf, dy.double().cpu() * 0)
    close(dw, torch.autograd.grad(y, leaf, dy.double().cpu())[0], 3e-6)


@interpreted
@pytest.mark.parametrize("factor", [1.01, math.nan])
@pytest.mark.parametrize("method", ["add", "home", "add_sums"])
def test_what_is_wrong_is_not_used(method: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    own = getattr(HaloTerms, method)

    def wrong(self: HaloTerms, first: torch.Tensor, *rest: Any) -> Any:
        found = own(self, first, *rest)
        (first if found is None else found[0])[..., -1].mul_(factor)
        return found

    monkeypatch.setattr(HaloTerms, method, wrong)
    monkeypatch.setattr(halo_choice, "BLOCKS", BLOCKS[1:2])
    monkeypatch.setattr(halo_choice, "GAIN", float("inf"))
    found = choose(a_call(), TorchPasses(), Options())
    assert found.terms is None
    assert "relative L2 error" in found.reason


@interpreted
def test_what_raises_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no registers left\nat line 3")

    monkeypatch.setattr(HaloTerms, "home", broken)
    assert choose(a_call(), TorchPasses(), Options()).reason == "raised RuntimeError: no registers left"


@pytest.mark.parametrize(
    ("groups", "dtypes", "words"),
    [(2, (torch.float32,), "2 groups"), (1, (torch.float64,), "float64"), (1, (torch.float32, torch.half), "types")],
)
def test_what_they_do_not_compute(groups: int, dtypes: tuple[Any, ...], words: str) -> None:
    assert words in why_not(groups, *(torch.ones(2, dtype=dtype) for dtype in dtypes))
    assert why_not(1, torch.ones(1), torch.ones(0)) == "an empty tensor"


class Noting(TorchPasses):
    """Notes how the boxes that it is given lie in memory."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def fprop(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.seen.append(x.stride())
        return super().fprop(x, *rest)

    def wgrad(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.seen.append(x.stride())
        return super().wgrad(x, *rest)


def test_problems_of_boxes_are_those_that_were_planned() -> None:
    """Whatever brings a box: plans are found by how their operands lie."""
    (_, share, *_) = shares_of((Axis(8, 3, before=1, after=1), Axis(5, 3, before=1, after=1)), False, (4,))
    w, dy = torch.randn(6, 4, 3, 3), torch.randn(2, 6, 2, 5)
    boxes = [torch.randn(2, 4, 1, 5) for _ in share.boxes]
    found = []
    for given in (boxes, [nearest(box, 1) for box in boxes]):
        passes = Noting()
        terms = LoopedTerms(passes, share, 1)
        y = torch.zeros_like(dy)
        terms.add(y, terms.results(given, w), w)
        found.append((passes.seen, y, terms.sums(given, w, dy)))
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) == 2 * len(boxes)
    for plain, near in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(plain, near)
