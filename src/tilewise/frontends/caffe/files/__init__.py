"""Caffe's files: networks and solvers in text, weights, snapshots and mean images.

Nothing of a file is trusted: what is wrong in it is a :class:`~tilewise.frontends.caffe.errors.CaffeError`.
"""

from __future__ import annotations

from tilewise.frontends.caffe.files.mapped import forget
from tilewise.frontends.caffe.files.nets import read_net, read_solver
from tilewise.frontends.caffe.files.phases import filtered
from tilewise.frontends.caffe.files.solvers import SolverNets, find_beside, solver_nets
from tilewise.frontends.caffe.files.states import (
    SavedSolver,
    read_mean,
    read_solverstate,
    write_mean,
    write_solverstate,
)
from tilewise.frontends.caffe.files.weights import read_weights, write_weights

__all__ = [
    "SavedSolver",
    "SolverNets",
    "filtered",
    "find_beside",
    "forget",
    "read_mean",
    "read_net",
    "read_solver",
    "read_solverstate",
    "read_weights",
    "solver_nets",
    "write_mean",
    "write_solverstate",
    "write_weights",
]
