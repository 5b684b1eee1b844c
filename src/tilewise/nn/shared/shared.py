"""``tilewise.shared``: a model whose batches several devices of one process compute at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilewise.nn.arguments import check_model
from tilewise.nn.graphs.recorder import recorder_of
from tilewise.nn.shared.division import LINEAR
from tilewise.nn.shared.engine import Engine
from tilewise.nn.shared.report import SharedReport

__all__ = ["SharedModel", "shared"]

GRAPHS = ("auto", "never")
SUMS = ("early", "late")


def shared(
    model: nn.Module,
    devices: Sequence[torch.device | str] | None = None,
    *,
    parts: int | None = None,
    shares: Sequence[float] | None = None,
    graphs: str = "auto",
    linear: str = "auto",
    sums: str = "early",
) -> SharedModel:
    """Let several devices of this process compute every batch of ``model`` together, each a part of it.

    Returns a module that is called as ``model`` is, with tensors whose first axis has the samples, ``(N, ...)``. It
    cuts them by shares, runs a copy of the model on each device, and returns the whole batch's results on the device
    of the first tensor. Gradients of all parts are summed into the parameters of ``model``, which the module's
    ``parameters()`` and ``state_dict()`` are, under the same names. So loss and optimizer stay as they are. Two copies
    on a CPU, where two GPUs would be ``devices=("cuda:0", "cuda:1")``:

    >>> model = tilewise.shared(torch.nn.Linear(4, 2), parts=2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model(torch.randn(6, 4)).square().mean().backward()
    >>> optimizer.step()
    >>> model.report().sizes
    (3, 3)

    - ``devices``: where copies run, such as ``("cuda:0", "cuda:1", "cpu")``. One may be named more than once.
    - ``parts``: instead of ``devices``, how many copies run at once on the device of the model. On a CPU each has its
      share of the threads (Hadjis et al. 2015, section 2.2 and Figure 3).
    - ``shares``: the part of a batch that each device takes, as numbers of any sum; 0 leaves one out. By default they
      begin equal, or in proportion to the devices' FLOPS where these differ (section 2.3), and follow the rates that
      are measured in the program's own steps.
    - ``graphs``: ``"auto"`` captures the copies on GPUs in CUDA graphs where they can be, ``"never"`` does not.
    - ``linear``: whether fully connected layers are divided by their outputs (section 3.3), so that each device has
      some rows of the weight and computes them for the whole batch. ``"auto"`` divides those whose gradients cost more
      to move than what the layer reads and returns, and keeps that if the program's steps get faster. ``"always"``
      divides all that can be, ``"never"`` none.
    - ``sums``: ``"early"`` sends gradients from GPUs and adds them while the backward goes on, ``"late"`` after it.
      They are added in the same order.

    Each copy computes a batch norm's statistics of its own part; running statistics are the mean of all, weighted by
    samples. Raises ``ValueError`` for anything but a module on one device, for devices that are not here, and for
    shares that cannot be. A call raises ``ValueError`` for arguments or results that cannot be cut or joined, and
    :class:`tilewise.nn.ReplicaError`, a ``RuntimeError``, where a copy raised something.
    """
    check_model(model)
    if isinstance(model, (SharedModel, nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"model={type(model).__name__}: the module inside would do")
    home = _home(model)
    places = _devices(devices, parts, home)
    if graphs not in GRAPHS:
        raise ValueError(f"graphs={graphs!r}: one of {', '.join(map(repr, GRAPHS))} would do")
    if linear not in LINEAR:
        raise ValueError(f"linear={linear!r}: one of {', '.join(map(repr, LINEAR))} would do")
    if sums not in SUMS:
        raise ValueError(f"sums={sums!r}: one of {', '.join(map(repr, SUMS))} would do")
    return SharedModel(model, places, _shares(shares, len(places)), graphs, linear, sums)


class SharedModel(nn.Module):
    """What :func:`tilewise.shared` returns. Names of parameters, buffers and parts are those of the model inside.

    A copy by ``copy.deepcopy`` or a pickle has a copy of the model, and begins to measure anew. :meth:`report` tells
    how batches are shared.

    >>> model = tilewise.shared(torch.nn.Linear(4, 2), parts=2)
    >>> model(torch.randn(6, 4)).shape
    torch.Size([6, 2])
    >>> [name for name, _ in model.named_parameters()]
    ['weight', 'bias']
    """

    def __init__(
        self,
        model: nn.Module,
        devices: tuple[torch.device, ...],
        shares: tuple[float, ...] | None,
        graphs: str,
        linear: str,
        sums: str,
    ) -> None:
        super().__init__()
        self.module = model
        self.training = model.training
        self._devices, self._shares, self._graphs = devices, shares, graphs
        self._linear, self._sums = linear, sums
        self._engine: Engine | None = None
        self.register_load_state_dict_pre_hook(_named_as_inside)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the whole batch."""
        if torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        return self._ready()(args, kwargs)

    def report(self) -> SharedReport:
        """How batches are shared, at which measured rates, and why so."""
        return self._ready().report()

    def refresh(self) -> None:
        """Copy all parameters and buffers to the devices before the next call.

        That is needed only after writes that torch does not count, such as those to ``parameter.data``.
        """
        self._ready().refresh()

    def _ready(self) -> Engine:
        if self._engine is None:
            recorders = {d: recorder_of for d in self._devices if d.type == "cuda" and self._graphs == "auto"}
            self._engine = Engine(
                self.module, self._devices, self._shares, recorders, self._linear, self._sums == "early"
            )
        return self._engine

    def extra_repr(self) -> str:
        """The devices with their shares."""
        if self._engine is None:
            return f"devices=({', '.join(map(str, self._devices))})"
        return f"report=({'; '.join(str(self._engine.report()).splitlines())})"

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The parts of the model inside, under its names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the model inside, under its names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the model inside."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" not in modules:
                raise
            return getattr(modules["module"], name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}


def _named_as_inside(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Where the module is part of another one: let the entries of the model be found by the part that it is here."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


def _home(model: nn.Module) -> torch.device | None:
    """The device of the model; ``None`` for one without parameters and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"model: {name} is not initialised yet; a call of the model would do")
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise ValueError(
                f"model: {name} is a {type(tensor).__name__} of layout {tensor.layout}: a plain one would do"
            )
    for name, buffer in model.named_buffers():
        if buffer.requires_grad:
            raise ValueError(f"model: buffer {name} requires a gradient: a parameter would do")
    devices = {tensor.device for _, tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"model: its tensors are on {', '.join(sorted(map(str, devices)))}: one device would do")
    return devices.pop() if devices else None


def _devices(
    devices: Sequence[torch.device | str] | None, parts: int | None, home: torch.device | None
) -> tuple[torch.device, ...]:
    """The devices that the arguments name. Raises ``ValueError``."""
    if (devices is None) == (parts is None):
        raise ValueError(f"devices={devices!r}, parts={parts!r}: one of the two would do, such as parts=2")
    if parts is not None:
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise ValueError(f"parts={parts!r}: a whole number of one or more would do")
        return (home or torch.device("cpu"),) * parts
    assert devices is not None
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"devices={devices!r}: a tuple of devices would do, such as ('cuda:0', 'cuda:1')")
    return tuple(map(_device, devices))


def _device(name: torch.device | str) -> torch.device:
    """One device with its number. Raises ``ValueError`` where it is not here."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"devices: {name!r} is no device; cpu or cuda:N would do") from error
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        there = f"one of {count} CUDA devices" if count else "parts=2, as there is no CUDA device,"
        raise ValueError(f"devices: {str(name)!r} is not here; cpu, or {there} would do")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _shares(shares: Sequence[float] | None, count: int) -> tuple[float, ...] | None:
    """The shares as numbers. Raises ``ValueError``."""
    if shares is None:
        return None
    try:
        found = tuple(float(share) for share in shares)
    except (TypeError, ValueError) as error:
        raise ValueError(f"shares={shares!r}: {count} numbers would do") from error
    if len(found) != count or not all(math.isfinite(s) and s >= 0 for s in found) or not sum(found):
        raise ValueError(f"shares={shares!r}: {count} numbers of 0 or more would do, at least one of them above 0")
    return found
