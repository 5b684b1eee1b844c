"""Numba kernels for CPUs: a folder for each family of solvers, and modules that the families share.

A function here that returns a function to be compiled is called a *maker*. Its docstring has the arguments of the
function that it makes. A module with such code imports Numba, so solvers import it only when they bind a plan. The
sizes and tilings that they need before are in modules without Numba.
"""
