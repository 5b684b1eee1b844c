"""One network by every side of a comparison with peers, in a process of its own: ``python -m harness.peer_race``.

It reads a :class:`Race` as JSON from its input and writes what was measured as JSON into the file that it names. So
threads and memory of one network's sides are gone before the next network begins, and a side that ends the process
costs one network.

In each turn a side runs once unmeasured, in which other sides' threads fall asleep and its own weights come into the
caches, and then as often in a row as fit into ``round_ms``. A side that cannot be built is told with its reason.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilewise
import tilewise.nn
from harness import peers
from harness.detection_operators import declare_detection_operators
from harness.settings import NothingToMeasure
from tilewise.frontends.networks import Network, load_network
from tilewise.machine.torch_state import framework_flags

__all__ = ["OURS", "SIDES", "Race", "main"]

Run = Callable[[], object]
SEED = 20141224
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MODES = {"infer": "inference with frozen weights", "train": "forward, loss and backward"}


@dataclass(frozen=True)
class Race:
    """What is measured: ``mode`` is one of :data:`MODES`, ``dtype`` is ``fp32`` or ``bf16``, and ``sides`` are names.

    ``bf16`` is the weights' type in inference, and autocast in training. Sides run ``rounds`` turns of ``round_ms``.
    """

    network: str
    batch: int
    mode: str
    dtype: str
    device: str
    layout: str
    sides: tuple[str, ...]
    rigor: str
    rounds: int
    round_ms: int

    def to_json(self) -> str:
        """As :meth:`from_json` reads it."""
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Race:
        """What :meth:`to_json` wrote."""
        found = json.loads(text)
        return cls(**{**found, "sides": tuple(found["sides"])})


@dataclass(frozen=True)
class Subject:
    """The network that every side computes: module and input are never changed, a side takes copies."""

    race: Race
    network: Network
    module: nn.Module
    x: torch.Tensor
    by_plan: dict[str, int] = field(default_factory=dict)
    """Under ``"last"``: how many layers and regions of the side that was planned last run by plan."""

    def copied(self, layout: str) -> tuple[nn.Module, torch.Tensor]:
        """The module and the input in one layout."""
        kind = LAYOUTS[layout]
        return copy.deepcopy(self.module).to(memory_format=kind), self.x.contiguous(memory_format=kind)

    def planned(self, **options: Any) -> tuple[nn.Module, torch.Tensor]:
        """The module with the plans that tilewise chooses, in the layout that the race names."""
        module, x = self.copied(self.race.layout)
        training = self.race.mode == "train"
        if not training:
            options |= {"training": False, "frozen": True}
        self.plan(module, x, **options)
        return module, x

    def plan(self, module: Any, x: torch.Tensor, **options: Any) -> None:
        """Let ``module``, which may be compiled, run by plan, and count what does."""
        with self.autocast():
            tilewise.optimize(module, x, rigor=self.race.rigor, **options)
        told = tilewise.nn.report(module)
        self.by_plan["last"] = sum(each.replaced for each in told.layers) + sum(each.kept for each in told.regions)

    def autocast(self) -> torch.autocast:
        """Autocast of training steps in bf16."""
        enabled = self.race.mode == "train" and self.race.dtype == "bf16"
        return torch.autocast(self.x.device.type, torch.bfloat16, enabled=enabled)

    def compiled(self, module: nn.Module, x: torch.Tensor, mode: str, *, frozen: bool = False) -> Any:
        """The module compiled by ``torch.compile``; weights of inference on a CPU are always frozen."""
        freezing = self.race.mode == "infer" and (frozen or x.device.type == "cpu")
        with self.autocast():
            return peers.compiled_with(module, x, mode, freezing=freezing)

    def run(self, call: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> Run:
        """One inference, or one training step, of ``call``, which computes ``module``."""
        if self.race.mode == "infer":
            return lambda: call(x)

        def step() -> torch.Tensor:
            module.zero_grad(set_to_none=True)
            with self.autocast():
                outputs = call(x)
                loss = self.network.loss(outputs)
            loss.backward()  # type: ignore[no-untyped-call]
            return outputs  # type: ignore[no-any-return]

        return step


def subject_of(race: Race) -> Subject:
    """The network with weights and statistics drawn from one seed, as if it had been trained.

    Norms get the statistics of a few inputs, and a scale and shift near those of a trained one: with what they start
    with, folding them would change nothing.
    """
    declare_detection_operators()
    torch.manual_seed(SEED)
    network = load_network(race.network)
    device = torch.device(race.device)
    module = network.module.to(device)
    generator = torch.Generator(device=device).manual_seed(SEED)
    norms = [each for each in module.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean over all inputs seen
        if norm.affine:
            with torch.no_grad():
                norm.weight.uniform_(0.8, 1.2, generator=generator)
                norm.bias.normal_(0.0, 0.1, generator=generator)
    with torch.no_grad():
        module.train()(network.example_inputs(4, device, seed=1))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    module.train(race.mode == "train")
    x = network.example_inputs(race.batch, device)
    if race.mode == "infer" and race.dtype == "bf16":
        module, x = module.to(torch.bfloat16), x.to(torch.bfloat16)
    return Subject(race, network, module, x)


def _eager(layout: str) -> Callable[[Subject], Run]:
    def build(subject: Subject) -> Run:
        module, x = subject.copied(layout)
        return subject.run(module, module, x)

    return build


def _compiled(mode: str, layout: str = "", *, frozen: bool = False) -> Callable[[Subject], Run]:
    def build(subject: Subject) -> Run:
        module, x = subject.copied(layout or subject.race.layout)
        return subject.run(subject.compiled(module, x, mode, frozen=frozen), module, x)

    return build


def _peer(name: str) -> Callable[[Subject], Run]:
    return lambda subject: peers.PEERS[name](subject.module, subject.x)


def _planned(**options: Any) -> Callable[[Subject], Run]:
    def build(subject: Subject) -> Run:
        module, x = subject.planned(**options)
        return subject.run(module, module, x)

    return build


def _planned_compiled(mode: str) -> Callable[[Subject], Run]:
    """Inference is planned and then compiled; a training step is compiled first, as plans are then compared so."""

    def build(subject: Subject) -> Run:
        if subject.race.mode == "infer":
            module, x = subject.planned()
            return subject.run(subject.compiled(module, x, mode), module, x)
        module, x = subject.copied(subject.race.layout)
        compiled = subject.compiled(module, x, mode)
        subject.plan(compiled, x)
        return subject.run(compiled, module, x)

    return build


SIDES: Mapping[str, Callable[[Subject], Run]] = {
    "torch": _eager("contiguous"),
    "torch channels_last": _eager("channels_last"),
    "compile": _compiled("default"),
    "compile channels_last": _compiled("default", "channels_last"),
    "compile reduce-overhead": _compiled("reduce-overhead"),
    "compile max-autotune": _compiled("max-autotune"),
    "compile reduce-overhead frozen": _compiled("reduce-overhead", frozen=True),
    "compile max-autotune frozen": _compiled("max-autotune", frozen=True),
    "onnxruntime": _peer("onnxruntime"),
    "openvino": _peer("openvino"),
    "planned": _planned(),
    "planned graphs": _planned(graphs="auto"),
    "planned compiled": _planned_compiled("default"),
    "planned compiled reduce-overhead": _planned_compiled("reduce-overhead"),
    "planned compiled max-autotune": _planned_compiled("max-autotune"),
}
"""How each side is built from the subject."""
OURS = "planned"
"""The first word of the names of sides that are tilewise's."""


def raced(race: Race) -> dict[str, Any]:
    """What the process writes: milliseconds and error of each side, and the reasons of those that are missing."""
    if race.device.startswith("cuda"):
        peers.take_torchs_assembler()
    flags = framework_flags(torch.device(race.device).type, "ieee", deterministic=False)
    with flags, torch.set_grad_enabled(race.mode == "train"):
        subject = subject_of(race)
        want = _reference(subject)
        runs, missing, facts = dict[str, Run](), dict[str, str](), dict[str, dict[str, Any]]()
        for name in race.sides:
            start = time.perf_counter()
            try:
                run = SIDES[name](subject)
                got = _first(run())
            except Exception as error:  # a peer that cannot run this network costs its own row only
                missing[name] = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
                continue
            runs[name] = run
            ready_s = time.perf_counter() - start
            error_of = None if want is None else float((got.double() - want).norm() / want.norm())
            facts[name] = {"error": error_of, "ready_s": ready_s}
            if name.startswith(OURS):
                facts[name]["by_plan"] = subject.by_plan.get("last", 0)
            print(f"  {race.network}, {name}: ready in {ready_s:.0f} s", file=sys.stderr, flush=True)
        took = in_turns(runs, race)
    sides = {
        name: {"ms": statistics.median(ms), "least": min(ms), "most": max(ms), **facts[name]}
        for name, ms in took.items()
    }
    return {"sides": sides, "missing": missing, "versions": peers.versions(), "threads": torch.get_num_threads()}


def in_turns(runs: Mapping[str, Run], race: Race) -> dict[str, list[float]]:
    """Milliseconds of a run in each turn, by side."""

    def wait() -> None:
        if race.device.startswith("cuda"):
            torch.cuda.synchronize()

    def took_ms(run: Run, count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        return (time.perf_counter() - start) * 1e3 / count

    counts = {}
    for name, run in runs.items():
        took_ms(run, 2)
        counts[name] = max(1, min(1000, round(race.round_ms / max(took_ms(run, 1), 1e-3))))
    took: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(race.rounds):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            took_ms(runs[name], 1)
            took[name].append(took_ms(runs[name], counts[name]))
    return took


def _reference(subject: Subject) -> torch.Tensor | None:
    """The outputs in float64; ``None`` for training steps, whose dropout draws anew."""
    if subject.race.mode == "train":
        return None
    module = copy.deepcopy(subject.module).double()
    return _first(module(subject.x.double())).clone()


def _first(result: object) -> torch.Tensor:
    found = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(found, torch.Tensor):
        raise NothingToMeasure(f"the network returns {type(found).__name__}: a tensor would do")
    return found.detach()


def main(arguments: list[str]) -> None:
    """Measure the race that the standard input names and write it into the file of the only argument."""
    found = raced(Race.from_json(sys.stdin.read()))
    Path(arguments[0]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
