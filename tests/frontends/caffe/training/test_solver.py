"""The solver's loop: loss curves in float64, log lines, tests, snapshots, resuming, and what goes wrong."""

from __future__ import annotations

import io
import logging
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tests.frontends.caffe.training.test_rules import reference_update

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import read_solver
from tilewise.frontends.caffe.training import sidecar
from tilewise.frontends.caffe.training.actions import Action
from tilewise.frontends.caffe.training.log import LOGGER, show_log
from tilewise.frontends.caffe.training.rates import rate
from tilewise.frontends.caffe.training.rules import RULES
from tilewise.frontends.caffe.training.solver import Solver

ROWS, FEATURES, CLASSES, BATCH = 26, 5, 3, 4


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What training tells."""
    stream = io.StringIO()
    handler = show_log(stream)
    yield stream
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(logging.NOTSET)


def net_text(folder: Path, *, dropout: bool = False, shuffle: bool = False) -> str:
    """A softmax regression on rows of a file, with an accuracy for testing."""
    generator = np.random.default_rng(4)
    if not (folder / "rows.h5").exists():
        with h5py.File(folder / "rows.h5", "w") as file:
            file["data"] = generator.standard_normal((ROWS, FEATURES)).astype(np.float32)
            file["label"] = generator.integers(0, CLASSES, ROWS).astype(np.float32)
        (folder / "rows.txt").write_text(f"{folder / 'rows.h5'}\n")
    drop = 'layer { name: "drop" type: "Dropout" bottom: "data" top: "data" dropout_param { dropout_ratio: 0.3 } }'
    return f"""
      name: "regression"
      layer {{ name: "rows" type: "HDF5Data" top: "data" top: "label"
        hdf5_data_param {{ source: "{folder}/rows.txt" batch_size: {BATCH} shuffle: {str(shuffle).lower()} }} }}
      {drop if dropout else ""}
      layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
        param {{ lr_mult: 1 decay_mult: 1 }} param {{ lr_mult: 2 decay_mult: 0 }}
        inner_product_param {{ num_output: {CLASSES} weight_filler {{ type: "gaussian" std: 0.1 }} }} }}
      layer {{ name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy"
        include {{ phase: TEST }} }}
      layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
    """


def solver_of(folder: Path, text: str, **net: Any) -> Solver:
    """A solver whose net is in its own text."""
    prefix = f'snapshot_prefix: "{folder}/snap" lr_policy: "fixed"'
    return Solver(read_solver(f"{prefix}\n{text}\nnet_param {{ {net_text(folder, **net)} }}\n"))


def weights_of(solver: Solver) -> list[torch.Tensor]:
    return [each.parameter.detach().clone() for each in solver.net.learnable]


def reference_losses(kind: str, solver: Any, weight: Any, bias: Any, data: Any, labels: Any, steps: int) -> list[float]:
    """The losses of a softmax regression in float64, by the published update rules alone."""
    values = [np.array(weight, np.float64), np.array(bias, np.float64)]
    kept = [[np.zeros_like(value) for _ in range(RULES[kind].kept)] for value in values]
    losses = []
    for t in range(steps):
        sums, loss = [np.zeros_like(value) for value in values], 0.0
        for part in range(solver.iter_size):
            rows = [((t * solver.iter_size + part) * BATCH + place) % ROWS for place in range(BATCH)]
            x, y = data[rows].astype(np.float64), labels[rows].astype(int)
            scores = x @ values[0].T + values[1]
            exp = np.exp(scores - scores.max(1, keepdims=True))
            share = exp / exp.sum(1, keepdims=True)
            loss -= np.log(share[range(BATCH), y]).mean()
            share[range(BATCH), y] -= 1
            sums[0] += share.T @ x / BATCH
            sums[1] += share.sum(0) / BATCH
        losses.append(loss / solver.iter_size)
        norm = np.sqrt(sum((each**2).sum() for each in sums))
        clip = solver.clip_gradients / norm if 0 <= solver.clip_gradients < norm else 1.0
        for i, (lr_mult, decay_mult) in enumerate(((1, 1), (2, 0))):
            gradient = sums[i] * clip / solver.iter_size + solver.weight_decay * decay_mult * values[i]
            step, kept[i] = reference_update(kind, solver, gradient, kept[i], rate(solver, t) * lr_mult, t)
            values[i] -= step
    return losses


@pytest.mark.parametrize("kind", RULES)
def test_the_loss_curve_is_that_of_the_published_rule_in_float64(tmp_path: Path, kind: str) -> None:
    momentum = "momentum: 0.9" if RULES[kind].takes_momentum else ""
    base = {"AdaDelta": 1.0, "Adam": 0.05}.get(kind, 0.1)
    solver = solver_of(
        tmp_path,
        f'type: "{kind}" base_lr: {base} {momentum} weight_decay: 0.01 iter_size: 2 clip_gradients: 0.8 random_seed: 1',
    )
    weight, bias = (each.numpy() for each in weights_of(solver))
    with h5py.File(tmp_path / "rows.h5") as file:
        data, labels = file["data"][()], file["label"][()]
    wanted = reference_losses(kind, solver.parameters, weight, bias, data, labels, 16)
    found = []
    for _ in range(16):
        solver.step(1)
        found.append(solver.smoothed_loss())
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert max(wanted) - min(wanted) > 0.1


def lines(log: io.StringIO) -> list[str]:
    """The lines of a log without their heads, which are checked."""
    found = []
    for line in log.getvalue().splitlines():
        head = re.fullmatch(r"[IW]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ \w+\.py:\d+\] (.*)", line)
        assert head is not None, line
        found.append(head[1])
    return found


def test_the_log_is_in_caffes_words(tmp_path: Path, log: io.StringIO) -> None:
    solver = solver_of(
        tmp_path, "base_lr: 0.1 max_iter: 4 display: 2 test_iter: 3 test_interval: 4 average_loss: 2 random_seed: 1"
    )
    assert solver.solve()
    number = r"-?\d+(\.\d+)?(e[-+]\d\d)?"
    test = [
        r"Iteration {}, Testing net \(#0\)",
        rf"    Test net output #0: accuracy = {number}",
        rf"    Test net output #1: loss = {number} \(\* 1 = {number} loss\)",
    ]
    shown = [
        rf"Iteration {{}} \({number} iter/s, {number}s/2 iters\), loss = {number}",
        rf"    Train net output #0: loss = {number} \(\* 1 = {number} loss\)",
        r"Iteration {}, lr = 0\.1",
    ]
    state = re.escape(str(tmp_path / "snap_iter_4"))
    wanted = [
        "Solving regression",
        "Learning Rate Policy: fixed",
        *[line.format(0) for line in test],
        *[line.replace("{}", "0", 1) for line in shown],
        *[line.replace("{}", "2", 1) for line in shown],
        rf"Snapshotting to binary proto file {state}\.caffemodel",
        rf"Snapshotting solver state to binary proto file {state}\.solverstate",
        rf"Iteration 4, loss = {number}",
        *[line.format(4) for line in test],
        r"Optimization Done\.",
    ]
    found = lines(log)
    found = found[found.index("Solving regression") :]
    assert len(found) == len(wanted), found
    for line, pattern in zip(found, wanted, strict=True):
        assert re.fullmatch(pattern.replace("{{", "{").replace("}}", "}"), line), (line, pattern)


def test_the_shown_loss_is_the_mean_of_the_last(tmp_path: Path) -> None:
    single = solver_of(tmp_path, "base_lr: 0.1 random_seed: 1")
    mean = solver_of(tmp_path, "base_lr: 0.1 random_seed: 1 average_loss: 3")
    losses = []
    for _ in range(5):
        single.step(1)
        losses.append(single.smoothed_loss())
    mean.step(5)
    assert mean.smoothed_loss() == pytest.approx(np.mean(losses[-3:]), rel=1e-6)


def test_a_test_net_has_the_weights_that_are_trained(tmp_path: Path) -> None:
    solver = solver_of(
        tmp_path, "base_lr: 0.5 test_iter: 7 test_interval: 100 test_initialization: false random_seed: 1"
    )
    with h5py.File(tmp_path / "rows.h5") as file:
        data, labels = file["data"][()], file["label"][()]
    rows = [place % ROWS for place in range(2 * 7 * BATCH)]
    for start in (0, 7 * BATCH):
        (means,) = solver.test_all()
        weight, bias = (each.numpy() for each in weights_of(solver))
        x, y = data[rows[start : start + 28]], labels[rows[start : start + 28]]
        assert means["accuracy"][0] == pytest.approx(((x @ weight.T + bias).argmax(1) == y).mean())
        solver.step(5)


@pytest.mark.parametrize(("kind", "form"), [*((kind, "BINARYPROTO") for kind in RULES), ("Adam", "HDF5")])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, kind: str, form: str) -> None:
    momentum = "momentum: 0.9" if RULES[kind].takes_momentum else ""
    text = (
        f'type: "{kind}" base_lr: 0.1 {momentum} snapshot_format: {form} average_loss: 3 test_iter: 2 test_interval: 4'
    )
    options = {"dropout": True, "shuffle": True}
    straight = solver_of(tmp_path, f"{text} random_seed: 1", **options)
    straight.step(6)
    state = straight.snapshot()
    straight.step(7)
    resumed = solver_of(tmp_path, text, **options)  # other random numbers, another order of data
    resumed.step(2)
    assert resumed.restore(str(state))
    assert resumed.iteration == 6
    resumed.step(7)
    for one, other in zip(weights_of(straight), weights_of(resumed), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(straight.update.histories, resumed.update.histories, strict=True):
        assert torch.equal(one, other)
    assert straight.smoothed_loss() == resumed.smoothed_loss()
    assert straight.test_all() == resumed.test_all()


def test_without_a_sidecar_data_begin_anew_as_in_caffe(tmp_path: Path) -> None:
    first = solver_of(tmp_path, "base_lr: 0.1 momentum: 0.9 random_seed: 1")
    first.step(3)
    state = first.snapshot()
    Path(f"{state}{sidecar.SUFFIX}").unlink()
    other = solver_of(tmp_path, "base_lr: 0.1 momentum: 0.9 random_seed: 1")
    assert not other.restore(str(state))
    assert other.iteration == 3
    assert other.net.sources["rows"].place()["batch"] == 0
    for one, two in zip(first.update.histories, other.update.histories, strict=True):
        assert torch.equal(one, two)


def test_weights_may_lie_beside_a_state_that_has_moved(tmp_path: Path) -> None:
    solver = solver_of(tmp_path, "base_lr: 0.1 random_seed: 1")
    state = solver.snapshot()
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("snap*"):
        path.rename(tmp_path / "moved" / path.name)
    assert solver.restore(str(tmp_path / "moved" / state.name))
    (tmp_path / "moved" / "snap_iter_0.caffemodel").unlink()
    with pytest.raises(CaffeError, match=r"snap_iter_0\.caffemodel"):
        solver.restore(str(tmp_path / "moved" / state.name))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f".snapshot-{os.uname().nodename}-{process}-x" for process in (ended.pid, os.getpid())]
    for name in (*names, ".snapshot-elsewhere-1-x"):
        (tmp_path / name).mkdir()
    solver_of(tmp_path, "base_lr: 0.1")
    assert sorted(path.name for path in tmp_path.glob(".*")) == sorted([names[1], ".snapshot-elsewhere-1-x"])


def test_a_label_that_is_no_class_is_told_with_layer_and_rows(tmp_path: Path) -> None:
    solver = solver_of(tmp_path, "base_lr: 0.1")
    with h5py.File(tmp_path / "rows.h5", "a") as file:
        file["label"][7] = 12
    solver = solver_of(tmp_path, "base_lr: 0.1")
    solver.step(1)
    with pytest.raises(CaffeError, match=r"layer 'loss'.*4 rows from row 4 of .*rows\.h5"):
        solver.step(1)


def test_a_sidecar_of_another_state_does_not_count(tmp_path: Path) -> None:
    solver = solver_of(tmp_path, "base_lr: 0.1 random_seed: 1")
    solver.step(1)
    first = solver.snapshot()
    solver.step(1)
    second = solver.snapshot()
    Path(f"{first}{sidecar.SUFFIX}").replace(f"{second}{sidecar.SUFFIX}")
    assert not solver.restore(str(second))


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "json", "head"])
def test_a_damaged_sidecar_is_named(tmp_path: Path, damage: str) -> None:
    solver = solver_of(tmp_path, "base_lr: 0.1 random_seed: 1")
    state = solver.snapshot()
    path = Path(f"{state}{sidecar.SUFFIX}")
    content = path.read_bytes()
    changed = {
        "cut": content[:-5],
        "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "longer": content + b"x",
        "json": content.replace(b'{"', b'["', 1),
        "head": b"something else" + content,
    }
    path.write_bytes(changed[damage])
    with pytest.raises(CaffeError, match=re.escape(path.name)):
        solver.restore(str(state))


def test_a_state_of_another_solver_is_refused(tmp_path: Path) -> None:
    state = solver_of(tmp_path, 'base_lr: 0.1 type: "SGD"').snapshot()
    with pytest.raises(CaffeError, match="2 histories"):
        solver_of(tmp_path, 'base_lr: 0.1 type: "Adam"').restore(str(state))


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_a_full_disk_leaves_the_old_snapshot_as_it_was(tmp_path: Path, form: str) -> None:
    solver = solver_of(tmp_path, f"base_lr: 0.1 random_seed: 1 snapshot_format: {form}")
    solver.step(1)
    solver.snapshot()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    solver.step(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # what is written beyond fails as on a full disk
    try:
        with pytest.raises(CaffeError, match=r"snap_iter_2.*cannot be written"):
            solver.snapshot()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert solver.snapshot().exists()


def test_signals_are_answered_between_iterations(tmp_path: Path, log: io.StringIO) -> None:
    solver = solver_of(tmp_path, "base_lr: 0.1 max_iter: 9 random_seed: 1 snapshot: 100")
    wanted = iter([Action.NONE, Action.SNAPSHOT, Action.NONE, Action.STOP])
    assert not solver.solve(lambda: next(wanted))
    assert sorted(path.name for path in tmp_path.glob("*.solverstate")) == [
        "snap_iter_2.solverstate",
        "snap_iter_4.solverstate",
    ]
    assert lines(log)[-1] == "Optimization stopped early."


def test_snapshots_come_at_their_interval_and_at_the_end(tmp_path: Path) -> None:
    solver_of(tmp_path, "base_lr: 0.1 max_iter: 5 snapshot: 2").solve()
    assert {path.name for path in tmp_path.glob("*.caffemodel")} == {f"snap_iter_{n}.caffemodel" for n in (2, 4, 5)}


def test_no_snapshot_after_training_where_the_file_says_so(tmp_path: Path) -> None:
    solver_of(tmp_path, "base_lr: 0.1 max_iter: 2 snapshot_after_train: false").solve()
    assert not list(tmp_path.glob("snap*"))


def test_gradient_clipping_is_told(tmp_path: Path, log: io.StringIO) -> None:
    solver_of(tmp_path, "base_lr: 0.1 clip_gradients: 0.001 random_seed: 1").step(1)
    assert re.search(r"Gradient clipping: .* > 0\.001\) by scale factor 0\.00", log.getvalue())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("snapshot_after_train: false", "lr_policy"),
        ('lr_policy: "step"', "stepsize"),
        ('lr_policy: "fixed"', "snapshot_prefix"),
        ('lr_policy: "fixed" snapshot_prefix: "/no/such/folder/x"', "/no/such/folder"),
        ('lr_policy: "fixed" snapshot_after_train: false type: "AdaGrad" momentum: 0.5', "momentum"),
        ('lr_policy: "fixed" average_loss: 0', "average_loss"),
        ('lr_policy: "fixed" snapshot_after_train: false test_iter: 3', "test_interval"),
        ('lr_policy: "fixed" snapshot_after_train: false test_interval: 2 test_iter: -1', "test_iter: -1"),
    ],
)
def test_what_is_wrong_with_a_solver_is_said_before_anything_runs(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(CaffeError, match=word):
        Solver(read_solver(f"{text}\nnet_param {{ {net_text(tmp_path)} }}\n"))
