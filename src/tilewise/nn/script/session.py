"""Planning of layers while it is enabled, in models that stay as they are.

Functions of ``torch.nn.functional`` are replaced where modules and most code look them up at each call: as attributes
of that module. ``torch.conv2d`` and its siblings stay torch's own, as does a name that was bound before by ``from
torch.nn.functional import conv2d``. The replacements may be kept: while nothing is enabled they compute as torch's
functions do.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import _VF as VF

from tilewise.comm.agreement import several_ranks
from tilewise.nn.arguments import settings_of, takes
from tilewise.nn.background.begin import finish
from tilewise.nn.background.service import service
from tilewise.nn.functional import Table
from tilewise.nn.layers.overrides import BY_TORCH
from tilewise.nn.layers.recurrent.autocast import OPERATORS
from tilewise.nn.progress import Late, showing
from tilewise.nn.report import Report
from tilewise.nn.script import bilinear, convolutions, current, linear, recurrent, without_weights
from tilewise.nn.script.environment import with_variables
from tilewise.nn.script.later import CallsToPlan, LaterRecorder
from tilewise.nn.script.recorder import Recorder
from tilewise.nn.script.replacement import Replacement
from tilewise.nn.script.steps import Calls, Steps
from tilewise.nn.step.compare import compare_live, why_not_live
from tilewise.planner import Planner, Progress
from tilewise.settings import EnableOptions, Settings

__all__ = ["Session", "disable", "enable", "enabled"]

MOST_SITES = 8192
"""Weights, and arguments of functions without one, whose last call is remembered."""


class Session:
    """What was recorded and planned while enabled. It prints as a table and may be entered again as a context manager.

    See :func:`enabled` for the arguments. Raises ``ValueError`` naming the argument at fault.

    >>> model, images = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    >>> with tilewise.enabled(rigor="estimate") as session:
    ...     for _ in range(3):
    ...         _ = model(images)
    >>> session.wait()
    >>> session.report().pending
    0
    """

    def __init__(self, settings: Settings, *, planner: Planner | None, progress: Progress | None) -> None:
        if planner is not None and progress is not None:
            raise ValueError("progress: the planner given has its own; give one or the other")
        silent = planner is not None or progress is not None
        if planner is None:
            planner = Planner(progress=Late() if progress is None else progress)
        self.work: CallsToPlan | None = None
        if settings.wait or several_ranks():
            self.plan_table = Recorder(settings.options(), planner, settings.most_plans)
        else:
            later = LaterRecorder(settings.options(), planner, settings.most_plans)
            self.plan_table, self.work = later, CallsToPlan(later, settings.background_share)
        self.table = Table(self.plan_table)
        self.sites: dict[Any, current.Site] = {}
        self.waiting = self.plan_table.waiting
        self.watched = False
        """Whether steps are of interest: something is still to be planned, or steps are compared."""
        self._asked = settings
        self._calls = Calls(self.plan_table, self._forget)
        self._goal = compare_live(self._calls, self._pending, settings, None, silent)
        self._steps = Steps(self._goal)

    def __enter__(self) -> Session:
        _push(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop(self)

    def __str__(self) -> str:
        return str(self.report())

    def report(self) -> Report:
        """The report of every kind of call: its plans and times, whether they replace torch's choice, and why not.

        Its ``step`` has the times of the program's whole steps by torch and by plans, or how far their comparison is.
        """
        return replace(self.plan_table.report(), step=self._goal.report)

    def wait(self) -> None:
        """Plan now what is left to be planned in the background, and return when that is done.

        Where steps are being compared, plans run at its end, and the comparison goes on with the next steps. Ctrl-C
        keeps what was measured. Raises ``RuntimeError`` as :func:`tilewise.wait` does.
        """
        if self.work is not None and self.work.pending:
            finish(self.work)
        self._goal.rest()

    def between(self, site: current.Site, *operands: Any) -> Any:
        """The result of a call while planning goes on in the background, or while steps are compared.

        A step may begin with it, and its graph keeps plans from changing. So torch's result is computed here, too.
        """
        self._steps.called(site.function, *operands[:2])
        self.watched = bool(self._pending()) or not self._goal.over
        y = NotImplemented
        if not self._calls.by_torch:
            y = site(*operands)
            if y is NotImplemented and self.waiting:
                y = self.note(site, *operands)
        if y is NotImplemented:
            y = site.by_torch(*operands)
        service().graphs.add(y)
        return y

    def compiled(self) -> None:
        """A call is compiled. Where all calls are, no step is seen any more."""
        self._goal.unseen("torch.compile traced their calls, and no other ones are seen")

    def add(self, weight: torch.Tensor, site: current.Site) -> None:
        """Remember the site of a weight."""
        self.keep(id(weight), site)

    def keep(self, key: object, site: current.Site) -> None:
        """Remember the site of ``key``."""
        if len(self.sites) >= MOST_SITES:
            self.sites.clear()
        self.sites[key] = site

    def note(self, site: current.Site, *operands: Any) -> Any:
        """Record a call that has no plan yet; its result where all is planned now, else ``NotImplemented``."""
        with showing(self.plan_table.planner.progress):
            planned = self.plan_table.note(site, operands[1])
        if planned:
            self._planned()
        return site(*operands) if planned else NotImplemented

    def _planned(self) -> None:
        """There are new plans, or will be: the steps that have them are compared."""
        reason = why_not_live(self._asked, None)  # ranks may have met since the session began
        if reason:
            self._goal.stop(reason)
        else:
            self._goal.reopen()
        self.watched = bool(self._pending()) or not self._goal.over

    def _pending(self) -> int:
        """How many problems are still to be planned."""
        return 0 if self.work is None else self.work.pending

    def _forget(self) -> None:
        """Let every layer look its plans up anew."""
        self.table.forget()
        for site in list(self.sites.values()):
            for each in (site, *site.shapes.values()):
                each.forget()


_stack: list[Session] = []
_of_process: Session | None = None
_switching = threading.RLock()


REPLACEMENTS: tuple[Replacement, ...] = (
    *(Replacement(F, name, BY_TORCH[name], function) for name, function in convolutions.FUNCTIONS.items()),
    Replacement(F, "linear", linear.BY_TORCH, linear.FUNCTION),
    Replacement(F, "bilinear", bilinear.BY_TORCH, bilinear.FUNCTION),
    *(
        Replacement(F, name, without_weights.BY_TORCH[name], function)
        for name, function in without_weights.FUNCTIONS.items()
    ),
    *(Replacement(VF, cell, OPERATORS[cell], function) for cell, function in recurrent.FUNCTIONS.items()),
)
"""All that is replaced while planning is enabled. Another kind of function is another line here."""
for _each in REPLACEMENTS:
    _each.prepare()


@takes(EnableOptions)
def enabled(
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    planner: Planner | None = None,
    **options: Unpack[EnableOptions],
) -> Session:
    """Plan ``F.conv1d`` to ``F.conv_transpose3d`` and ``F.linear`` within a ``with`` block, in any model and thread.

    So are ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, whose functions in ``torch._VF`` are replaced as well. ``F.bilinear``
    runs by a planned product, or by torch's own product in its place.

    The first step is computed by torch and its calls recorded. When a call comes again all of them are planned, with
    the gradients that they need, and from then on they run by plan where that is faster. Shapes that appear later are
    recorded and planned at their repeat in the same way. A problem for which no plan keeps ``workspace`` is left to
    torch, and so are linear, bilinear and recurrent layers under such a limit. What was recorded is planned in the
    background, in turns as a step begins; with ``wait=True`` at once. Then a few steps run by torch among the planned
    ones, and what is faster is kept, as ``goal`` says.

    Options, each by keyword. Where one is not given, its environment variable says, ``TILEWISE_WORKSPACE`` and so on,
    and else the default:

    {options}

    Further arguments, of which ``settings`` has no environment variable asked:

    {arguments}

    The session returned may be entered again and keeps its plans; ``session.report()`` tells what was done. In blocks
    within one another the innermost counts. Raises ``ValueError`` naming the argument or the variable at fault.

    >>> model, images = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    >>> with tilewise.enabled(rigor="estimate", wait=True) as session:
    ...     for _ in range(2):
    ...         _ = model(images)
    >>> len(session.report().layers)
    1
    """
    given = with_variables(options) if settings is None else options
    return Session(settings_of("enabled", EnableOptions, settings, given), planner=planner, progress=progress)


@takes(EnableOptions)
def enable(
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    planner: Planner | None = None,
    **options: Unpack[EnableOptions],
) -> Session:
    """:func:`enabled` from now on, until :func:`disable` or another :func:`enable`.

    Arguments and errors are those of :func:`enabled`. Returns the session, which need not be entered.

    >>> model, images = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    >>> session = tilewise.enable(rigor="estimate")
    >>> for _ in range(3):
    ...     model(images).sum().backward()
    >>> session.wait()
    >>> tilewise.disable()
    >>> [layer.kind for layer in session.report().layers]
    ['conv2d']
    """
    global _of_process
    session = enabled(settings=settings, progress=progress, planner=planner, **options)
    with _switching:
        disable()
        _of_process = session
        _push(session)
    return session


def disable() -> None:
    """Undo :func:`enable`, if it was called; a block of :func:`enabled` goes on.

    >>> session = tilewise.enable(rigor="estimate")
    >>> tilewise.disable()
    """
    global _of_process
    with _switching:
        if _of_process is not None:
            _pop(_of_process)
        _of_process = None


def _push(session: Session) -> None:
    """Make ``session`` the innermost."""
    with _switching:
        _stack.append(session)
        _switch()


def _pop(session: Session) -> None:
    """Remove ``session`` at its innermost place, which need not be last: threads leave blocks in any order."""
    with _switching:
        for index in reversed(range(len(_stack))):
            if _stack[index] is session:
                del _stack[index]
                break
        _switch()


def _switch() -> None:
    """Install or remove the replacements, as the stack says."""
    current.session = _stack[-1] if _stack else None
    for each in REPLACEMENTS:
        each.install(bool(_stack))


def _off_in_child() -> None:
    """End planning in a forked child, such as a worker that loads data, until the child enables it itself."""
    global _switching, _of_process
    _switching = threading.RLock()
    _of_process = None
    _stack.clear()
    _switch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_off_in_child)
