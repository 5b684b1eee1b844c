"""Caffe's training: solvers, learning-rate policies, snapshots, and the loop around them."""

from __future__ import annotations

from tilewise.frontends.caffe.training.log import show_log
from tilewise.frontends.caffe.training.solver import Solver

__all__ = ["Solver", "show_log"]
