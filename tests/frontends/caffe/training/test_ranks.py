"""Two processes that train one net: the same numbers as one process with batches twice as large."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
from tests.frontends.caffe.training.test_solver import BATCH, net_text

from tilewise.frontends.caffe.files import read_solver, read_solverstate, read_weights
from tilewise.frontends.caffe.training.actions import Action
from tilewise.frontends.caffe.training.ranks import ALONE, Ranks, joined
from tilewise.frontends.caffe.training.solver import Solver

TEXT = 'base_lr: 0.1 momentum: 0.9 weight_decay: 0.01 clip_gradients: 0.5 lr_policy: "fixed" random_seed: 2 '


def solver_of(folder: Path, prefix: str, batch: int, ranks: Ranks) -> Solver:
    net = net_text(folder).replace(f"batch_size: {BATCH}", f"batch_size: {batch}")
    text = f'snapshot_prefix: "{folder}/{prefix}" {TEXT} test_iter: 1 test_interval: 3\nnet_param {{ {net} }}\n'
    return Solver(read_solver(text), ranks=ranks)


def rank_of(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    ranks = joined(rank, 2, str(folder / "meeting"), "gloo")
    if rank:
        torch.manual_seed(99)  # what rank 0 has counts
    solver = solver_of(folder, "two", BATCH, ranks)
    # Rank 1 alone is asked to stop; both do, after the same iteration.
    solver.step(100, lambda: Action.STOP if rank and solver.iteration == 7 else Action.NONE)
    assert solver.iteration == 7
    solver.snapshot()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_are_one_process_with_batches_twice_as_large(tmp_path: Path) -> None:
    alone = solver_of(tmp_path, "one", 2 * BATCH, ALONE)  # which also writes the rows
    alone.step(7)
    alone.snapshot()
    torch.multiprocessing.spawn(rank_of, (tmp_path,), nprocs=2)
    one, two = (read_weights(tmp_path / f"{name}_iter_7.caffemodel")["ip"] for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-6)
    histories = [read_solverstate(tmp_path / f"{name}_iter_7.solverstate").history for name in ("one", "two")]
    for a, b in zip(*histories, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-6)
