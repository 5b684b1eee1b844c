"""``tilewise caffe train``: trains a net by its solver's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tilewise.cli.caffe.flags import (
    FlagsCommand,
    caffe_errors,
    device_options,
    devices_of,
    option,
    set_device,
    state_options,
)
from tilewise.cli.caffe.ranks import Job, run_ranks
from tilewise.cli.program import BadInput

if TYPE_CHECKING:
    import torch

    from tilewise.frontends.caffe.training.ranks import Ranks

__all__ = ["command", "train"]

EFFECTS = click.Choice(["stop", "snapshot", "none"])


EXAMPLES = (
    ("tilewise caffe train -solver solver.prototxt", "Train as the solver's file says."),
    ("tilewise caffe train -solver solver.prototxt -gpu 0,1", "On two GPUs."),
)


@click.command("train", cls=FlagsCommand, examples=EXAMPLES)
@option("solver", required=True, help="The solver's prototxt file.")
@option("snapshot", help="A solverstate to go on from.")
@option("weights", help="Weights to begin with, files with commas between them. Not with -snapshot.")
@device_options
@state_options
@option("sigint_effect", default="stop", kind=EFFECTS, help="What Ctrl-C does.")
@option("sighup_effect", default="snapshot", kind=EFFECTS, help="What a hang-up of the terminal does.")
def command(
    solver: str, snapshot: str, weights: str, gpu: str, level: int, stage: str, sigint_effect: str, sighup_effect: str
) -> None:
    """Train a net as a solver's file says, with its tests, log lines and snapshots.

    On several GPUs each reads batches of its own of the net's batch_size, and gradients are averaged, as in Caffe.
    """
    from tilewise.frontends.caffe.training.log import LOGGER, show_log
    from tilewise.frontends.caffe.training.ranks import ALONE

    if snapshot and weights:
        raise BadInput("-snapshot and -weights: one of them would do, since a snapshot has weights of its own")
    stages = tuple(stage.split(",")) if stage else ()
    names = tuple(weights.split(",")) if weights else ()
    job = Job(solver, snapshot, names, level, stages, sigint_effect, sighup_effect)
    handler = show_log()
    try:
        with caffe_errors():
            devices = _devices(_parameters(job), gpu)
            for device in devices:
                set_device(device)
            if len(devices) == 1:
                train(job, devices[0], ALONE)
            else:
                run_ranks(train, job, devices)
    finally:
        LOGGER.removeHandler(handler)


def train(job: Job, device: torch.device, ranks: Ranks) -> None:
    """Train on one device, as one of some ranks."""
    from tilewise.frontends.caffe.data.draws import drawn_seed
    from tilewise.frontends.caffe.training.actions import SignalActions
    from tilewise.frontends.caffe.training.log import LOGGER
    from tilewise.frontends.caffe.training.solver import Solver
    from tilewise.machine import random_states

    parameters = _parameters(job)
    if parameters.random_seed < 0:
        random_states.seed(drawn_seed() % 2**32, device)  # numbers that no run had before, as in Caffe
    solver = Solver(parameters, job.solver, device, ranks=ranks)
    if job.snapshot:
        LOGGER.info("Resuming from %s", job.snapshot)
        solver.restore(job.snapshot)
    for name in () if job.snapshot else job.weights or tuple(parameters.weights):
        solver.load_weights(name)
    LOGGER.info("Starting Optimization")
    with SignalActions(job.sigint_effect, job.sighup_effect) as actions:
        solver.solve(actions.requested)
    LOGGER.info("Optimization Done.")


def _parameters(job: Job) -> Any:
    """The solver's file, with what flags add to it."""
    from tilewise.frontends.caffe.files import read_solver

    parameters: Any = read_solver(job.solver)
    if not parameters.snapshot_prefix:
        parameters.snapshot_prefix = job.solver.removesuffix(".prototxt")
    if job.level:
        parameters.train_state.level = job.level
    parameters.train_state.stage.extend(job.stages)
    return parameters


def _devices(parameters: Any, gpu: str) -> list[torch.device]:
    """The devices that flags or file ask for. A file's GPU is a wish: where there is none, the CPU does the same."""
    from tilewise.frontends.caffe.training.log import LOGGER

    wished = parameters.solver_mode == 1  # which is also what a file means that says nothing
    devices = devices_of(gpu, parameters.device_id if wished else None)
    if wished and parameters.HasField("solver_mode") and devices[0].type == "cpu":
        LOGGER.warning("solver_mode: GPU, but there is no GPU %d here: the CPU is used", parameters.device_id)
    return devices
