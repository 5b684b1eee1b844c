"""Planned layers in torch models."""

from tilewise.comm.agreement import RankMismatch
from tilewise.nn.batch import LargestBatch, largest_batch
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
from tilewise.nn.report import CallReport, LayerReport, PassReport, Report, report
from tilewise.nn.scheduled import schedule
from tilewise.nn.transparent import Session, disable, enable, enabled
from tilewise.nn.within import StepTooLarge

__all__ = [
    "BranchReport",
    "CallReport",
    "LargestBatch",
    "LayerReport",
    "PassReport",
    "RankMismatch",
    "Report",
    "Session",
    "StepTooLarge",
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
    "largest_batch",
    "optimize",
    "report",
    "restore",
    "schedule",
    "set_defaults",
]
