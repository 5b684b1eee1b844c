"""Reads schedules from JSON that anybody may have written. What does not pass here never becomes a schedule.

What passes can be wrong, which a check before use finds, but not dangerous: names are never paths, and nothing is
looked up or run because a document says so.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tilewise.plan import Config, Error, Measurement, Plan
from tilewise.planner.options import Options
from tilewise.planner.schedules.results import Layer, LayerResult, PassResult, RunTimes
from tilewise.planner.schedules.results_json import VERSIONS
from tilewise.problems.base import DTYPES, LAYOUTS, PRECISIONS, Problem
from tilewise.problems.kinds import from_key, kinds
from tilewise.problems.limits import INT64_MAX

__all__ = ["ScheduleError", "read_fields", "read_file"]

SCHEMA = "tilewise/plan"
MOST_BYTES = 64 * 2**20
"""Largest file that is read. With every candidate of hundreds of layers a document has a tenth of it."""
MOST_LEVELS = 100
MOST_LAYERS = 10_000
MOST_NAMES = 100_000
MOST_PLANS = 1_000
MOST_CANDIDATES = 100_000
LONGEST = 4096
"""Most characters of a name or key; reasons may be longer."""
LEAST_MS, MOST_MS = 1e-9, 1e12
SLOWEST, FASTEST = 1.0, 1e18
POLICIES = ("arena", "paper_wd")
METHODS = ("milp", "exact")

T = TypeVar("T")


class ScheduleError(ValueError):
    """A document that is no schedule, or a schedule that cannot be used; the message names the field at fault.

    >>> try:
    ...     tilewise.Schedule.from_json({"kind": "shopping list"})
    ... except tilewise.ScheduleError as error:
    ...     print("no schedule")
    no schedule
    """


def read_file(path: Path) -> Any:
    """The JSON in a file. Raises ``OSError``, and :class:`ScheduleError` naming the file."""
    if "\0" in str(path):
        raise ScheduleError(f"schedule={str(path)!r:.80}: the path of a file would do, without NUL")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ScheduleError(
            f"{path}: not a regular file; one that schedule.save or tilewise plan --json wrote would do"
        )
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ScheduleError(f"{path}: has more than {MOST_BYTES} bytes; no schedule is as large")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError as error:
        raise ScheduleError(f"{path}: JSON is nested too deeply") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    except ValueError as error:  # no UTF-8, no JSON, or a number of too many digits
        raise ScheduleError(f"{path}: not JSON: {error}") from error


def _refuse(name: str) -> None:
    """Refuse ``NaN`` and ``Infinity``, which Python's JSON reader would take."""
    raise ScheduleError(f"{name} is not a JSON number")


def read_fields(data: object) -> dict[str, Any]:
    """A schedule's fields by name, from its document. Raises :class:`ScheduleError`."""
    check_values(data)
    document = _object(data, "schedule")
    if document.get("schema") != SCHEMA:
        raise _wrong("schema", document.get("schema"), f"{SCHEMA!r}, as tilewise plan --json writes it")
    version = _integer(document.get("version"), "version", least=1)
    if version > VERSIONS["plan"]:
        raise _wrong("version", version, f"at most {VERSIONS['plan']}; a newer tilewise wrote this")
    given = _object(document.get("options"), "options")
    device = _name(document.get("device"), "device")
    listed = _list(document.get("layers"), "layers", MOST_LAYERS)
    layers = tuple(_layer(entry, f"layers[{i}]", device) for i, entry in enumerate(listed))
    step_memory = _step_memory(document)
    if step_memory is None:
        _check_agreement(layers)
    return {
        "target": _name(document.get("target"), "target"),
        "device": device,
        "environment": _name(document.get("environment"), "environment"),
        "options": _options(given),
        "batch": _integer(given.get("batch"), "options.batch", least=1),
        "dtype": _one_of(given.get("dtype"), "options.dtype", tuple(DTYPES)),
        "precision": _one_of(given.get("precision"), "options.precision", PRECISIONS),
        "layout": _one_of(given.get("layout"), "options.layout", LAYOUTS),
        "layers": layers,
        "budget": _budget(document.get("budget")),
        "step_memory": step_memory,
        "largest_batch": _largest_batch(document.get("largest_batch")),
        "rates": _rates(document.get("rates")),
    }


def check_values(data: object) -> None:
    """Raise :class:`ScheduleError` for values that no document holds, wherever they stand.

    Those are numbers that are not finite or beyond 2^63, text that is not Unicode, and too much nesting.
    """
    waiting: list[tuple[object, int]] = [(data, 0)]
    while waiting:
        value, level = waiting.pop()
        if level > MOST_LEVELS:
            raise ScheduleError(f"schedule: nested more than {MOST_LEVELS} deep: no schedule is")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ScheduleError(f"schedule has the text {_short(value)}: {error.reason}") from error
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise ScheduleError(f"schedule has the number {value}: a finite one would do")
        elif isinstance(value, int):
            if abs(value) > INT64_MAX:
                raise ScheduleError("schedule has an integer of more than 63 bits: a smaller one would do")
        elif isinstance(value, dict):
            for key, inner in value.items():
                waiting += [(key, level), (inner, level + 1)]
        elif isinstance(value, list):
            waiting += [(inner, level + 1) for inner in value]
        elif value is not None:
            raise ScheduleError(f"schedule has a {type(value).__name__}: plain JSON values would do")


def _tasks() -> tuple[str, ...]:
    """Names of the computations that a layer of any kind may have."""
    return tuple(dict.fromkeys(task for kind in kinds().values() for task in kind.tasks))


def _layer(data: object, where: str, device: str) -> LayerResult:
    """A layer with its passes. ``where`` is its place in the document, for messages, as in all readers here."""
    entry = _object(data, where)
    names = _list(entry.get("names"), f"{where}.names", MOST_NAMES)
    if not names:
        raise _wrong(f"{where}.names", names, "at least one name")
    left = _text(entry.get("left"), f"{where}.left")
    listed = _list(entry.get("passes"), f"{where}.passes", len(_tasks()))
    passes = tuple(_pass(result, f"{where}.passes[{i}]", device) for i, result in enumerate(listed))
    if left and passes:
        raise _wrong(f"{where}.left", left, "empty text, as the layer has passes")
    if len({result.problem.task for result in passes}) < len(passes):
        raise ScheduleError(f"{where}.passes: the same pass twice; each once would do")
    layer = Layer(
        tuple(_name(name, f"{where}.names[{i}]", empty=True) for i, name in enumerate(names)),
        tuple(result.problem for result in passes),
        _flag(entry.get("transposed"), f"{where}.transposed"),
        left,
    )
    return LayerResult(layer, passes)


def _pass(data: object, where: str, device: str) -> PassResult:
    """One pass of a layer, whose problem is of ``device``."""
    entry = _object(data, where)
    key = _name(_object(entry.get("problem"), f"{where}.problem").get("key"), f"{where}.problem.key")
    problem = _valid(f"{where}.problem.key", lambda: from_key(key))
    if problem.device != device:
        raise _wrong(f"{where}.problem.key", key, f"a problem of device {_short(device)}, the schedule's")

    def plan_of(value: object, place: str) -> Plan:
        plan = _valid(place, lambda: Plan.from_json(value))
        if plan.problem != key:
            raise _wrong(f"{place}.problem", plan.problem, "the key of the problem that it is the plan of")
        return plan

    plan, front, candidates = (entry.get(name) for name in ("plan", "front", "candidates"))
    return PassResult(
        problem,
        None if plan is None else plan_of(plan, f"{where}.plan"),
        _text(entry.get("reason"), f"{where}.reason"),
        _time(entry.get("framework_ms"), f"{where}.framework_ms"),
        _time(entry.get("planned_ms"), f"{where}.planned_ms"),
        _several(front, f"{where}.front", MOST_PLANS, plan_of),
        _several(candidates, f"{where}.candidates", MOST_CANDIDATES, _measurement),
        _amount(entry, "framework_host_ms", where),
        _amount(entry, "planned_host_ms", where),
        _share(entry, where),
        _run_times(entry.get("runs"), f"{where}.runs"),
    )


def _run_times(data: object, where: str) -> RunTimes | None:
    """Times of single runs of a plan; ``None`` where nobody asked, and of documents of before there were any."""
    if data is None:
        return None
    entry = _object(data, where)
    count = _integer(entry.get("count"), f"{where}.count", least=1)
    return RunTimes(count, *(_milliseconds(entry.get(name), f"{where}.{name}") for name in ("least_ms", "median_ms")))


def _several(data: object, where: str, most: int, read: Callable[[object, str], T]) -> tuple[T, ...] | None:
    """The entries of the list ``data``, each read by ``read``; ``None`` where there is no list."""
    if data is None:
        return None
    return tuple(read(entry, f"{where}[{i}]") for i, entry in enumerate(_list(data, where, most)))


def _measurement(data: object, where: str) -> Measurement:
    """One candidate that was tried."""
    entry = _object(data, where)
    error, workspace, estimate_ms = (entry.get(name) for name in ("error", "workspace", "estimate_ms"))
    return Measurement(
        _name(entry.get("solver"), f"{where}.solver"),
        _integer(entry.get("version"), f"{where}.version"),
        _valid(f"{where}.config", lambda: Config.from_json(entry.get("config"))),
        _time(entry.get("time_ms"), f"{where}.time_ms"),
        None if workspace is None else _integer(workspace, f"{where}.workspace"),
        None if error is None else _error(error, f"{where}.error"),
        _text(entry.get("reason"), f"{where}.reason"),
        _time(entry.get("framework_ms"), f"{where}.framework_ms"),
        None if estimate_ms is None else _number(estimate_ms, f"{where}.estimate_ms"),
        _amount(entry, "host_ms", where),
        _amount(entry, "framework_host_ms", where),
        _amount(entry, "dispersion", where),
        None if entry.get("runs") is None else _integer(entry["runs"], f"{where}.runs"),
        _share(entry, where),
    )


def _amount(entry: dict[str, Any], name: str, where: str) -> float | None:
    """A number that earlier versions did not write, such as the host's milliseconds; ``None`` where there is none."""
    return None if entry.get(name) is None else _number(entry[name], f"{where}.{name}")


def _share(entry: dict[str, Any], where: str) -> float | None:
    """The share of the host's cores that other processes used; ``None`` where it is not known."""
    load = _amount(entry, "load", where)
    if load is not None and load > 1:
        raise _wrong(f"{where}.load", load, "a share from 0 to 1, or null")
    return load


def _error(data: object, where: str) -> Error:
    """Errors of a plan; null stands for one that is not finite."""
    entry = _object(data, where)
    values = ((name, entry.get(name)) for name in ("l2", "spread"))
    return Error(*(math.inf if value is None else _number(value, f"{where}.{name}") for name, value in values))


def _options(given: dict[str, Any]) -> Options:
    """The options that the network was planned under."""
    limit = given.get("workspace")
    return _valid(
        "options",
        lambda: Options(
            None if limit is None else _integer(limit, "options.workspace"),
            _name(given.get("batch_sizes"), "options.batch_sizes"),
            _name(given.get("rigor"), "options.rigor"),
            _flag(given.get("deterministic"), "options.deterministic"),
            None if given.get("error_limit") is None else _number(given["error_limit"], "options.error_limit"),
            _flag(given.get("strict", False), "options.strict"),
            _flag(given.get("cuda_graphs", False), "options.cuda_graphs"),
            tuple(_list(given.get("exclude", []), "options.exclude", MOST_NAMES)),
            tuple(_list(given.get("share_with", []), "options.share_with", MOST_NAMES)),
        ),
    )


def _budget(data: object) -> dict[str, Any] | None:
    """How one budget was divided among the kernels. Unknown fields are kept."""
    if data is None:
        return None
    budget = _object(data, "budget")
    _one_of(budget.get("policy"), "budget.policy", POLICIES)
    for name in ("total", "used", "least"):
        _integer(budget.get(name), f"budget.{name}")
    for i, entry in enumerate(_list(budget.get("segments"), "budget.segments", MOST_NAMES)):
        where = f"budget.segments[{i}]"
        segment = _kernel(entry, where)
        _integer(segment.get("workspace"), f"{where}.workspace")
        _time(segment.get("time_ms"), f"{where}.time_ms")
    program = _object(budget.get("program"), "budget.program")
    for name in ("variables", "rows"):
        _integer(program.get(name), f"budget.program.{name}")
    _number(program.get("solve_ms"), "budget.program.solve_ms")
    _flag(program.get("optimal"), "budget.program.optimal")
    _one_of(program.get("method"), "budget.program.method", METHODS)
    return budget


def _step_memory(document: dict[str, Any]) -> dict[str, Any] | None:
    """The memory that is alive when each kernel of a step runs. Unknown fields are kept.

    Documents of version 1 name it ``step``.
    """
    where = "step_memory" if "step_memory" in document else "step"
    if document.get(where) is None:
        return None
    memory = _object(document[where], where)
    if memory.get("limit") is not None:
        _integer(memory["limit"], f"{where}.limit")
    for name in ("peak", "least"):
        _integer(memory.get(name), f"{where}.{name}")
    for i, entry in enumerate(_list(memory.get("moments"), f"{where}.moments", MOST_NAMES)):
        moment = _kernel(entry, f"{where}.moments[{i}]")
        for name in ("alive", "result", "workspace"):
            _integer(moment.get(name), f"{where}.moments[{i}].{name}")
    return memory


def _kernel(data: object, where: str) -> dict[str, Any]:
    """An entry for one kernel: a pass of a layer."""
    entry = _object(data, where)
    _name(entry.get("layer"), f"{where}.layer", empty=True)
    _one_of(entry.get("pass"), f"{where}.pass", _tasks())
    return entry


def _check_agreement(layers: tuple[LayerResult, ...]) -> None:
    """Raise :class:`ScheduleError` where one problem has different plans in two places."""
    first: dict[Problem, tuple[str, Plan | None]] = {}
    for i, result in enumerate(layers):
        for j, pass_result in enumerate(result.passes):
            where, plan = first.setdefault(pass_result.problem, (f"layers[{i}].passes[{j}]", pass_result.plan))
            if plan != pass_result.plan:
                raise ScheduleError(f"layers[{i}].passes[{j}].plan: another than that of {where}, of the same problem")


def _valid(where: str, read: Callable[[], T]) -> T:
    """What ``read`` returns. A ``ValueError`` becomes a :class:`ScheduleError` that says ``where``."""
    try:
        return read()
    except ScheduleError:
        raise
    except ValueError as error:
        raise ScheduleError(f"{where}: {_short(error)}") from error


def _short(value: object) -> str:
    """A value as a message shows it."""
    text = str(value) if isinstance(value, Exception) else f"{value!r:.80}"
    return text.encode("ascii", "backslashreplace").decode()[:300]


def _wrong(where: str, value: object, expected: str) -> ScheduleError:
    """The error for a ``value`` that is not what was ``expected``."""
    return ScheduleError(f"{where}={_short(value)}: expected {expected}")


def _object(value: object, where: str) -> dict[str, Any]:
    """``value``, if it is an object. Raises :class:`ScheduleError` naming ``where`` it stands."""
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    return value


def _list(value: object, where: str, most: int) -> list[Any]:
    """``value``, if it is a list of at most ``most`` entries. Raises :class:`ScheduleError`."""
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    if len(value) > most:
        raise ScheduleError(f"{where}: has {len(value)} entries; at most {most} would do")
    return value


def _text(value: object, where: str) -> str:
    """``value``, if it is text. Raises :class:`ScheduleError`."""
    if not isinstance(value, str):
        raise _wrong(where, value, "text")
    return value


def _name(value: object, where: str, *, empty: bool = False) -> str:
    """``value``, if it is text of at most :data:`LONGEST` characters. Raises :class:`ScheduleError`."""
    text = _text(value, where)
    if not (text or empty) or len(text) > LONGEST:
        raise _wrong(where, text, f"text of {0 if empty else 1} to {LONGEST} characters")
    return text


def _one_of(value: object, where: str, known: tuple[str, ...]) -> str:
    """``value``, if it is one of the texts in ``known``. Raises :class:`ScheduleError`."""
    if not isinstance(value, str) or value not in known:
        raise _wrong(where, value, f"one of {', '.join(known)}")
    return value


def _flag(value: object, where: str) -> bool:
    """``value``, if it is true or false. Raises :class:`ScheduleError`."""
    if not isinstance(value, bool):
        raise _wrong(where, value, "true or false")
    return value


def _integer(value: object, where: str, least: int = 0) -> int:
    """``value``, if it is an integer from ``least`` to the largest of 64 bits. Raises :class:`ScheduleError`."""
    if type(value) is not int or not least <= value <= INT64_MAX:
        raise _wrong(where, value, f"an integer from {least} on")
    return value


def _number(value: object, where: str) -> float:
    """``value`` as a float, if it is a finite number and not negative. Raises :class:`ScheduleError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise _wrong(where, value, "a number, not negative")
    return float(value)


def _time(value: object, where: str) -> float | None:
    """Milliseconds, or ``None`` for null."""
    return None if value is None else _milliseconds(value, where, ", or null")


def _milliseconds(value: object, where: str, more: str = "") -> float:
    """``value`` as milliseconds that a run may take. Raises :class:`ScheduleError`, whose words ``more`` goes on."""
    number = _number(value, where)
    if not LEAST_MS <= number <= MOST_MS:
        raise _wrong(where, value, f"milliseconds, from {LEAST_MS} to {MOST_MS:.0e}{more}")
    return number


def _largest_batch(data: object) -> dict[str, Any] | None:
    """The largest batch that keeps to a step's limit. Unknown fields are kept."""
    if data is None:
        return None
    largest = _object(data, "largest_batch")
    _integer(largest.get("batch"), "largest_batch.batch", least=1)
    for name in ("step_ms", "image_ms"):
        _number(largest.get(name), f"largest_batch.{name}")
    return largest


def _rates(data: object) -> dict[str, Any] | None:
    """What the device was measured to reach; ``None`` where nobody knows, and of documents of before it was written."""
    if data is None:
        return None
    rates = _object(data, "rates")
    for name in ("bytes_per_second", "flops_per_second"):
        if not SLOWEST <= _number(rates.get(name), f"rates.{name}") <= FASTEST:
            raise _wrong(f"rates.{name}", rates[name], f"a rate from {SLOWEST:.0f} to {FASTEST:.0e}")
    return rates
