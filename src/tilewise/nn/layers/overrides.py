"""Whether a convolution module runs torch's own code, which is checked on the class, the instance and the functions.

The code of torch's modules is recorded when this module is imported. A function that is not torch's at that time counts
as an override, too: torch's own is a plain function, defined under its own name in torch's module.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilewise.nn.layers.swaps import copies_itself, swapped

__all__ = [
    "BASES",
    "BY_TORCH",
    "CONV",
    "ClassCode",
    "base_of",
    "function_name",
    "override",
    "reads_by_attribute",
    "stand_in",
    "stand_ins",
    "unchanged",
    "unchanged_in_trace",
]

BASES: dict[type[nn.Module], int] = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}
"""torch's convolution modules and their spatial dimensions."""
NAMES = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_functions: Any = torch._C._VariableFunctions
BY_TORCH: dict[str, Callable[..., torch.Tensor]] = {name: getattr(_functions, name) for name in NAMES}
"""torch's own functions, whatever stands in their place in ``torch.nn.functional``, before or later."""
ARGUMENTS = ("stride", "padding", "dilation", "groups", "padding_mode", "output_padding")
CONV: Any = nn.modules.conv
"""torch's module of convolutions, whose ``F`` is where its code looks functions up."""
GETTERS: dict[str, Any] = {name: getattr(nn.Module, name) for name in ("__getattr__", "__getattribute__")}

_stand_ins: dict[str, list[Callable[..., Any]]] = {name: [] for name in NAMES}
"""What tilewise itself puts in the place of torch's functions, by their names."""


def stand_in(name: str, function: Callable[..., Any]) -> None:
    """Let ``function`` count as torch's own function of that ``name``, as it computes the same."""
    stand_ins(name).append(function)


def stand_ins(name: str) -> list[Callable[..., Any]]:
    """What counts as torch's own function of that ``name``, beside that itself. The list grows."""
    return _stand_ins.setdefault(name, [])


def _is_known(name: str, found: object) -> bool:
    """Whether ``found``, which stands as ``torch.nn.functional.<name>``, computes what torch does."""
    return found is BY_TORCH[name] or any(found is function for function in _stand_ins[name])


def base_of(module: nn.Module) -> type[nn.Module] | None:
    """torch's class from which this convolution is derived; ``None`` where there is none."""
    return next((base for base in BASES if isinstance(module, base)), None)


@dataclass(frozen=True)
class Code:
    """A function of torch's: the class and name where it was found, and its code at that time."""

    owner: type
    name: str
    function: types.FunctionType
    code: types.CodeType

    @classmethod
    def of(cls, owner: type, name: str) -> Code | None:
        """The function that is there now; ``None`` where it is not torch's own."""
        function = inspect.getattr_static(owner, name)
        if not isinstance(function, types.FunctionType) or function.__closure__ is not None:
            return None
        home = next(kind for kind in owner.__mro__ if name in vars(kind))
        if function.__globals__ is not vars(CONV) or function.__code__.co_qualname != f"{home.__name__}.{name}":
            return None
        return cls(owner, name, function, function.__code__)


def _runs(base: type) -> tuple[str, str]:
    """The names of the methods that a call of a module runs."""
    return "forward", "_output_padding" if issubclass(base, CONV._ConvTransposeNd) else "_conv_forward"


def function_name(dims: int, transposed: bool) -> str:
    """The name of torch's function for such a convolution, a key of :data:`BY_TORCH`."""
    return f"conv_transpose{dims}d" if transposed else f"conv{dims}d"


def _function_of(base: type) -> str:
    """The name of the function in ``torch.nn.functional`` that a module of class ``base`` calls."""
    return function_name(BASES[base], issubclass(base, CONV._ConvTransposeNd))


_captured = {(base, name): Code.of(base, name) for base in BASES for name in _runs(base)}


def _code(base: type[nn.Module], name: str) -> Code | None:
    """torch's own method; ``None`` where it was replaced before the import and still is."""
    return _captured[base, name] or Code.of(base, name)


def override(module: nn.Module) -> str:
    """What this convolution runs instead of torch's own code, as a reason to leave it alone; empty where nothing."""
    base, kind, attributes = base_of(module), type(module), module.__dict__
    assert base is not None
    for name in _runs(base):
        reason = _method_override(base, kind, name)
        if reason:
            return reason
        if name in attributes and not _is_its_class_own(module, attributes[name], name):
            return f"has a {name} set on the instance"
    for name, getter in GETTERS.items():
        if getattr(kind, name) is not getter:
            return f"{kind.__name__} has a {name} of its own"
    for name in ARGUMENTS:
        if name not in attributes or hasattr(type(inspect.getattr_static(kind, name, None)), "__set__"):
            return f"{kind.__name__} has a {name} of its own"
    copies = copies_itself(module)
    if copies:
        return copies
    function = _function_of(base)
    installed = getattr(CONV.F, function)
    return (
        "" if _is_known(function, installed) else f"torch.nn.functional.{function} is not torch's own ({installed!r})"
    )


def _method_override(base: type[nn.Module], kind: type, name: str) -> str:
    """The reason where the method ``name`` of class ``kind`` is not torch's own; else empty."""
    code = _code(base, name)
    method = inspect.getattr_static(kind, name)
    if code is not None and method is code.function:
        return "" if code.function.__code__ is code.code else f"the code of {base.__name__}.{name} is not torch's own"
    if method is inspect.getattr_static(base, name):
        return f"{base.__name__}.{name} is not torch's own ({method!r})"
    return f"{kind.__name__} has a {name} of its own"


def _is_its_class_own(module: nn.Module, attribute: object, name: str) -> bool:
    """Whether an instance's attribute is what the class would give: bound by a swap, or loaded from an old pickle."""
    if name == "forward" and swapped(module) is not None:
        return True
    method = getattr(type(module), name)
    return isinstance(attribute, types.MethodType) and attribute.__self__ is module and attribute.__func__ is method


def reads_by_attribute(module: nn.Module) -> Callable[[], bool]:
    """A function that tells whether the class defines ``weight`` or ``bias``, as that of a parametrized module does.

    It is called with every call of the module, so it takes a tenth of a microsecond: it looks into the classes'
    dictionaries and does not use ``getattr``.
    """
    owners = [vars(kind) for kind in type(module).__mro__ if kind is not object]

    def by_attribute() -> bool:
        for names in owners:  # noqa: SIM110 (slow)
            if "weight" in names or "bias" in names:
                return True
        return False

    return by_attribute


@dataclass(frozen=True)
class ClassCode:
    """What a call of a module of class ``kind`` runs: two methods, and a function of ``torch.nn.functional``."""

    kind: Any
    forward: types.FunctionType
    helper_name: str
    helper: types.FunctionType
    codes: tuple[types.CodeType, types.CodeType]
    function: str

    @classmethod
    def of(cls, module: nn.Module) -> ClassCode | None:
        """torch's own code for the module; ``None`` where it was replaced before the import and still is."""
        base = base_of(module)
        assert base is not None
        first, second = (_code(base, name) for name in _runs(base))
        if first is None or second is None:
            return None
        codes = first.code, second.code
        return cls(type(module), first.function, second.name, second.function, codes, _function_of(base))


def unchanged(module: nn.Module) -> Callable[[Any], bool]:
    """A function that tells within a fraction of a microsecond whether a module still runs torch's own code.

    It notices another class, methods replaced on the module, its class or the classes above, exchanged code, and
    another function in ``torch.nn.functional``. Where it says no, :func:`override` gives the answer and the reason.
    """
    own = ClassCode.of(module)
    if own is None:
        return lambda _: False
    kind, forward, name, helper, function = own.kind, own.forward, own.helper_name, own.helper, own.function
    code, helper_code = own.codes
    by_torch, stand_ins = BY_TORCH[function], _stand_ins[function]
    getattr_, getattribute = GETTERS.values()

    def same(self: Any) -> bool:
        if (
            type(self) is not kind
            or kind.forward is not forward
            or forward.__code__ is not code
            or getattr(kind, name) is not helper
            or helper.__code__ is not helper_code
            or kind.__getattr__ is not getattr_
            or kind.__getattribute__ is not getattribute
            or name in self.__dict__
        ):
            return False
        installed = getattr(CONV.F, function)
        return installed is by_torch or installed in stand_ins

    return same


def unchanged_in_trace(module: nn.Module) -> Callable[[Any], bool]:
    """As :func:`unchanged`, for Dynamo, which guards attributes that are read but not missing dictionary keys."""
    same, base = unchanged(module), base_of(module)
    assert base is not None
    name = _runs(base)[1]
    helper = getattr(type(module), name)

    def same_in_trace(self: Any) -> bool:
        method = getattr(self, name)
        return same(self) and isinstance(method, types.MethodType) and method.__func__ is helper

    return same_in_trace
