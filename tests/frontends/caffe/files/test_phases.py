"""Which layers a network has in a phase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import filtered, read_net
from tilewise.frontends.caffe.schema import NetParameter, NetStateRule

STAGES = st.lists(st.sampled_from("abc"), max_size=2)
OPTIONAL_LEVELS = st.none() | st.integers(-2, 2)


@st.composite
def rules(draw: st.DrawFn) -> dict[str, object]:
    rule: dict[str, object] = {"stage": draw(STAGES), "not_stage": draw(STAGES)}
    for name, values in (("phase", st.sampled_from([None, 0, 1])), ("min_level", OPTIONAL_LEVELS)):
        rule[name] = draw(values)
    rule["max_level"] = draw(OPTIONAL_LEVELS)
    return {name: value for name, value in rule.items() if value is not None}


LAYERS = st.tuples(st.sampled_from(["include", "exclude"]), st.lists(rules(), max_size=3))


def broken(rule: dict[str, object], phase: str, level: int, stages: list[str]) -> bool:
    """Whether some part of a rule does not fit, by the words of Caffe's documentation."""
    if "phase" in rule and ["train", "test"][rule["phase"]] != phase:  # type: ignore[call-overload]
        return True
    if not rule.get("min_level", -99) <= level <= rule.get("max_level", 99):  # type: ignore[operator]
        return True
    wanted, unwanted = rule["stage"], rule["not_stage"]
    return any(stage not in stages for stage in wanted) or any(stage in stages for stage in unwanted)  # type: ignore[attr-defined]


@given(st.lists(LAYERS, max_size=5), st.sampled_from(["train", "test"]), st.integers(-2, 2), STAGES, STAGES)
def test_a_layer_is_kept_as_its_rules_say(
    drawn: list[tuple[str, list[dict[str, object]]]], phase: str, level: int, own: list[str], more: list[str]
) -> None:
    net = NetParameter()
    net.state.stage.extend(own)
    expected = []
    for index, (kind, given_rules) in enumerate(drawn):
        layer = net.layer.add(name=str(index))
        getattr(layer, kind).extend([NetStateRule(**rule) for rule in given_rules])
        fits = [not broken(rule, phase, level, own + more) for rule in given_rules]
        if not fits or (any(fits) if kind == "include" else not any(fits)):
            expected.append(str(index))
    result = filtered(net, phase, level, more)
    assert [layer.name for layer in result.layer] == expected
    assert len(net.layer) == len(drawn)


def test_the_state_and_the_phase_of_layers_are_set() -> None:
    net = read_net('state { level: 3 stage: "x" }\nlayer { name: "a" } layer { name: "b" phase: TEST }')
    result = filtered(net, "train", stages=["y"])
    assert (result.state.phase, result.state.level, list(result.state.stage)) == (0, 3, ["x", "y"])
    assert [layer.phase for layer in result.layer] == [0, 1]
    assert filtered(net, "train", level=0).state.level == 0
    assert not net.layer[0].HasField("phase")


def test_both_kinds_of_rules_and_unknown_phases_are_refused() -> None:
    net = read_net('layer { name: "a" include { } exclude { } }')
    with pytest.raises(CaffeError, match="layer 'a' has both include and exclude; one of them would do"):
        filtered(net, "train")
    with pytest.raises(CaffeError, match="phase = 'TRAIN'; 'train' or 'test' would do"):
        filtered(net, "TRAIN")
