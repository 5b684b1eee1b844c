"""``tilewise caffe train`` over two processes: the means are those of one process with batches twice as large."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch

from tilewise.cli.caffe.ranks import Job, run_ranks
from tilewise.cli.caffe.train import train
from tilewise.frontends.caffe.files import read_solverstate, read_weights
from tilewise.frontends.caffe.schema import Datum
from tilewise.frontends.caffe.training.ranks import ALONE

RECORDS, BATCH, STEPS = 7, 3, 5
"""Seven records in batches of six: every epoch but one ends within a batch, and within a rank's share of it."""

NET = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "FOLDER/db" batch_size: SIZE
  backend: LMDB } transform_param { scale: 0.01 mean_value: 100 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 }
  param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "norm" type: "LRN" bottom: "conv" top: "norm" lrn_param { local_size: 3 alpha: 0.1 } }
layer { name: "pool" type: "Pooling" bottom: "norm" top: "pool" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def job_of(folder: Path, prefix: str, batch: int) -> Job:
    net = NET.replace("FOLDER", str(folder)).replace("SIZE", str(batch))
    path = folder / f"{prefix}.prototxt"
    path.write_text(
        f'base_lr: 0.05 momentum: 0.9 weight_decay: 0.01 clip_gradients: 2 lr_policy: "fixed" random_seed: 3 '
        f'iter_size: 2 max_iter: {STEPS} snapshot_prefix: "{folder}/{prefix}" solver_mode: CPU\nnet_param {{ {net} }}\n'
    )
    return Job(str(path), "", (), 0, (), "stop", "snapshot")


@pytest.mark.slow
def test_two_processes_with_batches_that_end_an_epoch_unevenly(tmp_path: Path) -> None:
    generator = np.random.default_rng(8)
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 20) as environment, environment.begin(write=True) as writing:
        for number in range(RECORDS):
            datum = Datum(channels=2, height=6, width=5, label=number % 3)
            datum.data = generator.integers(0, 256, 60, np.uint8).tobytes()
            writing.put(f"{number:08d}".encode(), datum.SerializeToString())
    cpu = torch.device("cpu")
    train(job_of(tmp_path, "one", 2 * BATCH), cpu, ALONE)
    run_ranks(train, job_of(tmp_path, "two", BATCH), [cpu, cpu])
    one, two = (read_weights(tmp_path / f"{name}_iter_{STEPS}.caffemodel") for name in ("one", "two"))
    assert list(one) == list(two) == ["conv", "ip"]
    for name, blobs in one.items():
        for mine, theirs in zip(blobs, two[name], strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(theirs), rtol=1e-4, atol=1e-6)
    states = [read_solverstate(tmp_path / f"{name}_iter_{STEPS}.solverstate") for name in ("one", "two")]
    for mine, theirs in zip(states[0].history, states[1].history, strict=True):
        assert float(np.abs(np.array(mine)).max()) > 1e-4  # it has learned
        np.testing.assert_allclose(np.array(mine), np.array(theirs), rtol=1e-3, atol=1e-6)
