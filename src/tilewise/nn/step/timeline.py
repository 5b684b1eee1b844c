"""The time line of one step as a file that Perfetto and chrome://tracing open: torch's own, with tilewise's ranges."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilewise.machine.files import replacing
from tilewise.nn.step.step import Step
from tilewise.nn.step.trace import profiled, why_not_traced

__all__ = ["StepSource", "write_timeline"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values in examples that are kept. Others, such as tensors, are kept only as long as the program has them."""
WARM = 2
"""Steps that are run before the one that is recorded: the first ones allocate and compile."""


@dataclass(frozen=True)
class StepSource:
    """A model and the examples of its step, held weakly, so that a report keeps no memory that the program let go."""

    model: Callable[[], nn.Module | None]
    leaves: tuple[Callable[[], object], ...]
    structure: Any
    training: bool

    @classmethod
    def of(cls, model: nn.Module, examples: list[Any], *, training: bool) -> StepSource:
        """The step of ``model`` on ``examples``."""
        leaves, structure = tree_flatten(examples)
        return cls(weakref.ref(model), tuple(map(_held, leaves)), structure, training)

    def step(self, examples: list[Any] | None, own: Callable[[Any], object] | None) -> Step:
        """The step on ``examples``, or on those it was made of where these are ``None``.

        Raises ``ValueError`` where the model or the examples are gone.
        """
        model = self.model()
        if model is None:
            raise ValueError("model: it is gone; keep the model that was optimized, and trace its report again")
        if examples is None:
            leaves = [leaf() for leaf in self.leaves]
            if any(leaf is GONE for leaf in leaves):
                raise ValueError(
                    "example_inputs=None: the inputs that optimize was given are gone; inputs like them would do"
                )
            examples = tree_unflatten(leaves, self.structure)
        return Step(model, examples, own, training=self.training)


GONE = object()
"""Stands for a value of an example that the program let go."""


def _held(leaf: object) -> Callable[[], object]:
    """What gives a value of an example again, or :data:`GONE`."""
    if isinstance(leaf, PLAIN):
        return lambda: leaf
    try:
        reference = weakref.ref(leaf)
    except TypeError:
        return lambda: GONE
    return lambda: GONE if reference() is None else reference()


def write_timeline(step: Step, file: Path, facts: Mapping[str, object]) -> None:
    """Run ``step`` and write its time line to ``file``, with ``facts`` (JSON values) under the key ``tilewise``.

    What the step changes is put back, as :meth:`Step.repeatable` says. The file is there whole or not at all. Raises
    what the step raises, ``RuntimeError`` where nothing can be recorded now, and ``OSError`` where the file cannot be
    written.
    """
    reason = why_not_traced()
    if reason:
        raise RuntimeError(f"no time line can be recorded: {reason}; end it first")
    on_gpu = step.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with step.repeatable(compiled=True):
        for _ in range(WARM):
            step()
        _wait(step.device)
        with profiled(activities) as recorded:
            recorded.add_metadata_json("tilewise", json.dumps(facts))
            step()
            _wait(step.device)
    ending = ".json.gz" if file.name.endswith(".gz") else ".json"
    with replacing(file, ending=ending) as partial:
        recorded.export_chrome_trace(str(partial))
        if not partial.is_file() or not partial.stat().st_size:
            raise OSError(f"file={str(file)!r}: torch's profiler wrote nothing; room on the disk would do")


def _wait(device: torch.device) -> None:
    """Wait until the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
