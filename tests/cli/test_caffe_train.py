"""``tilewise caffe train``, ``test``, ``time`` and ``device_query`` on handwritten digits that scikit-learn ships."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image

from tilewise.frontends.caffe.data.database import close_all
from tilewise.frontends.caffe.files import read_solverstate, read_weights

Run = Callable[..., Result]
Start = Callable[..., subprocess.Popen[str]]
SIDE = 16

LENET = """
name: "LeNet"
layer {{ name: "digits" type: "Data" top: "data" top: "label" include {{ phase: TRAIN }}
  transform_param {{ scale: 0.00390625 {transform} }}
  data_param {{ source: "{folder}/train_lmdb" batch_size: {batch} backend: LMDB }} }}
layer {{ name: "digits" type: "Data" top: "data" top: "label" include {{ phase: TEST }}
  transform_param {{ scale: 0.00390625 {transform} }}
  data_param {{ source: "{folder}/test_lmdb" batch_size: 99 backend: LMDB }} }}
layer {{ name: "conv1" type: "Convolution" bottom: "data" top: "conv1" param {{ lr_mult: 1 }} param {{ lr_mult: 2 }}
  convolution_param {{ num_output: 8 kernel_size: 5 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
  pooling_param {{ pool: MAX kernel_size: 2 stride: 2 }} }}
layer {{ name: "ip1" type: "InnerProduct" bottom: "pool1" top: "ip1" param {{ lr_mult: 1 }} param {{ lr_mult: 2 }}
  inner_product_param {{ num_output: 32 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }}
layer {{ name: "drop1" type: "Dropout" bottom: "ip1" top: "ip1" dropout_param {{ dropout_ratio: 0.2 }} }}
layer {{ name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2" param {{ lr_mult: 1 }} param {{ lr_mult: 2 }}
  inner_product_param {{ num_output: 10 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" include {{ phase: TEST }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }}
"""


@pytest.fixture
def digits(tmp_path: Path, run: Run) -> Path:
    """A folder with databases of 700 and 198 digits, made by convert-imageset from 8 x 8 images resized to 16 x 16."""
    from sklearn.datasets import load_digits

    found = load_digits()
    (tmp_path / "images").mkdir()
    lines = []
    for number, (image, label) in enumerate(zip(found.images[:898], found.target[:898], strict=True)):
        Image.fromarray((image * 15).astype(np.uint8)).save(tmp_path / "images" / f"{number}.png")
        lines.append(f"{number}.png {label}\n")
    for name, part in (("train", lines[:700]), ("test", lines[700:])):
        (tmp_path / f"{name}.txt").write_text("".join(part))
        options = ("-gray", "-shuffle", f"-resize_height={SIDE}", f"-resize_width={SIDE}")
        paths = (f"{tmp_path}/images/", str(tmp_path / f"{name}.txt"), str(tmp_path / f"{name}_lmdb"))
        assert run("caffe", "convert-imageset", *options, *paths).exit_code == 0
    close_all()
    return tmp_path


def write_files(folder: Path, solver: str, transform: str = "", batch: int = 50) -> str:
    """The net and its solver; the solver's path."""
    (folder / "lenet.prototxt").write_text(LENET.format(folder=folder, transform=transform, batch=batch))
    text = f'net: "{folder}/lenet.prototxt"\nsnapshot_prefix: "{folder}/lenet"\nsolver_mode: CPU\n{solver}\n'
    (folder / "solver.prototxt").write_text(text)
    return str(folder / "solver.prototxt")


CROPPED = "mirror: true crop_size: 14"
SGD = 'base_lr: 0.05 momentum: 0.9 weight_decay: 0.0005 lr_policy: "inv" gamma: 0.0001 power: 0.75 '


def test_lenet_learns_digits_and_is_scored_and_timed(digits: Path, run: Run) -> None:
    solver = write_files(digits, f"{SGD} max_iter: 120 display: 40 test_iter: 2 test_interval: 120 random_seed: 3")
    result = run("caffe", "train", "-solver", solver)
    assert result.exit_code == 0, result.stderr
    before, after = (float(value) for value in re.findall(r"Test net output #0: accuracy = (\S+)", result.stderr))
    assert before < 0.4
    assert after > 0.8  # chance is 0.1
    weights = str(digits / "lenet_iter_120.caffemodel")
    scored = run("caffe", "test", f"-model={digits}/lenet.prototxt", "-weights", weights, "--iterations=2")
    mean = re.search(r"\] accuracy = (\S+)$", scored.stderr, re.MULTILINE)
    assert mean is not None, scored.stderr
    assert float(mean[1]) == pytest.approx(after, abs=1e-5)
    assert len(re.findall(r"Batch \d, accuracy = ", scored.stderr)) == 2
    timed = run("caffe", "time", "-model", f"{digits}/lenet.prototxt", "-iterations", "2")
    assert timed.exit_code == 0, timed.stderr
    names = ["conv1", "pool1", "ip1", "relu1", "drop1", "ip2", "loss"]
    assert re.findall(r"(\w+)\tbackward: \S+ ms\.", timed.stderr) == names
    assert re.search(r"Average Forward-Backward: \S+ ms\.", timed.stderr)


def test_training_begins_with_the_weights_that_are_given(digits: Path, run: Run) -> None:
    solver = write_files(digits, f"{SGD} max_iter: 1")
    assert run("caffe", "train", "-solver", solver).exit_code == 0
    first = str(digits / "lenet_iter_1.caffemodel")
    second = write_files(digits, f"{SGD} max_iter: 0 snapshot_format: HDF5".replace("0.05", "0"))
    assert run("caffe", "train", f"--solver={second}", f"--weights={first}").exit_code == 0
    one, other = read_weights(first), read_weights(str(digits / "lenet_iter_0.caffemodel.h5"))
    assert one.keys() == other.keys()
    for name in one:
        for a, b in zip(one[name], other[name], strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


def same_state(one: Path, other: Path) -> None:
    """Two snapshots hold the same bits."""
    for a, b in zip(read_solverstate(one).history, read_solverstate(other).history, strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))
    first, second = (read_weights(str(path).replace("solverstate", "caffemodel")) for path in (one, other))
    for name in first:
        for a, b in zip(first[name], second[name], strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(digits: Path, start: Start) -> None:
    """All by processes of their own: the last bits depend on how many threads a process has had from its start."""

    def trained(*arguments: str) -> None:
        process = start("caffe", "train", *arguments)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors

    # The killed run tests too, mirrors at random and has several epochs behind it.
    text = f"{SGD} max_iter: 45 snapshot: 15 test_iter: 2 test_interval: 10 random_seed: 5"
    solver = write_files(digits, text, CROPPED)
    trained("-solver", solver)
    straight = digits / "straight.solverstate"
    (digits / "lenet_iter_45.solverstate").rename(straight)
    (digits / "lenet_iter_45.caffemodel").rename(digits / "straight.caffemodel")
    for path in digits.glob("lenet_iter_*"):
        path.unlink()
    process = start("caffe", "train", "-solver", write_files(digits, text.replace("45", "100000"), CROPPED))
    try:
        deadline = time.monotonic() + 120
        while not (digits / "lenet_iter_30.solverstate").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    write_files(digits, text.replace("random_seed: 5", ""), CROPPED)
    trained("-solver", solver, "-snapshot", str(digits / "lenet_iter_30.solverstate"))
    same_state(straight, digits / "lenet_iter_45.solverstate")


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_whole_snapshots(digits: Path, start: Start) -> None:
    solver = write_files(digits, f"{SGD} max_iter: 100000 snapshot: 1 random_seed: 5", batch=2)
    for delay in (0.0, 0.013, 0.057, 0.101):
        process = start("caffe", "train", "-solver", solver)
        try:
            deadline = time.monotonic() + 120
            while not list(digits.glob("lenet_iter_*.solverstate")) and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        states = sorted(digits.glob("lenet_iter_*.solverstate"))
        assert states
        for state in states:
            found = read_solverstate(state)
            assert found.history
            assert len(read_weights(found.learned_net)) == 3
            state.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "flags", "ends"),
    [
        (signal.SIGINT, [], True),
        (signal.SIGHUP, [], False),
        (signal.SIGINT, ["-sigint_effect=snapshot"], False),
        (signal.SIGHUP, ["-sighup_effect", "stop"], True),
    ],
)
def test_signals_do_what_their_flags_say(digits: Path, start: Start, sent: int, flags: list[str], ends: bool) -> None:
    solver = write_files(digits, f"{SGD} max_iter: 100000 display: 1 random_seed: 5")
    process = start("caffe", "train", "-solver", solver, *flags)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "Iteration 2 " in line:
                break
        process.send_signal(sent)
        rest = []
        for line in process.stderr:
            rest.append(line)
            if "Snapshotting solver state" in line:
                break
        if ends:
            text = process.stderr.read()
            assert process.wait(60) == 0
            assert "Optimization stopped early." in text
        else:
            assert "Iteration" in process.stderr.readline() + process.stderr.readline()
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    (state,) = digits.glob("*.solverstate")
    assert read_solverstate(state).iter >= 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("train",), "-solver"),
        (("train", "-solver", "none.prototxt"), "none.prototxt"),
        (("train", "-solver", "x", "-weights", "a", "-snapshot", "b"), "one of them"),
        (("train", "-solver", "x", "-sigint_effect=wait"), "wait"),
        (("train", "-solver", "x", "-gpu", "one"), "-gpu"),
        (("test", "-model", "none.prototxt", "-weights", "b"), "none.prototxt"),
        (("test", "-model", "m", "-weights", "b", "-iterations=0"), "iterations"),
        (("time", "-model", "m", "-phase", "VALIDATE"), "VALIDATE"),
    ],
)
def test_what_makes_no_sense_is_one_line(run: Run, tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    (tmp_path / "x").write_text("base_lr: 1\n")
    result = run("caffe", *(str(tmp_path / each) if each == "x" else each for each in arguments))
    assert result.exit_code == 2
    *told, line = result.stderr.splitlines()
    assert word in line
    assert all(each.endswith("] Use CPU.") for each in told)


def test_gpus_are_listed(run: Run) -> None:
    result = run("caffe", "device_query")
    assert result.exit_code == 0
    if torch.cuda.is_available():
        assert result.stderr.count("Device id:") == torch.cuda.device_count()
    else:
        assert "no GPU" in result.stderr
        assert run("caffe", "device_query", "-gpu", "0").exit_code == 2
