"""The loop of Caffe's solvers: iterations, tests, log lines, snapshots, and resuming from them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.frontends.caffe.data.draws import drawn_seed
from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.net import Net
from tilewise.frontends.caffe.training import sidecar, snapshots
from tilewise.frontends.caffe.training.actions import Action
from tilewise.frontends.caffe.training.log import LOGGER, number
from tilewise.frontends.caffe.training.ranks import ALONE, Ranks
from tilewise.frontends.caffe.training.rates import check_policy, rate, step_reached
from tilewise.frontends.caffe.training.resuming import learned_weights, losses_of, places, put_history, put_places
from tilewise.frontends.caffe.training.structure import output_weights, planned_nets, share_records
from tilewise.frontends.caffe.training.testing import Means, forward, mean_outputs, show_outputs
from tilewise.frontends.caffe.training.update import Update
from tilewise.machine import random_states

__all__ = ["Solver", "caffe_net", "nothing_requested"]

MakeNet = Callable[[Any, str, int], Net]
HDF5 = 0
"""The ``snapshot_format`` that is not Caffe's usual one."""


def nothing_requested() -> Action:
    """What a solver asks between iterations where nobody else says: it goes on."""
    return Action.NONE


def caffe_net(net: Any, phase: Any, seed: int | None = None) -> Net:
    """The net of some layers, for a phase, whose data are drawn from a seed."""
    return Net(net, phase, seed=seed)


class Solver:
    """Trains and tests the nets of a solver's file as Caffe does, and tells in Caffe's words what it does.

    ``solver`` is a ``SolverParameter``, as :func:`tilewise.frontends.caffe.files.read_solver` gives it. ``path`` is its
    file: nets that are not below the current folder are looked for from there. ``device`` is where it trains.
    ``make_net(net, phase, seed)`` makes nets, by default those of :mod:`tilewise.frontends.caffe.net`.
    ``ranks`` are the processes that train together.
    Lines go to the logger ``tilewise.caffe``; :func:`~tilewise.frontends.caffe.training.log.show_log` shows them.

    With a ``random_seed`` the process's random numbers are seeded before the nets are made, torch's, Python's and
    NumPy's, and the data are drawn from it. :attr:`net` is the net that is trained, :attr:`test_nets` are the tested
    ones, and :attr:`iteration` counts the updates so far.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for whatever is wrong with the files.

    ::

        path = "lenet_solver.prototxt"
        solver = Solver(read_solver(path), path, device="cuda")
        solver.solve()
    """

    def __init__(
        self,
        solver: Any,
        path: str = "solver.prototxt",
        device: torch.device | str = "cpu",
        make_net: MakeNet = caffe_net,
        ranks: Ranks = ALONE,
    ) -> None:
        self.parameters, self.device, self.ranks = solver, torch.device(device), ranks
        check_policy(solver)
        if solver.average_loss < 1:
            raise CaffeError(f"average_loss: {solver.average_loss}; 1 or more would do")
        if solver.snapshot or solver.snapshot_after_train:
            snapshots.check_writable(self._prefix())
        seed = _seeded(solver.random_seed, self.device, ranks)
        trained, others = planned_nets(solver, path)
        others = others if ranks.first else []
        LOGGER.info("Creating training net %s", trained.name)
        self.layers, self.name = trained, trained.name
        self.net = self._made(trained, "train", make_net, seed)
        self.outputs = output_weights(self.net)
        self.test_nets: list[Net] = []
        for index, each in enumerate(others):
            LOGGER.info("Creating test net (#%d) %s", index, each.name)
            self.test_nets.append(self._made(each, "test", make_net, seed))
        self.test_outputs = [output_weights(each) for each in self.test_nets]
        self.update = Update(solver, self.net.learnable, ranks)
        ranks.share(each.parameter for each in self.net.learnable)
        self.iteration = self.current_step = 0
        self._losses: deque[Tensor] = deque(maxlen=solver.average_loss)
        self._requested: Callable[[], Action] = nothing_requested
        self._stopped = False
        self._since, self._last_shown = time.perf_counter(), 0
        LOGGER.info("Solver scaffolding done.")

    def solve(self, requested: Callable[[], Action] = nothing_requested) -> bool:
        """Train until ``max_iter``, with tests and snapshots on the way. Returns whether it got that far.

        ``requested`` is asked between iterations whether to stop or to write a snapshot.
        """
        parameters = self.parameters
        LOGGER.info("Solving %s", self.name)
        LOGGER.info("Learning Rate Policy: %s", parameters.lr_policy)
        self.step(parameters.max_iter - self.iteration, requested)
        if parameters.snapshot_after_train and (not parameters.snapshot or self.iteration % parameters.snapshot):
            self.snapshot()
        if self._stopped:
            LOGGER.info("Optimization stopped early.")
            return False
        if self._due(parameters.display):
            with torch.no_grad():
                forward(self.net)
            if self.net.loss is not None:
                self._losses.append(self.net.loss.detach())
            LOGGER.info("Iteration %d, loss = %s", self.iteration, number(self.smoothed_loss()))
        if self._due(parameters.test_interval) and not self._test_all():
            return False
        LOGGER.info("Optimization Done.")
        return True

    def step(self, iterations: int, requested: Callable[[], Action] = nothing_requested) -> None:
        """Do as many iterations, with the tests, log lines and snapshots that fall into them."""
        self._requested, self._stopped = requested, False
        self._since, self._last_shown = time.perf_counter(), self.iteration
        end = self.iteration + iterations
        while self.iteration < end and not self._stopped:
            due = self._due(self.parameters.test_interval)
            if due and (self.iteration or self.parameters.test_initialization) and not self._test_all():
                return
            self._iterate()
            action = self.ranks.agreed(requested)
            if action is Action.SNAPSHOT or self._due(self.parameters.snapshot):
                self.snapshot()
            self._stopped = action is Action.STOP

    def test_all(self) -> list[Means]:
        """Test each test net by its ``test_iter`` batches: its outputs by name, each value's mean over the batches."""
        found = [self._tested(index) for index in range(len(self.test_nets))]
        return [each for each in found if each is not None]

    def smoothed_loss(self) -> float:
        """The mean loss of the last ``average_loss`` iterations; 0 before the first."""
        return float(torch.stack(list(self._losses)).mean()) if self._losses else 0.0

    def load_weights(self, path: str) -> None:
        """Take the weights of a file for layers of the same names, in the trained and the tested nets."""
        LOGGER.info("Finetuning from %s", path)
        self._take(path)

    def snapshot(self) -> Path:
        """Write weights, solver's state and sidecar, in the solver's ``snapshot_format``; the state's path.

        Raises ``CaffeError`` where they cannot be written; snapshots that were there are as they were.
        """
        kind = "HDF5" if self.parameters.snapshot_format == HDF5 else "BINARYPROTO"
        words = "HDF5 file" if kind == "HDF5" else "binary proto file"
        weights, state = snapshots.names(self._prefix(), self.iteration, kind)
        if not self.ranks.first:
            return state
        LOGGER.info("Snapshotting to %s %s", words, weights)
        states, pieces = sidecar.random_states()
        losses = [float(loss) for loss in self._losses]
        told = {"random": states, "losses": losses, "sources": places([self.net, *self.test_nets])}
        history = [each.detach().cpu().numpy() for each in self.update.histories]
        numbers, weights_now = (self.iteration, self.current_step), self.net.weights()
        kept = snapshots.Snapshot(*numbers, weights_now, history, self.layers, told, pieces)
        snapshots.save(kept, self._prefix(), kind)
        LOGGER.info("Snapshotting solver state to %s %s", words, state)
        return state

    def restore(self, path: str) -> bool:
        """Go on from a ``solverstate``. Returns whether a sidecar was there, so that it goes on with the same bits.

        Without one the data begin again and random numbers go on as they are, as in Caffe. Raises ``CaffeError`` where
        the state is not one of this net and solver.
        """
        LOGGER.info("Restoring previous solver status from %s", path)
        found = snapshots.load(Path(path))
        if found.learned_net:
            self._take(str(learned_weights(found)))
        put_history(self.update, found)
        self.iteration, self.current_step = found.iteration, found.current_step
        if found.told is None:
            LOGGER.info("%s has no sidecar: data and random numbers begin anew, as in Caffe", path)
            return False
        put_places([self.net, *self.test_nets], found.told.get("sources"), found.path, self.ranks.first)
        for loss in losses_of(found.told, found.path):
            self._losses.append(torch.tensor(loss, dtype=torch.float32, device=self.device))
        # Last, since making nets and starting readers may draw.
        sidecar.put_random_states(found.told.get("random", {}), found.pieces, found.path)
        return True

    def _iterate(self) -> None:
        """One update: forward and backward ``iter_size`` times, log lines, and the step."""
        shown = self._due(self.parameters.display)
        if self.parameters.debug_info:
            self.net.debug_info = shown
        self.update.clear()
        total: Tensor | None = None
        for _ in range(self.update.iter_size):
            forward(self.net)
            loss = self.net.loss
            if loss is None:
                raise CaffeError(f"net {self.name!r} has no loss to train by; a layer such as SoftmaxWithLoss would do")
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        self._losses.append(total / self.update.iter_size)
        if shown:
            self._show_progress()
        self.current_step = step_reached(self.parameters, self.iteration, self.current_step)
        now = rate(self.parameters, self.iteration, self.current_step)
        if shown:
            LOGGER.info("Iteration %d, lr = %s", self.iteration, number(now))
        clipped = self.update.step(now, self.iteration)
        if clipped is not None:
            text = "Gradient clipping: scaling down gradients (L2 norm %s > %s) by scale factor %s"
            LOGGER.info(text, *map(number, (clipped.norm, clipped.limit, clipped.factor)))
        self.iteration += 1

    def _show_progress(self) -> None:
        """The lines of an iteration: its speed and loss, and the net's outputs."""
        seconds, done = time.perf_counter() - self._since, self.iteration - self._last_shown
        speed = (
            f"{number(done / seconds if seconds else 0.0)} iter/s, {number(seconds)}s/{self.parameters.display} iters"
        )
        LOGGER.info("Iteration %d (%s), loss = %s", self.iteration, speed, number(self.smoothed_loss()))
        values = {name: self.net.blobs[name].detach().flatten().tolist() for name in self.outputs}
        show_outputs("Train", self.outputs, values)
        self._since, self._last_shown = time.perf_counter(), self.iteration

    def _tested(self, index: int) -> Means | None:
        """The mean outputs of a test net, shown; ``None`` where a signal stopped it."""
        LOGGER.info("Iteration %d, Testing net (#%d)", self.iteration, index)
        net, outputs, batches = self.test_nets[index], self.test_outputs[index], self.parameters.test_iter[index]
        return mean_outputs(self.net, net, outputs, batches, self._interrupted, self.parameters.test_compute_loss)

    def _test_all(self) -> bool:
        """Test all test nets; ``False`` where a signal has stopped that."""
        return all(self._tested(index) is not None for index in range(len(self.test_nets)))

    def _interrupted(self) -> bool:
        """Answer what signals ask for during a test; whether it has to stop.

        Several ranks answer them after the test, since only one of them tests.
        """
        if self.ranks.count > 1:
            return False
        while (action := self._requested()) is not Action.NONE:
            if action is Action.STOP:
                self._stopped = True
                return True
            self.snapshot()
        return False

    def _take(self, path: str) -> None:
        """Load weights into all nets."""
        from tilewise.frontends.caffe.files import read_weights

        weights = read_weights(path)
        for net in (self.net, *self.test_nets):
            report = net.load_weights(weights)
            if net is self.net:
                for name in report.unused:
                    LOGGER.info("Ignoring source layer %s", name)

    def _due(self, interval: int) -> bool:
        """Whether something that is done every ``interval`` iterations is due; never where that is 0."""
        return bool(interval) and self.iteration % interval == 0

    def _prefix(self) -> str:
        """What the names of snapshots begin with."""
        if not self.parameters.snapshot_prefix:
            raise CaffeError("snapshot_prefix: is missing; the beginning of the names of snapshots would do")
        return str(self.parameters.snapshot_prefix)

    def _made(self, layers: Any, phase: str, make_net: MakeNet, seed: int) -> Net:
        """A net on the solver's device, whose data are drawn from the seed."""
        made = make_net(layers, phase, seed).to(self.device)
        if self.ranks.count > 1 and phase == "train":
            share_records(made, layers, seed, (self.ranks.rank, self.ranks.count))
        return made


def _seeded(seed: int, device: torch.device, ranks: Ranks) -> int:
    """Seed the process's random numbers where the solver's file asks for it; the seed of the data.

    Ranks drop out different values.
    """
    if seed < 0:
        return ranks.same(drawn_seed())
    random_states.seed((seed + ranks.rank) % 2**32, device)
    return seed
