"""What replaces the slow parts of Triton's interpreter computes and refuses what they do."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.interpreter import interpreted

pytestmark = interpreted
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import numpy as np  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language import core  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

INTEGERS = {tl.int8: np.int8, tl.uint8: np.uint8, tl.int16: np.int16, tl.int32: np.int32, tl.uint32: np.uint32}


@triton.jit
def _squares(x, out, factor, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, _square(tl.load(x + at)) * factor)


@triton.jit
def _square(x):
    return x * x


def test_nested_functions_run_and_the_language_is_as_before() -> None:
    before = tl.load, tl.range, core.tensor.__add__, tl.reduce
    x = torch.arange(8, dtype=torch.int32, device="cpu")
    out = torch.full_like(x, -1)
    for factor in (2, 3):
        _squares[(1,)](x, out, factor, 8)
        assert torch.equal(out, x * x * factor)
        assert (tl.load, tl.range, core.tensor.__add__, tl.reduce) == before


def test_an_overflow_ends_a_kernel_and_leaves_the_language_as_it_was() -> None:
    x = torch.tensor([1, 46341], dtype=torch.int32, device="cpu")  # its square is beyond 2^31
    before = tl.load
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation mul"):
        _squares[(1,)](x, torch.zeros_like(x), 1, 2)
    assert tl.load is before


@given(data=st.data(), kind=st.sampled_from(list(INTEGERS)), name=st.sampled_from(["add", "sub", "mul"]))
def test_overflows_are_found_where_triton_finds_them(data: st.DataObject, kind: core.dtype, name: str) -> None:
    from tests.quick_interpreter import TRITONS_CHECK

    semantic = interpreter.interpreter_semantic
    low, high = kind.get_int_min_value(), kind.get_int_max_value()
    near = st.one_of(st.integers(low, high), st.sampled_from([low, high, 0, 1]), st.integers(0, int(high**0.5) + 1))
    pair = [np.array(data.draw(st.lists(near, min_size=2, max_size=2)), dtype=INTEGERS[kind]) for _ in range(2)]
    sides = [core.tensor(interpreter.TensorHandle(side, kind), core.block_type(kind, [2])) for side in pair]
    found = []
    debugging = dataclasses.replace(semantic.builder.options, debug=True)  # without it Triton's says nothing
    patch = pytest.MonkeyPatch()
    patch.setattr(semantic.builder, "options", debugging)
    for check in (TRITONS_CHECK, type(semantic).binary_op_sanitize_overflow_impl):
        try:
            check(semantic, *sides, getattr(semantic, name))
        except AssertionError as error:
            found.append(str(error))
        else:
            found.append("")
    patch.undo()
    assert found[0] == found[1]


def test_types_have_the_names_that_triton_gives_them() -> None:
    block = core.block_type(tl.float32, [core.constexpr(4), 2])
    assert block.name == str(block) == "<['4', '2'], fp32>"
    assert block == core.block_type(tl.float32, (4, 2))
    assert block.numel == 8
    assert core.tuple_type([tl.int32, block], ["a", "b"]).name == "[a:int32,b:<['4', '2'], fp32>]"
    with pytest.raises(ValueError, match="power of 2"):
        core.block_type(tl.float32, [3])
    with pytest.raises(TypeError, match="0d"):
        core.block_type(tl.float32, [])
