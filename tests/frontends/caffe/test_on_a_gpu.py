"""Losses of detectors, recurrent layers and exported modules on a GPU: the numbers of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("google.protobuf", reason="Caffe's files need protobuf")

from tests.frontends.caffe.export.test_export import loaded
from tests.frontends.caffe.layers.nets import net
from tests.frontends.caffe.test_public_nets import NETS, given

from tilewise.frontends.caffe.export import export, read_torch_state
from tilewise.machine.torch_state import framework_flags

pytestmark = pytest.mark.gpu


# Not SSD: its true boxes fit two prior boxes equally well, and a rounding decides between these.
@pytest.mark.parametrize("name", ["FCN", "LRCN", "generative", "siamese"])
def test_a_network_has_the_losses_and_gradients_of_the_cpu(name: str) -> None:
    made = net(NETS[name], "train")
    for layer in made.layers.values():
        if layer.caffe_type == "Dropout":
            layer.eval()
    tensors = given(made.input_shapes)
    made(**tensors)
    assert made.loss is not None
    learned = [blob for blob in made.parameters() if blob.requires_grad]
    loss, gradients = made.loss.detach(), torch.autograd.grad(made.loss, learned)
    made.to("cuda")
    with framework_flags("cuda", "ieee", deterministic=False):
        for layer in made.layers.values():
            if hasattr(layer, "reset"):
                layer.reset()
        made(**{blob: tensor.to("cuda") for blob, tensor in tensors.items()})
        learned = [blob for blob in made.parameters() if blob.requires_grad]
        found = torch.autograd.grad(made.loss, learned)
    torch.testing.assert_close(made.loss.detach().cpu(), loss, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["FCN", "LRCN", "SSD", "ShuffleNet"])
def test_an_exported_module_has_the_outputs_of_the_network(tmp_path: Path, name: str) -> None:
    made = net(NETS[name])
    module, state = export(made, tmp_path / "net")
    other = loaded(module)
    other.load_state_dict(read_torch_state(state))
    tensors = {blob: tensor.to("cuda") for blob, tensor in given(made.input_shapes).items()}
    made.to("cuda")
    other.to("cuda").eval()
    with framework_flags("cuda", "ieee", deterministic=False):
        want, found = made(**tensors), other(*(tensors[blob] for blob in made.inputs))
    for blob, tensor in want.items():
        torch.testing.assert_close(found[blob], tensor, rtol=1e-4, atol=1e-5)
