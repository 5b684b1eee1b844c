"""Reading the text format: values as protobuf reads them, unknown fields named, and errors that say where."""

from __future__ import annotations

import codecs
import warnings
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from tilewise.frontends.caffe.errors import CaffeError, CaffeWarning
from tilewise.frontends.caffe.files import fields as fields_module
from tilewise.frontends.caffe.files import read_net, read_solver
from tilewise.frontends.caffe.files import text as text_module
from tilewise.frontends.caffe.files.text import parse, read_text
from tilewise.frontends.caffe.schema import LayerParameter, NetParameter

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
NUMBERS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(width=32, allow_nan=False)


@st.composite
def layers(draw: st.DrawFn) -> LayerParameter:
    layer = LayerParameter(name=draw(NAMES), type=draw(NAMES), bottom=draw(st.lists(NAMES, max_size=2)))
    layer.loss_weight.extend(draw(st.lists(FLOATS, max_size=2)))
    if draw(st.booleans()):
        layer.convolution_param.kernel_size.extend(draw(st.lists(NUMBERS, max_size=3)))
        layer.convolution_param.weight_filler.std = draw(FLOATS)
        layer.convolution_param.engine = draw(st.integers(0, 2))
    if draw(st.booleans()):
        layer.include.add(phase=draw(st.integers(0, 1)), stage=draw(st.lists(NAMES, max_size=2)))
    return layer


NETS = st.builds(lambda name, found: NetParameter(name=name, layer=found), NAMES, st.lists(layers(), max_size=4))
UNKNOWN = ["zoom: 3", 'zoom: "a" "b"', "zoom { depth: 1 }", "zoom: [1, 2]", "zoom: [{ a: 1 }, { b: [2] }]", "zoom <>"]


@given(NETS, st.sampled_from([False, True]))
def test_what_is_written_is_read(net: NetParameter, in_lines: bool) -> None:
    text = text_format.MessageToString(net, as_one_line=not in_lines)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(text, NetParameter(), "net") == net


@given(NETS, st.data())
def test_unknown_fields_are_skipped_and_named_with_their_lines(net: NetParameter, data: st.DataObject) -> None:
    lines = text_format.MessageToString(net).split("\n")
    # A field may begin after every whole line; protobuf writes one field, or the end of a message, in each.
    places = data.draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=3, unique=True))
    for place in sorted(places, reverse=True):
        lines.insert(place, data.draw(st.sampled_from(UNKNOWN)))
    with pytest.warns(CaffeWarning) as caught:
        assert parse("\n".join(lines), NetParameter(), "net") == net
    at = [number for number, line in enumerate(lines, 1) if line in UNKNOWN]
    assert len(caught) == 1
    assert [f"zoom (line {number})" in str(caught[0].message) for number in at] == [True] * len(at)
    assert str(caught[0].message).count("zoom (line") == len(at)


def test_a_warning_names_layer_and_line_and_leaves_out_what_is_too_much() -> None:
    many = "\n".join(f"field{number}: 1" for number in range(30))
    with pytest.warns(CaffeWarning) as caught:
        read_net(f'layer {{\n name: "conv1"\n lrn_param {{ zoom: 2 }}\n{many}\n}}')
    message = str(caught[0].message)
    assert "31 fields are unknown" in message
    assert "layer 'conv1', lrn_param, zoom (line 3)" in message
    assert message.endswith("and 11 more")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "layer {\n pooling_param { kernel_size: -3 } }",
            "line 2, column 31: layer, pooling_param, kernel_size: Value",
        ),
        ("layer { pooling_param { kernel_size: -3 } }", "whole numbers from 0 to 4294967295 would do"),
        ('layer { name: "a" pooling_param { pool: MOST } }', "layer 'a', pooling_param, pool: .*MAX, AVE, STOCHASTIC"),
        ("layer { pooling_param { pool: MAX pool: AVE } }", 'multiple "pool" fields; one would do'),
        ('layer { name: "a"\n', 'line 1, column 15: layer, name: Expected "}"$'),
        ("layer { type: POOLING }", "layer, type: Expected string .* text in quotes would do"),
        ("layer { lrn_param { alpha: abc } }", "alpha: Couldn't parse float: abc; a number would do"),
        ("layer { convolution_param { bias_term: 7\n} }", "bias_term: .* true or false would do"),
        ("layer: 3\n", "layer: .* layer { ... } would do"),
        ("layer { foo {" * 60 + "\n", "line 1: messages nest more than 50 deep"),
        ("layer { x: [[1]] }\n", r"line 1: layer, x: Invalid field value: \["),
        ('name: "a\n', "String missing ending quote"),
        ("\x01\n", "line 1, column 1: "),
        ("[some.thing/a.b] { x: 1 }\n", "line 1"),
        ("layer { name: 'a' } }\n", "line 1, column 21"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_would_do(text: str, words: str) -> None:
    with pytest.raises(CaffeError, match=words):
        read_net(text)


@given(st.text(st.sampled_from("{}[]<>:;,\"'#-+.1aenmlyr \n\t\\\x01é"), max_size=60))
def test_any_text_is_read_or_is_an_error_of_ours(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaffeWarning)
        try:
            net = read_net("{" + text)
        except CaffeError:
            return
        assert isinstance(net, NetParameter)


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_byte_order_marks_comments_and_any_ending_of_lines(tmp_path: Path, mark: bytes, ending: bytes) -> None:
    lines = ['# größe { " ', 'name: "größe" # } \'', "", "layer { # {", "  bottom: 'a' top: \"b\"", "}"]
    path = tmp_path / "net.prototxt"
    path.write_bytes(mark + ending.join(line.encode() for line in lines))
    net = read_net(path)
    assert (net.name, list(net.layer[0].bottom), list(net.layer[0].top)) == ("größe", ["a"], ["b"])


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_text_in_utf_16_with_a_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "net.prototxt"
    path.write_bytes("\ufeffname: 'é'\n".encode(encoding))
    assert read_net(path).name == "é"


def test_comments_in_another_encoding_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_bytes("name: 'n' # 卷积\n".encode("gbk"))
    assert read_net(path).name == "n"


def test_binary_and_too_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(b"\x0a\x03net\x00\x01")
    with pytest.raises(CaffeError, match=r"net\.caffemodel is binary; .*read_weights"):
        read_net(path)
    with pytest.raises(FileNotFoundError):
        read_net(tmp_path / "none.prototxt")
    path.write_text("name: 'net'\n", "utf-8")
    monkeypatch.setattr(text_module, "LARGEST", 12)
    assert read_text(path) == "name: 'net'\n"
    path.write_text("name: 'net2'\n", "utf-8")
    with pytest.raises(CaffeError, match="would do"):
        read_text(path)


def test_more_fields_than_any_network_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields_module, "MOST", 3)
    assert read_net("layer { } layer { } layer { }").layer[2].name == ""
    with pytest.raises(CaffeError, match="the text has over 3 fields; up to 3 would do"):
        read_net("layer { } layer { } layer { } layer { }")


def test_a_solver_and_numbers_as_people_write_them() -> None:
    solver = read_solver("base_lr: .5\nmomentum: 9e-1 weight_decay: 5E-4f\nstepvalue: [10, 20] stepvalue: 0x1e\n")
    assert solver.base_lr == 0.5
    assert solver.momentum == pytest.approx(0.9)
    assert solver.weight_decay == pytest.approx(5e-4)
    assert list(solver.stepvalue) == [10, 20, 30]
