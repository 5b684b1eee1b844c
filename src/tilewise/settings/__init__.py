"""The settings of planning: one list of options, which functions, the command line and the environment share.

:class:`Settings` is that list. Each of its fields has its type, its default, its help and what checks it here. (The
planner's own :class:`~tilewise.planner.Options` can be made alone and check themselves, with the same messages.) The
``TypedDict`` classes below say which function takes which of them by keyword. This module imports no
torch, so that the command line can print its help at once.

>>> from typing import get_args
>>> from tilewise.settings import OPTIONS, BatchSizes, Branches, Goal, Graphs, Policy, Rigor, Unplanned
>>> [get_args(words) for words in (Rigor, BatchSizes, Policy)]
[('estimate', 'measure', 'patient', 'wisdom_only'), ('undivided', 'powers_of_two', 'all'), ('arena', 'paper_wd')]
>>> [get_args(words) for words in (Unplanned, Branches, Goal, Graphs)]
[('plan', 'torch'), ('sequence', 'measured'), ('step', 'passes'), ('never', 'auto')]
>>> OPTIONS["rigor"].default
'measure'
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from tilewise.settings.kinds import (
    Choice,
    Count,
    Flag,
    FlagOrDefault,
    Kind,
    MemorySize,
    Names,
    Number,
    Share,
    Size,
)

if TYPE_CHECKING:
    from tilewise.planner.options import Options

__all__ = [
    "OPTIONS",
    "BackgroundOptions",
    "BatchSizes",
    "Branches",
    "DefaultOptions",
    "EnableOptions",
    "Goal",
    "Graphs",
    "LargestBatchOptions",
    "ModelOptions",
    "Option",
    "PlanOptions",
    "Policy",
    "Rigor",
    "Settings",
    "StepOptions",
    "Unplanned",
    "described",
    "listed",
]

BatchSizes = Literal["undivided", "powers_of_two", "all"]
Rigor = Literal["estimate", "measure", "patient", "wisdom_only"]
Policy = Literal["arena", "paper_wd"]
Unplanned = Literal["plan", "torch"]
Branches = Literal["sequence", "measured"]
Goal = Literal["step", "passes"]
Graphs = Literal["never", "auto"]


@dataclass(frozen=True)
class Option:
    """One option. ``help`` is a short sentence for the command line; ``more`` is what documentation says beside it.

    ``variable`` is the environment variable that is asked where the option is not given, empty where there is none.

    >>> from tilewise.settings import OPTIONS
    >>> option = OPTIONS["batch_sizes"]
    >>> option.flag, option.default, option.choices
    ('--batch-sizes', 'powers_of_two', ('undivided', 'powers_of_two', 'all'))
    """

    name: str
    default: Any
    kind: Kind
    help: str
    more: str = ""
    variable: str = ""

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--batch-sizes``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that may be chosen from. Raises ``TypeError`` for an option that is no choice."""
        if not isinstance(self.kind, Choice):
            raise TypeError(f"{self.name} is no choice of words")
        return self.kind.choices


def about(kind: Kind, help: str, more: str = "", *, variable: str = "") -> dict[str, Any]:
    """What is to be known of a field of :class:`Settings` beside its name, type and default."""
    return {"kind": kind, "help": help, "more": more, "variable": variable}


MOST_PLANS = 512
"""Problems planned while planning is enabled, at most, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked of planning, as one value that functions take as ``settings`` in place of single keywords.

    Each field is an option that a function of this package takes by keyword, too. A function refuses settings that have
    another value than the default for an option it does not take. ``dataclasses.replace`` makes other settings of
    these.

    {options}

    Raises ``ValueError`` naming the option at fault, its value and what would do.

    >>> from dataclasses import replace
    >>> asked = tilewise.Settings(workspace="64MiB", rigor="estimate")
    >>> replace(asked, training=False).options().workspace
    67108864
    """

    workspace: int | str | None = field(
        default=None,
        metadata=about(
            Size(),
            "Memory limit per kernel beyond operands and result, such as 64MiB.",
            "A number of bytes or text; ``None`` for no limit.",
            variable="TILEWISE_WORKSPACE",
        ),
    )
    total_workspace: int | str | None = field(
        default=None,
        metadata=about(
            Size(),
            "Memory for the workspaces of all kernels together, such as 120MiB.",
            "It is divided so that a step is fastest, and ``workspace`` holds beside it. Kernels that no example shows "
            "have the whole as a limit of their own. ``None`` for no such limit.",
        ),
    )
    policy: Policy = field(
        default="arena",
        metadata=about(
            Choice(get_args(Policy)),
            "What adds up to the total: workspaces in use at once, or a segment for every layer and pass.",
            '``"arena"`` adds up what may run at once, since a workspace lives only during its call; ``"paper_wd"`` '
            "everything (Oyama et al. 2018, III-C).",
        ),
    )
    memory_limit: int | str | None = field(
        default=None,
        metadata=about(
            MemorySize(),
            "Memory that a whole step may take on its device, such as 16GiB or 80%.",
            "Parameters, activations and gradients are included. A step is run to see what is alive when each kernel "
            "runs; each gets the rest, and the schedule is run and its peak measured.",
        ),
    )
    batch_sizes: BatchSizes = field(
        default="powers_of_two",
        metadata=about(
            Choice(get_args(BatchSizes)),
            "Micro-batches that are tried.",
            '``"undivided"``, ``"powers_of_two"`` or ``"all"``.',
            variable="TILEWISE_BATCH_SIZES",
        ),
    )
    rigor: Rigor = field(
        default="measure",
        metadata=about(
            Choice(get_args(Rigor)),
            "Effort spent on finding plans.",
            '``"estimate"`` measures nothing, ``"measure"`` what may win, ``"patient"`` everything; ``"wisdom_only"`` '
            "takes what is known already.",
            variable="TILEWISE_RIGOR",
        ),
    )
    training: bool = field(
        default=True,
        metadata=about(
            Flag(),
            "Plan the gradients that the calls need, too.",
            "If ``False``, what is computed from a weight alone (its spectrum, say) is kept on a CPU, and every call "
            "compares the weight with a copy first.",
        ),
    )
    frozen: bool = field(
        default=False,
        metadata=about(
            Flag(),
            "With ``training=False``, promise that weights will not change.",
            "What is computed from them is then kept on a GPU, too, and nothing is compared: only another memory or "
            "version counter of a weight is seen, no writes through ``weight.data`` or a NumPy view.",
        ),
    )
    regions: bool = field(
        default=True,
        metadata=about(
            Flag(),
            "With ``training=False``, plan whole parts of the model as one program, on a GPU with ``frozen=True``.",
            "Norms are folded, neighbours fused, layouts chosen for all. If ``False``, layers are planned one by one.",
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=about(
            Flag(),
            "Only what gives the same bits every time.",
            "torch's own flag, when on, asks for that too.",
            variable="TILEWISE_DETERMINISTIC",
        ),
    )
    error_limit: float | None = field(
        default=None,
        metadata=about(
            Number(),
            "The relative L2 error that a plan may have.",
            "``None``: 1e-5 in fp32, and twice torch's own otherwise.",
            variable="TILEWISE_ERROR_LIMIT",
        ),
    )
    strict: bool = field(
        default=False,
        metadata=about(
            Flag(),
            "Keep the error limit for results next to outliers, too.",
            variable="TILEWISE_STRICT",
        ),
    )
    cuda_graphs: bool = field(
        default=False,
        metadata=about(
            Flag(),
            "Choose plans by what they take on the GPU alone.",
            "That is for a model that will be replayed from a CUDA graph, where launches cost nothing.",
            variable="TILEWISE_CUDA_GRAPHS",
        ),
    )
    exclude: Sequence[str] = field(
        default=(),
        metadata=about(
            Names("exclude", "solver", "solvers' names, with commas between them"),
            "Solvers that no plan may use; `tilewise info` lists them, aten is torch's own choice.",
            'With ``("aten",)`` a plan is used whether it is faster or not. What no other solver can compute stays '
            "torch's then, and the report says why.",
            variable="TILEWISE_EXCLUDE",
        ),
    )
    share_with: Sequence[str] = field(
        default=(),
        metadata=about(
            Names("share_with", "device", "devices' names, with commas between them"),
            "Devices that may compute a share of a layer's batch beside its own device, such as cpu or cuda:1.",
            "All compute at once, and copies count in the time. The share of each is measured, and used where it wins. "
            "A workspace limit holds on each device by itself.",
            variable="TILEWISE_SHARE_WITH",
        ),
    )
    unplanned: Unplanned = field(
        default="plan",
        metadata=about(
            Choice(get_args(Unplanned)),
            "What happens with a shape that first appears later.",
            'It is planned on sight (``"plan"``) or left to torch (``"torch"``). Nothing is planned on sight while a '
            "CUDA graph is captured, under ``torch.compile``, or in one of several ranks.",
        ),
    )
    branches: Branches = field(
        default="sequence",
        metadata=about(
            Choice(get_args(Branches)),
            "How parallel branches run, such as an Inception module's.",
            'In ``"sequence"``, or on streams at once where that is ``"measured"`` faster with the plans in place: the '
            "region by itself, and the model's whole step.",
        ),
    )
    goal: Goal = field(
        default="step",
        metadata=about(
            Choice(get_args(Goal)),
            "What is to be fastest: a whole step of the model, or each pass by itself.",
            'With ``"step"`` torch\'s step and the planned one run in turns, passes from which the step does not gain '
            "are taken back, and a step that is not surely faster with plans stays torch's. After planning in the "
            "background, and while planning is enabled, these steps are the program's own.",
            variable="TILEWISE_GOAL",
        ),
    )
    graphs: Graphs = field(
        default="never",
        metadata=about(
            Choice(get_args(Graphs)),
            "Whether the model is replayed from CUDA graphs.",
            'With ``"auto"`` it is captured as :func:`graphed` does it, where it can be and where that is measured to '
            "be faster; the report says why it is not.",
        ),
    )
    most_plans: int = field(
        default=MOST_PLANS,
        metadata=about(
            Count(MOST_PLANS),
            "How many problems are planned at most.",
            "Torch computes what is new after that.",
            variable="TILEWISE_MOST_PLANS",
        ),
    )

    wait: bool | None = field(
        default=None,
        metadata=about(
            FlagOrDefault(),
            "Plan before anything runs, not in the background.",
            "If ``False``, a program goes on at once with torch's choice: planning takes short turns between steps, "
            "and layers change over as their plans are found. Several ranks plan before they go on all the same. "
            "``None``: ``True`` for :func:`optimize`, ``False`` for :func:`enabled` and :func:`enable`.",
            variable="TILEWISE_WAIT",
        ),
    )
    background_share: float = field(
        default=0.02,
        metadata=about(
            Share(),
            "The share of a program's time that planning may take between its steps.",
            "A turn that takes longer is made up for before the next one.",
            variable="TILEWISE_BACKGROUND_SHARE",
        ),
    )

    def __post_init__(self) -> None:
        for option in OPTIONS.values():
            option.kind.check(option.name, getattr(self, option.name))
        options = self.options()
        object.__setattr__(self, "exclude", options.exclude)
        object.__setattr__(self, "share_with", options.share_with)

    def options(self) -> Options:
        """What the planner is to keep for each problem."""
        from tilewise.planner.options import Options

        return Options(**{name: getattr(self, name) for name in PlanOptions.__annotations__})

    @classmethod
    def of(cls, options: Options) -> Settings:
        """Settings with the planner's ``options`` and every other default."""
        return cls(**{name: getattr(options, name) for name in PlanOptions.__annotations__})

    def others_than(self, taken: Mapping[str, object]) -> list[str]:
        """Names of the options that are not among ``taken`` and have another value than their default."""
        names = [name for name in OPTIONS if name not in taken]
        return [name for name in names if getattr(self, name) != OPTIONS[name].default]


OPTIONS: dict[str, Option] = {
    each.name: Option(each.name, None if each.default is MISSING else each.default, **each.metadata)
    for each in dataclasses.fields(Settings)
}
"""Every option by name, in the order that documentation has them."""


class PlanOptions(TypedDict, total=False):
    """What the planner keeps for each problem; every function that plans takes these.

    >>> from tilewise.settings import PlanOptions
    >>> options: PlanOptions = {"workspace": "64MiB", "rigor": "estimate"}
    >>> tilewise.nn.set_defaults(**options)
    >>> tilewise.nn.set_defaults()
    """

    workspace: int | str | None
    batch_sizes: BatchSizes
    rigor: Rigor
    deterministic: bool
    error_limit: float | None
    strict: bool
    cuda_graphs: bool
    exclude: Sequence[str]
    share_with: Sequence[str]


class BackgroundOptions(TypedDict, total=False):
    """Options of planning in the background.

    >>> from tilewise.settings import BackgroundOptions
    >>> options: BackgroundOptions = {"wait": False, "background_share": 0.05}
    >>> session = tilewise.enabled(**options)
    """

    wait: bool | None
    background_share: float


class EnableOptions(PlanOptions, BackgroundOptions, total=False):
    """Options of :func:`tilewise.enabled` and :func:`tilewise.enable`.

    >>> from tilewise.settings import EnableOptions
    >>> options: EnableOptions = {"most_plans": 64, "goal": "passes"}
    >>> session = tilewise.enabled(**options)
    """

    most_plans: int
    goal: Goal


class DefaultOptions(PlanOptions, total=False):
    """Options of :func:`tilewise.nn.set_defaults`.

    >>> from tilewise.settings import DefaultOptions
    >>> options: DefaultOptions = {"unplanned": "torch"}
    >>> tilewise.nn.set_defaults(**options)
    >>> tilewise.nn.set_defaults()
    """

    unplanned: Unplanned


class StepOptions(PlanOptions, total=False):
    """Options of :func:`tilewise.distributed.optimize`.

    >>> from tilewise.settings import StepOptions
    >>> options: StepOptions = {"training": False, "deterministic": True}
    >>> tilewise.Settings(**options).training
    False
    """

    training: bool


class LargestBatchOptions(DefaultOptions, StepOptions, total=False):
    """Options of :func:`tilewise.largest_batch`, whose limit of memory is an argument of its own.

    >>> from tilewise.settings import LargestBatchOptions
    >>> options: LargestBatchOptions = {"training": False, "frozen": True}
    >>> tilewise.Settings(**options).frozen
    True
    """

    total_workspace: int | str | None
    policy: Policy
    frozen: bool
    branches: Branches


class ModelOptions(LargestBatchOptions, BackgroundOptions, total=False):
    """Options of :func:`tilewise.optimize`.

    >>> from tilewise.settings import ModelOptions
    >>> options: ModelOptions = {"memory_limit": "16GiB", "graphs": "auto"}
    >>> tilewise.Settings(**options).memory_limit
    '16GiB'
    """

    memory_limit: int | str | None
    goal: Goal
    graphs: Graphs
    regions: bool


def described(names: Iterable[str]) -> str:
    """The options ``names`` with all that is said of them, as a list in a docstring.

    >>> from tilewise.settings import described
    >>> print(described(["rigor"]))
    - ``rigor``: Effort spent on finding plans. ``"estimate"`` measures nothing, ``"measure"`` what may win,
          ``"patient"`` everything; ``"wisdom_only"`` takes what is known already.
    """
    return listed({name: f"{OPTIONS[name].help} {OPTIONS[name].more}" for name in names})


def listed(texts: Mapping[str, str]) -> str:
    """What each name is, as a list in a docstring.

    >>> from tilewise.settings import listed
    >>> print(listed({"size": "in bytes."}))
    - ``size``: in bytes.
    """
    entries = [
        textwrap.fill(f"- ``{name}``: {text}".strip(), 116, subsequent_indent="  ", break_on_hyphens=False)
        for name, text in texts.items()
    ]
    return textwrap.indent("\n".join(entries), "    ").lstrip()


if Settings.__doc__ is not None:  # python -OO has none
    Settings.__doc__ = Settings.__doc__.replace("{options}", described(OPTIONS))
