"""The networks of a solver: which files or fields they are in, and in which state they are."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files.nets import read_net
from tilewise.frontends.caffe.schema import TEST, TRAIN, NetParameter, NetState, SolverParameter

__all__ = ["SolverNets", "find_beside", "solver_nets"]


@dataclasses.dataclass(frozen=True)
class SolverNets:
    """The networks that a solver trains and tests, each with its ``state`` set and not filtered yet.

    There is one network in ``tests`` for each ``test_iter`` of the solver, in their order.

    >>> from tilewise.frontends.caffe.files import read_solver, solver_nets
    >>> solver = read_solver("net_param { name: 'small' } test_iter: 1 test_interval: 1")
    >>> nets = solver_nets(solver, "solver.prototxt")
    >>> nets.train.name, len(nets.tests)
    ('small', 1)
    """

    train: NetParameter
    tests: tuple[NetParameter, ...]


def solver_nets(solver: SolverParameter, path: str | os.PathLike[str]) -> SolverNets:
    """The networks of a solver that was read from ``path``.

    The network to train is in one of ``net``, ``net_param``, ``train_net`` and ``train_net_param``. Those to test are
    in ``test_net_param``, then ``test_net``, and for every further ``test_iter`` in ``net`` or ``net_param``. The state
    of each is the phase, then what the network sets, then the solver's ``train_state`` or ``test_state``.

    Raises :class:`CaffeError` where none or several are given for training, where ``test_iter`` and ``test_state`` do
    not have one value for each network to test, and where a network's file is missing or wrong.

    >>> from tilewise.frontends.caffe.files import read_solver, solver_nets
    >>> solver = read_solver("net_param { name: 'small' } test_iter: 1 test_interval: 1")
    >>> solver_nets(solver, "solver.prototxt").train.name
    'small'
    """
    source = os.fspath(path)
    fields = [name for name in ("net", "net_param", "train_net", "train_net_param") if solver.HasField(name)]
    if len(fields) != 1:
        given = " and ".join(fields) or "none"
        raise CaffeError(f"{source}: {given} of net, net_param, train_net, train_net_param is given; one would do")
    train = _net(getattr(solver, fields[0]), source)
    _set_state(train, TRAIN, solver.train_state)
    tests = _tests(solver, source)
    return SolverNets(train, tests)


def find_beside(name: str, path: str | os.PathLike[str]) -> Path:
    """The file that a name in another file means.

    Caffe takes names from the folder in which it is started, which is often the top of a project. So a file is looked
    for there, then in the folder of ``path``, and then in all folders above it. Raises :class:`CaffeError` with the
    places where it is not.

    >>> import pathlib, tempfile
    >>> from tilewise.frontends.caffe.files import find_beside
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "mean.npy").write_bytes(b"")
    >>> find_beside("mean.npy", folder / "solver.prototxt").name
    'mean.npy'
    """
    above = Path(os.path.abspath(path)).parents
    places = [Path.cwd() / name, *(folder / name for folder in above)]
    for place in places:
        if place.is_file():
            return place
    where = ", ".join(str(place.parent) for place in dict.fromkeys(places))
    raise CaffeError(f"{os.fspath(path)}: {name!r} is no file of the folders {where}; a path from one of them would do")


def _tests(solver: SolverParameter, source: str) -> tuple[NetParameter, ...]:
    own: list[Any] = [*solver.test_net_param, *solver.test_net]
    count = len(solver.test_iter)
    shared = [name for name in ("net", "net_param") if solver.HasField(name)]
    if count < len(own) or (count > len(own) and not shared):
        raise CaffeError(f"{source}: {count} test_iter for {len(own)} networks to test; one for each would do")
    if solver.test_state and len(solver.test_state) != count:
        raise CaffeError(
            f"{source}: {len(solver.test_state)} test_state for {count} networks to test; none or one for each would do"
        )
    if count and solver.test_interval <= 0:
        raise CaffeError(f"{source}: test_interval = {solver.test_interval} with test_iter; at least 1 would do")
    own += [getattr(solver, shared[0])] * (count - len(own)) if shared else []
    nets = [_net(net, source) for net in own]
    for index, net in enumerate(nets):
        _set_state(net, TEST, solver.test_state[index] if solver.test_state else NetState())
    return tuple(nets)


def _net(net: Any, source: str) -> NetParameter:
    """A network that is given by the name of its file, or as a message, as a copy."""
    if isinstance(net, str):
        return read_net(find_beside(net, source))
    copy = NetParameter()
    copy.CopyFrom(net)
    return copy


def _set_state(net: NetParameter, phase: int, last: NetState) -> None:
    state = NetState(phase=phase)
    state.MergeFrom(net.state)
    state.MergeFrom(last)
    net.state.CopyFrom(state)
