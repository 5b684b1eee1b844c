"""How a problem is computed: configs, measurements and the immutable tree of choices called a plan.

>>> from tilewise.plan import BUSY, CHECK_VERSION, UNIT_FORGOTTEN, is_busy, question_of
>>> is_busy(BUSY["cpu"], "cpu"), CHECK_VERSION >= 1, bool(question_of(str(UNIT_FORGOTTEN)))
(False, True, False)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewise.problems.error import Error
from tilewise.problems.limits import INT64_MAX

__all__ = [
    "BUSY",
    "CHECK_VERSION",
    "UNIT_FORGOTTEN",
    "Config",
    "Error",
    "Measurement",
    "Plan",
    "PlanFormatError",
    "device_of",
    "format_bytes",
    "is_busy",
    "parse_bytes",
    "question_of",
    "sum_known",
]

Value = int | float | str | bool | tuple[int, ...]
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNIT_FORGOTTEN = 2**16
"""Bytes below which a limit of memory that is a mere number was surely meant in a larger unit.

Hardly any kernel can work in less than 64 KiB, so nobody sets such a limit on purpose. The unit left out is mostly MiB,
and 2^16 MiB are 64 GiB, more than most limits. What some do set on purpose, the size of a CPU's cache, is larger.
"""
LETTER = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])", re.IGNORECASE)
POWERS = {"K": (3, 10), "M": (6, 20), "G": (9, 30)}
"""By letter, the powers of ten and of two that it may stand for."""
FORMAT = 1
CHECK_VERSION = 3
"""Version of the comparison by which the planner checks a plan. Plans checked under another one are checked again."""
DEEPEST = 32
"""Most levels of a plan that is read: far more than splits nest, far fewer than exhaust the stack."""
MOST_NODES = 4096
"""Most nodes in the tree of a plan that is found, kept or read: few enough to be checked at once."""
BUSY = {"cpu": 0.1, "cuda": 0.75}
"""The share of all cores above which other processes make a host too busy to measure, by the type of device.

A CPU's kernels use all cores and wait for the slowest, so one core that is taken from them slows the whole. Single
jobs of the system stay below a tenth. A GPU computes by itself and needs one free core to be launched from, which is
there until most cores are taken: processes that load data do not disturb it.
"""


class PlanFormatError(ValueError):
    """A plan or wisdom document that cannot be read; the message names what is wrong.

    >>> try:
    ...     Plan.from_json({"solver": "fft"})
    ... except PlanFormatError as error:
    ...     print("no plan")
    no plan
    """


class Config(Mapping[str, Value]):
    """A solver's tunable parameters: frozen, hashable, ordered by name; prints as ``basis=32x32 product=batched``.

    >>> config = Config(basis=(32, 32), product="batched")
    >>> print(config)
    basis=32x32 product=batched
    >>> config["basis"]
    (32, 32)
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, /, **values: Value) -> None:
        self._items = tuple(sorted(values.items()))
        self._hash = hash(self._items)

    def __getitem__(self, name: str) -> Value:
        for key, value in self._items:
            if key == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._items == other._items

    def __str__(self) -> str:
        def show(value: Value) -> str:
            return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

        return " ".join(f"{key}={show(value)}" for key, value in self._items)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v!r}' for k, v in self._items)})"

    @property
    def key(self) -> str:
        """Canonical JSON text; :meth:`from_key` reads it back."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_key(cls, text: str) -> Config:
        """Read :attr:`key` back. Raises :class:`PlanFormatError`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also a number of too many digits, or depth
            raise PlanFormatError(f"config {text[:80]!r} is not JSON: {error}") from error
        return cls.from_json(data)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; tuples become lists."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self._items}

    @classmethod
    def from_json(cls, data: object) -> Config:
        """Read :meth:`to_json` back. Raises :class:`PlanFormatError` naming the entry at fault."""
        if not isinstance(data, dict):
            raise PlanFormatError(f"config must be an object, not {type(data).__name__}")
        values: dict[str, Value] = {}
        for key, value in data.items():
            if not isinstance(key, str):
                raise PlanFormatError(f"config has {key!r}: names are text")
            if isinstance(value, list) and all(type(v) is int for v in value):
                values[key] = tuple(value)
            elif isinstance(value, (int, str, bool)) or (isinstance(value, float) and math.isfinite(value)):
                values[key] = value
            else:
                raise PlanFormatError(
                    f"config[{key!r:.80}]={value!r:.80}: a number, text, truth value or integers would do"
                )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What trying one (solver, config) on one problem gave: its times, or the reason why it cannot be used.

    Times are in milliseconds, and two are kept apart. ``time_ms``, which :attr:`device_ms` names too, is what the
    device computes, with launches hidden: a median, by which candidates are ranked. ``host_ms`` is what the host needs
    to launch it: the least of its runs, as other work only adds to it. It is 0 on a CPU and in replays of CUDA graphs,
    and ``None`` where it is not known. ``baseline_ms`` and ``baseline_host_ms`` are those of the framework's own
    choice, measured in turns with it (``None`` where it was not measured).

    ``dispersion`` is how far the device's times spread: their interquartile range over the median. ``runs`` is how
    many of them counted. ``load`` is the share of all cores, from 0 to 1, that other processes used meanwhile. Each
    is ``None`` where it is not known. :func:`is_busy` says which loads make times doubtful.

    ``workspace`` is the peak of memory in bytes beyond operands, result and constants. ``reason`` is empty unless the
    candidate was lost. ``estimate_ms`` is what the planner expected it to take before it was run. Only
    :meth:`~tilewise.planner.Planner.explain` fills it in; wisdom does not keep it, since it follows from the device's
    profile. It is ``None`` where nothing was estimated: for splits, and for what the problem or the options rule out.

    >>> found = Measurement("fft", 1, Config(basis=(32, 32)), time_ms=2.5, workspace=2**20)
    >>> found.device_ms, found.reason
    (2.5, '')
    """

    solver: str
    version: int
    config: Config
    time_ms: float | None = None
    workspace: int | None = None
    error: Error | None = None
    reason: str = ""
    baseline_ms: float | None = None
    estimate_ms: float | None = None
    host_ms: float | None = None
    baseline_host_ms: float | None = None
    dispersion: float | None = None
    runs: int | None = None
    load: float | None = None

    @property
    def device_ms(self) -> float | None:
        """Milliseconds that the device computes: another name of ``time_ms``."""
        return self.time_ms


@dataclass(frozen=True, slots=True)
class Plan:
    """A solver, its config and the plans of its parts.

    ``problem`` is the problem's canonical key. ``children`` of a split hold one plan per distinct run of parts:
    ``counts[i]`` parts in a row follow ``children[i]``.

    Two times in milliseconds are kept apart. ``time_ms``, which :attr:`device_ms` names too, is what the device
    computes, with launches hidden: plans are ranked by it. ``host_ms`` is what the host needs to launch the plan: 0 on
    a CPU, and ``None`` where it is not known, as in plans of earlier versions. (There ``time_ms`` of a GPU holds a
    part of it.) Both are measured on the whole plan for a root; otherwise they are the sums of the children's.
    ``load`` is the share of all cores, from 0 to 1, that other processes used meanwhile, ``None`` where it is not
    known; see :attr:`busy`.

    ``workspace`` and ``constant`` (what stays between calls) are in bytes, of the problem's own device alone: a part
    that another device computes has its own. ``label`` is what people read in place of the config.

    >>> problem = tilewise.GemmProblem(16, 32, 8)
    >>> plan = tilewise.Planner().plan(problem, tilewise.Options(rigor="estimate"))
    >>> plan.problem == problem.key, tilewise.Plan.from_json(plan.to_json()) == plan
    (True, True)
    """

    problem: str
    solver: str
    version: int
    config: Config = field(default_factory=Config)
    children: tuple[Plan, ...] = ()
    counts: tuple[int, ...] = ()
    time_ms: float = math.nan
    workspace: int = 0
    constant: int = 0
    error: Error | None = None
    label: str = ""
    host_ms: float | None = None
    load: float | None = None

    @property
    def device_ms(self) -> float:
        """Milliseconds that the device computes: another name of ``time_ms``; not a number where it was not timed."""
        return self.time_ms

    @property
    def busy(self) -> bool:
        """Whether the host was busy with other processes while the plan was timed, so that its times are doubtful."""
        return is_busy(self.load, self.device)

    @property
    def device(self) -> str:
        """The device that computes it: the last word of its problem's key, ``cpu`` or ``cuda:`` and a GPU's name."""
        return device_of(self.problem)

    @property
    def leaf(self) -> bool:
        """Whether the plan has no parts."""
        return not self.children

    @property
    def is_kept(self) -> bool:
        """Whether the plan has few enough parts to be written to wisdom or a file and read back."""
        left, waiting = MOST_NODES, [self]
        while waiting and left >= 0:
            left -= len(children := waiting.pop().children)
            waiting += children
        return left >= 0

    def leaves(self) -> Iterator[Plan]:
        """Every leaf plan, each once per place in the tree."""
        if self.leaf:
            yield self
        for child in self.children:
            yield from child.leaves()

    def tree(self) -> str:
        """The plan as indented lines in columns: what runs, its time, workspace and error."""
        rows = list(self._rows(0))
        title, time, size = (max(len(row[i]) for row in rows) for i in range(3))
        lines = (f"{row[0]:{title}}  {row[1]:>{time}}  {row[2]:>{size}}  {row[3]}".rstrip() for row in rows)
        return "\n".join(lines)

    def _rows(self, indent: int) -> Iterator[tuple[str, str, str, str]]:
        """The lines of :meth:`tree` as columns, for this plan and those below it."""
        time = f"{self.time_ms:.3f} ms" if math.isfinite(self.time_ms) else "not timed"
        yield (
            " ".join(word for word in ("  " * indent + self.solver, self.label or str(self.config)) if word),
            f"{time} (busy)" if self.busy else time,
            format_bytes(self.workspace),
            "" if self.error is None else f"err {self.error.l2:.0e}",
        )
        for child in self.children:
            yield from child._rows(indent + 1)

    def __str__(self) -> str:
        return self.tree()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values. :meth:`from_json` reads them back."""
        return {
            "format": FORMAT,
            "problem": self.problem,
            "solver": self.solver,
            "version": self.version,
            "config": self.config.to_json(),
            "children": [child.to_json() for child in self.children],
            "counts": list(self.counts),
            "time_ms": self.time_ms if math.isfinite(self.time_ms) else None,
            "host_ms": self.host_ms,
            "load": self.load,
            "busy": self.busy,
            "workspace": self.workspace,
            "constant": self.constant,
            "error": None if self.error is None else [self.error.l2, self.error.spread],
            "label": self.label,
        }

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Read a document of :meth:`to_json`. Raises :class:`PlanFormatError` naming the entry at fault.

        At most 4,096 plans are read, nested at most 32 deep.
        """
        return cls._from_json(data, DEEPEST, [MOST_NODES])

    @classmethod
    def _from_json(cls, data: object, levels: int, left: list[int]) -> Plan:
        """Read a plan of at most ``levels`` levels.

        ``left[0]`` is how many further plans may be read, and is counted down.
        """
        if not levels:
            raise PlanFormatError(f"children are nested more than {DEEPEST} deep: no plan is")
        if not isinstance(data, dict):
            raise PlanFormatError(f"a plan must be an object, not {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise PlanFormatError(f"format={data.get('format')!r:.80}: this version reads plans of format {FORMAT}")
        kinds: dict[str, Any] = {
            "problem": str, "solver": str, "version": int, "children": list, "counts": list,
            "workspace": int, "constant": int, "label": str,
        }  # fmt: skip
        for name, kind in kinds.items():
            if not isinstance(data.get(name), kind) or isinstance(data[name], bool):
                raise PlanFormatError(f"{name}={data.get(name)!r:.80}: expected {kind.__name__}")
        left[0] -= len(data["children"])  # before any is read: the length of a list is known at once
        if left[0] < 0:
            raise PlanFormatError(f"children: more than {MOST_NODES} in all: no plan has so many")
        children = tuple(cls._from_json(child, levels - 1, left) for child in data["children"])
        counts = tuple(data["counts"])
        if len(counts) != len(children) or any(type(n) is not int or n < 1 for n in counts):
            raise PlanFormatError(
                f"counts={data['counts']!r:.200}: expected a positive count for each of {len(children)}"
            )
        time_ms, host_ms, load, error = (data.get(name) for name in ("time_ms", "host_ms", "load", "error"))
        for name, value in (("time_ms", time_ms), ("host_ms", host_ms)):
            if value is not None and not _is_number(value):
                raise PlanFormatError(f"{name}={value!r:.80}: expected a time or null")
        if load is not None and not (_is_number(load) and load <= 1):
            raise PlanFormatError(f"load={load!r:.80}: expected a share from 0 to 1, or null")
        if error is not None and not (isinstance(error, list) and len(error) == 2 and all(map(_is_number, error))):
            raise PlanFormatError(f"error={error!r:.80}: expected two numbers, not negative, or null")
        if not (0 <= data["workspace"] <= INT64_MAX and 0 <= data["constant"] <= INT64_MAX):
            raise PlanFormatError("workspace and constant must not be negative, nor above 2^63")
        return cls(
            problem=data["problem"],
            solver=data["solver"],
            version=data["version"],
            config=Config.from_json(data.get("config")),
            children=children,
            counts=counts,
            time_ms=math.nan if time_ms is None else float(time_ms),
            workspace=data["workspace"],
            constant=data["constant"],
            error=None if error is None else Error(float(error[0]), float(error[1])),
            label=data["label"],
            host_ms=None if host_ms is None else float(host_ms),
            load=None if load is None else float(load),
        )


def device_of(key: str) -> str:
    """The device in a problem's canonical key, its last word: ``cpu``, or ``cuda:`` and a GPU's name.

    >>> device_of(tilewise.GemmProblem(16, 32, 8).key)
    'cpu'
    """
    before, kind, name = key.partition(" cuda:")
    return f"cuda:{name}" if kind else before.rpartition(" ")[2]


def is_busy(load: float | None, device: str) -> bool:
    """Whether ``load``, a share of all cores, is above :data:`BUSY` for ``device``, a name such as ``cpu``.

    An unknown load (``None``) is not said to be busy.

    >>> is_busy(0.5, "cpu"), is_busy(0.5, "cuda:NVIDIA H100 80GB HBM3"), is_busy(None, "cpu")
    (True, False, False)
    """
    return load is not None and load > BUSY["cpu" if device == "cpu" else "cuda"]


def sum_known(values: Iterable[float | None]) -> float | None:
    """The sum of ``values``, such as the host's times of parts; ``None`` where one of them is.

    >>> sum_known([1.5, 2.0]), sum_known([1.5, None])
    (3.5, None)
    """
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _is_number(value: object) -> bool:
    """Whether ``value`` is a finite number, not negative, and no integer above ``INT64_MAX``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < math.inf and (isinstance(value, float) or value <= INT64_MAX)


def question_of(size: str) -> str:
    """What to ask back of a ``size`` that is one to no two people, ``64`` or ``64M``; empty for any other text.

    >>> question_of("64"), question_of("64B")
    ('64 of what? 64B would do for bytes, 64MiB for 2^20 of them', '')
    """
    text = size.strip()
    if match := LETTER.fullmatch(text):
        count, letter = match[1], match[2].upper()
        ten, two = POWERS[letter]
        return (
            f"{letter} may mean 10^{ten} or 2^{two} bytes; {count}{letter}B would do for the one, {count}{letter}iB "
            "for the other"
        )
    if text.isdecimal() and 0 < int(text[:30]) < UNIT_FORGOTTEN:
        return f"{text} of what? {text}B would do for bytes, {text}MiB for 2^20 of them"
    return ""


def parse_bytes(size: int | str, argument: str = "workspace") -> int:
    """Bytes of a size given as an int or text with a unit (``"64MiB"``, ``"0.5 GiB"``, ``"64B"``).

    Text of a large number needs no unit. Raises ``ValueError`` naming ``argument``, the value and what would do.

    >>> parse_bytes("64MiB"), parse_bytes("1.5 KB")
    (67108864, 1500)
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"{argument}={size!r}: a number of bytes or text such as '64MiB' would do")
    if isinstance(size, int):
        if size < 0:
            shown = str(size) if size >= -INT64_MAX else hex(size)  # Python may not print more digits
            raise ValueError(f"{argument}={shown:.40}: must not be negative; 0 or more bytes would do, such as '64MiB'")
        return _storable(size, argument)
    if question := question_of(size):
        raise ValueError(f"{argument}={size!r}: {question}")
    text = size.strip()
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.lower().endswith(unit.lower()):
            number, scale = text[: -len(unit)], UNITS[unit]
            break
    else:
        number, scale = text, 1
    try:
        value = float(number) * scale
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(
            f"{argument}={size!r}: a number of bytes with an optional unit ({', '.join(UNITS)}) would do, "
            "such as '64MiB'"
        )
    return _storable(int(value), argument)


def _storable(size: int, argument: str) -> int:
    """``size``, if SQLite can store it. Raises ``ValueError`` naming ``argument``."""
    if size > INT64_MAX:
        raise ValueError(f"{argument}={hex(size):.40}: at most 2^63 - 1 bytes would do")
    return size


def format_bytes(size: int) -> str:
    """A size in bytes as people read it, such as ``48.9 MiB``.

    >>> format_bytes(64 * 2**20)
    '64.0 MiB'
    """
    for unit in ("GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size} B"
