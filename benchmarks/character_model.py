"""A character model on text that comes with Python: losses and milliseconds a training step, torch's and planned.

The text is that of ``pydoc``'s topics. An embedding, a recurrent layer and a linear layer predict the next of 128
characters, in streams that go on from step to step with their states. Both sides begin with the same parameters, see
the same characters, and take their steps in turns, with Adam. Cases are ``CELL:lLtTnNhH@MODE``: L layers, T characters
a step, N streams, H units, in ``fp32``, ``bf16`` (autocast) or ``fp16``. In ``fp16`` weights and activations are
stored so, the optimizer's parameters are fp32 and the loss is scaled (Micikevicius et al. 2018). The bars are that the
losses of the last tenth of the steps are those of torch in fp32, to 1 % in fp32 and 2 % in narrower types. Times are
compared with torch's in the same mode.
"""

from __future__ import annotations

import copy
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pydoc_data import topics
from typing import Any

import torch
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, Settings
from torch import Tensor, nn

import tilewise

CASE = re.compile(r"(lstm|gru|rnn_tanh):l(\d+)t(\d+)n(\d+)h(\d+)@(fp32|bf16|fp16)")
DEFAULTS = {"cases": "", "steps": "300", "rigor": "measure"}
QUICK = {"cases": "gru:l1t4n2h8@fp32", "steps": "3", "rigor": "estimate"}
CPU_CASES = "lstm:l1t64n16h256@fp32,gru:l2t64n16h256@fp32"
GPU_CASES = ",".join(
    f"{cell}@{mode}" for cell in ("lstm:l2t128n32h768", "gru:l1t128n64h1024") for mode in ("fp32", "bf16", "fp16")
)
CHARACTERS = 128
RATE = 2e-3
CLIP = 1.0
SCALE = 1024.0
MOST_APART = {"fp32": 0.01, "bf16": 0.02, "fp16": 0.02}


def run(settings: Settings) -> Result:
    """One row a case. Raises :class:`BadInput`."""
    cases = settings.words("cases") or (GPU_CASES if settings.device.type == "cuda" else CPU_CASES).split(",")
    rows, bars = [], []
    for text in cases:
        match = CASE.fullmatch(text)
        if match is None:
            raise BadInput(f"cases={text!r}: CELL:lLtTnNhH@MODE such as {CPU_CASES.partition(',')[0]} would do")
        cell, mode = match[1], match[6]
        layers, length, streams, hidden = (int(match[i]) for i in range(2, 6))
        row = row_of(settings, text, cell, mode, layers, length, streams, hidden)
        settings.say(f"  {text}: {row.ratio:.2f}x, losses {row.details['torch_loss']:.4f} {row.details['loss']:.4f}")
        rows.append(row)
        apart = abs(row.details["loss"] / row.details["torch_loss"] - 1)
        bars.append(Bar(f"{text}: loss apart from torch's in fp32", apart, most=MOST_APART[mode],
                        applies=not settings.quick))  # fmt: skip
    return Result(rows, bars)


class Model(nn.Module):
    """Characters in, scores of the next ones out."""

    def __init__(self, cell: str, layers: int, hidden: int) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
        self.embedding = nn.Embedding(CHARACTERS, hidden)
        self.recurrent = kinds[cell](hidden, hidden, layers)
        self.scores = nn.Linear(hidden, CHARACTERS)

    def forward(self, characters: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Scores (steps, streams, characters) and the last state."""
        y, state = self.recurrent(self.embedding(characters), state)
        return self.scores(y), state


@dataclass
class Trainer:
    """A model that trains on streams of the text, in a mode. ``masters`` are its parameters in fp32."""

    model: Model
    text: Tensor
    length: int
    mode: str
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    state: Any = None
    place: int = 0

    def __post_init__(self) -> None:
        half = self.mode == "fp16"
        self.masters = [p.detach().clone() for p in self.model.parameters()] if half else list(self.model.parameters())
        if half:
            self.model.half()
        self.optimizer = torch.optim.Adam(self.masters, RATE)

    def characters(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, from the beginning again where a stream ends."""
        if self.place + self.length + 1 > len(self.text):
            self.place, self.state = 0, None
        part = self.text[self.place : self.place + self.length + 1]
        self.place += self.length
        return part[:-1], part[1:]

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, and the state for the next step."""
        device = inputs.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.mode == "bf16"):
            scores, state = self.model(inputs, self.state)
        states = state if isinstance(state, tuple) else (state,)
        detached = tuple(each.detach() for each in states)
        self.state = detached if isinstance(state, tuple) else detached[0]
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())

    def step(self) -> None:
        """One step of Adam."""
        scale = SCALE if self.mode == "fp16" else 1.0
        self.model.zero_grad()
        loss = self.loss_of(*self.characters())
        (loss * scale).backward()
        if self.mode == "fp16":
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float() / scale
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        if self.mode == "fp16":
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                    parameter.copy_(master)
        self.losses.append(float(loss.detach()))


def row_of(
    settings: Settings, name: str, cell: str, mode: str, layers: int, length: int, streams: int, hidden: int
) -> Row:
    """Train both sides in turns."""
    device = settings.device
    text = "".join(topics.topics[key] for key in sorted(topics.topics)).encode("ascii", "replace")
    each = len(text) // streams
    numbers = torch.tensor(list(text[: each * streams]), dtype=torch.int64, device=device).view(streams, each).T
    torch.manual_seed(0)
    first = Model(cell, layers, hidden).to(device)
    sides = {"torch": mode, "planned": mode} | ({"fp32": "fp32"} if mode != "fp32" else {})
    trainers = {side: Trainer(copy.deepcopy(first), numbers.contiguous(), length, each) for side, each in sides.items()}
    planned = trainers["planned"]
    inputs, _ = planned.characters()
    planned.place = 0
    begin = time.perf_counter()
    with settings.cache_directory(), torch.autocast(device.type, torch.bfloat16, enabled=mode == "bf16"):
        tilewise.optimize(planned.model, inputs, rigor=settings.text("rigor"), planner=settings.planner())
    seconds = time.perf_counter() - begin
    steps = settings.integer("steps")
    for turn in range(steps):
        for side in list(trainers) if turn % 2 == 0 else list(trainers)[::-1]:
            trainers[side].times.append(took_ms(trainers[side].step, device))
    passes = [each for _, _, each in tilewise.nn.report(planned.model).passes()]
    kept = sorted({each.plan.solver for each in passes if each.plan is not None and each.replaced})
    tail = max(1, steps // 10)
    losses = {side: statistics.fmean(trainer.losses[-tail:]) for side, trainer in trainers.items()}
    if not all(map(math.isfinite, losses.values())):
        settings.say(f"  {name}: a loss is not finite: {losses}")
    medians = {side: statistics.median(trainer.times[tail:] or trainer.times) for side, trainer in trainers.items()}
    details = {
        "loss": losses["planned"], "torch_loss": losses.get("fp32", losses["torch"]), "same_mode_loss": losses["torch"],
        "first_loss": planned.losses[0], "steps": steps, "planning_s": seconds,
    }  # fmt: skip
    what = ", ".join(kept) or "torch"
    return Row(name, mode, Side("torch", medians["torch"]), Side(what, medians["planned"]), replaced=bool(kept),
               details=details)  # fmt: skip


def took_ms(step: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of a step until the device is done."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3
