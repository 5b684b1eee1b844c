"""Small networks of the families that were published with Caffe: each runs forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.caffe.export.test_export import loaded
from tests.frontends.caffe.layers.nets import net
from torch import Tensor

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.export import export, module_text, read_torch_state
from tilewise.frontends.caffe.layers.base import Layer, Shape
from tilewise.frontends.caffe.layers.registry import register_python

FILL = 'weight_filler { type: "xavier" }'


def inputs(**shapes: tuple[int, ...]) -> str:
    return "".join(
        f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ dim: {list(shape)} }} }} }}\n'
        for name, shape in shapes.items()
    )


def conv(name: str, bottom: str, outputs: int, kernel: int = 3, pad: int = 1, more: str = "") -> str:
    return (
        f'layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{ '
        f"num_output: {outputs} kernel_size: {kernel} pad: {pad} {FILL} {more} }} }}\n"
    )


def deconv(name: str, bottom: str, outputs: int) -> str:
    """Twice the height and width."""
    return conv(name, bottom, outputs, 4, 1, "stride: 2").replace('"Convolution"', '"Deconvolution"')


def one(kind: str, name: str, bottoms: str, fields: str = "", tops: str = "") -> str:
    words = "".join(f' bottom: "{bottom}"' for bottom in bottoms.split())
    words += "".join(f' top: "{top}"' for top in (tops or name).split())
    return f'layer {{ name: "{name}" type: "{kind}"{words} {fields} }}\n'


FCN = (
    inputs(data=(1, 3, 33, 41), label=(1, 1, 33, 41))
    + conv("conv1", "data", 6, pad=20)
    + one("ReLU", "relu1", "conv1", tops="conv1")
    + one("Pooling", "pool1", "conv1", "pooling_param { kernel_size: 2 stride: 2 }")
    + conv("conv2", "pool1", 8)
    + one("Pooling", "pool2", "conv2", "pooling_param { kernel_size: 2 stride: 2 }")
    + conv("fc6", "pool2", 12, 3, 0)
    + one("Dropout", "drop6", "fc6", "dropout_param { dropout_ratio: 0.5 }", "fc6")
    + conv("score", "fc6", 5, 1, 0)
    + one("Deconvolution", "up", "score", "param { lr_mult: 0 } convolution_param { num_output: 5 bias_term: false "
          'kernel_size: 4 stride: 2 weight_filler { type: "bilinear" } }')
    + conv("score_pool1", "pool1", 5, 1, 0)
    + one("Crop", "cropped", "score_pool1 up", "crop_param { axis: 2 offset: 1 }")
    + one("Eltwise", "fused", "up cropped", "eltwise_param { operation: SUM }")
    + one("Deconvolution", "big", "fused", "convolution_param { num_output: 5 bias_term: false kernel_size: 8 "
          f"stride: 4 {FILL} }}")
    + one("Crop", "final", "big data", "crop_param { axis: 2 offset: 9 }")
    + one("SoftmaxWithLoss", "loss", "final label", "loss_param { ignore_label: 255 normalize: false }")
)  # fmt: skip
SEGNET = (
    inputs(data=(2, 3, 18, 22), label=(2, 1, 18, 22))
    + one("LRN", "norm", "data", "lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 }")
    + conv("conv1", "norm", 6)
    + one("BN", "bn1", "conv1", 'bn_param { scale_filler { type: "constant" value: 1 } shift_filler { value: 0.001 } }',
          "conv1")
    + one("ReLU", "relu1", "conv1", tops="conv1")
    + one("Pooling", "pool1", "conv1", "pooling_param { pool: MAX kernel_size: 2 stride: 2 }", "pool1 pool1_mask")
    + conv("conv2", "pool1", 6)
    + one("Upsample", "upsample1", "conv2 pool1_mask", "upsample_param { scale: 2 }")
    + conv("scores", "upsample1", 3)
    + one("SoftmaxWithLoss", "loss", "scores label", "loss_param { weight_by_label_freqs: true ignore_label: 11 "
          "class_weighting: 0.5 class_weighting: 1 class_weighting: 2 }")
)  # fmt: skip
PSPNET = (
    inputs(data=(1, 3, 17, 17))
    + conv("conv1", "data", 8, more="stride: 2 bias_term: false")
    + one("BN", "bn", "conv1", "param { decay_mult: 0 } bn_param { slope_filler { value: 1 } bias_filler { value: 0 } "
          "frozen: true momentum: 0.95 }")
    + one("ReLU", "relu", "bn", tops="bn")
    + conv("dilated", "bn", 8, pad=2, more="dilation: 2")
    + one("Pooling", "p2", "dilated", "pooling_param { pool: AVE kernel_size: 5 stride: 4 }")
    + one("Interp", "i2", "p2", "interp_param { height: 9 width: 9 }")
    + one("Concat", "cat", "dilated i2")
    + conv("score", "cat", 4, 1, 0)
    + one("Interp", "out", "score", "interp_param { zoom_factor: 2 }")
)  # fmt: skip
LRCN = (
    inputs(data=(6, 3, 12, 12), cont=(3, 2), input_sentence=(3, 2), target=(3, 2))
    + conv("conv1", "data", 4)
    + one("InnerProduct", "fc6", "conv1", f"inner_product_param {{ num_output: 5 {FILL} }}")
    + one("Reshape", "frames", "fc6", "reshape_param { shape { dim: 3 dim: 2 dim: 5 } }")
    + one("Embed", "embedding", "input_sentence", "embed_param { bias_term: false input_dim: 7 num_output: 4 "
          'weight_filler { type: "uniform" min: -0.08 max: 0.08 } }')
    + one("Concat", "both", "frames embedding", "concat_param { axis: 2 }")
    + one("LSTM", "lstm1", "both cont", f"recurrent_param {{ num_output: 6 {FILL} }}")
    + one("InnerProduct", "predict", "lstm1", f"inner_product_param {{ num_output: 7 axis: 2 {FILL} }}")
    + one("SoftmaxWithLoss", "loss", "predict target", "loss_weight: 20 softmax_param { axis: 2 } "
          "loss_param { ignore_label: -1 }")
    + one("Accuracy", "accuracy", "predict target", "accuracy_param { axis: 2 ignore_label: -1 }")
)  # fmt: skip
GENERATIVE = (
    inputs(feat=(2, 10), real=(2, 3, 16, 16), side=(2,))
    + one("InnerProduct", "fc", "feat", f"inner_product_param {{ num_output: 64 {FILL} }}")
    + one("ReLU", "relu", "fc", "relu_param { negative_slope: 0.3 }", "fc")
    + one("Reshape", "shaped", "fc", "reshape_param { shape { dim: 0 dim: 4 dim: 4 dim: 4 } }")
    + deconv("up1", "shaped", 6)
    + one("BatchNorm", "bn", "up1")
    + one("Scale", "scale", "bn", "scale_param { bias_term: true }")
    + deconv("up2", "scale", 3)
    + one("TanH", "fake", "up2")
    + one("Concat", "images", "fake real", "concat_param { axis: 0 }")
    + conv("d1", "images", 4, more="stride: 2")
    + one("ELU", "e1", "d1")
    + one("InnerProduct", "d2", "e1", f"inner_product_param {{ num_output: 1 {FILL} }}")
    + one("Slice", "halves", "d2", "slice_param { axis: 0 }", "of_fake of_real")
    + one("Power", "zero", "side", "power_param { scale: 0 shift: 0 }")
    + one("SigmoidCrossEntropyLoss", "gan", "of_fake zero")
    + one("EuclideanLoss", "pixels", "fake real", "loss_weight: 0.01")
    + one("Silence", "quiet", "of_real", tops=" ")
)
AUTOENCODER = (
    inputs(data=(3, 1, 6, 6))
    + one("Flatten", "flat", "data")
    + one("InnerProduct", "encode", "flat", 'inner_product_param { num_output: 5 weight_filler { type: "gaussian" '
          "std: 1 sparse: 3 } }")
    + one("Sigmoid", "code", "encode")
    + one("InnerProduct", "decode", "code", f"inner_product_param {{ num_output: 36 {FILL} }}")
    + one("SigmoidCrossEntropyLoss", "cross", "decode flat", "loss_weight: 1")
    + one("Sigmoid", "output", "decode")
    + one("EuclideanLoss", "l2", "output flat", "loss_weight: 0")
)  # fmt: skip
SIAMESE = (
    inputs(pair=(2, 2, 12, 12), sim=(2,))
    + one("Slice", "slice_pair", "pair", "slice_param { slice_dim: 1 slice_point: 1 }", "data data_p")
    + "".join(
        f'layer {{ name: "conv{end}" type: "Convolution" bottom: "data{end}" top: "conv{end}" param {{ name: "w" }} '
        f'param {{ name: "b" }} convolution_param {{ num_output: 3 kernel_size: 5 {FILL} }} }}\n'
        + one("InnerProduct", f"feat{end}", f"conv{end}", f'param {{ name: "fw" }} param {{ name: "fb" }} '
              f"inner_product_param {{ num_output: 2 {FILL} }}")
        for end in ("", "_p")
    )
    + one("ContrastiveLoss", "loss", "feat feat_p sim", "contrastive_loss_param { margin: 1 }")
)  # fmt: skip
V1 = """
name: "old"
input: "data" input_dim: 2 input_dim: 3 input_dim: 15 input_dim: 15
input: "label" input_dim: 2 input_dim: 1 input_dim: 1 input_dim: 1
layers { name: "conv1" type: CONVOLUTION bottom: "data" top: "conv1" blobs_lr: 1 blobs_lr: 2
  weight_decay: 1 weight_decay: 0
  convolution_param { num_output: 6 kernel_size: 3 stride: 2 weight_filler { type: "gaussian" std: 0.1 } } }
layers { name: "relu1" type: RELU bottom: "conv1" top: "conv1" }
layers { name: "cccp1" type: CONVOLUTION bottom: "conv1" top: "cccp1" convolution_param { num_output: 4 kernel_size: 1
  weight_filler { type: "gaussian" std: 0.1 } } }
layers { name: "pool" type: POOLING bottom: "cccp1" top: "pool" pooling_param { pool: AVE kernel_size: 7 stride: 1 } }
layers { name: "loss" type: SOFTMAX_LOSS bottom: "pool" bottom: "label" include { phase: TRAIN } }
layers { name: "prob" type: SOFTMAX bottom: "pool" top: "prob" include { phase: TEST } }
"""
SSD = (
    inputs(data=(2, 3, 24, 24), label=(1, 1, 4, 8))
    + conv("conv4", "data", 6, more="stride: 2")
    + one("Normalize", "norm", "conv4", "norm_param { across_spatial: false channel_shared: false "
          "scale_filler { value: 20 } }")
    + conv("loc", "norm", 16)
    + one("Permute", "loc_perm", "loc", "permute_param { order: [0, 2, 3, 1] }")
    + one("Flatten", "loc_flat", "loc_perm")
    + conv("conf", "norm", 12)
    + one("Permute", "conf_perm", "conf", "permute_param { order: [0, 2, 3, 1] }")
    + one("Flatten", "conf_flat", "conf_perm")
    + one("PriorBox", "prior", "norm data", "prior_box_param { min_size: 5 max_size: 9 aspect_ratio: 2 flip: true "
          "variance: [0.1, 0.1, 0.2, 0.2] step: 2 }")
    + one("Concat", "priors", "prior", "concat_param { axis: 2 }")
    + one("MultiBoxLoss", "mbox_loss", "loc_flat conf_flat priors label", "include { phase: TRAIN } "
          "multibox_loss_param { num_classes: 3 code_type: CENTER_SIZE neg_overlap: 0.5 mining_type: MAX_NEGATIVE } "
          "loss_param { normalization: VALID } propagate_down: true propagate_down: true propagate_down: false "
          "propagate_down: false")
    + one("Reshape", "conf_rows", "conf_flat", "include { phase: TEST } reshape_param { shape { dim: [0, -1, 3] } }")
    + one("Softmax", "conf_soft", "conf_rows", "include { phase: TEST } softmax_param { axis: 2 }")
    + one("Flatten", "scores", "conf_soft", "include { phase: TEST }")
    + one("DetectionOutput", "found", "loc_flat scores priors", "include { phase: TEST } detection_output_param "
          "{ num_classes: 3 code_type: CENTER_SIZE keep_top_k: 5 confidence_threshold: 0.01 "
          "nms_param { nms_threshold: 0.45 top_k: 20 } }")
)  # fmt: skip
RCNN = (
    inputs(data=(1, 3, 32, 32), im_info=(1, 3))
    + conv("conv5", "data", 6, more="stride: 4")
    + conv("rpn_cls_score", "conv5", 2, 1, 0)
    + conv("rpn_bbox_pred", "conv5", 4, 1, 0)
    + one("Reshape", "rpn_rows", "rpn_cls_score", "reshape_param { shape { dim: 0 dim: 2 dim: -1 dim: 0 } }")
    + one("Softmax", "rpn_prob", "rpn_rows")
    + one("Python", "proposal", "rpn_prob rpn_bbox_pred im_info", "python_param { module: 'rpn.proposal_layer' "
          "layer: 'ProposalLayer' param_str: 'feat_stride = 4' }", "rois")
    + one("ROIPooling", "pool5", "conv5 rois", "roi_pooling_param { pooled_w: 3 pooled_h: 3 spatial_scale: 0.25 }")
    + one("InnerProduct", "fc6", "pool5", f"inner_product_param {{ num_output: 8 {FILL} }}")
    + one("InnerProduct", "cls_score", "fc6", f"inner_product_param {{ num_output: 3 {FILL} }}")
    + one("Softmax", "cls_prob", "cls_score")
    + one("InnerProduct", "bbox_pred", "fc6", f"inner_product_param {{ num_output: 12 {FILL} }}")
)  # fmt: skip
SHUFFLENET = (
    inputs(data=(2, 3, 16, 16))
    + conv("conv1", "data", 8, more="stride: 2")
    + conv("group", "conv1", 8, 1, 0, "group: 2")
    + one("ShuffleChannel", "shuffled", "group", "shuffle_channel_param { group: 2 }")
    + conv("dw", "shuffled", 8, more="group: 8").replace('"Convolution"', '"ConvolutionDepthwise"')
    + one("ReLU6", "r6", "dw")
    + one("Eltwise", "sum", "conv1 r6")
    + one("Pooling", "pool", "sum", "pooling_param { pool: AVE global_pooling: true }")
)
NETS = {
    "FCN": FCN, "SegNet": SEGNET, "PSPNet": PSPNET, "LRCN": LRCN, "generative": GENERATIVE, "autoencoder": AUTOENCODER,
    "siamese": SIAMESE, "V1": V1, "SSD": SSD, "Faster R-CNN": RCNN, "ShuffleNet": SHUFFLENET,
}  # fmt: skip


@register_python("rpn.proposal_layer", "ProposalLayer")
class Proposals(Layer):
    """The two boxes of the highest scores: what a program registers for its own network."""

    bottoms = (3, 3)
    constant = True

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [(2, 5)]

    def forward(self, scores: Tensor, offsets: Tensor, info: Tensor) -> Tensor:
        best = scores[0, 1].flatten().topk(2).indices.to(scores.dtype)
        corners = torch.stack([best % 8 * 4, best // 8 * 2, best % 8 * 4 + 9, best // 8 * 2 + 9], 1)
        return torch.cat([torch.zeros_like(best)[:, None], corners], 1)


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers that an input of this name may have."""
    if name == "label" and shape[-1:] == (8,):
        rows = [[0, 1, 0, 0.1, 0.1, 0.4, 0.4, 0], [0, 2, 1, 0.5, 0.5, 0.9, 0.8, 0], [1, 1, 0, 0.2, 0.3, 0.6, 0.9, 0]]
        return torch.tensor([[[*rows, [-1.0] * 8]]], dtype=torch.float32, device="cpu")
    if name in ("label", "target", "input_sentence", "cont", "sim", "side"):
        return torch.randint(0, 2, shape, dtype=torch.int64, device="cpu").to(torch.float32)
    if name == "im_info":
        return torch.tensor([[32.0, 32.0, 1.0]], dtype=torch.float32, device="cpu")
    return torch.rand(shape, dtype=torch.float32, device="cpu")


def given(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: values(name, shape) for name, shape in shapes.items()}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("phase", ["train", "test"])
@pytest.mark.parametrize("name", NETS)
def test_a_network_of_this_family_runs_forward_and_backward(name: str, phase: Any) -> None:
    made = net(NETS[name], phase)
    outputs = made(**given(made.input_shapes))
    if made.loss is not None:
        made.loss.backward()
    else:
        torch.stack([y.square().sum() for y in made.blobs.values() if y.requires_grad]).sum().backward()
    learned = [blob for blob in made.parameters() if blob.requires_grad]
    reached = [blob for blob in learned if blob.grad is not None and bool(blob.grad.isfinite().all())]
    assert len(reached) == len(learned)
    assert all(bool(y.isfinite().all()) for y in outputs.values())
    assert made.inputs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted({*NETS} - {"SegNet", "Faster R-CNN"}))
def test_a_network_of_this_family_is_written_in_plain_torch(name: str) -> None:
    assert "import tilewise" not in module_text(net(NETS[name]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("FCN", {"data": (2, 3, 25, 49), "label": (2, 1, 25, 49)}),
        ("SSD", {"data": (1, 3, 30, 18), "label": (1, 1, 4, 8)}),
        ("LRCN", {"data": (6, 3, 12, 12), "cont": (3, 2), "input_sentence": (3, 2), "target": (3, 2)}),
        ("ShuffleNet", {"data": (3, 3, 21, 12)}),
    ],
)
def test_what_is_written_in_plain_torch_takes_images_of_another_size(
    tmp_path: Path, name: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    made = net(NETS[name])
    module, state = export(made, tmp_path / "net")
    other = loaded(module)
    other.load_state_dict(read_torch_state(state))
    tensors = given(shapes)
    want = made(**tensors)
    found = other.eval()(*(tensors[blob] for blob in made.inputs))
    assert list(found) == list(want)
    for blob, tensor in want.items():
        torch.testing.assert_close(found[blob], tensor, rtol=1e-6, atol=1e-6)


def test_what_is_missing_in_a_network_is_named_with_the_hook() -> None:
    text = RCNN.replace("rpn.proposal_layer", "elsewhere") + one("Correlation", "corr", "conv5 conv5")
    with pytest.raises(CaffeError) as caught:
        net(text)
    assert "register_python('elsewhere', 'ProposalLayer') above a Layer class would add it" in str(caught.value)
    assert "layer 'corr' has the unknown type 'Correlation'" in str(caught.value)
    assert "register('Correlation') above a Layer class would add it" in str(caught.value)
