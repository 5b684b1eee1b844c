"""What can be said against a command line before torch is imported, which takes a second or more."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from tilewise.cli.given.here import modules_here
from tilewise.cli.program import BadInput, bad_input
from tilewise.cli.settings import OPS, PASSES, ROLES, TASKS, Asked, workspace_bytes
from tilewise.declared import solver_names
from tilewise.frontends.names import check_name
from tilewise.plan import parse_bytes
from tilewise.problems.texts.conv import looks_like_layer, read_layer
from tilewise.problems.texts.gemm import looks_like_product, read_product
from tilewise.problems.texts.lrn import looks_like_lrn, read_lrn
from tilewise.problems.texts.pooling import looks_like_pooling, read_pooling
from tilewise.problems.texts.recurrent import looks_like_recurrent, read_recurrent

__all__ = [
    "check_asked",
    "check_budget",
    "check_file",
    "check_passes",
    "check_solvers",
    "check_target",
    "kind_of_text",
    "own_passes",
]

DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")
KINDS: dict[str, tuple[Callable[[str], bool], tuple[str, ...]]] = {
    "pooling": (looks_like_pooling, TASKS),
    "lrn": (looks_like_lrn, TASKS),
    "gemm": (looks_like_product, OPS),
    "rnn": (looks_like_recurrent, TASKS),
    "conv": (looks_like_layer, PASSES),
}
"""Kinds of layers that may be given as text: what tells one, and its passes."""
BY_ROLE: dict[str, dict[str, str]] = {
    "conv": dict(zip(ROLES, PASSES, strict=True)),
    "transposed": dict(zip(ROLES, ("dgrad", "fprop", "wgrad"), strict=True)),
    "gemm": dict(zip(ROLES, ("nt", "nn", "tn"), strict=True)),
}
"""The passes of each kind by torch's words for them. A product's are those of the linear layer whose forward it is.

Other kinds have passes in which forward and gradients are one.
"""


def own_passes(kind: str, passes: Iterable[str]) -> tuple[str, ...]:
    """``passes`` in the words of a ``kind`` of :data:`BY_ROLE`, each once.

    >>> own_passes("conv", ["forward", "fprop", "wgrad"]), own_passes("transposed", ["forward"])
    (('fprop', 'wgrad'), ('dgrad',))
    """
    return tuple(dict.fromkeys(BY_ROLE[kind].get(name, name) for name in passes))


def kind_of_text(text: str) -> str:
    """The kind of layer that ``text`` is meant as, right or wrong; empty for the name of a network."""
    return next((kind for kind, (is_meant, _) in KINDS.items() if is_meant(text)), "")


def check_target(text: str, settings: Asked, passes: tuple[str, ...] = (), kind: str | None = None) -> None:
    """Raise :class:`BadInput` for a layer or network that cannot be, or that ``settings`` do not fit.

    ``kind`` is the kind of layer that it is to be, ``""`` for a network; ``None`` leaves that to the text.
    """
    kind = kind_of_text(text) if kind is None else kind
    known = KINDS[kind][1] if kind else PASSES
    check_passes(text, passes, (*known, *ROLES) if kind in ("", *BY_ROLE) else known)
    if not kind:
        with bad_input("NET|LAYER"), modules_here(text):
            check_name(text)
        return
    with bad_input():
        _READ[kind](text, settings)


def check_passes(text: str, passes: Iterable[str], known: tuple[str, ...]) -> None:
    """Raise :class:`BadInput` for a pass that ``text`` does not have."""
    for name in passes:
        if name not in known:
            raise BadInput(f"--pass {name!r}: {text} has {', '.join(known)}")


def _conv(text: str, settings: Asked) -> None:
    read_layer(text, settings.batch)


def _gemm(text: str, settings: Asked) -> None:
    if settings.layout != "contiguous":
        raise BadInput(f"--layout {settings.layout!r}: a product has contiguous rows; leave it out")
    if settings.batch not in (None, max(read_product(text).batch, 1)):
        raise BadInput(f"--batch {settings.batch}: sizes of a product are in its text, as in 8x16x512:8x512x64")


def _rnn(text: str, settings: Asked) -> None:
    if settings.layout != "contiguous":
        raise BadInput(f"--layout {settings.layout!r}: a recurrent layer is contiguous, time first; leave it out")
    _, fields = read_recurrent(text)
    if settings.batch not in (None, fields["batch"]):
        raise BadInput(f"--batch {settings.batch}: a recurrent layer's is in its text, as n16 in lstm:t9n16i8h8")


def _of_images(called: str, read: Callable[[str], dict[str, Any]]) -> Callable[[str, Asked], None]:
    """What checks a layer without weights, whose text ``read`` reads."""

    def check(text: str, settings: Asked) -> None:
        batch = read(text)["batch"]
        if settings.batch not in (None, batch):
            raise BadInput(f"--batch {settings.batch}: that of {called} is in its text, as n{batch} in {text}")

    return check


_READ: dict[str, Callable[[str, Asked], None]] = {
    "conv": _conv,
    "gemm": _gemm,
    "rnn": _rnn,
    "pooling": _of_images("a pooling", lambda text: read_pooling(text)[1]),
    "lrn": _of_images("a normalization", read_lrn),
}


def check_asked(settings: Asked) -> None:
    """Raise :class:`BadInput` for options of planning that cannot be, as far as can be told without torch."""
    if settings.workspace is not None:
        workspace_bytes(settings.workspace)
    if settings.device is not None and DEVICE.fullmatch(settings.device) is None:
        raise BadInput(
            f"--device: {settings.device!r} is not a device tilewise plans for; cpu, cuda or cuda:N would do"
        )
    for name in settings.share_with:
        if DEVICE.fullmatch(name) is None:
            raise BadInput(f"--share-with: {name!r:.80} is no device; cpu, cuda or cuda:N would do")
    check_solvers("--exclude", settings.exclude)


def check_budget(total_workspace: str | None, policy: str | None) -> None:
    """Raise :class:`BadInput` for a budget of all kernels together that is none."""
    if total_workspace is None:
        if policy is not None:
            raise BadInput(f"--policy {policy!r}: it divides a --total-workspace; give one, such as 120MiB")
        return
    with bad_input():
        parse_bytes(total_workspace, "--total-workspace")


def check_solvers(flag: str, names: Iterable[str]) -> None:
    """Raise :class:`BadInput` naming ``flag`` for a name that is no solver's."""
    given = tuple(names)
    known = solver_names() if given else ()
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name.lower(), known)
            meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            raise BadInput(f"{flag}: {name!r:.80} is no solver; {meant}`tilewise info` lists all {len(known)}")


def check_file(argument: str, path: str) -> None:
    """Raise :class:`BadInput` naming ``argument`` where the file at ``path`` cannot be read."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise BadInput(f"{argument}: {path!r} cannot be read: {error.strerror}") from error
