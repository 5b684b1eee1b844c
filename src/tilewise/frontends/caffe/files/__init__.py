"""Caffe's files: networks and solvers in text, weights, snapshots and mean images.

Nothing of a file is trusted: what is wrong in it is a :class:`~tilewise.frontends.caffe.errors.CaffeError`.
"""

from __future__ import annotations

from tilewise.frontends.caffe.files.nets import read_net, read_solver
from tilewise.frontends.caffe.files.phases import filtered
from tilewise.frontends.caffe.files.solvers import SolverNets, find_beside, solver_nets

__all__ = ["SolverNets", "filtered", "find_beside", "read_net", "read_solver", "solver_nets"]
