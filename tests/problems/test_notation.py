"""benchdnn's notation both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.notation import format_layer, layer_name, looks_like_layer, parse_layer
from tilewise.problems.conv.problem import ConvProblem, Pass


def axes_of(text: str) -> tuple[Axis, ...]:
    return parse_layer(text).axes


def test_reads_the_papers_layer():
    p = parse_layer("mb256ic64ih27oc192oh27kh5ph2")
    assert (p.batch, p.in_channels, p.out_channels, p.groups) == (256, 64, 192, 1)
    assert p.axes == (Axis(27, 5, 1, 1, 2, 2),) * 2
    assert p.pass_ is Pass.FPROP


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        # Lines of benchdnn's own lists: names, groups, depth, dilation, odd orders, underscores.
        ('g1mb256ic3ih227iw227oc96oh55ow55kh11kw11sh4sw4ph0pw0n"alexnet:conv1"', (Axis(227, 11, 4),) * 2),
        ('mb1_g1ic32oc32_iw84350ow84349kw2sw1dw0pw0n"wavenet:conv1d_1"', (Axis(84350, 2),)),
        (
            'mb1ic3ih132iw132id116oc32kh3kw3kd3ph0pw0pd0sh1sw1sd1n"3d_unet:conv_1"',
            (Axis(116, 3), Axis(132, 3), Axis(132, 3)),
        ),
        (
            'mb1ic512ih38iw57oc512oh38ow57kh3kw3ph3pw3dh2dw2n"dilated_rfcn"',
            (Axis(38, 3, 1, 3, 3, 3), Axis(57, 3, 1, 3, 3, 3)),
        ),
        ("ic16oc16_iw1kw3ow100pw100", (Axis(1, 3, 1, 1, 100, 1),)),
        ("ic1oc64_ih55oh18kh30sh3ph29dh2", (Axis(55, 30, 3, 3, 29, 55),) * 2),
        ("ic3oc64id28od36kd3pd5sd1dd0", (Axis(28, 3, 1, 1, 5, 5),) * 3),
        ("mb1ic16oc16_ih10kh5_ph7sh1", (Axis(10, 5, 1, 1, 7, 7),) * 2),
    ],
)
def test_reads_benchdnn_lists(text: str, axes: tuple[Axis, ...]):
    assert axes_of(text) == axes


def test_what_may_be_left_out():
    assert parse_layer("ic3ih8oc4kh3").batch == 2
    assert axes_of("ic3ih8oc4kh3") == (Axis(8, 3),) * 2  # no output, no padding: padding 0
    assert axes_of("ic3ih8oc4oh8kh3") == (Axis(8, 3, 1, 1, 1, 1),) * 2  # padding from the output
    assert axes_of("ic3ih8oc4oh8kh2") == (Axis(8, 2, 1, 1, 0, 1),) * 2  # an odd sum puts the more behind
    assert axes_of("ic3ih8oc4oh2kh1sh4") == (Axis(8, 1, 4),) * 2  # none is needed
    assert axes_of("ic3id8oc4kd3") == (Axis(8, 3),) * 3
    assert axes_of("ic3ih8iw9oc4kh3kw5pw2") == (Axis(8, 3), Axis(9, 5, 1, 1, 2, 2))
    assert axes_of("ic3ih8oc4kh3pd0sd1dd0pw0") == (Axis(8, 3),) * 2  # entries that say nothing make no axis


def test_trailing_padding_is_torchs_where_that_gives_the_output():
    # ResNet's strided layers: torch pads (1, 1), of which the last is read by no output.
    assert axes_of("ic64ih56oc128oh28kh3sh2ph1") == (Axis(56, 3, 2, 1, 1, 1),) * 2
    # Only a crop gives 3 outputs.
    assert axes_of("ic64ih8oc128oh3kh3ph0") == (Axis(8, 3, 1, 1, 0, -3),) * 2


def test_other_fields_and_batch():
    p = parse_layer(
        "g32mb8ic32ih14oc32kh3", pass_=Pass.WGRAD, batch=5, layout="channels_last", dtype="bf16", device="cuda:H100"
    )
    assert (p.pass_, p.batch, p.dtype, p.device, p.groups) == (Pass.WGRAD, 5, "bf16", "cuda:H100", 32)
    assert p.layouts == ("channels_last",) * 3
    assert parse_layer("ic3ih8oc4kh3", precision="tf32", bias=True).precision == "tf32"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no entries"]),
        ("alexnet", ["'alexnet'", "mb, ic"]),
        ("mb4ih8oc4kh3", ["ic: missing"]),
        ("mb4ic3ih8kh3", ["oc: missing"]),
        ("mb4ic3ih8oc4", ["kh: missing", "ih and kh"]),
        ("mb4ic3oc4oh8kh3", ["ih: missing"]),
        ("mb4ic3oc4", ["no spatial axis"]),
        ("mb4ic3ih8oc4kh3xx5", ["'xx5'"]),
        ("mb4ic3ih8oc4kh", ["kh must be followed by a whole number"]),
        ("mb4ic3ih8oc4kh3.5", ["'.5'"]),
        ("mb4ic3ic4ih8oc4kh3", ["ic4", "twice", "ic3"]),
        ("mb0ic3ih8oc4kh3", ["mb0", "at least 1"]),
        ("mb4ic0ih8oc4kh3", ["ic0", "at least 1"]),
        ("g0mb4ic3ih8oc4kh3", ["g0", "at least 1"]),
        ("g2mb4ic3ih8oc4kh3", ["ic3", "g2"]),
        ("g3mb4ic3ih8oc4kh3", ["oc4", "g3"]),
        ("mb4ic3ih8oc4kh3sh0", ["sh0", "at least 1"]),
        ("mb4ic3ih8oc4kh3ph-1", ["ph-1", "negative"]),
        ("mb4ic3ih8oc4kh9", ["ih8", "kh9", "empty"]),
        ("mb4ic3ih8oc4kh5dh2", ["ih8", "kh5", "dh2", "13"]),
        ("mb4ic3ih8oc4oh2kh3ph9", ["oh2", "ph9"]),
        ("mb4ic3id8ih8oc4kd3kh3", ["iw and kw", "missing"]),
        ("mb4ic3id8iw8oc4kd3kw3", ["ih and kh", "missing"]),
        ("mb4ic3ih8iw9oc4kh3", ["kw: missing", "iw9"]),
        ("mb99999999999999999999ic3ih8oc4kh3", ["bytes", "smaller"]),
        ("mb4ic3ih8oc4kh3ph1pw0", ["pw0", "ph is 1", "iw and kw"]),
    ],
)
def test_errors_name_the_entry_and_what_would_do(text: str, words: list[str]):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the words are checked below
        parse_layer(text)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_negative_batch_is_refused():
    with pytest.raises(ValueError, match="mb-3"):
        parse_layer("ic3ih8oc4kh3", batch=-3)


def test_names_and_layers_are_told_apart():
    for text in ("mb256ic64ih27oc192", "g32ic4", "_ic3", "ic-3"):
        assert looks_like_layer(text)
    for text in ("alexnet", "googlenet", "densenet40", "torchvision:resnet18", "my.module:ic3", "", "icecream"):
        assert not looks_like_layer(text)


def test_layer_name():
    assert layer_name('ic3ih8oc4kh3n"alexnet:conv1*2"') == "alexnet:conv1*2"
    assert layer_name("ic3ih8oc4kh3_nconv1") == "conv1"
    assert layer_name("ic3ih8oc4kh3") == ""
    assert layer_name(format_layer(parse_layer("ic3ih8oc4kh3"), name="conv1")) == "conv1"


def test_writes_as_short_as_benchdnn():
    def again(text: str) -> str:
        return format_layer(parse_layer(text))

    assert again("mb256_ic64ih27iw27_oc192oh27ow27_kh5kw5_ph2pw2") == "mb256ic64ih27oc192oh27kh5ph2"
    assert again("g32ic32iw14oc32kw3") == "g32mb2ic32iw14oc32ow12kw3pw0"
    assert again("ic3id9ih8iw8oc4kd3kh3kw3") == "mb2ic3id9ih8iw8oc4od7oh6ow6kd3kh3kw3pd0ph0pw0"
    assert again("ic3ih9iw8oc4kh3kw3sw2dh1") == "mb2ic3ih9iw8oc4oh5ow3kh3kw3sh1sw2ph0pw0dh1dw0"


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (Axis(8, 3, 1, 1, -1, 0), ["pw-1", "negative"]),
        (Axis(8, 3, 2, 1, 0, 0), []),
        (Axis(8, 3, 2, 1, 0, -1), ["trailing padding -1", "ow3", "gives 0"]),
        (Axis(8, 1, 4, 1, 0, 1), ["trailing padding 1", "ow3", "gives 1"]),
        (Axis(7, 3, 2, 1, 0, 1), ["trailing padding 1", "gives 0"]),
    ],
)
def test_padding_without_text(axis: Axis, words: list[str]):
    p = ConvProblem(Pass.FPROP, 2, 3, 4, (axis,))
    if not words or f"gives {axis.after}" in " ".join(words):
        assert parse_layer(format_layer(p)) == p
        return
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the words are checked below
        format_layer(p)
    for word in words:
        assert word in str(raised.value)


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    kernel, stride, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    before, after = draw(st.integers(-3, 6)), draw(st.integers(-3, 6))
    reach = (kernel - 1) * dilation + 1
    least = max(reach - before - after, 1 - min(before, 0) - min(after, 0), 1)
    return Axis(draw(st.integers(least, least + 12)), kernel, stride, dilation, before, after)


@st.composite
def problems(draw: st.DrawFn) -> ConvProblem:
    groups = draw(st.integers(1, 3))
    shapes = draw(st.lists(axes(), min_size=1, max_size=3))
    if draw(st.booleans()):
        shapes = shapes[:1] * len(shapes)
    return ConvProblem(
        pass_=draw(st.sampled_from(Pass)),
        batch=draw(st.integers(1, 300)),
        in_channels=groups * draw(st.integers(1, 5)),
        out_channels=groups * draw(st.integers(1, 5)),
        axes=tuple(shapes),
        groups=groups,
    )


def message_of(call: Callable[[], object]) -> str:
    """What the ``ValueError`` of ``call`` says; empty where it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@given(problems())
def test_round_trip(p: ConvProblem):
    refused = message_of(lambda: format_layer(p))
    if refused:
        # Only padding that the notation cannot say is refused.
        assert "padding" in refused
        assert any(a.before < 0 or a.after != a.before for a in p.axes)
        return
    text = format_layer(p)
    assert parse_layer(text, pass_=p.pass_) == p
    assert looks_like_layer(text)


@given(problems())
def test_whatever_is_written_describes_the_same_outputs(p: ConvProblem):
    """Where the trailing padding is not the notation's, the layer that the text would name differs in it alone."""
    if any(a.before < 0 for a in p.axes):
        return
    words = [f"g{p.groups}mb{p.batch}ic{p.in_channels}oc{p.out_channels}"]
    for n, a in zip(p.space, p.axes, strict=True):
        words.append(f"i{n}{a.size}o{n}{a.out}k{n}{a.kernel}s{n}{a.stride}d{n}{a.dilation - 1}p{n}{a.before}")
    refused = message_of(lambda: parse_layer("_".join(words)))
    if refused:
        # Only an axis whose outputs read padding alone, which no trailing padding makes a convolution.
        assert "reads none" in refused
        assert any((a.out - 1) * a.stride + a.reach <= a.before for a in p.axes)
        return
    got = parse_layer("_".join(words))
    assert [(a.size, a.out, a.kernel, a.before) for a in got.axes] == [
        (a.size, a.out, a.kernel, a.before) for a in p.axes
    ]


@given(st.text(alphabet='gmbicohdwkspn0123456789_-" ', max_size=40))
def test_any_text_is_a_problem_or_one_clear_line(text: str):
    assert "\n" not in message_of(lambda: parse_layer(text))
