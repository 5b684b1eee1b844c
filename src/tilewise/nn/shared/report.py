"""What is told of a shared model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SharedReport"]


@dataclass(frozen=True)
class SharedReport:
    """How a model is shared among devices, and why so.

    ``shares`` are the parts of a batch by device, and ``sizes`` the samples of the last call; 0 stands for a device
    that is left out. ``rates`` are the measured samples a second of each device, ``None`` before enough steps were
    seen. ``reasons`` tell where the shares come from, the first guess first. ``steps`` counts calls that were shared,
    ``alone`` those that ran on the model itself, by reason, and ``rebuilt`` how often replicas were made anew because
    the model had changed. ``graphs`` tells for each device what became of CUDA graphs. ``rows`` are the outputs that
    each device has of the linear layers that are divided by outputs, and ``division`` tells why these and no others.

    >>> model = tilewise.shared(torch.nn.Linear(4, 2), parts=2)
    >>> y = model(torch.randn(6, 4))
    >>> found = model.report()
    >>> found.sizes, found.steps
    ((3, 3), 1)
    """

    devices: tuple[str, ...]
    shares: tuple[float, ...]
    sizes: tuple[int, ...]
    rates: tuple[float, ...] | None
    reasons: tuple[str, ...]
    steps: int
    graphs: tuple[str, ...]
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    division: tuple[str, ...] = ()
    alone: Mapping[str, int] = field(default_factory=dict)
    rebuilt: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.steps} calls shared by {len(self.devices)} devices"]
        for index, device in enumerate(self.devices):
            told = f"{device}: share {self.shares[index]:.3f}"
            if self.sizes:
                told += f", {self.sizes[index]} samples of the last call" + ("" if self.sizes[index] else " (left out)")
            if self.rates is not None:
                told += f", {self.rates[index]:.4g} samples/s" if self.rates[index] else ", not measured"
            lines.append(f"{told}; {self.graphs[index]}")
        lines += [f"shares: {reason}" for reason in self.reasons]
        lines += [f"{name}: {'+'.join(map(str, rows))} outputs by device" for name, rows in self.rows.items()]
        lines += [f"linear layers: {reason}" for reason in self.division]
        lines += [f"{count} calls on the model alone: {reason}" for reason, count in self.alone.items()]
        lines += [f"replicas made anew {count} times: {reason}" for reason, count in self.rebuilt.items()]
        return "\n".join(lines)
