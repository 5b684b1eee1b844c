"""Reads the text files of networks and solvers."""

from __future__ import annotations

import os

from tilewise.frontends.caffe.files.text import parse, read_text
from tilewise.frontends.caffe.files.upgrade import upgrade_net, upgrade_solver
from tilewise.frontends.caffe.schema import NetParameter, SolverParameter

__all__ = ["read_net", "read_solver"]


def read_net(path_or_text: str | os.PathLike[str]) -> NetParameter:
    """The network of a prototxt file, or of its text, in the form of the newest Caffe.

    Text is told from a path by a line break or a brace, of which a prototxt has at least one. Networks of older forms
    are brought up to date (:mod:`~tilewise.frontends.caffe.files.upgrade`). All layers are there, of all phases;
    :func:`~tilewise.frontends.caffe.files.filtered` leaves those of one. Fields that are not known are skipped with a
    :class:`~tilewise.frontends.caffe.errors.CaffeWarning` that lists them.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` with line, column and field where the text is wrong, and
    ``OSError`` where the file cannot be read.

        >>> net = read_net('layers { name: "conv1" type: CONVOLUTION blobs_lr: 1 blobs_lr: 2 }')
        >>> net.layer[0].type, [spec.lr_mult for spec in net.layer[0].param]
        ('Convolution', [1.0, 2.0])
    """
    text, source = _text_and_source(path_or_text)
    return upgrade_net(parse(text, NetParameter(), source), source)


def read_solver(path_or_text: str | os.PathLike[str]) -> SolverParameter:
    """The solver of a prototxt file, or of its text, in the form of the newest Caffe, with the networks inside it.

    Networks in files of their own are not read; :func:`~tilewise.frontends.caffe.files.solver_nets` does. Raises what
    :func:`read_net` does.

        >>> read_solver("solver_type: ADAGRAD\\nbase_lr: 0.01").type
        'AdaGrad'
    """
    text, source = _text_and_source(path_or_text)
    return upgrade_solver(parse(text, SolverParameter(), source), source)


def _text_and_source(path_or_text: str | os.PathLike[str]) -> tuple[str, str]:
    if isinstance(path_or_text, str) and any(mark in path_or_text for mark in "\n{"):
        return path_or_text, "the text"
    return read_text(path_or_text), os.fspath(path_or_text)
