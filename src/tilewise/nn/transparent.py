"""Planning of every ``torch.nn.functional`` convolution while it is enabled, in models that know nothing of it.

The functions are replaced where ``nn.ConvNd`` and most code look them up at each call: as attributes of
``torch.nn.functional``. ``torch.conv2d`` and its siblings stay torch's own, as does a name bound by ``from
torch.nn.functional import conv2d`` before. The replacements may be kept: when nothing is enabled they are torch's.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.jit._builtins import _register_builtin

from tilewise.nn.book import make_options
from tilewise.nn.call import kernel_of
from tilewise.nn.functional import Planned, Table, convolution, traced_by, transposed_convolution
from tilewise.nn.overrides import BY_TORCH, function_name, stand_in
from tilewise.nn.progress import Late, showing
from tilewise.nn.recorder import Recorder, Site
from tilewise.nn.report import Report
from tilewise.nn.settings import Unset, settled
from tilewise.planner import Planner, Progress

__all__ = ["Session", "disable", "enable", "enabled"]

MOST_SITES = 8192
"""Weights whose last call is remembered."""
FEW = 8
"""Calls of other kinds than the last before a weight is taken to meet several in turns."""
ENVIRONMENT: Any = Unset.ENVIRONMENT


class Session:
    """What was recorded and planned while enabled; prints as a table. A context manager that may be entered again.

    See :func:`enabled` for the arguments. Raises ``ValueError`` naming the argument, or the environment's variable, at
    fault.
    """

    def __init__(self, *, planner: Planner | None, progress: Progress | None, **given: Any) -> None:
        values = settled(given)
        most_plans = values.pop("most_plans")
        if type(most_plans) is not int or most_plans < 0:
            raise ValueError(f"most_plans={most_plans!r}: a whole number would do, 0 to plan nothing")
        if planner is not None and progress is not None:
            raise ValueError("progress: the planner given has its own; give one or the other")
        options = make_options(**values)
        if planner is None:
            planner = Planner(progress=progress or Late())
        self.book = Recorder(options, planner, most_plans)
        self.table = Table(self.book)
        self.sites: dict[int, Site] = {}
        self.waiting = self.book.waiting

    def __enter__(self) -> Session:
        _push(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop(self)

    def __str__(self) -> str:
        return str(self.report())

    def report(self) -> Report:
        """Every kind of call recorded: its plans and times, whether they run in place of torch, and why not."""
        return self.book.report()

    def site(self, arguments: tuple[Any, ...], weight: object) -> Site | None:
        """The layer of these arguments as ``weight`` meets it from now on; ``None`` where torch must judge them."""
        if not isinstance(weight, torch.Tensor):
            return None
        dims, stride, padding, dilation, groups, transposed, extra = arguments
        if type(padding) is tuple and padding and type(padding[0]) is str:
            padding = padding[0]
        kernel = tuple(kernel_of(weight))
        layer = self.table.layer(dims, stride, padding, dilation, groups, kernel, transposed, extra)
        if layer is None:
            return None
        if len(self.sites) >= MOST_SITES:
            self.sites.clear()
        note = functools.partial(self.note, f"conv{'_transpose' if transposed else ''}{dims}d")
        site = self.sites[id(weight)] = Site(layer, arguments, note)
        return site

    def note(self, function: str, site: Site, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        """A call that could not be resolved: its result where it is planned with this, else ``NotImplemented``."""
        with showing(self.book.planner.progress):
            planned = self.book.note(function, site, w)
        return site(x, w, b) if planned else NotImplemented


_current: Session | None = None
_stack: list[Session] = []
_of_process: Session | None = None
_switching = threading.RLock()


def _entrance(dims: int, transposed: bool) -> Planned:
    """What a replaced function asks first. A weight's ``id`` only leads to a guess, which the layer checks."""
    function = function_name(dims, transposed)
    compiling = torch.compiler.is_dynamo_compiling

    def planned(x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, groups: Any, extra: Any = 0) -> Any:
        session = _current
        if session is None:
            return NotImplemented
        if compiling():
            traced = (dims, stride, padding, dilation, groups, w.shape[2:], transposed, extra)
            return traced_by(session.table, traced, x, w, b)
        if type(padding) is str and isinstance(w, torch.Tensor):  # what it stands for depends on the kernel
            padding = (padding, kernel_of(w))
        arguments = (dims, stride, padding, dilation, groups, transposed, extra)
        site = session.sites.get(id(w))
        if site is None or site.arguments != arguments:
            site = session.site(arguments, w)
            if site is None:
                return NotImplemented
        if site.misses > FEW:
            site = site.at(x)
            if site is None:
                return NotImplemented
        y = site(x, w, b)
        if y is NotImplemented and session.waiting:
            return session.note(function, site, x, w, b)
        return y

    return planned


REPLACEMENTS = {
    **{f"conv{dims}d": convolution(dims, _entrance(dims, False)) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": transposed_convolution(dims, _entrance(dims, True)) for dims in (1, 2, 3)},
}
for _name, _function in REPLACEMENTS.items():
    _function.__doc__ = BY_TORCH[_name].__doc__
    _function.__module__ = F.__name__  # pickled by name, it loads as torch's
    stand_in(_name, _function)
    _register_builtin(_function, f"aten::{_name}")  # what torch.jit.script makes of it


def enabled(
    *,
    workspace: int | str | None = ENVIRONMENT,
    batch_sizes: str = ENVIRONMENT,
    rigor: str = ENVIRONMENT,
    deterministic: bool = ENVIRONMENT,
    error_limit: float | None = ENVIRONMENT,
    strict: bool = ENVIRONMENT,
    cuda_graphs: bool = ENVIRONMENT,
    exclude: Sequence[str] = ENVIRONMENT,
    most_plans: int = ENVIRONMENT,
    progress: Progress | None = None,
    planner: Planner | None = None,
) -> Session:
    """Plan every ``F.conv1d`` to ``F.conv_transpose3d`` within a ``with`` block, in any model and thread.

    The first step is computed by torch and its calls recorded. When a call comes again all of them are planned, with
    the gradients that they need, and from then on they run by plan where that is faster. Shapes that appear later are
    recorded and planned at their repeat in the same way.

    - ``workspace``, ``batch_sizes``, ``rigor``, ``deterministic``, ``error_limit``, ``strict``, ``cuda_graphs``,
      ``exclude``, ``planner``: as for :func:`optimize`. Where not given, ``TILEWISE_WORKSPACE`` and so on say, and else
      the defaults there. A problem for which no plan keeps ``workspace`` is left to torch.
    - ``most_plans``: how many problems are planned at most (512); then torch computes what is new.
    - ``progress(done, total, text)``: called as problems are planned; by default a bar on stderr where that takes more
      than two seconds.

    The session returned may be entered again and keeps its plans; ``session.report()`` tells what was done. In blocks
    within one another the innermost counts. Raises ``ValueError`` naming the argument or the variable at fault.
    """
    return Session(
        workspace=workspace,
        batch_sizes=batch_sizes,
        rigor=rigor,
        deterministic=deterministic,
        error_limit=error_limit,
        strict=strict,
        cuda_graphs=cuda_graphs,
        exclude=exclude,
        most_plans=most_plans,
        progress=progress,
        planner=planner,
    )


def enable(**arguments: Any) -> Session:
    """:func:`enabled` from now on, until :func:`disable` or another :func:`enable`. Arguments are the same."""
    global _of_process
    session = enabled(**arguments)
    with _switching:
        disable()
        _of_process = session
        _push(session)
    return session


def disable() -> None:
    """Undo :func:`enable`, if it was called; a block of :func:`enabled` goes on."""
    global _of_process
    with _switching:
        if _of_process is not None:
            _pop(_of_process)
        _of_process = None


def _push(session: Session) -> None:
    with _switching:
        _stack.append(session)
        _switch()


def _pop(session: Session) -> None:
    """Take out the innermost place of ``session``: blocks of several threads end in any order."""
    with _switching:
        for index in reversed(range(len(_stack))):
            if _stack[index] is session:
                del _stack[index]
                break
        _switch()


def _switch() -> None:
    """Have the functions be as the stack says. One that somebody else has replaced meanwhile is theirs to put back."""
    global _current
    _current = _stack[-1] if _stack else None
    for name, function in REPLACEMENTS.items():
        own, other = (BY_TORCH[name], function) if _stack else (function, BY_TORCH[name])
        found = getattr(F, name)
        if found is own:
            setattr(F, name, other)
        elif found is not other and _stack:
            warnings.warn(
                f"tilewise: torch.nn.functional.{name} is not torch's own ({found!r}): it stays", stacklevel=4
            )


def _off_in_child() -> None:
    """A forked child, such as a worker that loads data, plans nothing until it enables planning itself."""
    global _switching, _of_process
    _switching = threading.RLock()
    _of_process = None
    _stack.clear()
    _switch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_off_in_child)
