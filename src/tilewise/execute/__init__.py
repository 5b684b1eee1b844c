"""Runs plans: every leaf is bound to its tensors once, then called with no decision left to take."""

from tilewise.execute.bound import (
    Bound,
    activates,
    adds_bias,
    bind,
    compile_only,
    finishes,
    release_workspaces,
    touch_workspace,
)
from tilewise.execute.node import PlanMismatch
from tilewise.execute.nodes import parts_of
from tilewise.execute.places import carved

__all__ = [
    "Bound",
    "PlanMismatch",
    "activates",
    "adds_bias",
    "bind",
    "carved",
    "compile_only",
    "finishes",
    "parts_of",
    "release_workspaces",
    "touch_workspace",
]
