"""The text of a convolution layer, as :mod:`tilewise.problems.conv.notation` describes it, read without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tilewise.problems.activation_names import (
    CONV_ACTIVATIONS,
    activation_kind,
    activation_name,
    activation_parameters,
)

__all__ = ["AxisText", "LayerText", "layer_name", "looks_like_layer", "read_layer", "trailing_padding"]

AXES = (("w",), ("h", "w"), ("d", "h", "w"))
"""Letters of the axes of layers in one, two and three dimensions."""
PLAIN = ("g", "mb", "ic", "oc")
QUANTITIES = ("i", "o", "k", "s", "d", "p")
NAMES = (*PLAIN, *(quantity + axis for quantity in QUANTITIES for axis in "dhw"))
DEFAULT_BATCH = 2
ENTRY = re.compile(rf"({'|'.join(sorted(NAMES, key=len, reverse=True))})(-?\d+)")
FIRST = re.compile(rf"_*(?:{'|'.join(NAMES)})[-\d]")
_NUMBER = r"[-+]?(?:inf|\d[\d.]*(?:e[-+]?\d+)?)"
_APPLIED = "|".join(sorted(CONV_ACTIVATIONS[1:], key=len, reverse=True))
WORD = re.compile(rf"\+(bias|res|(?:{_APPLIED})(?::{_NUMBER})*)")
WORDS = {"g": "groups", "mb": "mini-batch", "ic": "input channels", "oc": "output channels"}


def looks_like_layer(text: str) -> bool:
    """Whether ``text`` is meant as a layer (it starts with an entry), right or wrong, and not as a network's name.

    >>> looks_like_layer("mb8ic64ih56oc128kh3ph1"), looks_like_layer("alexnet")
    (True, False)
    """
    return FIRST.match(text.strip()) is not None


def layer_name(text: str) -> str:
    """What stands after ``n`` in a layer's text, without its quotes; empty when there is none.

    >>> layer_name('mb8ic64ih56oc128kh3ph1n"conv1"')
    'conv1'
    """
    return _scan(text)[2]


@dataclass(frozen=True, slots=True)
class AxisText:
    """One spatial axis of a layer as its text has it; the fields are those of :class:`tilewise.axis.Axis`."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class LayerText:
    """What a layer's text says. ``bias``, ``residual`` and ``activation`` are of its forward pass."""

    batch: int
    in_channels: int
    out_channels: int
    groups: int
    axes: tuple[AxisText, ...]
    bias: bool
    residual: bool
    activation: str


def read_layer(text: str, batch: int | None = None) -> LayerText:
    """What ``text`` says of a layer; ``batch`` replaces its ``mb``.

    Raises ``ValueError`` naming the entry at fault, its value and what would do. For example the ``in_channels`` of
    ``read_layer("mb2ic3ih8oc4kh3")`` are 3.
    """
    values, words, _ = _scan(text)
    for name in ("ic", "oc"):
        if name not in values:
            raise ValueError(f"{name}: missing from {text!r}; {name}N gives its {WORDS[name]}")
    if batch is not None:
        values["mb"] = batch
    for name in PLAIN:
        if values.get(name, 1) < 1:
            raise ValueError(f"{name}{values[name]}: a layer needs at least 1 ({WORDS[name]})")
    groups = values.get("g", 1)
    for name in ("ic", "oc"):
        if values[name] % groups:
            raise ValueError(f"{name}{values[name]}: not a multiple of g{groups}; channels are cut evenly into groups")
    return LayerText(
        values.get("mb", DEFAULT_BATCH),
        values["ic"],
        values["oc"],
        groups,
        _axes(values, text),
        "bias" in words,
        "res" in words,
        _activation(words, text),
    )


def _scan(text: str) -> tuple[dict[str, int], list[str], str]:
    """Entries of ``text`` in the order given, the words behind them, and its name."""
    values: dict[str, int] = {}
    rest = text.strip().lstrip("_")
    while rest and not rest.startswith(("n", "+")):
        entry = ENTRY.match(rest)
        if entry is None:
            raise ValueError(f"layer {text!r}: cannot read {rest[:24]!r}; {_expected(rest)}")
        name, value = entry[1], int(entry[2])
        if name in values:
            raise ValueError(f"{name}{value}: given twice in {text!r} (before it: {name}{values[name]}); keep one")
        if value < 0:
            raise ValueError(f"{name}{value}: must not be negative")
        values[name] = value
        rest = rest[entry.end() :].lstrip("_")
    if not values:
        raise ValueError(f"layer {text!r}: has no entries; text such as 'mb256ic64ih27oc192oh27kh5ph2' would do")
    words = []
    while rest.startswith("+"):
        word = WORD.match(rest)
        if word is None:
            raise ValueError(
                f"layer {text!r}: cannot read {rest[:24]!r}; +bias, +res or an activation such as +relu would do"
            )
        words.append(word[1])
        rest = rest[word.end() :].lstrip("_")
    if rest and not rest.startswith("n"):
        raise ValueError(f"layer {text!r}: cannot read {rest[:24]!r}; words such as +relu stand behind all entries")
    return values, words, rest[1:].strip("\"'")


def _activation(words: list[str], text: str) -> str:
    """The activation among the words of a layer, ``none`` where there is none. Raises ``ValueError`` for several."""
    applied = [word for word in words if word not in ("bias", "res")]
    if len(applied) > 1:
        raise ValueError(f"layer {text!r}: one activation would do, not {', '.join(applied)}")
    if not applied:
        return "none"
    try:
        parameters = activation_parameters(applied[0])
    except ValueError as error:
        raise ValueError(f"layer {text!r}: numbers behind the colons of {applied[0]!r} would do") from error
    return activation_name(activation_kind(applied[0]), *parameters)


def _expected(rest: str) -> str:
    """What would do where ``rest`` begins, for a message."""
    name = next((name for name in sorted(NAMES, key=len, reverse=True) if rest.startswith(name)), "")
    if name:
        return f"{name} must be followed by a whole number"
    return f"an entry such as {', '.join(NAMES)} would do"


@dataclass(frozen=True, slots=True)
class _Entries:
    """What a layer's text says of one spatial axis; ``None`` where it says nothing."""

    name: str
    i: int | None
    o: int | None
    k: int | None
    s: int | None
    d: int | None
    p: int | None

    @property
    def given(self) -> bool:
        """Whether the text has this axis: anything that differs from having none."""
        return any((self.i, self.o, self.k, self.d, self.p)) or self.s not in (None, 1)

    @property
    def written(self) -> list[str]:
        """The entries as they stand in the text."""
        return [f"{q}{self.name}{getattr(self, q)}" for q in QUANTITIES if getattr(self, q) is not None]


def _axes(values: Mapping[str, int], text: str) -> tuple[AxisText, ...]:
    """The spatial axes of a layer. Raises ``ValueError`` for entries that describe none."""
    entries = {
        name: _Entries(name, *(values.get(quantity + name) for quantity in QUANTITIES)) for name in ("d", "h", "w")
    }
    given = tuple(name for name in entries if entries[name].given)
    if given in (("d",), ("h",)):
        names = AXES[2] if given == ("d",) else AXES[1]
        _check_ignored(entries, given[0], names)
        return (_axis(entries[given[0]], text),) * len(names)
    if given not in AXES:
        if not given:
            raise ValueError(f"{text!r} has no spatial axis: ih and kh (square), iw and kw (1-D) or id and kd would do")
        missing = next(name for name in AXES[2] if name not in given and name > min(given))
        raise ValueError(
            f"i{missing} and k{missing}: missing from {text!r}; with {' and '.join(given)} given, give {missing} too, "
            f"or {given[0]} alone for equal axes"
        )
    return tuple(_axis(entries[name], text) for name in given)


def _check_ignored(entries: Mapping[str, _Entries], source: str, names: tuple[str, ...]) -> None:
    """Entries such as ``pw0`` without ``iw`` are superseded by the square's; refuse those that say something else."""
    for name in names:
        for quantity in QUANTITIES:
            said, meant = getattr(entries[name], quantity), getattr(entries[source], quantity)
            default = 1 if quantity == "s" else 0
            if said is not None and said != (default if meant is None else meant):
                raise ValueError(
                    f"{quantity}{name}{said}: without i{name} and k{name} the axis {name} is a copy of {source}, "
                    f"where {quantity}{source} is {default if meant is None else meant}; give i{name} and k{name} too"
                )


def _axis(e: _Entries, text: str) -> AxisText:
    """The axis that the entries of one letter describe. Raises ``ValueError`` for one that cannot be."""
    for quantity, value in (("i", e.i), ("k", e.k)):
        if not value:
            raise ValueError(
                f"{quantity}{e.name}: missing or 0 in {text!r}; an axis needs i{e.name} and k{e.name}"
                f" (given: {' '.join(e.written)})"
            )
    if e.s == 0:
        raise ValueError(f"s{e.name}0: a stride is at least 1")
    size, kernel, stride, dilation = e.i or 0, e.k or 0, e.s or 1, (e.d or 0) + 1
    reach = (kernel - 1) * dilation + 1
    if not e.o:
        before = after = e.p or 0
        if size + 2 * before < reach:
            raise ValueError(
                f"i{e.name}{size}: with p{e.name}{before} shorter than the {reach} inputs that k{e.name}{kernel} "
                f"d{e.name}{dilation - 1} reaches over, so the output would be empty; more input or padding would do"
            )
    else:
        needed = (e.o - 1) * stride + reach - size
        before = max(needed // 2, 0) if e.p is None else e.p
        after = trailing_padding(size, reach, stride, before, e.o)
        if size + min(after, 0) < 1:
            raise ValueError(f"o{e.name}{e.o}: reads none of i{e.name}{size}, only the padding p{e.name}{before}")
    return AxisText(size, kernel, stride, dilation, before, after)


def trailing_padding(size: int, reach: int, stride: int, before: int, out: int) -> int:
    """Trailing padding that gives ``out`` outputs: the leading one where that does, else the least."""
    span = size + 2 * before - reach
    if span >= 0 and span // stride + 1 == out:
        return before
    return (out - 1) * stride + reach - size - before
