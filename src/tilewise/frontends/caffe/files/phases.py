"""Which layers a network has in a phase: its ``include`` and ``exclude`` rules."""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.schema import TEST, TRAIN, NetParameter, NetState, NetStateRule

__all__ = ["PHASES", "filtered", "keeps"]

PHASES = {"train": TRAIN, "test": TEST}


def filtered(
    net: NetParameter, phase: str = "test", level: int | None = None, stages: Iterable[str] = ()
) -> NetParameter:
    """A copy of a network with the layers that it has in a phase, in their order.

    ``phase`` is ``"train"`` or ``"test"``. ``level`` is what rules compare with ``min_level`` and ``max_level``.
    Without it that of ``net.state`` counts, which is 0 if not set. ``stages`` are added to those of ``net.state``. The
    copy's ``state`` has all three, and each of its layers the phase, if it sets none of its own.

    A layer with ``include`` rules is kept if one of them holds, a layer with ``exclude`` rules if none does. Raises
    :class:`CaffeError` for a layer that has both, and for another ``phase``.

        >>> from tilewise.frontends.caffe.files import read_net
        >>> net = read_net('layer { name: "loss" include { phase: TRAIN } }')
        >>> len(filtered(net, "train").layer), len(filtered(net, "test").layer)
        (1, 0)
    """
    if phase not in PHASES:
        raise CaffeError(f"phase = {phase!r}; 'train' or 'test' would do")
    result = NetParameter()
    result.CopyFrom(net)
    state = result.state
    state.phase = PHASES[phase]
    if level is not None:
        state.level = level
    state.stage.extend(stages)
    del result.layer[:]
    for layer in net.layer:
        if layer.include and layer.exclude:
            raise CaffeError(f"layer {layer.name!r} has both include and exclude; one of them would do")
        if keeps(state, layer.include, layer.exclude):
            kept = result.layer.add()
            kept.CopyFrom(layer)
            if not kept.HasField("phase"):
                kept.phase = state.phase
    return result


def keeps(state: NetState, include: Iterable[NetStateRule], exclude: Iterable[NetStateRule]) -> bool:
    """Whether a layer with these rules, of which one kind may be given, is part of a network in a state."""
    include = list(include)
    if include:
        return any(_holds(rule, state) for rule in include)
    return not any(_holds(rule, state) for rule in exclude)


def _holds(rule: NetStateRule, state: NetState) -> bool:
    """Whether a state is as a rule says: all that the rule sets must fit."""
    stages = set(state.stage)
    return (
        (not rule.HasField("phase") or rule.phase == state.phase)
        and (not rule.HasField("min_level") or state.level >= rule.min_level)
        and (not rule.HasField("max_level") or state.level <= rule.max_level)
        and stages.issuperset(rule.stage)
        and stages.isdisjoint(rule.not_stage)
    )
