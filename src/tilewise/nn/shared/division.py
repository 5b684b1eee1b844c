"""Which linear layers are divided by their outputs, and where a backward is cut so that gradients travel meanwhile.

A linear layer whose gradients are larger than what it reads and returns costs less to share by its outputs than by
samples: each device then has some rows of the weight, and samples are exchanged before and after. Hadjis et al. 2015,
section 3.3, expect that of model parallelism for fully connected layers. Bytes and measured rates of copies say which
layers may gain. The program's own steps then say whether they do (:mod:`tilewise.nn.shared.trial`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilewise.nn.graphs.standing import HOOKS, hooks_of
from tilewise.nn.shared.balance import divided
from tilewise.nn.shared.batch import Batch
from tilewise.nn.shared.chain import Chain, Cut, Untraceable, chain_of, chosen
from tilewise.nn.shared.rates import copy_rate
from tilewise.nn.shared.replica import Stages
from tilewise.plan import format_bytes

__all__ = ["LINEAR", "Division", "Layer", "cuts_for_sums"]

LINEAR = ("auto", "never", "always")
MOST_KINDS = 16
"""Modes of a model whose chains are kept."""
LEAST_BYTES = 8 << 20
"""The least weights in a stage of the backward, for whose gradients a cut is made."""
MOST_CUTS = 7
PASSES = 6
"""How often a value at a cut is read or written more than without it, in forward and backward."""
EXCHANGE_S = 1e-4
"""Seconds of a step that the launches of a layer's four exchanges take beside their bytes."""


@dataclass(frozen=True)
class Layer:
    """A linear layer that may be divided: its path, and the predicted seconds of a step by samples and by outputs."""

    path: str
    weight_bytes: int
    whole_s: float
    divided_s: float

    def __str__(self) -> str:
        return (
            f"{self.path} ({format_bytes(self.weight_bytes)}): what it moves takes {self.divided_s * 1e3:.3g} ms by "
            f"outputs, {self.whole_s * 1e3:.3g} ms by samples"
        )


class Division:
    """How the forward of ``model`` is divided among ``devices``, which take ``shares`` of a batch.

    ``linear`` is ``"auto"``, ``"never"`` or ``"always"``, and ``early`` says whether gradients travel during the
    backward. :attr:`rows` are those of each divided layer by device. :attr:`reasons` tell why.
    """

    def __init__(
        self, model: nn.Module, devices: Sequence[torch.device], shares: Sequence[float], linear: str, early: bool
    ) -> None:
        self._model, self._devices, self._linear, self._early = model, devices, linear, early
        self._shares = shares
        self._home = next((t.device for t in (*model.parameters(), *model.buffers())), devices[0])
        self.rows: dict[str, tuple[tuple[int, int], ...]] = {}
        self.reasons: list[str] = []
        self.decided = sum(share > 0 for share in shares) < 2
        self.compared = False
        """Whether the program's steps are to say if it pays."""
        self._known: dict[tuple[Any, ...], Stages | None] = {}

    def of(self, number: int) -> dict[str, tuple[int, int]]:
        """The rows of each divided layer that device ``number`` has."""
        return {path: rows[number] for path, rows in self.rows.items()}

    def again(self) -> Division:
        """The division of the model as it is now, decided anew."""
        return Division(self._model, self._devices, self._shares, self._linear, self._early)

    def drop(self, reason: str) -> None:
        """Divide no layer, for this reason."""
        self.rows, self.compared, self.decided = {}, False, True
        self._known.clear()
        self.say(f"no linear layer is divided: {reason}")

    def use(self, rows: Mapping[str, tuple[tuple[int, int], ...]]) -> None:
        """Divide these layers from now on."""
        self.rows = dict(rows)
        self._known.clear()

    def say(self, reason: str) -> None:
        """Note a reason once."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def decide(self, batch: Batch, sizes: Sequence[int]) -> bool:
        """Decide which layers are divided, with the first batch that trains; say whether any is."""
        self.decided = True
        names = self._candidates(batch.size) if self._linear != "never" else []
        if not names:
            return False
        chain = self._chain(batch, names)
        if chain is None:
            return False
        found = []
        for name in names:
            try:
                chosen(chain, (), [name])
            except Untraceable as error:
                self.say(f"not divided: {error}")
                continue
            layer = self._predicted(chain, name, batch.size, sizes)
            gains = layer.divided_s < layer.whole_s
            if gains or self._linear == "always":
                found.append(name)
            self.say(f"{'divided' if name in found else 'not divided'} by outputs: {layer}")
        for name in found:
            starts = [0]
            for size in divided(int(self._layer(name).out_features), self._shares):
                starts.append(starts[-1] + size)
            self.rows[name] = tuple(itertools.pairwise(starts))
        self.compared = bool(found) and self._linear == "auto"
        return bool(found)

    def how(self, batch: Batch, *, trained: bool) -> Stages | None:
        """The stages of a call with ``batch``; ``None`` for the whole model at once.

        Raises :class:`Untraceable` where divided layers stand in the way of that.
        """
        early = self._early and trained and any(device.type == "cuda" for device in self._elsewhere())
        if not self.rows and not early:
            return None
        key = (trained, batch.single, batch.tensors[0].shape[1:], *[part.training for part in self._model.modules()])
        if key not in self._known:
            if len(self._known) >= MOST_KINDS:
                del self._known[next(iter(self._known))]
            self._known[key] = self._found(batch, early=early)
        return self._known[key]

    def _found(self, batch: Batch, *, early: bool) -> Stages | None:
        chain = self._chain(batch, list(self.rows))
        if chain is None:
            if self.rows:
                raise Untraceable(self.reasons[-1])
            return None
        cuts: Sequence[Cut] = ()
        if early:
            link = min(copy_rate(device, self._home) for device in self._elsewhere() if device.type == "cuda")
            cuts = cuts_for_sums(chain.cuts, -(-batch.size // len(self._devices)), link, self._memory_rate())
        if not cuts and not self.rows:
            return None
        return Stages(chain, chosen(chain, cuts, list(self.rows)))

    def _chain(self, batch: Batch, names: Sequence[str]) -> Chain | None:
        """The model's chain; ``None`` with a reason where it has none."""
        try:
            if not batch.single:
                raise Untraceable("called with more than one tensor alone")
            hooked = next((what for what, hooks in hooks_of(self._model) if hooks), "")
            if hooked:
                raise Untraceable(hooked)
            tried = -(-batch.size // sum(share > 0 for share in self._shares))  # as one device has: no new shapes
            return chain_of(self._model, names, batch.tensors[0].detach()[:tried].to(self._home))
        except Untraceable as error:
            self.say(f"the model runs whole: {error}")
        except Exception as error:  # the model's own, which the call itself will meet
            self.say(f"the model runs whole: a trial of it raised {type(error).__name__}: {error}")
        return None

    def _elsewhere(self) -> list[torch.device]:
        return [device for device in self._devices if device != self._home]

    def _layer(self, name: str) -> nn.Linear:
        layer = self._model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        return layer

    def _candidates(self, samples: int) -> list[str]:
        """The linear layers that can be divided, and may gain by their numbers of features alone."""
        uses = Counter(id(p) for module in self._model.modules() for p in module._parameters.values() if p is not None)
        kinds = {device.type for device in self._devices}
        found = []
        for name, layer in self._model.named_modules():
            if type(layer) is not nn.Linear or not name or "forward" in layer.__dict__:
                continue
            small = layer.weight.numel() <= samples * (layer.in_features + layer.out_features)
            if small and self._linear == "auto":
                continue
            if len(kinds) > 1:
                self.say("no linear layer is divided: devices are of several kinds")
                return []
            if any(uses[id(p)] > 1 for p in layer.parameters()):
                self.say(f"not divided: {name} shares a parameter with another layer")
            elif any(getattr(layer, kind) for kind in HOOKS) or "parametrizations" in layer._modules:
                self.say(f"not divided: {name} has hooks")
            elif min(divided(layer.out_features, self._shares)) == 0 and layer.out_features < len(self._devices):
                self.say(f"not divided: {name} has {layer.out_features} outputs for {len(self._devices)} devices")
            else:
                found.append(name)
        return found

    def _predicted(self, chain: Chain, name: str, samples: int, sizes: Sequence[int]) -> Layer:
        """What a step moves for a layer, by samples and by outputs, in seconds at the measured rates of copies."""
        layer = self._layer(name)
        weight = sum(p.numel() * p.element_size() for p in layer.parameters())
        places: dict[object, float] = {cut.value: cut.sample_bytes for cut in chain.cuts}
        node = next(each for each in chain.nodes if each.target == name)
        element = layer.weight.element_size()
        read = places.get(node.args[0], layer.in_features * element) * samples
        made = places.get(node, layer.out_features * element) * samples
        active, memory = sum(map(bool, sizes)), self._memory_rate()
        elsewhere = [device for device in self._elsewhere() if device.type == "cuda"]
        if not elsewhere:
            # Every part writes a gradient of all weights, which are then added; or they are put together once.
            whole = (active + 3 * (active - 1)) * weight / memory
            split = (3 * weight + 2 * read + 4 * made + (4 * active - 3) * read) / memory
            return Layer(name, weight, whole, split)
        link = min(min(copy_rate(a, self._home), copy_rate(self._home, a)) for a in elsewhere)
        part = (active - 1) / active
        whole = weight * (2 / link + 5 / memory)
        split = weight / active * (2 / link + 5 / memory) + 2 * part * (read + made) / link + EXCHANGE_S
        return Layer(name, weight, whole, split)

    def _memory_rate(self) -> float:
        """Bytes a second that are read or written on the model's device."""
        return 2 * copy_rate(self._home, self._home)


def cuts_for_sums(cuts: Sequence[Cut], samples: int, link: float, memory: float) -> list[Cut]:
    """Where a backward is cut, so that the gradients of the weights after each cut travel during what is left of it.

    ``samples`` are those of one device, ``link`` and ``memory`` bytes a second between devices and within one. A cut
    must save more by the bytes that can travel meanwhile than it costs by those of its value, which is copied.
    """
    found, waiting = list[Cut](), 0
    for cut in reversed(cuts):
        waiting += cut.weight_bytes
        cost = PASSES * cut.sample_bytes * samples / memory
        if waiting >= LEAST_BYTES and cost < waiting / link and len(found) < MOST_CUTS:
            found.append(cut)
            waiting = 0
    return found[::-1]
