"""Numba's compiler down to an object file, and no further.

Numba makes machine code of every function, with all that it calls and with wrappers for Python, loads it, and optimises
it again in each caller. A kernel of twenty functions takes twice as long that way. Here inner functions wait for the
outermost one, in which all are optimised together, and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

__all__ = ["emitted", "inner"]


class _NoEnvironments:
    """Takes what a function called from Python would look up at run time."""

    def set_env(self, name: str, environment: object) -> None:
        """Nothing: nobody looks."""


class _Library(JITCodeLibrary):
    """Linked functions that are never loaded."""

    @property
    def codegen(self) -> Any:
        """What a function is told to that could be called now."""
        return _NoEnvironments()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """None: 0."""
        self._ensure_finalized()
        return 0

    def emitted(self) -> bytes:
        """An object file of what is not inlined."""
        self._ensure_finalized()
        code: bytes = self._codegen._tm.emit_object(self._final_module)
        return code


class _Inner(_Library):
    """Functions for others to inline."""

    def _optimize_final_module(self) -> None:
        pass


class _OuterCompiler(Compiler):
    library: type[_Library] = _Library

    def compile_extra(self, func: Any) -> Any:
        self.state.library = self.library(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


class _InnerCompiler(_OuterCompiler):
    library = _Inner


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "pipeline_class": _InnerCompiler}
_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Callable[[Any], Any] = njit(**_OPTIONS, **_NO_WRAPPERS)
"""Decorates a function that others call."""


def emitted(function: Any, arguments: tuple[Any, ...]) -> tuple[bytes, str]:
    """An object file of a function without a result, and its name there."""
    found: Any = CFunc(function, (arguments, types.void), {}, {"error_model": "numpy"}, _OuterCompiler)
    found.compile()
    return found._library.emitted(), found._wrapper_name
