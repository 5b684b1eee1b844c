"""cuDNN operation graphs of one convolution: which engines take them, and building the plan of one engine.

An engine config is known by cuDNN's own name, such as ``eng70_k2=12_k18=0``: the engine's number, then numbers and
values of its knobs. From the name the same plan is rebuilt without asking heuristics. Plans with deprecated knobs are
the exception: cuDNN's heuristics still choose them but nobody else can set them, so they are looked up in the lists.

Nothing is built only to learn its workspace. With a limit below zero the frontend refuses every config and names the
size that the config asks for, which is what the built plan then has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.machine.turns import pause
from tilewise.plan import Config
from tilewise.problems.base import ALIGNMENT, dense_strides
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.vendor import _api as api
from tilewise.solvers.vendor._epilogue import followed

__all__ = [
    "MODES", "Built", "Engine", "Entry", "Strides", "Traits", "build", "canonical_strides", "engine_count",
    "exact_strides", "listed", "modes", "supported", "traits",
]  # fmt: skip

Strides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Strides of x, w and y in elements, as cuDNN gets them: a 1-D problem has a unit axis before its own."""

KNOBS = {
    1: "SWIZZLE", 2: "TILE_SIZE", 4: "EDGE", 11: "MULTIPLY", 12: "SPLIT_K_BUF", 13: "TILEK", 14: "STAGES",
    15: "REDUCTION_MODE", 17: "SPLIT_K_SLC", 18: "IDX_MODE", 23: "SPECFILT", 24: "KERNEL_CFG", 25: "WORKSPACE",
    27: "TILE_CGA_M", 28: "TILE_CGA_N", 29: "BLOCK_SIZE", 30: "OCCUPANCY", 31: "ARRAY_SIZE_PER_THREAD",
    33: "SPLIT_COLS", 34: "TILE_ROWS", 35: "TILE_COLS", 36: "LOAD_SIZE", 37: "CTA_COUNT", 38: "STREAM_K",
    39: "SPLIT_P_SLC", 40: "TILE_M", 41: "TILE_N", 42: "WARP_SPEC_CFG",
}  # fmt: skip
"""Names of cuDNN's knob numbers (``cudnnBackendKnobType_t``) that the frontend sets; the rest are deprecated."""
MODES = ("A", "B", "FALLBACK")
"""cuDNN's heuristics. B asks a model, takes 8 ms and lists tiles that A leaves out, the fastest at times."""
NOTES = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "NONDETERMINISTIC", "FFT", "WINOGRAD", "STRICT_NAN_PROP")
"""The numerical notes of engines that matter to this package."""
ENGINE_NAME = re.compile(r"eng(\d{1,6})((?:_k\d{1,6}=-?\d{1,9})*)")
KNOB_TEXT = re.compile(r"k(\d+)=(-?\d+)")
WORKSPACE_TEXT = re.compile(r"workspace violation\. Requires (\d+)")
DESELECTED_TEXT = "Deselecting execution plan"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine config: the engine's number, and pairs of a knob's number and its value, sorted."""

    number: int
    knobs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, name: str) -> Engine:
        """Read cuDNN's name of a plan. Raises ``ValueError`` where it is none."""
        match = ENGINE_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"engine={name!r}: cuDNN's name of a plan would do, such as 'eng70_k2=12_k18=0'")
        return cls(int(match[1]), tuple(sorted((int(k), int(v)) for k, v in KNOB_TEXT.findall(match[2]))))

    @classmethod
    def of(cls, config: Config) -> Engine:
        """The engine that a config names. Raises ``ValueError`` where it names none."""
        name = config.get("engine")
        if set(config) != {"engine"} or not isinstance(name, str):
            raise ValueError(f"config {config.key}: one entry 'engine' with cuDNN's name of a plan would do")
        return cls.parse(name)

    @property
    def name(self) -> str:
        """cuDNN's name of the plan, which :meth:`parse` reads back."""
        return "".join([f"eng{self.number}", *(f"_k{knob}={value}" for knob, value in self.knobs)])

    @property
    def config(self) -> Config:
        """The solver's config for this engine."""
        return Config(engine=self.name)

    @property
    def settable(self) -> bool:
        """Whether every knob can be set, so that the plan can be made without heuristics."""
        return all(knob in KNOBS for knob, _ in self.knobs)


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine config that takes a problem, and its workspace in bytes, ``None`` where only building tells."""

    engine: Engine
    workspace: int | None


@dataclass(frozen=True, slots=True)
class Traits:
    """cuDNN's notes of an engine: its numerical notes, and whether building it compiles a kernel."""

    notes: frozenset[str]
    compiles: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A built plan with its workspace in bytes.

    ``graph._execute_with_raw_ptrs`` queues it on the handle's stream.
    """

    graph: Any
    workspace: int


def canonical_strides(p: ConvProblem) -> Strides:
    """Strides of tensors with the problem's layout classes; a view is rows of a larger tensor."""
    x, w, y = (_with_unit_axis(p, role, _class_strides(p, role)) for role in ROLES)
    return x, w, y


def exact_strides(p: ConvProblem, given: Mapping[str, Sequence[int]]) -> Strides:
    """Strides of the ``given`` tensors by role, and canonical ones of the others.

    Dimensions of size 1 get canonical strides too: theirs mean nothing but change what cuDNN takes a tensor for.
    """
    x, w, y = (_with_unit_axis(p, role, _cleaned(p, role, given.get(role))) for role in ROLES)
    return x, w, y


def _class_strides(p: ConvProblem, role: str) -> tuple[int, ...]:
    """Strides of a tensor with the layout class of ``role``."""
    shape, layout = p.shape(role), p.layout(role)
    if layout != "view":
        return dense_strides(shape, layout)
    gap = max(8, ALIGNMENT // p.torch_dtype(role).itemsize)
    return dense_strides((*shape[:-1], shape[-1] + gap), "contiguous")


def _cleaned(p: ConvProblem, role: str, strides: Sequence[int] | None) -> tuple[int, ...]:
    """``strides`` with those of dimensions of size 1 replaced by the canonical ones."""
    usual = _class_strides(p, role)
    if strides is None:
        return usual
    return tuple(u if n == 1 else s for n, s, u in zip(p.shape(role), strides, usual, strict=True))


def _with_unit_axis(p: ConvProblem, role: str, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with a unit axis before the axis of a 1-D problem, as cuDNN has no 1-D convolutions."""
    if p.dims > 1:
        return strides
    return (*strides[:2], p.shape(role)[2] * strides[2], strides[2])


def operation_graph(p: ConvProblem, strides: Strides, handle: int) -> Any:
    """The validated graph of ``p``, with what it adds and its activation.

    The operands' uids are 1 and 2, the result's is 3.
    """
    cudnn = api.load()
    kinds = {"fp32": cudnn.data_type.FLOAT, "bf16": cudnn.data_type.BFLOAT16, "fp16": cudnn.data_type.HALF}
    zero, one = ([0], [1]) if p.dims == 1 else ([], [])
    steps = dict(zip(ROLES, strides, strict=True))
    alignment = dict(zip(ROLES, p.alignment, strict=True))
    graph = cudnn.pygraph(
        io_data_type=kinds[p.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    operands = []
    for uid, role in enumerate(p.operands, 1):
        tensor = graph.tensor(_dims(p, role), list(steps[role]), data_type=kinds[p.dtype], name=role, uid=uid)
        tensor.set_alignment(alignment[role])
        operands.append(tensor)
    call, first, second = {
        Pass.FPROP: (graph.conv_fprop, "image", "weight"),
        Pass.DGRAD: (graph.conv_dgrad, "loss", "filter"),
        Pass.WGRAD: (graph.conv_wgrad, "image", "loss"),
    }[p.pass_]
    result = call(
        pre_padding=zero + [axis.before for axis in p.axes],
        post_padding=zero + [axis.after for axis in p.axes],
        stride=one + [axis.stride for axis in p.axes],
        dilation=one + [axis.dilation for axis in p.axes],
        **{first: operands[0], second: operands[1]},
    )
    if p.bias or p.residual or p.activation != "none":
        result = followed(graph, p, result, _dims(p, p.result), list(steps[p.result]), kinds[p.out_dtype])
    result.set_output(True).set_data_type(kinds[p.out_dtype])
    result.set_dim(_dims(p, p.result)).set_stride(list(steps[p.result]))
    result.set_uid(3).set_alignment(alignment[p.result])
    graph.validate()
    graph.build_operation_graph()
    return graph


def _dims(p: ConvProblem, role: str) -> list[int]:
    """A tensor's shape, with a unit axis before the axis of a 1-D problem."""
    shape = p.shape(role)
    return [*shape[:2], 1, shape[2]] if p.dims == 1 else list(shape)


def _canonical_graph(p: ConvProblem, device: int) -> Any:
    """The graph of ``p`` with canonical strides."""
    return operation_graph(p, canonical_strides(p), api.handle(device).value)


def _ask(graph: Any, modes: Iterable[str]) -> list[Engine]:
    """Add the plans that heuristics ``modes`` list to ``graph`` and return their engines in order."""
    cudnn = api.load()
    graph.create_execution_plans([cudnn.heur_mode.__members__[mode] for mode in modes])
    return [Engine.parse(graph.get_plan_name_at_index(i)) for i in range(graph.get_execution_plan_count())]


def _add(graph: Any, engine: Engine) -> None:
    """Add the plan of ``engine`` to ``graph``. Raises one of :func:`api.errors` where it does not take the problem."""
    cudnn = api.load()
    knobs = {cudnn.knob_type.__members__[KNOBS[knob]]: value for knob, value in engine.knobs}
    graph.create_execution_plan(engine.number, knobs)


def _refusal(graph: Any, index: int) -> str:
    """What plan ``index`` answers to a workspace limit below zero, which stops it before anything is built."""
    graph.deselect_workspace_greater_than(-1)
    try:
        graph.build_plan_at_index(index)
    except api.errors() as error:
        return str(error)
    return ""


def _entry(graph: Any, index: int, engine: Engine) -> Entry:
    """``engine``, plan ``index`` of ``graph``, with the workspace that it asks for."""
    pause()
    needs = WORKSPACE_TEXT.search(_refusal(graph, index))
    return Entry(engine, int(needs[1]) if needs else None)


def listed(p: ConvProblem, device: int, asked: Sequence[str]) -> list[Entry]:
    """Engine configs that heuristics ``asked`` list, each once, most promising first.

    Raises one of :func:`api.errors` when cuDNN refuses the problem or knows no engine for it.
    """
    with torch.cuda.device(device):
        graph = _canonical_graph(p, device)
        entries: dict[Engine, Entry] = {}
        for index, engine in enumerate(_ask(graph, asked)):
            if engine not in entries:
                entries[engine] = _entry(graph, index, engine)
    return list(entries.values())


def supported(p: ConvProblem, device: int, engines: Iterable[Engine]) -> list[Entry]:
    """Those of ``engines`` that take the problem, in their order. Their knobs must be settable."""
    with torch.cuda.device(device):
        graph = _canonical_graph(p, device)
        taken: list[Engine] = []
        for engine in engines:
            pause()
            try:
                _add(graph, engine)
            except api.errors():
                continue  # an engine that does not take the problem is no candidate: there is no more to say
            taken.append(engine)
        return [_entry(graph, index, engine) for index, engine in enumerate(taken)]


def engine_count(p: ConvProblem, device: int) -> int:
    """How many engine numbers cuDNN has for this kind of problem; they count from 0."""
    with torch.cuda.device(device):
        return int(_canonical_graph(p, device).get_engine_count())


def traits(p: ConvProblem, device: int, engine: Engine) -> Traits | None:
    """cuDNN's notes of an engine, asked with ``p``; ``None`` where it cannot be asked.

    The frontend can only filter plans by a numerical note, and cannot undo that, so each note takes a graph of its own.
    """
    cudnn = api.load()
    plain = engine if engine.settable else Engine(engine.number)
    notes: set[str] = set()
    compiles = False
    with torch.cuda.device(device):
        for note in NOTES:
            pause()
            try:
                graph = _canonical_graph(p, device)
                _add(graph, plain)
            except api.errors():
                return None
            if note == NOTES[0]:
                compiles = cudnn.behavior_note.RUNTIME_COMPILATION in graph.get_behavior_notes_for_plan_at_index(0)
            graph.deselect_numeric_notes([cudnn.numerical_note.__members__[note]])
            if DESELECTED_TEXT in _refusal(graph, 0):
                notes.add(note)
    return Traits(frozenset(notes), compiles)


def modes(p: ConvProblem) -> tuple[str, ...]:
    """The heuristics of cuDNN that are asked for engines, by their letters.

    B crashes the process for some WGRAD problems with odd strides and padding (cuDNN 9.19).
    """
    return tuple(mode for mode in MODES if mode != "B" or p.pass_ is not Pass.WGRAD)


def build(p: ConvProblem, engine: Engine, strides: Strides, device: int) -> Built:
    """Build the plan of ``engine`` for exact strides. Raises :class:`SolverUnavailable` naming the engine."""
    try:
        with torch.cuda.device(device):
            graph, index = _graph_with(p, engine, strides, api.handle(device).value)
            pause()
            graph.build_plan_at_index(index)
            workspace = int(graph.get_workspace_size_plan_at_index(index))
    except api.errors() as error:
        raise SolverUnavailable(f"{engine.name}: {api.first_line(error)}") from error
    return Built(graph, workspace)


def _graph_with(p: ConvProblem, engine: Engine, strides: Strides, handle: int) -> tuple[Any, int]:
    """A graph with the plan of ``engine``, and the plan's index. Raises ``ValueError`` where it cannot be made."""
    if engine.settable:
        graph = operation_graph(p, strides, handle)
        _add(graph, engine)
        return graph, 0
    for mode in modes(p):
        graph = operation_graph(p, strides, handle)
        engines = _ask(graph, [mode])
        if engine in engines:
            return graph, engines.index(engine)
    raise ValueError("it has knobs that cannot be set, and cuDNN's heuristics do not list it for these strides")
