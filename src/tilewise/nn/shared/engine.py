"""The replicas of one model, and the calls that they share."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilewise.machine import random_states
from tilewise.nn.layers.call import disturbed
from tilewise.nn.shared.balance import Balance
from tilewise.nn.shared.batch import Batch
from tilewise.nn.shared.captures import NewRecorder
from tilewise.nn.shared.chain import Untraceable
from tilewise.nn.shared.division import Division
from tilewise.nn.shared.part import Modes
from tilewise.nn.shared.rates import first_rates
from tilewise.nn.shared.replica import Replica, Stages
from tilewise.nn.shared.report import SharedReport
from tilewise.nn.shared.step import Joined, Step
from tilewise.nn.shared.trial import Trial
from tilewise.nn.shared.watch import Watch

__all__ = ["Engine"]

MOST_PENDING = 64
"""Steps whose times are waited for."""


class Engine:
    """Replicas of ``model`` on ``devices``, and how batches are divided among them.

    ``shares`` fixes the division of batches. ``recorders`` make what captures replicas on a device; on one without
    they are not captured. ``linear`` says whether linear layers are divided by their outputs, and ``early`` whether
    gradients travel during the backward.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[torch.device],
        shares: Sequence[float] | None,
        recorders: Mapping[torch.device, NewRecorder],
        linear: str = "auto",
        early: bool = True,
    ) -> None:
        self._model, self.devices, self._recorders = model, tuple(devices), recorders
        if shares is None:
            rates, why = first_rates(devices)
            self._balances = {kind: Balance(rates, why=why) for kind in (True, False)}
        else:
            self._balances = {kind: Balance(shares, fixed=True, why="shares as given") for kind in (True, False)}
        self._early = early
        self._division = Division(model, self.devices, self._balances[True].rates, linear, early)
        self._trial: Trial | None = None
        self._lock = threading.Lock()
        self._ended: deque[Step] = deque(maxlen=MOST_PENDING)
        self._alone: Counter[str] = Counter()
        self._rebuilt: Counter[str] = Counter()
        self._steps = 0
        self._sizes: tuple[int, ...] = ()
        self._trained = True
        self._warned = False
        self._build()

    def _build(self) -> None:
        """Make the replicas of the model as it is."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._home = tensors[0].device if tensors else self.devices[0]
        gpus = {device for device in (self._home, *self.devices) if device.type == "cuda"}
        self._side = {device: torch.cuda.Stream(device) for device in gpus}
        self._ended.clear()
        self._buffers = list(self._model.buffers())
        self.replicas: list[Replica] = []
        for number, device in enumerate(self.devices):
            self.replicas.append(
                Replica(self._model, self._home, device, number, self._recorders.get(device), self._division.of(number))
            )
        self._watch = Watch(self._model)
        self._take_modes()
        self._buffer_versions: list[int] | None = None

    def _take_modes(self) -> None:
        """Let the replicas follow the modes of the model and its parameters."""
        modules = list(self._model.modules())
        modes = [module.training for module in modules]
        for replica in self.replicas:
            replica.take_modes(modes)
            replica.take_needs()
        self._weights = [p for p in self._model.parameters() if p.requires_grad]
        self._statistics = any(m.training and isinstance(m, nn.modules.batchnorm._NormBase) for m in modules)
        self._changing = bool(self._buffers) and any(m.training and any(True for _ in m.buffers()) for m in modules)

    def refresh(self) -> None:
        """Copy every parameter and buffer anew at the next call."""
        for replica in self.replicas:
            replica.forget()
        self._buffer_versions = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns for the whole batch."""
        reason = "called in a trace, a transform of torch.func, or a mode that watches operators" if disturbed() else ""
        if not reason and not self._lock.acquire(blocking=False):
            reason = "called while another thread calls it"
        if reason:
            self._alone[reason] += 1
            return self._model(*args, **kwargs)
        try:
            return self._shared(args, kwargs)
        finally:
            self._lock.release()

    def _shared(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch = Batch.of(args, kwargs)
        self._prepare()
        self._harvest()
        gradients = torch.is_grad_enabled()
        trained = gradients and any(t.requires_grad for t in (*batch.tensors, *self._weights))
        self._trained = trained
        sizes = self._balances[trained].sizes(batch.size)
        if self._statistics and not self._warned and sum(map(bool, sizes)) > 1:
            self._warn()
        random_states.tell_apart(self.devices)
        modes = Modes.now(self.devices, gradients=gradients)
        how = self._stages(batch, sizes, trained=trained)
        step = Step(self.replicas, sizes, batch, modes, how, self._side, self._early, self._ended.append)
        try:
            if trained:
                apply: Any = Joined.apply
                outputs = apply(step, self._buffers, self._changing, *batch.tensors, *self._weights)
            else:
                outputs = step.forward(self._buffers, keep=self._changing)
        except BaseException:
            self._buffer_versions = None  # some replicas may have changed theirs
            raise
        if self._changing:
            self._give_buffers()
        self._steps += 1
        self._sizes = sizes
        return step.returned(outputs)

    def _prepare(self) -> None:
        """Let every replica be what the model is now."""
        maybe, reason = self._watch.look()
        if reason:
            self._rebuilt[reason] += 1
            self._division, self._trial = self._division.again(), None
            self._build()
        elif maybe:
            self._take_modes()
        if [b._version for b in self._buffers] != self._buffer_versions:
            self._give_buffers()

    def _stages(self, batch: Batch, sizes: Sequence[int], *, trained: bool) -> Stages | None:
        """In which stages a call runs. Replicas are made anew where that divides layers, or may no longer."""
        division = self._division
        if trained and not division.decided and division.decide(batch, sizes):
            if division.compared:
                self._trial = Trial("linear layers by outputs", "by samples")
                self._rows = dict(division.rows)
            self._anew()
        try:
            return division.how(batch, trained=trained)
        except Untraceable as error:
            self._trial = None
            division.drop(str(error))
            self._anew()
            return division.how(batch, trained=trained)

    def _anew(self) -> None:
        """Make the replicas anew, as the division has changed."""
        self._build()
        self._give_buffers()

    def _compare(self, step: Step) -> None:
        """Let a step that has ended count in the comparison of divided layers."""
        trial = self._trial
        if trial is None or trial.over() or not any(step.requires):
            return
        if trial.note(sum(step.sizes), step.clock.seconds()):
            self._division.use({} if trial.way else self._rows)
            self._anew()
        if trial.over():
            self._division.say(str(trial))

    def _give_buffers(self) -> None:
        """Copy the model's buffers to the replicas."""
        if self._buffers:
            for replica in self.replicas:
                replica.take_buffers(self._buffers)
        self._buffer_versions = [b._version for b in self._buffers]

    def _harvest(self) -> None:
        """Take the times of steps that the devices have finished."""
        while self._ended and all(clock.ready() for clock in self._ended[0].clocks):
            step = self._ended.popleft()
            seconds = [0.0] * len(self.replicas)
            for part in step.parts:
                seconds[part.replica.number] = part.clock.seconds()
            if self._trial is None or self._trial.over():
                self._balances[any(step.requires)].note(step.sizes, seconds)
            self._compare(step)

    def _warn(self) -> None:
        self._warned = True
        warnings.warn(
            "the model has batch norms in training: each replica normalizes by the statistics of its own part of the "
            "batch, and running statistics become the mean of all parts, weighted by their samples",
            stacklevel=6,
        )

    def report(self) -> SharedReport:
        """What has become of the calls."""
        balance = self._balances[self._trained]
        total = sum(balance.rates)
        return SharedReport(
            devices=tuple(map(str, self.devices)),
            shares=tuple(rate / total for rate in balance.rates),
            sizes=self._sizes,
            rates=balance.measured,
            reasons=tuple(balance.reasons),
            steps=self._steps,
            graphs=tuple(replica.summary() for replica in self.replicas),
            rows={name: tuple(b - a for a, b in rows) for name, rows in self._division.rows.items()},
            division=(*self._division.reasons, *([str(self._trial)] if self._trial and not self._trial.over() else [])),
            alone=dict(self._alone),
            rebuilt=dict(self._rebuilt),
        )
