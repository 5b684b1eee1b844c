"""Recording on a CUDA device, by ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

__all__ = ["CudaRecorder"]

T = TypeVar("T")


@contextmanager
def _alone() -> Iterator[None]:
    """Meanwhile let no graph be destroyed by Python's cycle collector, and cuBLAS take its workspaces anew.

    A workspace from before would be given back when somebody clears cuBLAS's workspaces, as planning does, and belong
    to another tensor when the graph writes to it. One that is taken in a capture is memory of the graph's pool.
    """
    collects = gc.isenabled()
    gc.disable()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collects:
            gc.enable()


class CudaRecorder:
    """Records what runs on one CUDA device, as :class:`~tilewise.machine.recording.Recorder` says.

    Each of its graphs takes its memory from a private pool of its own. Were it one pool for all, the gradients that a
    backward leaves could lie where the forward had something for a moment, and the next forward would write there,
    while the program may still hold them as ``.grad``.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.generator: torch.Generator = torch.cuda.default_generators[index]
        self._pools: list[Any] = []
        self._stream = torch.cuda.Stream(self.device)
        self._last: torch.cuda.Stream | None = None

    def warm_up(self, run: Callable[[], object]) -> None:
        """Call ``run()`` on the stream of the recordings, where libraries then make what they keep by stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Capture ``run()`` in a graph; return its replay and the result.

        Other threads may go on using the device meanwhile, such as one that pins memory for a data loader.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        random = self.generator.clone_state()
        torch.cuda.synchronize(self.device)
        # The outer block puts the current stream back where torch's own does not, after a capture that failed.
        with (
            _alone(),
            torch.cuda.device(self.device),
            torch.cuda.stream(self._stream),
        ):
            capture = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
            capture.__enter__()
            failed = True
            try:
                result = run()
                failed = False
            finally:
                self._end(capture, pool, random, failed=failed)
        self._pools.append(tuple(pool))
        return graph.replay, result

    def _end(self, capture: Any, pool: Any, random: torch.Generator, *, failed: bool) -> None:
        """End a capture. Where CUDA refuses its end, undo what torch leaves behind of it.

        Raises the refusal, unless ``failed`` says that an exception is on its way already, which names the cause.
        """
        try:
            capture.__exit__(None, None, None)
        except RuntimeError:
            # torch leaves the generator as if it were still captured, so that any later draw would raise.
            self.generator.graphsafe_set_state(random)
            for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with suppress(RuntimeError):  # raised where torch has done this much itself
                    getattr(torch._C, undo)(self.device.index, pool)
            if not failed:
                raise

    def ordered(self) -> None:
        """Let the current stream wait for the last replay where that was on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream

    def recording(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def bytes(self) -> int:
        """The bytes that the pools hold."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in self._pools)
