"""Calls that take a default of the caller's: tensors made without a type or a device, as far as syntax shows."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Default", "defaults_in", "full_name", "imported", "python_files"]

BOTH = frozenset({"dtype", "device"})
TYPE, PLACE = frozenset({"dtype"}), frozenset({"device"})
PLAIN = """
    arange as_tensor asarray empty empty_permuted empty_quantized empty_strided eye full linspace logspace normal ones
    rand randint randn randperm range scalar_tensor tensor tril_indices triu_indices zeros
    bartlett_window blackman_window hamming_window hann_window kaiser_window fft.fftfreq fft.rfftfreq
    signal.windows.bartlett signal.windows.blackman signal.windows.cosine signal.windows.exponential
    signal.windows.gaussian signal.windows.general_cosine signal.windows.general_hamming signal.windows.hamming
    signal.windows.hann signal.windows.kaiser signal.windows.nuttall
    sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor
    nested.as_nested_tensor nested.nested_tensor
"""
MODULES = {
    f"nn.{name}"
    for name, module in vars(torch.nn).items()
    if inspect.isclass(module) and inspect.signature(module).parameters.keys() >= BOTH
}
"""Layers that have parameters."""
TORCH: dict[str, frozenset[str]] = {
    **dict.fromkeys(PLAIN.split(), BOTH),
    **dict.fromkeys(MODULES, BOTH),
    **dict.fromkeys(["frombuffer", "from_file"], TYPE),  # on the CPU whatever the default
    "Generator": PLACE,
}
"""What a factory of torch's must be told, by its name under ``torch``."""
OLD = """
    Tensor BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor
    ShortTensor
"""
DEFAULTS = """
    get_default_device get_default_dtype set_default_device set_default_dtype set_default_tensor_type
"""
NEVER = frozenset((OLD + DEFAULTS).split())
"""Of torch, what is not to be called at all: old constructors of the default type, and the defaults themselves."""
NUMPY_TYPE: dict[str, int | None] = {
    "arange": 3, "array": 1, "asarray": 1, "ascontiguousarray": 1, "empty": 1, "eye": None, "frombuffer": 1,
    "fromiter": 1, "full": 2, "identity": 1, "linspace": None, "logspace": None, "ones": 1, "zeros": 1,
}  # fmt: skip
"""Of NumPy, where it matters what kernels read: where each has the type, if by place at all."""
PLACES = {"Generator": {"device": 0}}
"""Arguments of torch's that may be told by place."""


@dataclass(frozen=True, slots=True)
class Default:
    """A call at ``line`` of ``path`` that would follow a default; ``why`` says which."""

    path: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


def python_files(root: Path) -> list[Path]:
    """The Python files below ``root``."""
    return sorted(root.rglob("*.py"))


def defaults_in(path: Path, text: str, numpy: bool = False) -> list[Default]:
    """What in ``text``, the code at ``path``, follows defaults of torch's, or with ``numpy`` of NumPy's too."""
    tree = ast.parse(text)
    names = dict(imported(tree))
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    annotations = {id(node) for one in _annotations(tree) for node in ast.walk(one)}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Attribute, ast.Name)) or id(node) in bases | annotations:
            continue
        module, _, function = full_name(node, names).partition(".")
        call = called.get(id(node))
        why = ""
        if module == "torch":
            why = _of_torch(function, call)
        elif module == "numpy" and numpy:
            why = _of_numpy(function, call)
        if why:
            found.append(Default(path, node.lineno, why))
    return found


def _of_torch(function: str, call: ast.Call | None) -> str:
    if function in NEVER and (call is not None or "default" in function):
        return f"torch.{function} is of the default type or device"
    if function == "where" and call is not None and len(call.args) == 3 and all(map(_is_number, call.args[1:])):
        return "torch.where of two numbers is of the default type"
    if function == "finfo" and call is not None and not call.args and not call.keywords:
        return "torch.finfo() is of the default type"
    wanted = TORCH.get(function)
    if wanted is None:
        return ""
    if call is None:
        if function in MODULES or function == "Generator":
            return ""  # a class is asked about more often than it is made
        return f"torch.{function} is handed on, so that nobody sees what it is told: a function that tells it would do"
    return _lacks(f"torch.{function}", call, wanted, PLACES.get(function, {}))


def _of_numpy(function: str, call: ast.Call | None) -> str:
    if function not in NUMPY_TYPE:
        return ""
    if call is None:
        return f"numpy.{function} is handed on, so that nobody sees what it is told: a function that tells it would do"
    place = NUMPY_TYPE[function]
    places = {} if place is None else {"dtype": place}
    return _lacks(f"numpy.{function}", call, TYPE, places)


def _lacks(name: str, call: ast.Call, wanted: frozenset[str], places: dict[str, int]) -> str:
    """What ``call`` is not told. What comes in a mapping is not seen, so it counts for nothing."""
    told = {word.arg for word in call.keywords if not _is_none(word.value)}
    told |= {what for what, place in places.items() if place < len(call.args) and not _starred(call, place)}
    missing = " and ".join(sorted(wanted - told))
    return f"{name} is not told its {missing}" if missing else ""


def _starred(call: ast.Call, place: int) -> bool:
    return any(isinstance(argument, ast.Starred) for argument in call.args[: place + 1])


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float, complex))


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """``torch.fft.fftfreq`` for whatever it is called in this file; empty where it is nothing imported."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *reversed(parts)])


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What each imported name stands for, wherever in the file it is imported; and names given to torch itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            yield node.returns
