"""Options that the planning commands share, and their values made ready for the planner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tilewise.cli.given.sizes import checked_size
from tilewise.cli.program import bad_input, enough_memory
from tilewise.plan import parse_bytes
from tilewise.settings import OPTIONS, Option
from tilewise.settings.kinds import Choice, Count, Flag, MemorySize, Names, Share, Size

if TYPE_CHECKING:
    import torch

    from tilewise.nn.budget import Budget
    from tilewise.planner import Options, Planner

__all__ = [
    "BATCH_OF_LAYER",
    "DEFAULT_BATCH",
    "MEASURING",
    "OPS",
    "PASSES",
    "ROLES",
    "TASKS",
    "Asked",
    "budget_options",
    "devices_option",
    "enabling_options",
    "excluded_names",
    "make_planner",
    "passes_option",
    "planning_options",
    "shared_option",
    "sharing_devices",
    "workspace_bytes",
]

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]

# These choices are spelled out here because the modules that own them import torch; a test holds them equal.
PRECISIONS = ("ieee", "tf32")
DTYPES = ("fp32", "bf16", "fp16")
LAYOUTS = ("contiguous", "channels_last")
PASSES = ("fprop", "dgrad", "wgrad")
ROLES = ("forward", "grad_input", "grad_weight")
"""torch's words for passes, as ``tilewise.summary`` prints them: those of a convolution's and a linear layer's."""
MEASURING = ("measure", "patient")
"""The rigors that measure."""
OPS = ("nn", "nt", "tn", "tt")
"""A product's passes: how its operands are stored."""
TASKS = ("inference", "training")
"""Passes of a recurrent layer, a pooling or a normalization: its forward, or forward and backward as one."""
DEFAULT_BATCH = 32
BATCH_OF_NETWORK = f"{DEFAULT_BATCH} for a network, a layer's own mb"
BATCH_OF_LAYER = "the layer's own mb"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for, as given; each method says it in the terms of the module it is for."""

    batch: int | None = None
    device: str | None = None
    precision: str | None = None
    workspace: str | None = None
    batch_sizes: str = OPTIONS["batch_sizes"].default
    rigor: str = OPTIONS["rigor"].default
    dtype: str = "fp32"
    layout: str = "contiguous"
    deterministic: bool = False
    exclude: tuple[str, ...] = ()
    share_with: tuple[str, ...] = ()

    def options(self) -> Options:
        """The planner's options. Raises :class:`BadInput`."""
        from tilewise.planner import Options

        limit = None if self.workspace is None else workspace_bytes(self.workspace)
        with bad_input():
            return Options(
                limit, self.batch_sizes, self.rigor, self.deterministic, exclude=excluded_names(self.exclude),
                share_with=sharing_devices(self.share_with),
            )  # fmt: skip

    def budget(self, total_workspace: str | None, policy: str | None) -> Budget | None:
        """The budget of all kernels together, if one was given. Raises :class:`BadInput`."""
        if total_workspace is None:
            return None
        from tilewise.nn.budget import make_budget

        with bad_input():
            total = parse_bytes(total_workspace, "--total-workspace")
        return make_budget(total, policy or OPTIONS["policy"].default, self.options().workspace)

    def torch_device(self) -> torch.device:
        """The device to plan for, made the current one. Raises :class:`BadInput`."""
        import torch

        if self.device is None:
            return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _cpu()
        try:
            device = torch.device(self.device)
        except RuntimeError:
            device = torch.device("meta")
        with bad_input("--device"):
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"{self.device!r} is not a device tilewise plans for; cpu, cuda or cuda:N would do")
            if device.type == "cuda":
                count = torch.cuda.device_count()
                if count == 0:
                    raise ValueError(f"{self.device!r}: torch {torch.__version__} sees no GPU here; cpu would do")
                if (device.index or 0) >= count:
                    raise ValueError(f"{self.device!r}: GPUs here are cuda:0 to cuda:{count - 1}")
                index = torch.cuda.current_device() if device.index is None else device.index
                torch.cuda.set_device(index)
                return torch.device("cuda", index)
        return _cpu()

    def set_precision(self, device: torch.device, operation: str = "conv") -> str:
        """The precision of fp32 convolutions: as torch has it, or as asked for, and torch has it during the command.

        With the ``operation`` "matmul" that of matrix products, with "rnn" that of recurrent layers.
        """
        from tilewise.machine.device import conv_precision, matmul_precision, recurrent_precision
        from tilewise.machine.torch_state import fp32_precision

        if self.precision is not None:
            if device.type == "cuda":
                click.get_current_context().with_resource(fp32_precision("cuda", operation, self.precision))
            return self.precision
        now = {"conv": conv_precision, "matmul": matmul_precision, "rnn": recurrent_precision}[operation]
        return now() if device.type == "cuda" else "ieee"


def _cpu() -> torch.device:
    """The CPU as torch's device. Importing torch waits until it is needed."""
    import torch

    return torch.device("cpu")


def devices_option(function: Function) -> Function:
    """Add ``--devices``; the command receives it as ``devices``, for :func:`make_planner`."""
    text = "Measure on these GPUs at once: all of the model, or numbers such as 0,1.  [default: on one]"
    return click.option("--devices", metavar="all|N,N", help=text)(function)


def make_planner(devices: str | None, device: torch.device) -> Planner:
    """The planner for ``device`` on all the devices asked for. Raises :class:`BadInput`."""
    from tilewise.machine.device import device_name
    from tilewise.planner import Planner

    with bad_input("--devices"):
        if devices is None or (devices == "all" and device.type == "cpu"):
            return Planner()
        words = [word.strip() for word in devices.split(",")]
        numbers = [int(word) if word.isdecimal() else word for word in words]
        planner = Planner(devices="all" if devices == "all" else numbers)
        if planner.workers is not None and planner.workers.name != device_name(device):
            raise ValueError(f"{devices!r} is {planner.workers.name}, and it is planned for {device_name(device)}")
        return planner


def planning_options(
    *, batch: str = BATCH_OF_NETWORK, without: Collection[str] = (), rigors: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """A decorator that adds the shared options but those ``without``; the command receives them as ``settings``.

    ``batch`` says which mini-batch holds where none is given. ``rigors`` are the only ones that make sense, if not all
    do.
    """
    options = {name: option for name, option in _options(batch, rigors).items() if name not in without}

    def decorator(function: Function) -> Function:
        @functools.wraps(function)  # click keeps a function's other options on the function
        def command(**values: Any) -> Any:
            settings = Asked(**{name: values.pop(name) for name in options})
            with enough_memory():
                return function(settings=settings, **values)

        wrapped: Any = command
        for option in reversed(options.values()):
            wrapped = option(wrapped)
        result: Function = wrapped
        return result

    return decorator


def budget_options(function: Function) -> Function:
    """Add ``--total-workspace`` and ``--policy``, as the arguments ``total_workspace`` and ``policy``."""
    policy = shared_option("policy", otherwise=OPTIONS["policy"].default)
    wrapped: Function = shared_option("total_workspace")(policy(function))
    return wrapped


def enabling_options(function: Function) -> Function:
    """Add the options of :func:`tilewise.enable`, each an argument that is ``None`` where it is not given."""
    wrapped: Any = function
    for name in (
        "background_share",
        "wait",
        "goal",
        "most_plans",
        "share_with",
        "exclude",
        "deterministic",
        "rigor",
        "batch_sizes",
        "workspace",
    ):
        option = OPTIONS[name]
        wrapped = shared_option(name, otherwise=f"{option.variable}, else {_in_words(option)}")(wrapped)
    result: Function = wrapped
    return result


def _in_words(option: Option) -> str:
    """An option's default as the help shows it."""
    return "none" if option.default is None else str(option.default)


def passes_option(command: Function) -> Function:
    """Add ``--pass``, the passes of a layer of any kind, as the argument ``passes``."""
    option = click.option(
        "--pass",
        "passes",
        type=click.Choice((*PASSES, *ROLES, *OPS, *TASKS)),
        multiple=True,
        help="Only this pass, in torch's words too; may be repeated. Those of a product say how its operands are "
        "stored, those of a recurrent layer, a pooling or a normalization whether its gradients are computed too.",
    )
    return option(command)


def shared_option(name: str, *, otherwise: str | None = None, only: tuple[str, ...] = ()) -> Decorator:
    """An option of :class:`tilewise.settings.Settings` with its help, for a command to take as the argument ``name``.

    Where it is not given it has its default there. With ``otherwise``, which says in words what holds then, it is
    ``None``, so that the command can tell. ``only`` are the words that may be chosen, if not all make sense.
    """
    option = OPTIONS[name]
    default = option.default if otherwise is None else None
    if isinstance(option.kind, Flag) and option.default is not False:
        off = option.flag.replace("--", "--no-", 1)
        return click.option(f"{option.flag}/{off}", default=default, help=option.help)
    if isinstance(option.kind, Flag):
        return click.option(option.flag, is_flag=True, default=default, help=option.help)
    if isinstance(option.kind, Names):
        metavar, help = option.kind.one.upper(), f"{option.help} May be repeated."
        return click.option(option.flag, multiple=True, metavar=metavar, help=help)
    help = f"{option.help}  [default: {_in_words(option) if otherwise is None else otherwise}]"
    if isinstance(option.kind, Choice):
        return click.option(option.flag, type=click.Choice(only or option.choices), default=default, help=help)
    if isinstance(option.kind, Share):
        within = click.FloatRange(0, 1, min_open=True)
        return click.option(option.flag, type=within, metavar="SHARE", default=default, help=help)
    if isinstance(option.kind, Count):
        return click.option(option.flag, type=click.IntRange(min=0), metavar="N", default=default, help=help)
    if isinstance(option.kind, Size | MemorySize):
        return click.option(option.flag, metavar="SIZE", default=default, help=help, callback=checked_size)
    raise TypeError(f"{name}: a {type(option.kind).__name__} is no option of the command line yet")


def excluded_names(given: Iterable[str]) -> tuple[str, ...]:
    """The solvers to leave out, checked. Raises :class:`BadInput` naming the option."""
    if not (names := tuple(given)):
        return ()
    from tilewise.planner import Options

    with bad_input("--exclude"):
        return Options(exclude=names).exclude


def sharing_devices(given: Iterable[str]) -> tuple[str, ...]:
    """The devices that may take shares of batches, checked. Raises :class:`BadInput` naming the option."""
    if not (asked := tuple(given)):
        return ()
    from tilewise.machine.places import check_present
    from tilewise.planner import Options

    with bad_input("--share-with"):
        names = Options(share_with=asked).share_with
        check_present(names)
        return names


def workspace_bytes(given: str) -> int | None:
    """The limit for a kernel in bytes, where ``none`` is none. Raises :class:`BadInput` naming the option."""
    with bad_input():
        limit: int | None = OPTIONS["workspace"].kind.read("--workspace", given)
        return limit


def _options(batch: str, rigors: tuple[str, ...]) -> dict[str, Decorator]:
    """The options that say for which layers, device and precision a command plans, by the name of their argument."""

    def choice(name: str, values: tuple[str, ...], default: str | None, text: str) -> Decorator:
        return click.option(name, type=click.Choice(values), default=default, show_default=bool(default), help=text)

    return {
        "batch": click.option(
            "--batch", type=click.IntRange(min=1), metavar="N", help=f"Mini-batch size.  [default: {batch}]"
        ),
        "device": click.option(
            "--device", metavar="NAME", help="cpu, cuda or cuda:N.  [default: a GPU if there is one]"
        ),
        "precision": choice(
            "--precision", PRECISIONS, None, "Products of fp32 convolutions.  [default: as torch is set]"
        ),
        "workspace": shared_option("workspace"),
        "batch_sizes": shared_option("batch_sizes"),
        "rigor": shared_option("rigor", only=rigors),
        "dtype": choice("--dtype", DTYPES, "fp32", "Type of the operands; a network is cast to it."),
        "layout": choice("--layout", LAYOUTS, "contiguous", "Memory order of images, filters and outputs."),
        "deterministic": shared_option("deterministic"),
        "exclude": shared_option("exclude"),
        "share_with": shared_option("share_with"),
    }
