"""``explain`` for people: a sentence that answers, then every candidate and why it was not chosen."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.markup import escape

from tilewise.plan import Measurement, Plan, format_bytes, is_busy
from tilewise.planner.measuring.replacing import MARGIN, loses_by_launches
from tilewise.planner.measuring.took import Took
from tilewise.report.sheet import Sheet
from tilewise.report.values import PassResult, is_left
from tilewise.report.words import NOTHING, config_words, format_ms, format_ratio, marked, plan_words

__all__ = ["Explained", "answer", "answer_text", "explain_table", "why_not"]

NUMBERS = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?")
LONGEST = 240
"""Letters of a reason that are shown."""
EQUAL = 0.005
"""Times that differ by this part of the chosen plan's are called equal: less shows in no figure of the table."""
ESTIMATED = ("not measured", "not run")
"""How reasons begin of candidates that were left out by their estimates."""


@dataclass(frozen=True)
class Explained:
    """What was tried for one pass, and what came of it. ``rigor`` is how hard was searched."""

    result: PassResult
    tried: Sequence[Measurement]
    rigor: str = "measure"

    @property
    def device(self) -> str:
        """The device's name."""
        return self.result.problem.device

    @property
    def chosen(self) -> Measurement | None:
        """The measurement of the plan that was chosen; ``None`` where there is none, or it came from elsewhere."""
        plan = self.result.plan
        if plan is None:
            return None
        same = [m for m in self.tried if not m.reason and m.solver == plan.solver]
        exact = [m for m in same if m.config == plan.config or m.time_ms == plan.time_ms]
        return exact[0] if exact else None

    @property
    def torchs(self) -> Measurement | None:
        """torch's own choice, if it was measured."""
        return next((m for m in self.tried if _is_torchs(m) and m.time_ms is not None), None)


def answer(explained: Explained) -> str:
    """One sentence that says what computes the pass and why, and a second one with what was tried, for a terminal."""
    doubt = f"[yellow]{escape(words)}.[/] " if (words := _doubt(explained)) else ""
    return f"[bold]{escape(_why(explained))}.[/] {doubt}{escape(_counts(explained))}."


def answer_text(explained: Explained) -> str:
    """:func:`answer` as plain text."""
    return ". ".join(filter(None, (_why(explained), _doubt(explained), _counts(explained)))) + "."


def _why(explained: Explained) -> str:
    """What computes the pass, and why, as a sentence without its stop."""
    plan = explained.result.plan
    if plan is None:
        return _nothing(explained)
    if explained.rigor == "estimate":
        return f"By estimate alone {_called(explained, plan)} is the fastest for {explained.result.problem.task}"
    return _kept(explained, plan) if is_left(plan) else _replaced(explained, plan)


def _doubt(explained: Explained) -> str:
    """That the answer is doubtful, where other processes kept the host busy while it was found; else empty."""
    plan = explained.result.plan
    if plan is None or not plan.busy:
        return ""
    return "Doubtful: other processes kept the host busy while these times were taken"


def _called(explained: Explained, plan: Plan) -> str:
    """What a plan is called in a sentence."""
    if is_left(plan):
        return "torch's own choice"
    name = plan_words(plan) if explained.chosen is None else _Names(explained.tried).of(explained.chosen)
    solver, colon, words = name.partition(": ")
    return f"{solver} ({words})" if colon else solver


def _replaced(explained: Explained, plan: Plan) -> str:
    """Why a plan takes the place of torch's own choice."""
    m, torchs = explained.chosen, explained.torchs
    text = f"The fastest for {explained.result.problem.task} is {_called(explained, plan)}: {_ms(plan.time_ms)}"
    base_ms = m.baseline_ms if m is not None and m.baseline_ms is not None else (torchs.time_ms if torchs else None)
    if base_ms is not None and plan.time_ms:
        text += f", {base_ms / plan.time_ms:.2f} times as fast as torch's own choice ({_ms(base_ms)})"
        if torchs is not None and torchs.reason:
            text += f", which may not be used: it {torchs.reason}"
    return f"{text}, in {format_bytes(plan.workspace)} of workspace"


def _kept(explained: Explained, plan: Plan) -> str:
    """Why torch's own choice stays."""
    others = [m for m in explained.tried if not m.reason and m.time_ms is not None and not _is_torchs(m)]
    text = f"Torch's own choice is kept for {explained.result.problem.task}: {_ms(plan.time_ms)}"
    if not others:
        return f"{text}, and nothing else was timed"
    best = min(others, key=lambda m: m.time_ms or math.inf)
    name = _Names(explained.tried).of(best).replace(": ", " (", 1)
    name += ")" if " (" in name else ""
    return f"{text}. The fastest other, {name}, took {_ms(best.time_ms)}: {why_not(best, explained)}"


def _nothing(explained: Explained) -> str:
    """Why there is no plan."""
    task = explained.result.problem.task
    over = [m for m in explained.tried if m.reason and m.workspace and "the limit is" in m.reason]
    if over:
        least = min(over, key=lambda m: m.workspace or 0)
        name, needed = _Names(explained.tried).of(least), format_bytes(least.workspace or 0)
        return f"Nothing computes {task} within the workspace: the least that a candidate needs is {needed}, {name}"
    if explained.rigor == "wisdom_only":
        return f"Wisdom has no plan for {task}: without --rigor wisdom_only it would be looked for"
    return f"Nothing computes {task}: the reasons stand below"


def _counts(explained: Explained) -> str:
    """How many candidates were tried, and how the others were lost."""
    timed = sum(not m.reason and m.time_ms is not None for m in explained.tried)
    estimated = sum(m.reason.startswith(ESTIMATED) for m in explained.tried)
    lost = len(explained.tried) - timed - estimated
    verb = "estimated" if explained.rigor == "estimate" else "timed"
    words = [f"{timed} {'candidate' if timed == 1 else 'candidates'} {'was' if timed == 1 else 'were'} {verb}"]
    words += [f"{estimated} left out by their estimates"] if estimated else []
    words += [f"{lost} out for the reasons below"] if lost else []
    return ", ".join(words)


def why_not(m: Measurement, explained: Explained) -> str:
    """Why a candidate was not chosen, in words; empty for the chosen one."""
    if m.reason:
        return m.reason
    plan, chosen = explained.result.plan, explained.chosen
    if m is chosen or plan is None or m.time_ms is None or not math.isfinite(plan.time_ms):
        return ""
    behind = m.time_ms - plan.time_ms
    if abs(behind) <= EQUAL * plan.time_ms:
        return f"as fast as {_than(plan)}, within what single runs vary"
    if behind > 0:
        return f"{_ms(behind)} slower{_beside(m.time_ms, plan.time_ms)}"
    return _faster_alone(m, plan, explained)


def _beside(time_ms: float, chosen_ms: float) -> str:
    """How a longer time compares with that of the chosen plan, in brackets."""
    if not chosen_ms:
        return ""
    ratio = time_ms / chosen_ms
    return f" ({ratio - 1:.0%})" if ratio < 2 else f" ({ratio:.3g} times as long)"


def _faster_alone(m: Measurement, plan: Plan, explained: Explained) -> str:
    """Why a candidate was not chosen whose own trial took less than the chosen plan.

    The chosen plan's time is another one: the few that were expected to be the fastest are timed in turns with torch's
    own choice, when all trials are over.
    """
    assert m.time_ms is not None
    gain, torchs = plan.time_ms - m.time_ms, plan if is_left(plan) else explained.torchs
    if torchs is not None and (more := _host_us_more(m, torchs)):
        needs = f"this needs {more:.0f} us more of the host in a step" + ("" if is_left(plan) else " than torch's")
        return f"{_than(plan)} is {_ms(gain)} slower alone, but {needs}"
    turns = "when the best were timed in turns" + (" on a busy host" if plan.busy else "")
    if not is_left(plan):
        return f"{_ms(gain)} faster when tried alone; {turns}, the chosen one won"
    margin = MARGIN["cpu" if explained.device == "cpu" else "cuda"]
    if m.time_ms > margin * plan.time_ms:
        percent = math.floor(100 * gain / plan.time_ms)
        share = f"{percent}%" if percent else "less than 1%"
        return f"{share} faster than torch's: a gain of less than {1 - margin:.0%} is not sure"
    return f"{_ms(gain)} faster when tried alone; {turns}, none surely beat torch's"


def _than(plan: Plan) -> str:
    """What the plan that runs is called beside another candidate."""
    return "torch's" if is_left(plan) else "the chosen one"


def _host_us_more(m: Measurement, torchs: Measurement | Plan) -> float:
    """Microseconds of the host by which a candidate loses to torch's choice in a step; 0 where it does not."""
    times = m.time_ms, m.host_ms, torchs.time_ms, torchs.host_ms
    known = [ms for ms in times if ms is not None and math.isfinite(ms)]
    may_run = isinstance(torchs, Plan) or not torchs.reason
    if len(known) < len(times) or not may_run or not loses_by_launches(Took(*known[:2]), Took(*known[2:])):
        return 0.0
    return 1e3 * (known[1] - known[3])


def explain_table(explained: Explained, *, verbose: bool = False) -> Sheet:
    """Everything that was tried: measured candidates by time, then lost ones with their reasons.

    ``varies`` is the interquartile range of the runs' times over their median. Lost candidates with the same reason are
    one row, and configs are in words; with ``verbose`` each has its own row, its raw config, its speed-up and the
    spread of an outlier's error.
    """
    on_gpu = explained.device != "cpu"
    host = (("host ms", "right"),) if on_gpu else ()
    more = (("speed-up", "right"), ("spread", "right")) if verbose else ()
    sheet = Sheet(
        (("candidate", "text"), ("estimate ms", "right"), ("ms", "right"), ("varies", "right"), *host,
         ("workspace", "right"), ("error", "right"), *more, ("why not", "note"))
    )  # fmt: skip
    names = _Names(explained.tried, verbose)
    ranked = sorted(explained.tried, key=_merit)
    chosen = explained.chosen
    for m in sorted((m for m in ranked if not m.reason), key=lambda m: m is not chosen):  # which comes first
        name, why = escape(names.of(m)), escape(why_not(m, explained))
        if m is chosen:
            name, why = f"[bold]{name}[/]", "[bold]chosen[/]"
        sheet.add_row(name, *_figures(m, explained.device, on_gpu, verbose), why)
    out = [[m] for m in ranked if m.reason] if verbose else _grouped(m for m in ranked if m.reason)
    for group in (group for group in out if _has_figures(group[0])):
        figures = _figures(group[0], explained.device, on_gpu, verbose)
        sheet.add_row(escape(names.of_all(group)), *figures, escape(_short(group[0].reason, verbose)), style="dim")
    for place, group in enumerate(group for group in out if not _has_figures(group[0])):
        if not place:
            sheet.add_line("\n[bold]out[/]")
        sheet.add_line(f"  {escape(names.of_all(group))}: [dim]{escape(_short(group[0].reason, verbose))}[/]")
    return sheet


def _short(reason: str, verbose: bool) -> str:
    """A reason, cut short at a word where it goes on and on, as that of a split with those of all its parts does."""
    if verbose or len(reason) <= LONGEST:
        return reason
    return f"{reason[:LONGEST].rpartition(' ')[0]} ... (--verbose says all)"


def _has_figures(m: Measurement) -> bool:
    """Whether anything is known of a candidate beside the reason why it is out."""
    return any(value is not None for value in (m.estimate_ms, m.time_ms, m.workspace, m.error))


def _figures(m: Measurement, device: str, on_gpu: bool, verbose: bool) -> list[str]:
    """The cells of a candidate's numbers."""
    ratio = None if m.time_ms is None or m.baseline_ms is None else m.baseline_ms / m.time_ms
    return [
        format_ms(m.estimate_ms),
        marked(format_ms(m.time_ms), is_busy(m.load, device)),
        NOTHING if m.dispersion is None else f"{m.dispersion:.0%}",
        *([format_ms(m.host_ms)] if on_gpu else []),
        NOTHING if m.workspace is None else format_bytes(m.workspace),
        NOTHING if m.error is None else f"{m.error.l2:.0e}",
        *([format_ratio(ratio), NOTHING if m.error is None else f"{m.error.spread:.0e}"] if verbose else []),
    ]


def _grouped(lost: Iterable[Measurement]) -> list[list[Measurement]]:
    """Lost candidates by solver and reason, numbers aside; solvers that were never asked for a config by reason."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in lost:
        groups.setdefault((m.solver if m.config else "", NUMBERS.sub("0", m.reason)), []).append(m)
    return list(groups.values())


class _Names:
    """What candidates are called. Of several configs of one solver only what differs is said, with ``verbose`` all."""

    def __init__(self, tried: Iterable[Measurement], verbose: bool = False) -> None:
        self._verbose = verbose
        self._values: dict[str, dict[str, set[object]]] = {}
        for m in tried:
            for name, value in m.config.items():
                self._values.setdefault(m.solver, {}).setdefault(name, set()).add(value)

    def of(self, m: Measurement) -> str:
        """The name of one candidate: its solver and its config."""
        if self._verbose:
            return f"{m.solver} {m.config}".strip()
        differing = {name for name, values in self._values.get(m.solver, {}).items() if len(values) > 1}
        words = config_words({name: value for name, value in m.config.items() if not differing or name in differing})
        return f"{m.solver}: {words}" if words else m.solver

    def of_all(self, group: Sequence[Measurement]) -> str:
        """The names of candidates that are out for one reason."""
        if len(group) > 1 and not group[0].config:
            return ", ".join(m.solver for m in group)
        others = len(group) - 1
        more = f", and {others} other config{'s' if others > 1 else ''}" if others else ""
        return self.of(group[0]) + more


def _is_torchs(m: Measurement) -> bool:
    """Whether a candidate is torch's own choice."""
    return is_left(Plan("", m.solver, m.version))


def _merit(m: Measurement) -> tuple[bool, float, str, str]:
    """The order of measurements in a table."""
    return bool(m.reason), math.inf if m.time_ms is None else m.time_ms, m.solver, m.config.key


def _ms(value: float | None) -> str:
    """Milliseconds with their unit."""
    return f"{format_ms(value)} ms"
