"""``tilewise.fft``: on the CPU through torch, on a GPU by kernels, against transforms in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulated, launched
from tests.kernels.spectra import Guarded, relative, spectrum

from tilewise import fft
from tilewise.fft import LAYOUTS, SIZES, irfft, irfft2, next_size, rfft, rfft2, unsupported
from tilewise.kernels.cuda import launch

LIMIT = 5e-7
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KERNELS = ["cpu", pytest.param("emulated", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)]
"""``emulated``: the kernels' own C++, with all that leads to it, on the CPU."""
HALF = {torch.float32: LIMIT, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ODD = (1, 2, 7, 10, 20)
"""Sizes without a kernel."""


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of one of ``KERNELS``."""
    name: str = request.param
    if name != "emulated":
        yield name
        return
    monkeypatch.setattr(fft, "_unsupported", lambda device, s: ())
    monkeypatch.setattr(launch.Bound, "launch", lambda bound, device: launched(bound))
    with monkeypatch.context() as patch:
        for name in ("_forward_kernel", "_inverse_kernel"):
            patch.setattr(fft, name, functools.cache(getattr(fft, name).__wrapped__))
        yield "cpu"


def forward(x: torch.Tensor, s: Sequence[int], offset: Sequence[int], layout: str) -> torch.Tensor:
    if len(s) == 1:
        return rfft(x, s[0], offset=offset[0], layout=layout)
    return rfft2(x, s, offset=offset, layout=layout)


def inverse(y: torch.Tensor, s: Sequence[int], size: Sequence[int], offset: Sequence[int], **more: Any) -> torch.Tensor:
    if len(s) == 1:
        return irfft(y, s[0], size=size[0], offset=offset[0], **more)
    return irfft2(y, s, size=size, offset=offset, **more)


@st.composite
def cases(draw: st.DrawFn, dims: int | None = None) -> dict[str, Any]:
    """A transform's size, a window in it, a layout, leading dimensions and the order of all in memory."""
    dims = dims or draw(st.sampled_from((1, 2)))
    layout = draw(st.sampled_from(LAYOUTS))
    small = [n for n in SIZES[dims] if n <= 32]
    known = [n for n in (*small, *ODD) if layout != "packed" or n % 2 == 0]
    s = tuple(draw(st.sampled_from(known)) for _ in range(dims))
    size = tuple(draw(st.integers(1, n)) for n in s)
    offset = tuple(draw(st.integers(0, n - h)) for n, h in zip(s, size, strict=True))
    lead = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    order = draw(st.permutations(range(len(lead) + dims)))
    return {
        "s": s, "size": size, "offset": offset, "layout": layout, "lead": lead, "order": order,
        "gap": draw(st.integers(0, 2)), "start": draw(st.integers(0, 3)), "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


def drawn(case: dict[str, Any], place: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Data of a case, between NaN."""
    shape = (*case["lead"], *case["size"])
    return Guarded(shape, dtype, place, case["gap"], case["start"], case["order"]).fill(case["seed"]).tensor


def close(got: torch.Tensor, want: torch.Tensor, limit: float = LIMIT, terms: float = 0.0) -> bool:
    """Whether shapes agree and the relative L2 error is small; ``terms``: the size of what cancelled, where it did."""
    assert got.shape == want.shape
    wide = torch.complex128 if got.is_complex() else torch.float64
    return bool((got.to(wide) - want).norm() <= limit * max(float(want.norm()), terms))


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=60)
@given(case=cases())
def test_spectra_are_those_of_float64(place: str, case: dict[str, Any]) -> None:
    x = drawn(case, place)
    y = forward(x, case["s"], case["offset"], case["layout"])
    assert y.dtype == torch.complex64
    assert y.is_contiguous()
    if x.numel():
        assert close(y, spectrum(x, case["s"], case["offset"], case["layout"]))
    else:
        assert y.shape == fft.spectrum_shape(case["lead"], case["s"], case["layout"])
        assert not y.abs().any()


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=60)
@given(case=cases())
def test_a_round_trip_gives_the_window_back(place: str, case: dict[str, Any]) -> None:
    x = drawn(case, place)
    y = forward(x, case["s"], case["offset"], case["layout"])
    back = inverse(y, case["s"], case["size"], case["offset"], layout=case["layout"])
    assert back.dtype == torch.float32
    assert back.is_contiguous()
    assert close(back, x.double())


def exact_inverse(plain: torch.Tensor, s: Sequence[int]) -> torch.Tensor:
    """Of plain numbers in float64, whether or not they are a spectrum of real data: the real part, symmetry assumed."""
    for dim, n in zip((-2, -1)[-len(s) :], s, strict=True):
        size = plain.shape[dim]
        roots = torch.exp(2j * np.pi / n * torch.outer(torch.arange(size), torch.arange(n)).double()).to(plain.device)
        if dim == -1:
            plain = plain * fft.multiplicity(s, "plain", 0, plain.device).double()
        plain = torch.tensordot(plain, roots / n, ([dim], [0])).movedim(-1, dim)
    return plain.real


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=60)
@given(case=cases(), scale=st.sampled_from((None, 1.0, -2.5)))
def test_the_inverse_is_that_of_float64(place: str, case: dict[str, Any], scale: float | None) -> None:
    s, dims, lead = case["s"], len(case["s"]), case["lead"]
    generator = torch.Generator().manual_seed(case["seed"])
    plain = torch.randn(*lead, *s[:-1], s[-1] // 2 + 1, dtype=torch.complex128, generator=generator).to(place)
    want = exact_inverse(plain, s)
    if case["layout"] != "plain":
        plain = (
            spectrum(want, s, (0,) * dims, case["layout"])
            if want.numel()
            else plain.new_zeros(fft.spectrum_shape(lead, s, case["layout"]))
        )
    got = inverse(plain.to(torch.complex64), s, case["size"], case["offset"], layout=case["layout"], scale=scale)
    window = tuple(slice(o, o + h) for o, h in zip(case["offset"], case["size"], strict=True))
    factor = 1.0 if scale is None else scale * np.prod(s)
    assert close(got, want[(..., *window)] * factor, terms=float(abs(factor) * plain.norm() / np.prod(s)))


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("layout", ["plain", "frequency_major"])
@pytest.mark.parametrize("s", [(24,), (16, 24)])
def test_only_the_hermitian_part_counts(device: str, s: tuple[int, ...], layout: str) -> None:
    shape = (5, *s[:-1], s[-1] // 2 + 1)
    plain = torch.randn(*shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(8)).to(device)
    y = plain if layout == "plain" else plain.flatten(-len(s)).movedim(-1, 0)
    got = inverse(y.to(torch.complex64), s, s, (0,) * len(s), layout=layout)
    assert close(got, exact_inverse(plain, s), 1e-6)


@settings(max_examples=30)
@given(case=cases())
def test_numpy_agrees(case: dict[str, Any]) -> None:
    x = drawn(case, "cpu")
    if not x.numel():
        return
    places = [(o, n - o - h) for o, n, h in zip(case["offset"], case["s"], case["size"], strict=True)]
    wide = np.pad(x.double().numpy(), [(0, 0)] * len(case["lead"]) + places)
    want = np.fft.rfftn(wide, axes=tuple(range(-len(case["s"]), 0)))
    assert close(forward(x, case["s"], case["offset"], "plain"), torch.from_numpy(want))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [1, 2])
def test_linearity_and_parseval(place: str, layout: str, dims: int) -> None:
    s, size = (24, 16)[:dims], (20, 16)[:dims]
    a, b = torch.randn(2, 5, *size, generator=torch.Generator().manual_seed(dims)).to(place)
    ya, yb = (forward(x, s, (0,) * dims, layout) for x in (a, b))
    both = forward(2 * a - 3 * b, s, (0,) * dims, layout)
    assert relative(both, (2 * ya - 3 * yb).to(torch.complex128)) <= LIMIT
    many = fft.multiplicity(s, layout, ya.dim() - (dims if layout == "plain" else 1), ya.device)
    energy = (ya.abs().double() ** 2 * many).sum() / np.prod(s)
    assert float(energy) == pytest.approx(float((a.double() ** 2).sum()), rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dims", [1, 2])
def test_every_kernel_size_and_layout(place: str, dims: int) -> None:
    for n, layout in itertools.product(SIZES[dims], LAYOUTS):
        s, size, offset = (n,) * dims, (n - 3, n - 5)[:dims], (1, 4)[:dims]
        x = torch.randn(3, *size, generator=torch.Generator().manual_seed(n)).to(place)
        y = forward(x, s, offset, layout)
        assert relative(y, spectrum(x, s, offset, layout)) <= LIMIT
        assert relative(inverse(y, s, size, offset, layout=layout), x.double()) <= LIMIT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dims", [1, 2])
def test_dtypes(place: str, dtype: torch.dtype, dims: int) -> None:
    s, size, offset = (16,) * dims, (13,) * dims, (2,) * dims
    x = torch.randn(4, *size, generator=torch.Generator().manual_seed(1)).to(place, dtype)
    y = forward(x, s, offset, "plain")
    assert relative(y, spectrum(x, s, offset, "plain")) <= LIMIT
    back = inverse(y, s, size, offset, dtype=dtype)
    assert back.dtype == dtype
    assert relative(back, x.double()) <= HALF[dtype]


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("dims", [1, 2])
def test_conjugated_and_negated_views(device: str, dims: int) -> None:
    """torch conjugates and negates by a mark on a view: memory holds something else."""
    s, offset = (16,) * dims, (0,) * dims
    x = torch.randn(2, 3, *s, generator=torch.Generator().manual_seed(2)).to(device)
    y = forward(x, s, offset, "plain")
    marked = y.conj()
    assert marked.is_conj()
    assert torch.equal(inverse(marked, s, s, offset), inverse(y.conj_physical(), s, s, offset))
    imaginary = torch.randn(2, 3, *s, dtype=torch.complex64, device=device).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(
        forward(imaginary, s, offset, "plain"), forward(imaginary.clone().contiguous(), s, offset, "plain")
    )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [1, 2])
def test_any_leading_dimensions_and_strides(device: str, layout: str, dims: int) -> None:
    """More than kernels join are copied first."""
    s, offset = (16,) * dims, (1,) * dims
    x = torch.randn(6, 5, 4, 3, *[15] * dims, generator=torch.Generator().manual_seed(3)).to(device)
    x = x.transpose(0, 2)[::2, :, 1::2]
    y = forward(x, s, offset, layout)
    assert relative(y, spectrum(x, s, offset, layout)) <= LIMIT
    scattered = torch.zeros(*(2 * n for n in y.shape), dtype=y.dtype, device=device)[
        tuple([slice(0, None, 2)] * y.dim())
    ]
    scattered.copy_(y)
    assert relative(inverse(scattered, s, x.shape[-dims:], offset, layout=layout), x.double()) <= LIMIT
    expanded = x[:1].expand(7, *x.shape[1:])
    assert relative(forward(expanded, s, offset, layout), spectrum(expanded, s, offset, layout)) <= LIMIT


def by_torch(x: torch.Tensor, s: Sequence[int], offset: Sequence[int], layout: str) -> torch.Tensor:
    """Spectra in float64 in a way that autograd follows: numbers of a layout out of the full transform."""
    dims = len(s)
    padding = [
        n for h, o, b in zip(x.shape[: -dims - 1 : -1], offset[::-1], s[::-1], strict=True) for n in (o, b - h - o)
    ]
    y = torch.fft.fftn(torch.nn.functional.pad(x.double(), padding), dim=tuple(range(-dims, 0)))
    n = s[-1]
    if layout != "packed":
        y = y[..., : n // 2 + 1]
        return y if layout == "plain" else y.flatten(-dims).movedim(-1, 0)
    if dims == 1:
        first = torch.complex(y[..., :1].real, y[..., n // 2 : n // 2 + 1].real)
        return torch.cat([first, y[..., 1 : n // 2]], -1).movedim(-1, 0)
    r, c = s[0] // 2, n // 2
    edges = [(torch.complex(y[..., k, :1].real, y[..., k, c : c + 1].real), y[..., k, 1:c]) for k in (0, r)]
    row = torch.cat([edges[0][0], edges[0][1], edges[1][0], edges[1][1]], -1)
    return torch.cat([row, y[..., 1:r, :].flatten(-2)], -1).movedim(-1, 0)


def gradient(of: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of the real inner product of what ``of`` gives with ``weight``."""
    leaf = at.clone().requires_grad_()
    result = of(leaf)
    products = result * weight.to(result.dtype).conj()
    (found,) = torch.autograd.grad((products.real if products.is_complex() else products).sum(), leaf)
    return found


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=40)
@given(case=cases())
def test_gradients_of_spectra(place: str, case: dict[str, Any]) -> None:
    s, offset, layout = case["s"], case["offset"], case["layout"]
    x = drawn(case, place)
    if not x.numel():
        return
    shape = fft.spectrum_shape(case["lead"], s, layout)
    generator = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(*shape, dtype=torch.complex128, generator=generator).to(place)
    got = gradient(lambda t: forward(t, s, offset, layout), x, weight)
    assert got.dtype == x.dtype
    assert close(
        got, gradient(lambda t: by_torch(t, s, offset, layout), x.double(), weight), terms=float(weight.norm())
    )


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=40)
@given(case=cases())
def test_gradients_of_inverses(place: str, case: dict[str, Any]) -> None:
    """The inverse is the transpose of a forward transform with weights, found by autograd in float64."""
    s, offset, layout, size = case["s"], case["offset"], case["layout"], case["size"]
    shape = fft.spectrum_shape(case["lead"], s, layout)
    if not np.prod(shape):
        return
    generator = torch.Generator().manual_seed(case["seed"])
    y = torch.randn(*shape, dtype=torch.complex128, generator=generator).to(place)
    weight = torch.randn(*case["lead"], *size, dtype=torch.float64, generator=generator).to(place)

    def exact(t: torch.Tensor) -> torch.Tensor:
        """inverse(Y) is x -> Re <by_torch(x), many * Y> differentiated by x, over the number of elements."""
        x = torch.zeros(*case["lead"], *size, dtype=torch.float64, device=place, requires_grad=True)
        many = fft.multiplicity(s, layout, t.dim() - (len(s) if layout == "plain" else 1), t.device)
        product = (by_torch(x, s, offset, layout).conj() * (many * t)).real.sum() / np.prod(s)
        return torch.autograd.grad(product, x, create_graph=True)[0]

    def ours(t: torch.Tensor) -> torch.Tensor:
        return inverse(t, s, size, offset, layout=layout)

    assert close(ours(y.to(torch.complex64)), exact(y), terms=float(y.norm() / np.prod(s)))
    assert close(gradient(ours, y.to(torch.complex64), weight), gradient(exact, y, weight))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALF)
def test_gradients_keep_the_dtype(place: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 13, 13).to(place, dtype).requires_grad_()
    y = rfft2(x, (16, 16))
    irfft2(y, (16, 16), size=(13, 13), dtype=dtype).float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert relative(x.grad, 2 * x.detach().double()) <= 2 * HALF[dtype] + 1e-6


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [1, 2])
def test_gradients_of_gradients(device: str, layout: str, dims: int) -> None:
    s, offset = (16,) * dims, (1,) * dims
    generator = torch.Generator().manual_seed(5)
    x, v = (torch.randn(3, *[14] * dims, generator=generator).to(device) for _ in range(2))

    def quartic(transform: Callable[..., torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        y = transform(at, s, offset, layout)
        return (y * y.conj()).real.square().sum() / 1e4

    found = []
    for transform, dtype in ((forward, torch.float32), (by_torch, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(quartic(transform, leaf), leaf, create_graph=True)
        found.append(torch.autograd.grad((first * v.to(dtype)).sum(), leaf)[0])
    assert close(found[0], found[1], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [1, 2])
def test_a_gpu_gives_what_the_cpu_gives_with_and_without_kernels(dims: int) -> None:
    for n in (16, 20):
        s, size, offset = (n,) * dims, (n - 3,) * dims, (2,) * dims
        assert bool(unsupported("cuda", *s)) == (n == 20 or bool(launch.unavailable()))
        x = torch.randn(2, 5, *size)
        for layout in LAYOUTS:
            y = forward(x, s, offset, layout)
            got = forward(x.cuda(), s, offset, layout)
            assert got.stride() == y.stride()
            assert relative(got.cpu(), y.to(torch.complex128)) <= LIMIT
            back = inverse(y.cuda(), s, size, offset, layout=layout)
            assert relative(back.cpu(), x.double()) <= LIMIT


@pytest.mark.gpu
def test_it_can_be_captured_in_a_cuda_graph() -> None:
    x = torch.randn(8, 30, 30, device="cuda")
    want = rfft2(x, (32, 32))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rfft2(x, (32, 32))
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


def test_sizes_follow_from_spectra_where_they_tell_them() -> None:
    x, plane = torch.randn(3, 24), torch.randn(3, 16, 24)
    for layout in LAYOUTS:
        assert irfft(rfft(x, layout=layout), layout=layout).shape == x.shape
    assert irfft2(rfft2(plane)).shape == plane.shape
    with pytest.raises(ValueError, match="s=None: packed spectra do not tell"):
        irfft2(rfft2(plane, layout="packed"), layout="packed")


def test_reasons_for_going_through_torch() -> None:
    assert unsupported("cpu", 16) == ["kernels run on NVIDIA GPUs, not on cpu"]
    assert "not 16x20" in unsupported("cpu", 16, 20)[0]
    with pytest.raises(ValueError, match="one number or two"):
        unsupported("cpu", 8, 8, 8)


def test_next_size() -> None:
    assert [next_size(n) for n in (1, 8, 9, 129, 256)] == [8, 8, 16, 192, 256]
    assert next_size(65, dims=2) == 96
    with pytest.raises(ValueError, match="n=129: the largest size with a kernel is 128"):
        next_size(129, dims=2)


X, P = torch.zeros(2, 16), torch.zeros(2, 16, 12)
Y, Q = torch.zeros(2, 9, dtype=torch.complex64), torch.zeros(2, 16, 9, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rfft(X.double()), TypeError, r"x is torch\.float64: float32.* would do; torch\.fft transforms it"),
        (lambda: rfft(X.int()), TypeError, r"x is torch\.int32: float32"),
        (lambda: rfft2(P.to(torch.complex64)), TypeError, r"x is torch\.complex64"),
        (lambda: rfft(torch.tensor(1.0)), ValueError, "x has 0 dimensions: 1 at least"),
        (lambda: rfft2(X[0]), ValueError, "x has 1 dimensions: 2 at least"),
        (lambda: rfft(X, 8), ValueError, "x: length 16 at offset=0 does not fit into a transform of 8"),
        (lambda: rfft(X, 16, offset=1), ValueError, "x: length 16 at offset=1 does not fit"),
        (lambda: rfft2(P, (16, 16), offset=(0, 5)), ValueError, "x: width 12 at offset=5 does not fit"),
        (lambda: rfft2(P, (16, 16), offset=(-1, 0)), ValueError, "x: height 16 at offset=-1 does not fit"),
        (lambda: rfft(X, 17, layout="packed"), ValueError, "n=17: packed spectra need even sizes"),
        (lambda: rfft2(P, (16, 13), layout="packed"), ValueError, r"s=\(16, 13\): packed spectra need even"),
        (lambda: rfft(X, layout="transposed"), ValueError, "layout='transposed': must be one of plain"),
        (lambda: rfft(X, 16.0), TypeError, r"n=16\.0: a whole number would do"),  # type: ignore[arg-type]
        (lambda: rfft2(P, (16, 16.5)), TypeError, r"s=16\.5: a whole number"),  # type: ignore[list-item]
        (lambda: rfft2(P, (16,)), ValueError, r"s=\(16,\): two numbers would do"),
        (lambda: rfft2(P, 16), ValueError, "s=16: two numbers would do"),  # type: ignore[arg-type]
        (lambda: rfft2(P, offset=1), ValueError, "offset=1: two numbers would do"),  # type: ignore[arg-type]
        (lambda: rfft(X[:, :0]), ValueError, "n=0: 1 at least would do"),
        (lambda: irfft(X, 16), TypeError, r"y is torch\.float32: complex64 would do"),
        (lambda: irfft(Y.to(torch.complex128), 16), TypeError, r"y is torch\.complex128"),
        (lambda: irfft(Y, 20), ValueError, r"y has shape \(2, 9\): plain spectra of size 20 have \(2, 11\)"),
        (lambda: irfft(Y, 16, size=17), ValueError, "size: length 17 at offset=0 does not fit"),
        (lambda: irfft(Y, 16, size=10, offset=7), ValueError, "size: length 10 at offset=7 does not fit"),
        (lambda: irfft(Y, 16, dtype=torch.float64), TypeError, r"dtype=torch\.float64: float32"),
        (lambda: irfft2(Q, (8, 16)), ValueError, r"y has shape \(2, 16, 9\): plain spectra of size 8x16"),
        (lambda: irfft2(Q, (16, 16), layout="packed"), ValueError, r"packed spectra of size 16x16 have \(128, 16, 9\)"),
        (lambda: irfft2(Y[0], (16, 16)), ValueError, "y has 1 dimensions: 2 at least"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
