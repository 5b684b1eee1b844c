"""A recurrent cell stated as a Python function, followed once with placeholders for its numbers.

Placeholders take part in torch's functions. What a cell computes of them, unit by unit or as means over units, becomes
an expression that kernels compile. Anything else ends the tracing with a reason.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.kernels.cpu.recurrent.expressions import UNARY, Cell, Expressions

__all__ = ["NotTraceable", "trace"]


class NotTraceable(Exception):
    """A cell computes something that kernels cannot: the message says what."""


class Symbol:
    """Stands for a tensor (batch, parts * hidden): of each part one node of the expression.

    Means over units have ``hidden`` 1. ``batch`` is empty for a parameter, which has no such dimension.
    """

    def __init__(self, made: Expressions, places: Sequence[int], hidden: int, batch: tuple[int, ...]) -> None:
        self._made, self._places, self._hidden, self._batch = made, tuple(places), hidden, batch

    @property
    def shape(self) -> torch.Size:
        """The tensor's."""
        return torch.Size((*self._batch, len(self._places) * self._hidden))

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch's function ``func`` gives for placeholders. Raises :class:`NotTraceable`."""
        return _applied(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """A method of tensors. Raises :class:`NotTraceable`."""
        function = _METHODS.get(name)
        if function is None:
            raise NotTraceable(f"uses {name!r} of a tensor; {_what_would_do()}")
        return lambda *args, **kwargs: _applied(function, (self, *args), kwargs)

    def __add__(self, other: Any) -> Any:
        return _applied(torch.add, (self, other), {})

    def __radd__(self, other: Any) -> Any:
        return _applied(torch.add, (other, self), {})

    def __sub__(self, other: Any) -> Any:
        return _applied(torch.sub, (self, other), {})

    def __rsub__(self, other: Any) -> Any:
        return _applied(torch.sub, (other, self), {})

    def __mul__(self, other: Any) -> Any:
        return _applied(torch.mul, (self, other), {})

    def __rmul__(self, other: Any) -> Any:
        return _applied(torch.mul, (other, self), {})

    def __truediv__(self, other: Any) -> Any:
        return _applied(torch.div, (self, other), {})

    def __rtruediv__(self, other: Any) -> Any:
        return _applied(torch.div, (other, self), {})

    def __neg__(self) -> Any:
        return _applied(torch.neg, (self,), {})

    def __lt__(self, other: Any) -> Any:
        return _applied(torch.lt, (self, other), {})

    def __le__(self, other: Any) -> Any:
        return _applied(torch.le, (self, other), {})

    def __gt__(self, other: Any) -> Any:
        return _applied(torch.gt, (self, other), {})

    def __ge__(self, other: Any) -> Any:
        return _applied(torch.ge, (self, other), {})

    @property
    def dtype(self) -> torch.dtype:
        """The type in which kernels compute."""
        return torch.float32

    def __bool__(self) -> bool:
        raise NotTraceable("decides by a tensor's value, which differs from unit to unit")


def trace(
    cell: Callable[..., Any],
    from_x: int,
    from_h: int,
    states: int,
    parameters: Sequence[int],
    sizes: tuple[int, int],
    noise: int = 0,
) -> Cell:
    """What ``cell(x, h, state, *parameters)`` computes, or with ``noise`` parts of random numbers as its last argument.

    ``sizes`` are those of a state, (batch, hidden). ``x`` and ``h`` have ``from_x`` and ``from_h`` parts of ``hidden``
    numbers, ``parameters`` say how many parts each of them has. Of several ``states`` the cell gets and returns a
    tuple, of one the tensor. Raises :class:`NotTraceable`.
    """
    made = Expressions()

    def given(name: str, first: int, count: int) -> Symbol:
        batch = () if name == "parameter" else sizes[:1]
        return Symbol(made, [made.input(name, first + i) for i in range(count)], sizes[1], batch)

    taken = [sum(parameters[:j]) for j in range(len(parameters) + 1)]
    of_parameters = [given("parameter", first, parts) for first, parts in zip(taken, parameters, strict=False)]
    state = [given("state", k, 1) for k in range(states)]
    x, h = given("x", 0, from_x), given("h", 0, from_h)
    last = [given("random", 0, noise)] if noise else []
    try:
        results = cell(x, h, state[0] if states == 1 else tuple(state), *of_parameters, *last)
    except NotTraceable:
        raise
    except Exception as error:  # whatever the cell does with what is no tensor
        raise NotTraceable(f"raised {type(error).__name__} for placeholders: {error}") from error
    results = (results,) if states == 1 else results
    if not isinstance(results, tuple | list) or len(results) != states:
        raise NotTraceable(f"does not return {states} states, as many as it gets")
    places = []
    for number, result in enumerate(results):
        if not isinstance(result, Symbol) or result.shape[-1] != sizes[1]:
            raise NotTraceable(f"returns a state {number} that is no tensor (batch, hidden) made of its arguments")
        places.append(result._places[0])
    return Cell(from_x, from_h, states, taken[-1], tuple(made.nodes), tuple(places), noise)


def _what_would_do() -> str:
    """The functions that are followed."""
    return f"arithmetic and {', '.join(sorted(name for name in _METHODS if not name.endswith('_')))} would do"


def _applied(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of torch's function for placeholders. Raises :class:`NotTraceable`."""
    rule = _RULES.get(function)
    if rule is None:
        name = getattr(function, "__name__", repr(function))
        raise NotTraceable(f"calls {name}; {_what_would_do()}")
    try:
        return rule(*args, **kwargs)
    except TypeError as error:
        raise NotTraceable(f"calls {getattr(function, '__name__', function)} with other arguments: {error}") from error


def _elementwise(name: str, *operands: Any) -> Symbol:
    """An operation on each part of the operands, of which numbers and single parts count for every part."""
    made = next(each._made for each in operands if isinstance(each, Symbol))
    columns = [_places(made, each) for each in operands]
    width = max(map(len, columns))
    if any(len(column) not in (1, width) for column in columns):
        widths = " and ".join(str(len(column)) for column in columns)
        raise NotTraceable(f"combines tensors of {widths} times as many numbers as the state")
    wide = [column * width if len(column) == 1 else column for column in columns]
    symbols = [each for each in operands if isinstance(each, Symbol)]
    hidden, batch = max(each._hidden for each in symbols), max(each._batch for each in symbols)
    return Symbol(made, [made.apply(name, *places) for places in zip(*wide, strict=True)], hidden, batch)


def _places(made: Expressions, operand: Any) -> list[int]:
    """The places of an operand's parts. Raises :class:`NotTraceable` for a tensor that is no argument of the cell."""
    if isinstance(operand, Symbol):
        return list(operand._places)
    if isinstance(operand, numbers.Real):
        return [made.constant(float(operand))]
    what = "a tensor" if isinstance(operand, torch.Tensor) else type(operand).__name__
    raise NotTraceable(f"uses {what} that is no argument of it; one given as a parameter would do")


def _sum(a: Any, b: Any, *, alpha: float = 1) -> Symbol:
    return _elementwise("add", a, b if alpha == 1 else _elementwise("mul", b, alpha))


def _difference(a: Any, b: Any, *, alpha: float = 1) -> Symbol:
    return _elementwise("sub", a, b if alpha == 1 else _elementwise("mul", b, alpha))


def _chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Symbol, ...]:
    """Equal parts along the last dimension."""
    if dim not in (-1, x.ndim - 1):
        raise NotTraceable(f"divides along dimension {dim}; the last one would do")
    count = len(x._places)
    if count % chunks:
        raise NotTraceable(f"divides {count} times as many numbers as the state into {chunks} equal parts")
    each = count // chunks
    return tuple(Symbol(x._made, x._places[i : i + each], x._hidden, x._batch) for i in range(0, count, each))


def _clamp(x: Any, min: float | None = None, max: float | None = None) -> Symbol:
    """Between two numbers."""
    if isinstance(min, Symbol) or isinstance(max, Symbol):
        raise NotTraceable("clamps between tensors; numbers would do")
    low = float("-inf") if min is None else float(min)
    high = float("inf") if max is None else float(max)
    places = [x._made.apply("clamp", place, numbers=(low, high)) for place in x._places]
    return Symbol(x._made, places, x._hidden, x._batch)


def _lerp(a: Any, b: Any, weight: Any) -> Symbol:
    return _elementwise("add", a, _elementwise("mul", weight, _elementwise("sub", b, a)))


def _addcmul(a: Any, b: Any, c: Any, *, value: float = 1) -> Symbol:
    return _elementwise("add", a, _elementwise("mul", _elementwise("mul", b, c), value))


def _square(x: Any) -> Symbol:
    return _elementwise("mul", x, x)


def _silu(x: Any, inplace: bool = False) -> Symbol:
    return _elementwise("mul", x, _elementwise("sigmoid", x))


def _relu(x: Any, inplace: bool = False) -> Symbol:
    return _elementwise("relu", x)


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> Symbol:
    """Over all parts and units, as a column."""
    last = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if last not in (-1, x.ndim - 1) or not keepdim:
        raise NotTraceable("takes means of another kind; over dim=-1 with keepdim=True would do")
    each = [x._made.apply("mean", place) for place in x._places]
    total = Symbol(x._made, [functools.reduce(functools.partial(x._made.apply, "add"), each)], 1, x._batch)
    return total if len(each) == 1 else _elementwise("div", total, len(each))


def _var(
    x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Symbol:
    """The mean square of what differs from the mean, over n numbers times n / (n - correction)."""
    count = x.shape[-1]
    less = float(unbiased) if correction is None else correction
    squares = _mean(_square(_elementwise("sub", x, _mean(x, dim, keepdim))), dim, keepdim)
    if not less:
        return squares
    if count <= less:
        raise NotTraceable(f"takes a variance of {count} numbers with correction {less:g}")
    return _elementwise("mul", squares, count / (count - less))


def _rsqrt(x: Any) -> Symbol:
    return _elementwise("div", 1.0, _elementwise("sqrt", x))


def _scaled(x: Any, shape: Sequence[int], weight: Any, bias: Any) -> Symbol:
    """What a norm ends with. Raises :class:`NotTraceable` where it is not over all numbers of ``x``."""
    if tuple(shape) != (x.shape[-1],):
        raise NotTraceable(f"normalizes over {tuple(shape)}; {x.shape[-1]} numbers would do")
    x = x if weight is None else _elementwise("mul", x, weight)
    return x if bias is None else _elementwise("add", x, bias)


def _layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Symbol:
    less = _elementwise("sub", x, _mean(x, -1, True))
    spread = _elementwise("sqrt", _elementwise("add", _mean(_square(less), -1, True), eps))
    return _scaled(_elementwise("div", less, spread), normalized_shape, weight, bias)


def _rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Symbol:
    squares = _elementwise("add", _mean(_square(x), -1, True), torch.finfo(torch.float32).eps if eps is None else eps)
    return _scaled(_elementwise("div", x, _elementwise("sqrt", squares)), normalized_shape, weight, None)


def _where(condition: Any, a: Any, b: Any) -> Symbol:
    if not isinstance(condition, Symbol):
        raise NotTraceable("chooses by what is no comparison of its arguments")
    return _elementwise("select", condition, a, b)


def _converted(x: Any, dtype: Any = torch.float32) -> Symbol:
    """To a type: comparisons are numbers here."""
    if dtype is not torch.float32:
        raise NotTraceable(f"converts to {dtype}; kernels compute in torch.float32")
    return x  # type: ignore[no-any-return]


def _compared(name: str, turned: bool) -> Callable[[Any, Any], Symbol]:
    return lambda a, b: _elementwise(name, b, a) if turned else _elementwise(name, a, b)


def _unary(name: str) -> Callable[[Any], Symbol]:
    return lambda x: _elementwise(name, x)


def _binary(name: str) -> Callable[[Any, Any], Symbol]:
    return lambda a, b: _elementwise(name, a, b)


_BY_NAME: dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in UNARY},
    "add": _sum,
    "sub": _difference,
    "mul": _binary("mul"),
    "div": _binary("div"),
    "chunk": _chunk,
    "clamp": _clamp,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "square": _square,
    "relu": _relu,
    "mean": _mean,
    "var": _var,
    "rsqrt": _rsqrt,
    "where": _where,
    "lt": _compared("less", False),
    "le": _compared("less_equal", False),
    "gt": _compared("less", True),
    "ge": _compared("less_equal", True),
}
_METHODS: dict[str, Any] = {name: getattr(torch, name) for name in _BY_NAME if name != "where"} | {
    "to": torch.Tensor.to,
    "float": torch.Tensor.float,
}
_RULES: dict[Any, Callable[..., Any]] = {getattr(torch, name): rule for name, rule in _BY_NAME.items()} | {
    torch.nn.functional.relu: _relu,
    torch.nn.functional.silu: _silu,
    torch.nn.functional.layer_norm: _layer_norm,
    torch.nn.functional.rms_norm: _rms_norm,
    torch.nn.functional.sigmoid: _unary("sigmoid"),
    torch.nn.functional.tanh: _unary("tanh"),
    torch.Tensor.to: _converted,
    torch.Tensor.float: _converted,
    torch.clip: _clamp,
    torch.multiply: _binary("mul"),
    torch.subtract: _difference,
    torch.divide: _binary("div"),
    torch.negative: _unary("neg"),
}
