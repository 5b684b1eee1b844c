"""Planned layers in torch models."""

from tilewise.nn.branch_times import BranchReport, groups
from tilewise.nn.functional import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    set_defaults,
)
from tilewise.nn.optimize import optimize, restore
from tilewise.nn.ranks import RankMismatch
from tilewise.nn.report import CallReport, LayerReport, PassReport, Report, report
from tilewise.nn.scheduled import schedule
from tilewise.nn.transparent import Session, disable, enable, enabled

__all__ = [
    "BranchReport",
    "CallReport",
    "LayerReport",
    "PassReport",
    "RankMismatch",
    "Report",
    "Session",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "disable",
    "enable",
    "enabled",
    "groups",
    "optimize",
    "report",
    "restore",
    "schedule",
    "set_defaults",
]
