"""Networks in plain torch: the same outputs, gradients and weights as the network that they are written from."""

from __future__ import annotations

import ast
import copy
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked import run_script
from tests.frontends.caffe.layers.nets import net
from torch import Tensor, nn

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.export import export, load_torch_state, module_text, read_torch_state, torch_state
from tilewise.frontends.caffe.layers.base import Layer
from tilewise.frontends.caffe.layers.registry import register
from tilewise.frontends.caffe.net import Net

IMAGE = (2, 6, 9, 7)
CASES: list[tuple[str, str, Sequence[tuple[int, ...]], int]] = [
    ("Convolution", "convolution_param { num_output: 4 kernel_size: 3 pad: 1 stride: 2 }", [IMAGE], 1),
    ("Convolution", "convolution_param { num_output: 4 kernel_h: 3 kernel_w: 1 group: 2 }", [IMAGE], 1),
    ("Convolution", "convolution_param { num_output: 4 kernel_size: 1 bias_term: false }", [IMAGE], 1),
    ("Convolution", "convolution_param { num_output: 4 kernel_size: 2 dilation: 2 }", [IMAGE, IMAGE], 2),
    ("Convolution", "convolution_param { num_output: 4 kernel_size: 3 axis: 2 }", [(2, 3, 5, 6, 7)], 1),
    ("Convolution", "convolution_param { num_output: 4 kernel_size: 3 axis: 0 }", [(5, 6, 7)], 1),
    ("Convolution", "convolution_param { num_output: 2 kernel_size: 2 }", [(2, 3, 4, 5, 6)], 1),
    ("Deconvolution", "convolution_param { num_output: 6 kernel_size: 4 stride: 2 group: 6 }", [IMAGE], 1),
    ("Im2col", "convolution_param { kernel_size: 3 pad: 1 stride: 2 }", [IMAGE], 1),
    ("InnerProduct", "inner_product_param { num_output: 3 }", [IMAGE], 1),
    ("InnerProduct", "inner_product_param { num_output: 3 axis: 2 bias_term: false }", [(2, 3, 5)], 1),
    ("InnerProduct", "inner_product_param { num_output: 3 transpose: true }", [IMAGE], 1),
    ("Embed", "embed_param { num_output: 3 input_dim: 1 }", [(4, 2)], 1),
    ("ReLU", "", [IMAGE], 1),
    ("ReLU", "relu_param { negative_slope: 0.1 }", [IMAGE], 1),
    ("ReLU6", "relu6_param { negative_slope: 0.1 }", [IMAGE], 1),
    ("ReLU6", "", [IMAGE], 1),
    ("PReLU", "", [IMAGE], 1),
    ("PReLU", "prelu_param { channel_shared: true }", [IMAGE], 1),
    ("ELU", "elu_param { alpha: 0.3 }", [IMAGE], 1),
    ("Sigmoid", "", [IMAGE], 1),
    ("TanH", "", [IMAGE], 1),
    ("Swish", "swish_param { beta: 2 }", [IMAGE], 1),
    ("AbsVal", "", [IMAGE], 1),
    ("BNLL", "", [IMAGE], 1),
    ("Power", "power_param { power: 2 scale: 3 shift: 0.5 }", [IMAGE], 1),
    ("Power", "power_param { power: 0 }", [IMAGE], 1),
    ("Power", "", [IMAGE], 1),
    ("Exp", "exp_param { base: 2 scale: 0.5 shift: 1 }", [IMAGE], 1),
    ("Log", "log_param { base: 10 shift: 3 }", [IMAGE], 1),
    ("Threshold", "threshold_param { threshold: 0.25 }", [IMAGE], 1),
    ("Clip", "clip_param { min: -0.5 max: 0.25 }", [IMAGE], 1),
    ("Dropout", "", [IMAGE], 1),
    ("Dropout", "dropout_param { scale_train: false }", [IMAGE], 1),
    ("Dropout", "dropout_param { sample_weights_test: true }", [IMAGE], 1),
    ("Softmax", "softmax_param { axis: 2 }", [IMAGE], 1),
    ("LRN", "lrn_param { local_size: 3 alpha: 0.5 }", [IMAGE], 1),
    ("LRN", "lrn_param { local_size: 3 alpha: 0.5 norm_region: WITHIN_CHANNEL }", [IMAGE], 1),
    ("BatchNorm", "", [IMAGE], 1),
    ("BatchNorm", "", [(4, 3)], 1),
    ("BatchNorm", "batch_norm_param { use_global_stats: true }", [IMAGE], 1),
    ("BatchNorm", "batch_norm_param { use_global_stats: false }", [IMAGE], 1),
    ("BN", "", [IMAGE], 1),
    ("BN", "bn_param { frozen: true }", [IMAGE], 1),
    ("BN", "bn_param { bn_mode: INFERENCE }", [IMAGE], 1),
    ("BN", "bn_param { scale_filler { value: 2 } }", [IMAGE], 1),
    ("Scale", "scale_param { bias_term: true }", [IMAGE], 1),
    ("Scale", "scale_param { axis: 0 }", [IMAGE, (2, 6)], 1),
    ("Scale", "scale_param { num_axes: 0 }", [IMAGE], 1),
    ("Bias", "bias_param { axis: 2 num_axes: -1 }", [IMAGE], 1),
    ("Bias", "bias_param { axis: 0 }", [IMAGE, (2,)], 1),
    ("MVN", "", [IMAGE], 1),
    ("MVN", "mvn_param { across_channels: true normalize_variance: false }", [IMAGE], 1),
    ("Normalize", "", [IMAGE], 1),
    ("Normalize", "norm_param { across_spatial: false channel_shared: false }", [IMAGE], 1),
    ("Pooling", "pooling_param { kernel_size: 3 stride: 2 }", [IMAGE], 1),
    ("Pooling", "pooling_param { kernel_size: 3 stride: 2 pad: 1 pool: AVE }", [IMAGE], 1),
    ("Pooling", "pooling_param { kernel_size: 3 pad: 2 stride: 2 }", [IMAGE], 1),
    ("Pooling", "pooling_param { kernel_size: 3 pad: 2 stride: 2 pool: AVE }", [IMAGE], 1),
    ("Pooling", "pooling_param { kernel_size: 2 stride: 4 pool: AVE }", [IMAGE], 1),
    ("Pooling", "pooling_param { kernel_size: 3 stride: 2 round_mode: FLOOR }", [IMAGE], 1),
    ("Pooling", "pooling_param { kernel_size: 3 stride: 2 pad: 1 }", [IMAGE], 2),
    ("Pooling", "pooling_param { global_pooling: true pool: AVE }", [IMAGE], 1),
    ("Pooling", "pooling_param { global_pooling: true }", [IMAGE], 1),
    ("SPP", "spp_param { pyramid_height: 3 pool: AVE }", [IMAGE], 1),
    ("Interp", "interp_param { height: 5 width: 12 }", [IMAGE], 1),
    ("Interp", "interp_param { zoom_factor: 2 pad_beg: -1 pad_end: -2 }", [IMAGE], 1),
    ("Interp", "", [IMAGE, (1, 1, 4, 3)], 1),
    ("Concat", "concat_param { axis: 2 }", [IMAGE, IMAGE], 1),
    ("Slice", "slice_param { slice_point: [1, 4] }", [IMAGE], 3),
    ("Slice", "", [IMAGE], 2),
    ("Slice", "", [IMAGE], 1),
    ("Split", "", [IMAGE], 2),
    ("Silence", "", [IMAGE], 0),
    ("Crop", "crop_param { axis: 2 offset: [1, 2] }", [IMAGE, (1, 1, 4, 3)], 1),
    ("Flatten", "flatten_param { axis: 2 }", [IMAGE], 1),
    ("Reshape", "reshape_param { shape { dim: [0, 3, -1] } axis: 0 num_axes: 3 }", [IMAGE], 1),
    ("Permute", "permute_param { order: [0, 2, 3, 1] }", [IMAGE], 1),
    ("Tile", "tile_param { tiles: 3 }", [IMAGE], 1),
    ("ShuffleChannel", "shuffle_channel_param { group: 3 }", [IMAGE], 1),
    ("Eltwise", "", [IMAGE, IMAGE, IMAGE], 1),
    ("Eltwise", "eltwise_param { coeff: [1, -0.5] }", [IMAGE, IMAGE], 1),
    ("Eltwise", "eltwise_param { operation: PROD }", [IMAGE, IMAGE], 1),
    ("Eltwise", "eltwise_param { operation: MAX }", [IMAGE, IMAGE], 1),
    ("Axpy", "", [(2, 6, 1, 1), IMAGE, IMAGE], 1),
    ("Reduction", "reduction_param { operation: SUMSQ axis: 1 coeff: 0.5 }", [IMAGE], 1),
    ("Reduction", "reduction_param { operation: MEAN }", [IMAGE], 1),
    ("ArgMax", "argmax_param { top_k: 2 out_max_val: true }", [IMAGE], 1),
    ("ArgMax", "argmax_param { axis: 1 }", [IMAGE], 1),
    ("RNN", "recurrent_param { num_output: 3 }", [(4, 2, 5), (4, 2)], 1),
    ("LSTM", "recurrent_param { num_output: 3 }", [(4, 2, 5), (4, 2), (2, 3)], 1),
    ("LSTM", "recurrent_param { num_output: 3 expose_hidden: true }", [(4, 2, 5), (4, 2), (1, 2, 3), (1, 2, 3)], 3),
    ("Parameter", "parameter_param { shape { dim: [2, 3] } }", [], 1),
    ("PriorBox", "prior_box_param { min_size: 3 max_size: 5 aspect_ratio: 2 clip: true }", [IMAGE, (1, 3, 20, 30)], 1),
    ("SmoothL1Loss", "smooth_l1_loss_param { sigma: 2 }", [IMAGE, IMAGE, IMAGE, IMAGE], 1),
    ("EuclideanLoss", "", [IMAGE, IMAGE], 1),
    ("ContrastiveLoss", "contrastive_loss_param { margin: 4 }", [(4, 3), (4, 3), (4,)], 1),
    ("ContrastiveLoss", "contrastive_loss_param { margin: 4 legacy_version: true }", [(4, 3), (4, 3), (4,)], 1),
    ("SigmoidCrossEntropyLoss", "loss_param { normalization: VALID ignore_label: 0 }", [IMAGE, IMAGE], 1),
    ("SigmoidCrossEntropyLoss", "", [IMAGE, IMAGE], 2),
]  # fmt: skip
LABELLED = [
    ("SoftmaxWithLoss", "", (4, 3), 2),
    ("SoftmaxWithLoss", "loss_param { ignore_label: 1 normalization: VALID }", (4, 3, 2, 2), 1),
    ("SoftmaxWithLoss", "loss_param { normalize: false }", (4, 3), 1),
    ("MultinomialLogisticLoss", "", (4, 3), 1),
    ("HingeLoss", "hinge_loss_param { norm: L2 }", (4, 3), 1),
    ("Accuracy", "accuracy_param { top_k: 2 ignore_label: 0 }", (4, 3), 2),
    ("Accuracy", "", (4, 3), 1),
    ("MarginInnerProduct", "margin_inner_product_param { num_output: 3 type: QUADRUPLE base: 2 }", (4, 5), 1),
    ("Filter", "", (4, 3), 1),
    ("BatchReindex", "", (4, 3), 1),
]  # fmt: skip


def text_of(kind: str, fields: str, shapes: Sequence[tuple[int, ...]], tops: int) -> str:
    """A network of one layer between its inputs and outputs."""
    names = [f"in/{place}" for place in range(len(shapes))]
    inputs = "".join(
        f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ dim: {list(shape)} }} }} }}\n'
        for name, shape in zip(names, shapes, strict=True)
    )
    bottoms = " ".join(f'bottom: "{name}"' for name in names)
    made = " ".join(f'top: "{place}.top"' for place in range(tops))
    return f'{inputs}layer {{ name: "it/1" type: "{kind}" {bottoms} {made} {fields} }}'


def loaded(path: str) -> nn.Module:
    """The module of an exported file."""
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, nn.Module)]
    made: nn.Module = classes[-1]()
    return made


def check(network: Net, inputs: Sequence[Tensor], folder: Path) -> None:
    """Whether an exported network has the outputs and gradients of ``network``, and its weights come back."""
    with torch.no_grad():
        for blob in network.parameters():
            blob.uniform_(0.25, 1)
    before = copy.deepcopy(network)
    module, state = export(network, folder / "net")
    other = loaded(module)
    other.load_state_dict(torch.load(state, weights_only=True))
    other.train(network.phase == "train")
    found: list[list[Tensor]] = []
    for each in (network, other):
        given = [x.clone().requires_grad_() for x in inputs]
        results = []
        for _ in range(2):  # recurrent layers go on from their last states
            torch.manual_seed(3)
            outputs = each(*given)
            results += list(outputs.values())
        total = [y.sin().sum() for y in outputs.values() if y.requires_grad]
        grads = torch.autograd.grad(torch.stack(total).sum(), given, allow_unused=True) if total and given else []
        found.append([*results, *(g for g in grads if g is not None)])
    assert list(outputs) == list(network.outputs)
    assert len(found[0]) == len(found[1])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    again = copy.deepcopy(network)
    with torch.no_grad():
        for blob in again.parameters():
            blob.zero_()
    assert not load_torch_state(again, read_torch_state(state)).missing
    for name, layer in again.layers.items():
        if layer.caffe_type != "BatchNorm":  # whose third blob divides the others
            for mine, theirs in zip(layer.blobs, before.layers[name].blobs, strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("phase", ["test", "train"])
@pytest.mark.parametrize(("kind", "fields", "shapes", "tops"), CASES)
def test_a_layer_in_plain_torch(
    tmp_path: Path, kind: str, fields: str, shapes: Sequence[tuple[int, ...]], tops: int, phase: Any
) -> None:
    made = net(text_of(kind, fields, shapes, tops), phase)
    inputs = [2 * torch.rand(shape, dtype=torch.float32, device="cpu") - 1 for shape in shapes]
    if kind == "Embed":
        inputs = [torch.zeros_like(x) for x in inputs]
    if kind == "ContrastiveLoss":
        inputs[2] = (inputs[2] > 0).to(torch.float32)
    if kind in ("RNN", "LSTM"):
        inputs[1] = (inputs[1] > 0).to(torch.float32)
    check(made, inputs, tmp_path)


@pytest.mark.parametrize(("kind", "fields", "shape", "tops"), LABELLED)
def test_a_layer_with_labels_in_plain_torch(tmp_path: Path, kind: str, fields: str, shape: Any, tops: int) -> None:
    labels = (shape[0], *shape[2:])
    made = net(text_of(kind, fields, [shape, labels], tops))
    inputs = [
        torch.randn(shape, dtype=torch.float32, device="cpu"),
        torch.arange(math.prod(labels), dtype=torch.float32, device="cpu") % 3,
    ]
    scores = inputs[0].softmax(1) if kind == "MultinomialLogisticLoss" else inputs[0]
    check(made, [scores, inputs[1].reshape(labels)], tmp_path)


@pytest.mark.parametrize("training", [False, True])
def test_stochastic_pooling_in_plain_torch(tmp_path: Path, training: bool) -> None:
    text = text_of("Pooling", "pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }", [IMAGE], 1)
    check(net(text, "train" if training else "test"), [torch.rand(IMAGE, dtype=torch.float32, device="cpu")], tmp_path)


def test_places_of_pooling_are_put_back(tmp_path: Path) -> None:
    text = text_of("Pooling", "pooling_param { kernel_size: 2 stride: 2 }", [IMAGE], 2)
    text += ' layer { name: "up" type: "Upsample" bottom: "0.top" bottom: "1.top" top: "up" '
    text += "upsample_param { scale: 2 pad_out_h: true pad_out_w: true } }"
    check(net(text), [torch.randn(IMAGE, dtype=torch.float32, device="cpu")], tmp_path)


@pytest.mark.parametrize("code", ["CORNER", "CENTER_SIZE", "CORNER_SIZE"])
@pytest.mark.parametrize("keep", [-1, 3])
def test_detections_in_plain_torch(tmp_path: Path, code: str, keep: int) -> None:
    fields = f"num_classes: 3 code_type: {code} keep_top_k: {keep} confidence_threshold: 0.1"
    fields = f"detection_output_param {{ {fields} nms_param {{ nms_threshold: 0.4 top_k: 5 }} }}"
    made = net(text_of("DetectionOutput", fields, [(2, 24), (2, 18), (1, 2, 24)], 1))
    corners = torch.rand(6, 2, dtype=torch.float32, device="cpu")
    boxes = torch.cat([corners * 0.5, corners * 0.5 + 0.4], 1).flatten()
    priors = torch.stack([boxes, torch.full_like(boxes, 0.1)])[None]
    inputs = [
        torch.randn(2, 24, dtype=torch.float32, device="cpu"),
        torch.rand(2, 18, dtype=torch.float32, device="cpu"),
        priors,
    ]
    with torch.no_grad():
        check(made, inputs, tmp_path)


TWO = """
name: "two 'quotes\\"\\"\\" of three"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [2, 4] } } }
layer { name: "class" type: "InnerProduct" bottom: "data" top: "for" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "ip.2" type: "InnerProduct" bottom: "for" top: "self" param { name: "w" } param { name: "b" }
  propagate_down: false inner_product_param { num_output: 4 } }
layer { name: "');import os;('" type: "TanH" bottom: "self" top: "torch" }
"""


def test_shared_weights_stopped_gradients_and_strange_names(tmp_path: Path) -> None:
    made = net(TWO)
    check(made, [torch.randn(2, 4, dtype=torch.float32, device="cpu")], tmp_path)
    other = loaded(export(made, tmp_path / "net")[0])
    assert sorted(other.state_dict()) == ["class.bias", "class.weight", "ip_2.bias", "ip_2.weight"]
    assert len(list(other.parameters())) == 2
    names = {node.names[0].name for node in ast.walk(ast.parse(module_text(made))) if isinstance(node, ast.Import)}
    assert names <= {"torch", "torch.nn.functional", "math"}


@pytest.mark.parametrize("name", ["F", "Blobs", "tensor", "nn", "4 nets", "größe", "class"])
def test_a_network_whose_name_the_file_has_already(tmp_path: Path, name: str) -> None:
    text = f'name: "{name}" {text_of("Scale", "scale_param { bias_term: true }", [IMAGE], 1)} '
    text += one_more("relu", "ReLU", "0.top", "F") + one_more("tanh", "TanH", "F", "accuracy")
    made = net(text)
    check(made, [torch.randn(IMAGE, dtype=torch.float32, device="cpu")], tmp_path)


def one_more(name: str, kind: str, bottom: str, top: str) -> str:
    return f'layer {{ name: "{name}" type: "{kind}" bottom: "{bottom}" top: "{top}" }}\n'


@pytest.mark.slow
def test_an_exported_file_runs_without_this_library(tmp_path: Path) -> None:
    made = net(TWO)
    export(made, tmp_path / "net")
    program = (
        "import sys, torch, net\n"
        "it = [c for c in vars(net).values() if isinstance(c, type) and c.__module__ == 'net'][-1]()\n"
        "it.load_state_dict(torch.load('net.pth', weights_only=True))\n"
        "assert not any(name.startswith('tilewise') for name in sys.modules)\n"
        "print(it(torch.ones(2, 4))['torch'].flatten().tolist())\n"
    )
    done = run_script("-c", program, environment=dict(os.environ), cwd=tmp_path, has_tilewise=False)
    assert done.returncode == 0, done.stderr
    want = made(torch.ones(2, 4, dtype=torch.float32, device="cpu"))["torch"].flatten().tolist()
    assert ast.literal_eval(done.stdout) == pytest.approx(want, rel=1e-6)


def test_a_state_dict_of_the_network_itself_is_read_too() -> None:
    made = net(
        text_of("BatchNorm", "", [IMAGE], 1)
        + text_of("Scale", "", [], 1)
        .replace('"Scale"', '"Scale" bottom: "0.top"')
        .replace("it/1", "s")
        .replace('top: "0.top"', 'top: "s"')
    )
    with torch.no_grad():
        for blob in made.parameters():
            blob.uniform_(0.25, 1)
    blank = copy.deepcopy(made)
    with torch.no_grad():
        for blob in blank.parameters():
            blob.zero_()
    report = load_torch_state(
        blank, {**made.state_dict(), "other.weight": torch.ones(1, dtype=torch.float32, device="cpu")}
    )
    assert report.matched == ("it/1", "s")
    assert report.unused == ("other",)
    for name, value in made.state_dict().items():
        assert torch.equal(blank.state_dict()[name], value)


def test_statistics_come_back_as_means_and_variances() -> None:
    made = net(text_of("BatchNorm", "", [IMAGE], 1))
    mean, variance, factor = made.layers["it/1"].blobs
    with torch.no_grad():
        mean.fill_(6)
        variance.fill_(9)
        factor.fill_(3)
    state = torch_state(made)
    assert state["it/1.running_mean"].tolist() == pytest.approx([2] * 6)
    load_torch_state(made, state)
    assert [float(blob.detach()[0]) for blob in (mean, variance, factor)] == pytest.approx([2, 3, 1])
    with torch.no_grad():
        factor.zero_()
    assert torch_state(made)["it/1.running_var"].tolist() == [0] * 6


def test_what_cannot_be_written_is_listed_before_any_file_is_made(tmp_path: Path) -> None:
    @register("ExportOfOnesOwn")
    class Own(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x

    made = net(
        text_of("ExportOfOnesOwn", "", [IMAGE], 1) + ' layer { name: "b" type: "BatchNorm" bottom: "0.top" top: "b" '
        "batch_norm_param { update_global_stats: false } }"
    )
    with pytest.raises(CaffeError, match=r"2 layers cannot be written.*'it/1' \(ExportOfOnesOwn\).*'b' \(BatchNorm\)"):
        export(made, tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_files_that_are_no_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CaffeError, match=r"is no file of torch\.save's"):
        read_torch_state(path)
    torch.save({"a": 1}, path)
    with pytest.raises(CaffeError, match="is not tensors by name"):
        read_torch_state(path)
    torch.save(net(TWO), path)
    with pytest.raises(CaffeError, match="cannot be read as tensors"):
        read_torch_state(path)
    with pytest.raises(FileNotFoundError):
        read_torch_state(tmp_path / "none.pth")


def test_a_state_dict_that_does_not_fit_is_an_error_with_the_layer() -> None:
    made = net(text_of("InnerProduct", "inner_product_param { num_output: 3 }", [(2, 4)], 1))
    weight, bias = torch.ones(3, 4, dtype=torch.float32, device="cpu"), torch.ones(3, dtype=torch.float32, device="cpu")
    with pytest.raises(CaffeError, match=r"'it/1' .*has no 'it/1.bias'"):
        load_torch_state(made, {"it/1.weight": weight})
    with pytest.raises(CaffeError, match=r"'it/1' .*blob 0 has shape \(4, 3\)"):
        load_torch_state(made, {"it/1.weight": weight.T, "it/1.bias": bias})
    with pytest.raises(CaffeError, match=r"'it/1.bias', a torch.int64"):
        load_torch_state(made, {"it/1.weight": weight, "it/1.bias": bias.long()})
