"""CaffeNet as a text that Caffe reads, at any size: the network of Caffe con Troll's experiments."""

from __future__ import annotations

__all__ = ["caffenet"]

CONVOLUTIONS = (
    ("conv1", 96, 11, 0, 4, 1, 0),
    ("conv2", 256, 5, 2, 1, 2, 1),
    ("conv3", 384, 3, 1, 1, 1, 0),
    ("conv4", 384, 3, 1, 1, 2, 1),
    ("conv5", 256, 3, 1, 1, 2, 1),
)
"""Name, outputs, kernel, padding, stride, groups (Krizhevsky et al. 2012, section 3.5), and the biases to begin with.

Weights begin with a deviation of 0.01, those of the first two fully connected layers with 0.005 (section 5).
"""


def caffenet(batch: int, size: int = 227, share: int = 1, classes: int = 1000) -> str:
    """A network for training, without dropout, with the losses of ``classes``; ``share`` divides all channels.

    Without dropout two runs of different precision do the same. Pooling comes before normalization, as in CaffeNet.
    """
    layers = [
        f'name: "CaffeNet"\nlayer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ dim: [{batch}, 3, '
        f"{size}, {size}] }} }} }}",
        f'layer {{ name: "label" type: "Input" top: "label" input_param {{ shape {{ dim: {batch} }} }} }}',
    ]
    bottom = "data"
    for name, outputs, kernel, pad, stride, group, bias in CONVOLUTIONS:
        layers += [
            f'layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" {_rates()} '
            f"convolution_param {{ num_output: {outputs // share} kernel_size: {kernel} pad: {pad} stride: {stride} "
            f'group: {group} weight_filler {{ type: "gaussian" std: 0.01 }} bias_filler {{ value: {bias} }} }} }}',
            f'layer {{ name: "relu{name[-1]}" type: "ReLU" bottom: "{name}" top: "{name}" }}',
        ]
        bottom = name
        if name in ("conv1", "conv2", "conv5"):
            bottom = f"pool{name[-1]}"
            layers.append(
                f'layer {{ name: "{bottom}" type: "Pooling" bottom: "{name}" top: "{bottom}" '
                "pooling_param { kernel_size: 3 stride: 2 } }"
            )
        if name in ("conv1", "conv2"):
            layers.append(
                f'layer {{ name: "norm{name[-1]}" type: "LRN" bottom: "{bottom}" top: "norm{name[-1]}" '
                "lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 } }"
            )
            bottom = f"norm{name[-1]}"
    for name, outputs, deviation, bias in (
        ("fc6", 4096 // share, 0.005, 1),
        ("fc7", 4096 // share, 0.005, 1),
        ("fc8", classes, 0.01, 0),
    ):
        layers.append(
            f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" {_rates()} '
            f'inner_product_param {{ num_output: {outputs} weight_filler {{ type: "gaussian" std: {deviation} }} '
            f"bias_filler {{ value: {bias} }} }} }}"
        )
        if name != "fc8":
            layers.append(f'layer {{ name: "relu{name[-1]}" type: "ReLU" bottom: "{name}" top: "{name}" }}')
        bottom = name
    layers.append('layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc8" bottom: "label" top: "loss" }')
    return "\n".join(layers)


def _rates() -> str:
    return "param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }"
