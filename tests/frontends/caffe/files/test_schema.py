"""The classes of Caffe's messages: what everybody's files rely on."""

from __future__ import annotations

import pytest

from tilewise.frontends.caffe import schema
from tilewise.frontends.caffe.errors import CaffeError


def test_a_layer_has_the_defaults_of_caffe() -> None:
    layer = schema.LayerParameter()
    assert layer.phase == schema.TRAIN
    assert layer.convolution_param.bias_term
    assert layer.convolution_param.group == 1
    assert list(layer.convolution_param.kernel_size) == []
    assert layer.lrn_param.local_size == 5
    assert layer.lrn_param.beta == 0.75
    assert layer.pooling_param.Engine.Name(layer.pooling_param.engine) == "DEFAULT"
    assert layer.transform_param.scale == 1
    assert layer.bn_param.eps == pytest.approx(1e-5)
    assert schema.SolverParameter().type == "SGD"
    assert schema.NetState().phase == schema.TEST


def test_blobs_are_written_packed_under_the_numbers_of_the_format() -> None:
    blob = schema.BlobProto(data=[1.0, 2.0], shape=schema.BlobShape(dim=[2, 1]))
    assert blob.SerializeToString() == b"\x2a\x08\x00\x00\x80\x3f\x00\x00\x00\x40" + b"\x3a\x04\x0a\x02\x02\x01"


@pytest.mark.parametrize(
    ("profile", "field", "number"),
    [
        ("bvlc", "input_param", 143),
        ("pspnet", "interp_param", 143),
        ("segnet", "bn_param", 45),
        ("pspnet", "bn_param", 152),
        ("ssd", "permute_param", 202),
        ("rcnn", "roi_pooling_param", 8266711),
        ("shufflenet", "shuffle_channel_param", 164),
    ],
)
def test_a_profile_has_the_numbers_of_its_fork(profile: str, field: str, number: int) -> None:
    assert schema.profile(profile)["LayerParameter"].DESCRIPTOR.fields_by_name[field].number == number


@pytest.mark.parametrize("profile", schema.profiles())
def test_every_field_of_a_profile_can_be_written_in_text_in_any_network(profile: str) -> None:
    for name, own in schema.profile(profile).items():
        united = schema.message(name).DESCRIPTOR
        assert {field.name for field in own.DESCRIPTOR.fields} <= {field.name for field in united.fields}
        numbers = [field.number for field in own.DESCRIPTOR.fields]
        assert len(numbers) == len(set(numbers))


def test_the_numbers_of_caffe_are_the_same_in_all_profiles_together() -> None:
    for name, own in schema.profile("bvlc").items():
        united = schema.message(name).DESCRIPTOR.fields_by_name
        for field in own.DESCRIPTOR.fields:
            assert (field.name, united[field.name].number) == (field.name, field.number)


def test_unknown_names_are_refused_with_those_that_would_do() -> None:
    with pytest.raises(CaffeError, match=r"'darknet' is no known fork of Caffe; one of bvlc, ssd, .* would do"):
        schema.profile("darknet")
    with pytest.raises(CaffeError, match=r"'LayerParam' is no message of Caffe's; one of .*LayerParameter.* would do"):
        schema.message("LayerParam")
