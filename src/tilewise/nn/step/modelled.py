"""What a step is expected to take by the plans of some passes: the host's queue before the device's.

torch's step was recorded once, with every operator's time on host and device. A pass that runs by plan changes what its
operator takes by as much as the plan's own times differ from those of torch's choice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tilewise.nn.step.search import Key
from tilewise.nn.step.trace import Operator, Trace
from tilewise.planner.budget.queue import Change, Launch, choose_options, device_waits, queue_ms

__all__ = ["Cost", "StepModel"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plan takes more than torch's choice in one call: milliseconds of host and device, negative for a gain."""

    host_ms: float
    device_ms: float


@dataclass(frozen=True)
class StepModel:
    """The recorded step ``trace``, and what the plan of each problem costs in one call of it.

    >>> from tilewise.nn.step.trace import Operator, Trace
    >>> pooling, norm = Operator("aten::max_pool2d", 0.1, 2.0), Operator("aten::batch_norm", 0.1, 1.0)
    >>> StepModel(Trace((pooling, norm)), {}).step_ms(())
    3.1
    """

    trace: Trace
    costs: Mapping[Key, Cost]
    _queue: list[Launch] = field(init=False, repr=False)
    _options: dict[Key, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seen = {key for operator in self.trace.operators for key in operator.passes}
        options = {key: i for i, key in enumerate(key for key in self.costs if key in seen)}
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_queue", [self._launch(operator) for operator in self.trace.operators])

    def step_ms(self, withheld: Collection[Key]) -> float:
        """Milliseconds of a step in which all plans run but those of ``withheld``."""
        return queue_ms(self._queue, {option for key, option in self._options.items() if key not in withheld})

    @property
    def torch_ms(self) -> float:
        """Milliseconds of torch's step."""
        return queue_ms(self._queue)

    def to_withhold(self) -> frozenset[Key]:
        """The problems whose plans do not make the step faster; all others do so together.

        None where the host is never what the step waits for: then every gain of the device reaches the step. None
        either where no plan at all is expected to: steps that are run will show it.
        """
        every = frozenset(self._options.values())
        if not self.trace.on_device or not device_waits(self._queue, every):
            return frozenset()
        chosen = choose_options(self._queue).options
        return frozenset(key for key, option in self._options.items() if chosen and option not in chosen)

    def _launch(self, operator: Operator) -> Launch:
        """An operator with what plans change of it."""
        keys = [key for key in operator.passes if key in self._options]
        hosts = [self.costs[key].host_ms for key in keys]
        devices = [self.costs[key].device_ms for key in keys]
        if not self.trace.on_device:  # the host computes all itself
            hosts, devices = [h + d for h, d in zip(hosts, devices, strict=True)], [0.0] * len(keys)
        hosts, devices = _bounded(hosts, operator.host_ms), _bounded(devices, operator.device_ms)
        changes = [Change(self._options[key], h, d) for key, h, d in zip(keys, hosts, devices, strict=True)]
        return Launch(operator.host_ms, operator.device_ms, operator.waits, tuple(changes))


def _bounded(added: list[float], there: float) -> list[float]:
    """``added`` with gains that take no more than is ``there``: alone a pass may have been slower than in the step."""
    gained = -sum(ms for ms in added if ms < 0)
    share = min(1.0, there / gained) if gained > 0 else 1.0
    return [ms * share if ms < 0 else ms for ms in added]
