"""A program of steps over slots: what a region of a model is for inference, run without the model's modules."""

from __future__ import annotations

import copy
import os
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.execute.bound import writes_over_residual
from tilewise.kernels.native.programs import loading, why_never
from tilewise.machine.device import is_capturing
from tilewise.machine.recording import Recorder
from tilewise.machine.workspaces import aligned
from tilewise.nn.programs.arena import Use, lives_of, most_at_once, packed
from tilewise.nn.programs.checks import check_program
from tilewise.nn.programs.graphed import Graphed
from tilewise.nn.programs.native import Native, native_program
from tilewise.nn.programs.slots import Slot, Step, described, offset_in_root, root
from tilewise.nn.ranges import in_range, range_name, watched

__all__ = ["ALIGNMENT", "KEPT_ARENAS", "Program", "where_expected"]

ALIGNMENT = 16
"""Bytes at a multiple of which an input begins, or it is copied."""
MOST_STREAMS = 8
"""Streams of a GPU for which arenas are kept."""
KEPT_ARENAS = 4
"""Arenas that a program keeps between calls at most: as many threads may call it at once without new memory."""
CPU = torch.device("cpu")
UNASKED = "use_native() has not been called"


class Program:
    """Steps over slots, called as ``program(*inputs)`` for inference.

    ``slots`` and ``steps`` are as :class:`~tilewise.nn.programs.slots.Slot` and
    :class:`~tilewise.nn.programs.slots.Step` say; ``inputs`` and ``outputs`` are indices of slots, in the order of the
    call's arguments and results. A call returns the tensor of the one output, or a tuple of several. Gradients are
    not recorded.

    Intermediate tensors lie in one arena of :attr:`arena_bytes`, see :mod:`tilewise.nn.programs.arena`. Each call in
    flight has an arena of its own, so several threads may call one program; up to :data:`KEPT_ARENAS` are kept between
    calls. Outputs are new memory, except where an output is an input, a constant, or a view of one.

    All tensors are on ``device``. On a GPU arenas belong to streams: a call's work is queued on the current one.

    Steps run in Python until :meth:`use_native` has them run from C++, with the same bits. While a profiler of torch
    runs they run in Python, each in a range with its name and what computes it; the replay of a graph stays one.

    Raises ``ValueError`` for slots and steps that do not fit together, and at a call for inputs that do not lie as
    their slots say. What a step raises is raised with a note that names the step.

    Example::

        aten = torch.ops.aten
        slots = [Slot((4,), (1,), torch.float32, kind) for kind in ("input", "intermediate", "output")]
        steps = [
            Step("double", (0,), 1, lambda x, out: torch.add(x, x, out=out)),
            Step("relu", (1,), 2, operator=Operator(aten.clamp_min.out, (Place(0), 0), out="out")),
        ]
        y = Program(slots, steps, inputs=[0], outputs=[2])(x)
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        steps: Sequence[Step],
        inputs: Sequence[int],
        outputs: Sequence[int],
        device: torch.device = CPU,
    ) -> None:
        self.slots, self.steps = tuple(slots), tuple(steps)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.device = device
        check_program(self.slots, self.steps, self.inputs, self.outputs, device)
        roots = [root(self.slots, index) for index in range(len(self.slots))]
        self.new = {step.output for step in self.steps if step.gives_new}
        written = {roots[step.output] for step in self.steps}
        results = {roots[index] for index in self.outputs} & written
        self.fresh = sorted(results - self.new)
        """Outputs that a call allocates before the first step."""
        uses = [Use(step.inputs, step.output, step.may_alias) for step in self.steps]
        lives = lives_of([slot.nbytes for slot in self.slots], roots, uses, self.outputs)
        kept = {i: life for i, life in lives.items() if i in written and i not in results and i not in self.new}
        self.over = _written_over(self.slots, self.steps, roots)
        """Slots whose results may be written over the residuals that they add, and these slots."""
        self.offsets, self.arena_bytes = packed(kept, over=self.over)
        self.least_bytes, self.separate_bytes = most_at_once(kept), sum(life.size for life in kept.values())
        self._views: dict[int, list[int]] = {}
        for index, base in enumerate(roots):
            if index != base:
                self._views.setdefault(base, []).append(index)
        self._calls = [_Call(step) for step in self.steps]
        changing = {*self.inputs, *self.fresh, *self.new}
        self._changing = sorted(changing | {view for base in changing for view in self._views.get(base, ())})
        self._frames: dict[int, list[_Frame]] = {}
        self.kept_arenas = KEPT_ARENAS
        self.graph: Graphed | None = None
        """The recording that calls replay; ``None`` where they run step by step."""
        self.native: Native | None = None
        """The program in native code; ``None`` where it runs in Python."""
        self.why_not_native = UNASKED
        """Why it runs in Python; empty where it does not."""
        _programs.add(self)

    def __call__(self, *tensors: Tensor) -> Any:
        """The outputs for the given inputs."""
        graph = self.graph
        if graph is not None:
            self._check(tensors)
            found = graph(*tensors)
            if found is not NotImplemented:
                return found
        native = self.native
        if native is not None and not watched():
            found = native.call(*tensors)
            if found is not NotImplemented:
                return found
            self._check(tensors)
            if native.has_stale_constants():
                self.use_native()
        return self.in_python(*tensors)

    def use_native(self, *, checked: bool = True) -> str:
        """Have calls run from C++ from now on, and return why they cannot; empty where they do.

        Waits for the compiler the first time on a machine, half a minute. Each plan's launches are found by running it
        a few times and, with ``checked``, compared with the plan's own results. Steps that only Python can run stay in
        Python between native ones: ``program.native.in_python`` says which, and why. Raises ``ValueError`` for a
        ``TILEWISE_NATIVE`` that makes no sense.
        """
        self.native = None
        if self.device.type != "cpu":
            self.why_not_native = f"its tensors are on {self.device}, whose steps a graph replays"
            return self.why_not_native
        self.why_not_native = why_never() or loading().finished().reason
        if not self.why_not_native:
            try:
                self.native = native_program(self, checked=checked)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                self.why_not_native = f"{type(error).__name__}: {error}"
        return self.why_not_native

    def use_graph(self, tensors: Sequence[Tensor], recorder: Recorder) -> str:
        """Have calls replay one recording of all steps from now on, and return why they cannot; empty where they do.

        The steps are run on ``tensors`` to be recorded. Calls that come while another replays run step by step.
        """
        self.graph = None
        try:
            self.graph = Graphed(self.in_python, tensors, recorder)
        except (RuntimeError, ValueError) as error:  # what CUDA and libraries say of what cannot be captured
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return ""

    def in_python(self, *tensors: Tensor) -> Any:
        """A call whose steps all run from Python."""
        self._check(tensors)
        calls = [call.in_range() for call in self._calls] if watched() else None
        if torch.is_autocast_enabled(self.device.type):  # the steps' types have been decided
            with torch.autocast(self.device.type, enabled=False):
                return self._in_frame(tensors, calls)
        return self._in_frame(tensors, calls)

    def step_ms(self, tensors: Sequence[Tensor], rounds: int) -> list[float]:
        """What each step takes in its place, in milliseconds: caches hold what the steps before it left there.

        It is the median of ``rounds`` calls after one that is not counted, as calls run: from C++ where they do.
        """
        native = self.native
        if native is not None:
            calls_ns = [native.call.times(*tensors) for _ in range(rounds + 1)]
            if NotImplemented not in calls_ns:
                return native.step_ms([statistics.median(each) for each in zip(*calls_ns[1:], strict=True)])
        self._check(tensors)
        taken: list[list[float]] = [[] for _ in self.steps]
        calls = [call.timed(into) for call, into in zip(self._calls, taken, strict=True)]
        for _ in range(rounds + 1):
            self._in_frame(tensors, calls)
        return [statistics.median(each[1:]) for each in taken]

    def show_steps(self, tensors: Sequence[Tensor], show: Callable[[int, Sequence[Tensor], Tensor], None]) -> None:
        """Run all steps in Python. After each call ``show(number, inputs, result)``, while its tensors are there.

        Of a residual that the result is written over, a copy is shown.
        """
        self._check(tensors)
        calls = enumerate(self._calls)
        self._in_frame(tensors, [call.shown(number, show, call.output in self.over) for number, call in calls])

    def _in_frame(self, tensors: Sequence[Tensor], calls: Sequence[_Call] | None = None) -> Any:
        """Run the steps, or ``calls`` in their place, with an arena that no other call uses."""
        kept = _kept_now(self._frames, self.device)
        try:
            frame = kept.pop()
        except IndexError:
            frame = _Frame(self)
        try:
            with torch.no_grad():
                return self._run(frame, tensors, self._calls if calls is None else calls)
        finally:
            for index in self._changing:
                frame.values[index] = None
            if len(kept) < KEPT_ARENAS:
                kept.append(frame)

    def release(self) -> None:
        """Free the arenas that are kept between calls."""
        self._frames.clear()
        if self.native is not None:
            self.native.call.release()

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``ValueError`` or ``TypeError`` for inputs that are not as their slots say."""
        if len(tensors) != len(self.inputs):
            raise ValueError(f"{len(tensors)} inputs given: {len(self.inputs)} would do")
        for number, (index, tensor) in enumerate(zip(self.inputs, tensors, strict=True)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"input {number} is a {type(tensor).__name__}: a tensor would do")
            slot = self.slots[index]
            strange = tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj()
            if tensor.device != self.device or strange:
                wanted = "a plain CPU tensor" if self.device.type == "cpu" else f"a plain tensor on {self.device}"
                raise ValueError(f"input {number} is on {tensor.device}, {tensor.layout}: {wanted} would do")
            if not slot.has(tensor):
                given = described(tensor.dtype, tensor.shape, tensor.stride())
                raise ValueError(f"input {number} is {given}: {slot} would do")

    def _run(self, frame: _Frame, tensors: Sequence[Tensor], calls: Sequence[_Call]) -> Any:
        """Run all steps in Python and return the outputs."""
        values = frame.values
        for index, tensor in zip(self.inputs, tensors, strict=True):
            self._set(values, index, tensor)
        for index in self.fresh:
            slot = self.slots[index]
            self._set(values, index, _empty(slot, self.device))
        for number, call in enumerate(calls):
            try:
                if call.new:
                    found = call.run(*[values[i] for i in call.inputs])
                    self._check_new(number, found)
                    self._set(values, call.output, found)
                else:
                    call.run(*[values[i] for i in call.inputs], values[call.output])
            except BaseException as error:
                error.add_note(self.note(number))
                raise
        results = tuple(self._result(frame, index) for index in self.outputs)
        return results[0] if len(results) == 1 else results

    def note(self, number: int) -> str:
        """What is said of an error in step ``number``."""
        return f"in step {number} of {len(self.steps)}, {self.steps[number].name!r}"

    def _set(self, values: list[Any], index: int, tensor: Tensor) -> None:
        """Put ``tensor`` into slot ``index``, and its views into theirs."""
        values[index] = tensor
        for view in self._views.get(index, ()):
            values[view] = _view(tensor, self.slots[view], offset_in_root(self.slots, view))

    def _check_new(self, number: int, found: object) -> None:
        """Raise for something that a step returned and that does not lie as its slot says."""
        slot = self.slots[self.steps[number].output]
        if not isinstance(found, Tensor):
            raise TypeError(f"the step returned a {type(found).__name__}: a tensor would do")
        if not slot.has(found) or found.device != self.device:
            given = described(found.dtype, found.shape, found.stride())
            raise ValueError(f"the step returned {given}: {slot} would do")

    def _result(self, frame: _Frame, index: int) -> Tensor:
        """The tensor of an output; a copy where a step returned a view of the arena, which the next call overwrites."""
        found: Tensor = frame.values[index]
        if frame.arena is not None and found.untyped_storage().data_ptr() == frame.arena.untyped_storage().data_ptr():
            copy = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=self.device)
            return copy.copy_(found)
        return found


class _Call:
    """A step as it runs in Python."""

    __slots__ = ("inputs", "new", "output", "run", "step")

    def __init__(self, step: Step) -> None:
        self.step, self.inputs, self.output, self.new = step, step.inputs, step.output, step.gives_new
        self.run: Callable[..., Any] = step.call()

    def in_range(self) -> _Call:
        """The same, which a profiler sees in a range of its own."""
        call = copy.copy(self)
        call.run = in_range(range_name(self.step.name, "", _what_computes(self.step)), self.run)
        return call

    def timed(self, into: list[float]) -> _Call:
        """The same, which adds what each run takes in milliseconds to ``into``."""
        run, call = self.run, copy.copy(self)

        def timed_run(*tensors: Tensor) -> Any:
            begin = time.perf_counter()
            found = run(*tensors)
            into.append((time.perf_counter() - begin) * 1e3)
            return found

        call.run = timed_run
        return call

    def shown(self, number: int, show: Callable[[int, Sequence[Tensor], Tensor], None], is_over: bool) -> _Call:
        """The same, which shows what each run read and gave, as step ``number``.

        With ``is_over`` the last input may be gone then, and a copy of it is shown.
        """
        run, call, count = self.run, copy.copy(self), len(self.inputs)

        def shown_run(*tensors: Tensor) -> Any:
            inputs = (*tensors[: count - 1], tensors[count - 1].clone()) if is_over else tensors[:count]
            found = run(*tensors)
            show(number, inputs, tensors[-1] if len(tensors) > count else found)
            return found

        call.run = shown_run
        return call


def _written_over(slots: Sequence[Slot], steps: Sequence[Step], roots: Sequence[int]) -> dict[int, int]:
    """The slots of results that their plans may write over the residuals that they add, with the slots of these.

    A step that reads its residual as another input too, or a part of it, would read what it has already written.
    """
    found: dict[int, int] = {}
    shows = _memory_shown(steps, roots)
    for step in steps:
        plan = step.plan
        if plan is None or not getattr(plan.problem, "residual", False):
            continue
        residual, result = step.inputs[-1], step.output
        one, other = slots[residual], slots[result]
        read_otherwise = any(shows[index] & shows[residual] for index in step.inputs[:-1])
        whole = one.view_of is None and other.view_of is None and not read_otherwise
        alike = (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype)
        if whole and alike and writes_over_residual(plan.plan, plan.problem):
            found[result] = residual
    return found


def _memory_shown(steps: Sequence[Step], roots: Sequence[int]) -> list[set[int]]:
    """For each slot those whose memory it shows: its root, and what a step that returned that one may have returned."""
    shown = {index: {index} for index in roots}
    for step in steps:
        if step.may_alias:
            shown[step.output].update(*(shown[roots[index]] for index in step.inputs))
    return [shown[index] for index in roots]


def _what_computes(step: Step) -> str:
    """The solver of a step's plan, or the name of its operator; empty for another function."""
    if step.plan is not None:
        return str(step.plan.plan.solver)
    return "" if step.operator is None else str(step.operator.overload)


def _kept_now(frames: dict[int, list[_Frame]], device: torch.device) -> list[_Frame]:
    """The arenas that a call now may use, of those kept by the stream that they belong to.

    There are none while a graph is captured, whose own memory has to hold them.
    """
    if device.type == "cpu":
        return frames.setdefault(0, [])
    if is_capturing(device):
        return []
    if len(frames) > MOST_STREAMS:
        frames.clear()
    return frames.setdefault(torch.cuda.current_stream(device).cuda_stream, [])


class _Frame:
    """The arena of one call in flight, and the tensors in all slots: those of the arena stay the same."""

    __slots__ = ("arena", "values")

    def __init__(self, program: Program) -> None:
        size = program.arena_bytes
        self.values: list[Any] = [slot.tensor for slot in program.slots]
        with torch.inference_mode(False), torch.no_grad():
            self.arena = aligned(size, program.device) if size else None
            for index, offset in program.offsets.items():
                slot = program.slots[index]
                program._set(self.values, index, _carved(self.arena, offset, slot, program.device))
            for index, slot in enumerate(program.slots):
                if slot.kind == "constant" and slot.tensor is not None:
                    program._set(self.values, index, slot.tensor.detach())


def where_expected(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, or copies of those that begin where plans do not expect an input to begin."""
    return [t if t.data_ptr() % ALIGNMENT == 0 else _copied(t) for t in tensors]


def _copied(t: Tensor) -> Tensor:
    """A copy that lies in new memory exactly as ``t`` does: views with gaps and expanded tensors keep their strides."""
    if not t.numel():
        return t
    span = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,)).clone().as_strided(t.shape, t.stride())


def _empty(slot: Slot, device: torch.device) -> Tensor:
    """New memory for a slot."""
    return torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device=device)


def _carved(arena: Tensor | None, offset: int, slot: Slot, device: torch.device) -> Tensor:
    """The tensor of ``slot`` that begins ``offset`` bytes behind the arena's beginning."""
    if arena is None or not slot.nbytes:
        return _empty(slot, device)
    piece = arena.narrow(0, offset, slot.nbytes).view(slot.dtype)
    return piece.as_strided(slot.shape, slot.strides)


def _view(tensor: Tensor, slot: Slot, offset: int) -> Tensor:
    """The view of a root's ``tensor`` that ``slot`` describes."""
    return tensor.as_strided(slot.shape, slot.strides, tensor.storage_offset() + offset)


_programs: weakref.WeakSet[Program] = weakref.WeakSet()


def _after_fork() -> None:
    """Let programs of a forked process run in Python: OpenMP's threads do not exist there."""
    for program in list(_programs):
        program.native, program.why_not_native = None, "a forked process has none of OpenMP's threads"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
