"""Generated transforms against numpy in float64, their operation counts, and their C++."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.kernels.emulator import FLAGS, HEADER, emulated

from tilewise.kernels.codelets import fft, literal, root, rotation

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SPLIT_RADIX = {2: 4, 4: 16, 8: 56, 16: 168, 32: 456, 64: 1160, 128: 2824, 256: 6664}
"""Real additions and multiplications of a complex transform by split radix, the textbook's least (Duhamel 1986)."""


def signal(n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, 5)) + 1j * rng.standard_normal((n, 5))


@pytest.mark.parametrize("n", SIZES)
def test_it_is_the_transform(n: int) -> None:
    x = signal(n)
    for sign, want in ((-1, np.fft.fft(x, axis=0)), (1, np.fft.ifft(x, axis=0) * n)):
        got = np.array(fft(n, sign)(list(x)))
        assert np.linalg.norm(got - want) <= 1e-15 * np.linalg.norm(want)


@pytest.mark.parametrize("n", [9, 36, 72])
def test_it_takes_other_powers_of_three(n: int) -> None:
    x = signal(n)
    np.testing.assert_allclose(np.array(fft(n)(list(x))), np.fft.fft(x, axis=0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("n", SIZES)
def test_no_multiplication_stands_alone(n: int) -> None:
    codelet = fft(n)
    assert {abs(term.factor) for pair in codelet.outputs for term in pair} == {1.0}
    # Values inside stay of one size, so that little is lost to rounding.
    assert all(0.02 < abs(step.factor) < 1.2 for step in codelet.steps)


@pytest.mark.parametrize("n", sorted(SPLIT_RADIX))
def test_instructions_stay_below_split_radix(n: int) -> None:
    """A fused multiply-add is one instruction: radix 4 with factors held back needs fewer than split radix."""
    steps = len(fft(n).steps)
    assert steps <= SPLIT_RADIX[n]
    if n >= 16:
        assert steps <= 0.87 * SPLIT_RADIX[n]


def test_instructions_are_no_more_than_they_were() -> None:
    counts = {n: len(fft(n).steps) for n in SIZES}
    assert counts == {
        2: 4, 3: 12, 4: 16, 6: 40, 8: 52, 12: 104, 16: 144, 24: 280, 32: 376, 48: 668, 64: 920, 96: 1636, 128: 2200,
        192: 3716, 256: 5080,
    }  # fmt: skip
    assert fft(8).flops == 60
    assert fft(64).flops == 1384
    # 5 n log2 n is what libraries count for a complex transform.
    assert all(fft(n).flops <= 5 * n * math.log2(n) for n in SIZES if n & (n - 1) == 0)


@pytest.mark.parametrize(("m", "n"), [(48, 96), (64, 128), (8, 8)])
def test_rotation(m: int, n: int) -> None:
    x = signal(m)
    for sign in (-1, 1):
        want = x * np.exp(sign * 2j * np.pi * np.arange(m) / n)[:, None]
        np.testing.assert_allclose(np.array(rotation(m, n, sign)(list(x))), want, rtol=1e-14, atol=1e-14)


def test_roots_are_symmetric() -> None:
    for n in (3, 8, 12, 96, 256):
        for k in range(-n, 2 * n):
            c, s = root(k, n)
            assert abs(complex(c, s) - np.exp(2j * np.pi * k / n)) < 4e-16 * max(1, abs(k))
            assert (c, -s) == root(-k, n)
    assert root(2, 8) == (0.0, 1.0)
    assert root(4, 8) == (-1.0, 0.0)


def test_literals_are_the_nearest_single() -> None:
    rng = np.random.default_rng(0)
    for value in (1.0, 0.5, -3.0, 1e-7, *rng.standard_normal(200)):
        text = literal(value)
        assert text.endswith("f")
        assert np.float32(text[:-1]) == np.float32(value)
        assert "." in text or "e" in text


def test_bad_sizes_and_signs_are_named() -> None:
    with pytest.raises(ValueError, match=r"n=5: a codelet's size is 2\^a \* 3\^b"):
        fft(10)
    with pytest.raises(ValueError, match="sign=2"):
        fft(8, 2)


@emulated
def test_the_cpp_computes_in_single_precision(tmp_path: Path) -> None:
    sizes = (8, 12, 24, 64)
    text = [f'#include "{HEADER}"']
    for n in sizes:
        for codelet in (fft(n), fft(n, 1)):
            name = codelet.name
            text += [codelet.cpp(), f'extern "C" void run_{name}(float2* r) {{ {name}(*(float2 (*)[{n}])r); }}']
    (tmp_path / "codelets.cpp").write_text("\n".join(text))
    subprocess.run(["g++", *FLAGS, "-o", "codelets.so", "codelets.cpp"], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "codelets.so"))
    for n in sizes:
        x = signal(n)[:, 0].astype(np.complex64)
        for name, want in ((f"fft{n}", np.fft.fft(x)), (f"ifft{n}", np.fft.ifft(x) * n)):
            got = x.copy()
            getattr(library, f"run_{name}")(got.ctypes.data_as(ctypes.c_void_p))
            assert np.linalg.norm(got - want) <= 1.5e-7 * np.linalg.norm(want)
