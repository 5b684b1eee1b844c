"""The command line that explains a pass of a model's layer."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from typing import Any

from tilewise.problems.base import Problem
from tilewise.problems.kinds import kind_of

__all__ = ["explain_command", "one_of"]

WITH_BIAS = ("fprop", "nn", "nt", "tn", "tt")
"""The passes whose text may say that a bias is added."""


def explain_command(problem: Problem) -> str:
    """The ``tilewise explain`` command of ``problem``; empty where its text cannot be written, as with odd padding.

    The command is about tensors that are dense and aligned, as those of most models are. On a GPU it leaves the device
    to where it is typed.

    >>> explain_command(tilewise.GemmProblem(16, 1024, 512, "NT", bias=True))
    'tilewise explain 16x512:512x1024+bias --pass nt --device cpu'
    """
    described: Any = problem
    try:
        text = kind_of(problem).notation(problem)
    except ValueError:
        return ""
    if text is None:
        return ""
    if getattr(described, "bias", False) and problem.task in WITH_BIAS:
        sizes, plus, others = text.partition("+")
        text = f"{sizes}+bias{plus}{others}"
    words = ["tilewise", "explain", text, "--pass", problem.task]
    if described.dtype != "fp32":
        words += ["--dtype", described.dtype]
    if problem.layouts_in_words[0] == "channels_last":  # the images': a filter may be dense in both orders
        words += ["--layout", "channels_last"]
    if problem.device == "cpu":
        words += ["--device", "cpu"]
    elif getattr(described, "precision", "ieee") != "ieee":
        words += ["--precision", described.precision]
    return shlex.join(words)


def one_of(name: str, names: Iterable[str]) -> str:
    """``name``, which is one of a model's layers. Raises ``ValueError`` with those that read like it.

    >>> one_of("conv1", ["conv1", "conv2"])
    'conv1'
    """
    known = dict.fromkeys(names)
    if name in known:
        return name
    close = difflib.get_close_matches(str(name), known, n=3) or list(known)[:3]
    would = f"; {' or '.join(map(repr, close))} would do" if close else ", and none was looked at"
    raise ValueError(f"layer={name!r:.80}: no layer that was planned{would}")
