"""Triton's interpreter without what takes most of its time beside the arithmetic: our kernels run in half of the time.

Nothing that a kernel computes changes. Integers that overflow are found, which Triton's own interpreter does only in
debug mode. Written for the insides of Triton 3.6 and 3.7: with another version look at what changed there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["TRITONS_CHECK", "hasten"]

TRITONS_CHECK = TritonSemantic.binary_op_sanitize_overflow_impl
"""What :func:`hasten` replaces. It finds integers that leave the range of their type only where debugging is on."""

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def hasten() -> None:
    """Put the functions of this module in the place of Triton's."""
    _name_types_when_asked()
    _look_up_numpys_types()
    _patch_the_language_once()
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


def _check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
    """Raise where an operation of integers leaves their type's range: by NumPy, not by nine operations of Triton's."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    assert kind == rhs.type.scalar
    assert kind.is_int()
    wide = (side.handle.data.astype(np.int64) for side in (lhs, rhs))
    result = OPERATIONS[binary_op.__name__](*wide)
    if result.size:
        fits = kind.get_int_min_value() <= result.min() and result.max() <= kind.get_int_max_value()
        assert fits, f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"


def _name_types_when_asked() -> None:
    """Have types of blocks and tuples make up their names when these are read, and check a shape once."""
    validated = functools.cache(core.validate_block_shape)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | tuple | core.tuple)
        self.element_ty = element_ty
        sizes = core._unwrap_shape(shape)
        self.shape = core.tuple(sizes)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.numel = validated(tuple(sizes))

    def tuple_type(self: Any, types: Any, fields: Any = None) -> None:
        self.types = types
        self.fields = fields or [""] * len(types)

    def name_of_tuple(self: Any) -> str:
        return "[" + ",".join(f"{field}:{kind}" for field, kind in zip(self.fields, self.types, strict=False)) + "]"

    core.block_type.__init__ = block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tuple_type.__init__ = tuple_type
    core.tuple_type.name = property(name_of_tuple)


def _look_up_numpys_types() -> None:
    """Keep NumPy's types of Triton's scalars, of which a table was made at each operation."""
    original = interpreter._get_np_dtype
    of_scalars: dict[str, Any] = {}

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, core.pointer_type):
            return original(scalar)
        found = of_scalars.get(scalar.name)
        if found is None:
            found = of_scalars[scalar.name] = original(scalar)
        return found

    interpreter._get_np_dtype = get_np_dtype


def _patch_the_language_once() -> None:
    """Replace ``tl``'s functions at a launch and not at each call within it, and list them once."""
    patch_lang, patch_builtin = interpreter._patch_lang, interpreter._patch_builtin
    now: list[frozenset[str]] = []  # the modules that the launch which is under way has patched

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            now.clear()

    @functools.cache
    def seen_by(function: Any) -> frozenset[str]:
        modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
        return frozenset(module.__name__ for module in modules if module in (tl, core))

    def patch_once(function: Any) -> Any:
        seen = seen_by(function)
        if not now:
            scope = patch_lang(function)
            now.append(seen)
            return scope
        return interpreter._LangPatchScope() if seen <= now[0] else patch_lang(function)

    @functools.cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_listed(package: Any, builder: Any, scope: Any) -> None:
        if now:
            patch_builtin(package, builder, scope)
            return
        for name, member in builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_once
    interpreter._patch_builtin = patch_listed
