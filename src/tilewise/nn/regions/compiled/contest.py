"""Which is faster for a compiled region: its program, or what the compiler makes of it.

The compiler may fuse more than a program does, and may know kernels that no plan has. So both are timed where the
compiled graph calls the region first, in turns, and a program stays where it is surely faster. The region is compiled
by the same compiler with the same options, so a graph with a region takes as long to compile as one without.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tilewise.nn.layers.plan_table import planning
from tilewise.nn.progress import Late, showing
from tilewise.nn.regions.check import timed
from tilewise.nn.step.pairs import Pairs

__all__ = ["Contest", "is_alone"]

Call = Callable[..., Any]
LEAST_SPEEDUP = 1.0
"""A program runs where the lower end of its speedup's 95 % interval, over the compiled region, is above this."""

_state = threading.local()


def is_alone() -> bool:
    """Whether this thread compiles a region by itself, so that Dynamo has to see torch's operators."""
    return getattr(_state, "alone", False)


class Contest:
    """Runs one kind of calls of a region by its program, or by the compiler, once it is known which is faster.

    ``program`` computes a call as the planned module does, and ``forward`` as its class. ``backend`` is the compiler as
    Dynamo holds it, which may have frozen the weights. ``note`` is told the outcome, as plain JSON values.
    """

    def __init__(
        self, program: Call, forward: Call, backend: Any, *, frozen: bool, note: Callable[[dict[str, Any]], object]
    ) -> None:
        self._program, self._forward = program, forward
        self._backend, self._frozen, self._note = backend, frozen, note
        self._chosen: Call | None = None
        self._lock = threading.Lock()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors among the results, by what is faster."""
        chosen = self._chosen
        if chosen is None:
            chosen = self._decide(tensors)
        results = chosen(*tensors)
        return [results] if isinstance(results, torch.Tensor) else _tensors_in(results)

    def _decide(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The faster of both, which is known from then on."""
        with self._lock:
            if self._chosen is None:
                self._chosen = self._faster(tensors)
        return self._chosen

    def _faster(self, tensors: Sequence[torch.Tensor]) -> Call:
        """Compile the region alone and time both. A region that the compiler refuses runs by its program."""
        progress = Late("compiled regions", "timing", "timed")
        try:
            # In the caller's modes, as they are part of what the compiled region is guarded by.
            with showing(progress), planning():
                progress(0, 1, "a compiled region")
                with _alone(), self._freezing():
                    compiled = _below_autograd(torch._dynamo.optimize(self._backend, dynamic=False)(self._forward))
                    compiled(*tensors)
                pairs = timed(
                    functools.partial(compiled, *tensors), functools.partial(self._program, *tensors), tensors[0].device
                )
                progress(1, 1, "")
        except Exception as error:
            self._note({"runs": "program", "reason": f"the compiler failed: {type(error).__name__}: {error}"})
            return self._program
        self._note(_told(pairs))
        return self._program if pairs.speedup[0] > LEAST_SPEEDUP else compiled

    def _freezing(self) -> AbstractContextManager[Any]:
        """Inductor's setting of the process for weights, as it was when the graph was traced."""
        if not self._frozen:
            return nullcontext()
        import torch._inductor.config

        return torch._inductor.config.patch(freezing=True)  # type: ignore[no-any-return]


def _below_autograd(compiled: Call) -> Call:
    """Calls without the dispatch keys of autograd and of views, as the first one has neither.

    Later ones have them, for which Dynamo would compile anew: in the midst of a run, and without frozen weights.
    """
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

    def below(*tensors: torch.Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(views):
            return compiled(*tensors)

    return below


def _told(pairs: Pairs) -> dict[str, Any]:
    """The outcome: medians in milliseconds, and the speedup of the program with its 95 % interval."""
    least, speedup, most = pairs.speedup
    compiled_ms, program_ms = pairs.medians
    return {
        "runs": "program" if least > LEAST_SPEEDUP else "compiler",
        "compiled_ms": compiled_ms,
        "program_ms": program_ms,
        "speedup": speedup,
        "least": least,
        "most": most,
    }


def _tensors_in(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _alone() -> Iterator[None]:
    """In this block, on this thread, Dynamo sees torch's operators in place of regions."""
    before, _state.alone = is_alone(), True
    try:
        yield
    finally:
        _state.alone = before
