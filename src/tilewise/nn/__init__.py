"""Planned convolutions in PyTorch models: whole models, single calls, and programs that stay as they are.

>>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
>>> tilewise.nn.report(model).layers[0].kind
'Conv2d'
"""

from tilewise.comm.agreement import RankMismatch
from tilewise.nn.background.begin import wait
from tilewise.nn.branches.choose import BranchReport, groups
from tilewise.nn.exported.export import ExportReport, export
from tilewise.nn.exported.loaded import Exported, load_exported
from tilewise.nn.exported.values import ExportError
from tilewise.nn.functional import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    linear,
    set_defaults,
)
from tilewise.nn.graphs.graphed import CannotCapture, GraphReport, graph_report, graphed, ungraphed
from tilewise.nn.largest_batch import LargestBatch, largest_batch
from tilewise.nn.memory.step_planner import StepTooLarge
from tilewise.nn.notices.channel import NothingPlannedWarning
from tilewise.nn.optimize import optimize, restore
from tilewise.nn.report import (
    CallReport,
    LayerReport,
    PassReport,
    RegionLine,
    RegionReport,
    Report,
    report,
    summary,
)
from tilewise.nn.schedule import schedule
from tilewise.nn.script.session import Session, disable, enable, enabled
from tilewise.nn.shared.replica import ReplicaError
from tilewise.nn.shared.report import SharedReport
from tilewise.nn.shared.shared import SharedModel, shared

__all__ = [
    "BranchReport",
    "CallReport",
    "CannotCapture",
    "ExportError",
    "ExportReport",
    "Exported",
    "GraphReport",
    "LargestBatch",
    "LayerReport",
    "NothingPlannedWarning",
    "PassReport",
    "RankMismatch",
    "RegionLine",
    "RegionReport",
    "ReplicaError",
    "Report",
    "Session",
    "SharedModel",
    "SharedReport",
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
    "export",
    "graph_report",
    "graphed",
    "groups",
    "largest_batch",
    "linear",
    "load_exported",
    "optimize",
    "report",
    "restore",
    "schedule",
    "set_defaults",
    "shared",
    "summary",
    "ungraphed",
    "wait",
]
