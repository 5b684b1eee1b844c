"""A recorder on a CPU: it notes every operator that runs, and runs the same operators on the same tensors again.

Like a CUDA graph it knows no Python code, no modes and no attributes: what they decided when it was made stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Tape(TorchDispatchMode):
    """The operators that ran under it, with their arguments and results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("operation not permitted while recording")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, _detached(args), _detached(kwargs or {}), _detached(result)))
        return result

    def replay(self) -> None:
        with torch.no_grad(), torch._C._DisableAutocast():
            for func, args, kwargs, results in self.calls:
                new = func(*args, **kwargs)
                given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
                for old, fresh in zip(tree_leaves(results), tree_leaves(new), strict=True):
                    if (
                        torch.is_tensor(old)
                        and torch.is_tensor(fresh)
                        and old.untyped_storage().data_ptr() not in given
                    ):
                        old.copy_(fresh)


def _detached(values: Any) -> Any:
    """The same memory without autograd, so that the tape keeps no graph of the model alive."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), values)


@dataclass
class TapeRecorder:
    """Records on a CPU. ``log`` says what was done: the tests' measure of what a call cost."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    generator: torch.Generator = torch.default_generator
    log: list[str] = field(default_factory=list)

    def warm_up(self, run: Callable[[], object]) -> None:
        self.log.append("warm up")
        run()

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], object], T]:
        tape = Tape()
        self.log.append("record")
        with tape:
            result = run()
        return functools.partial(self._replay, tape), result

    def _replay(self, tape: Tape) -> None:
        self.log.append("replay")
        tape.replay()

    def ordered(self) -> None:
        pass

    def recording(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def bytes(self) -> int:
        return 1 << 20
