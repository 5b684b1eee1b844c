"""Compiles a function by Numba to an object file, without loading it.

By default Numba makes machine code of every function with all that it calls and with wrappers for Python, loads it, and
optimises it again in each caller. A kernel of twenty functions takes twice as long that way. Here inner functions are
optimised only within the outermost one, all together, and nothing is loaded.
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
    """Stands for the table of environments that functions called from Python look up at run time."""

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing, as no function looks up an environment."""


class _Library(JITCodeLibrary):
    """A library of linked functions that are never loaded."""

    @property
    def codegen(self) -> Any:
        """The object to which Numba reports functions that could be called from Python."""
        return _NoEnvironments()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Always 0, as functions are not loaded."""
        self._ensure_finalized()
        return 0

    def emitted(self) -> bytes:
        """The object file, with all functions that are not inlined."""
        self._ensure_finalized()
        code: bytes = self._codegen._tm.emit_object(self._final_module)
        return code


class _Inner(_Library):
    """A library of functions for others to inline, which is not optimised by itself."""

    def _optimize_final_module(self) -> None:
        pass


class _OuterCompiler(Compiler):
    """Numba's compiler, with libraries of the type ``library``."""

    library: type[_Library] = _Library

    def compile_extra(self, func: Any) -> Any:
        self.state.library = self.library(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


class _InnerCompiler(_OuterCompiler):
    """The compiler of functions that others inline."""

    library = _Inner


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "pipeline_class": _InnerCompiler}
_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Callable[[Any], Any] = njit(**_OPTIONS, **_NO_WRAPPERS)
"""Decorates a function that other kernel functions call."""


def emitted(function: Any, arguments: tuple[Any, ...]) -> tuple[bytes, str]:
    """The object file of ``function``, which takes ``arguments`` and returns nothing, and its name in the file."""
    compiled: Any = CFunc(function, (arguments, types.void), {}, {"error_model": "numpy"}, _OuterCompiler)
    compiled.compile()
    return compiled._library.emitted(), compiled._wrapper_name
