"""Options that the planning commands share, and their values made ready for the planner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tilewise.cli.program import BadInput, bad_input, enough_memory

if TYPE_CHECKING:
    import torch

    from tilewise.nn.budget import Budget
    from tilewise.planner import Options, Planner

__all__ = [
    "DEFAULT_BATCH",
    "PASSES",
    "Settings",
    "budget_options",
    "devices_option",
    "exclude_option",
    "excluded_names",
    "make_planner",
    "planning_options",
]

Function = TypeVar("Function", bound=Callable[..., Any])

# The choices are spelled out here because the modules that own them import torch; a test holds them equal.
RIGORS = ("estimate", "measure", "patient", "wisdom_only")
BATCH_SIZES = ("undivided", "powers_of_two", "all")
PRECISIONS = ("ieee", "tf32")
DTYPES = ("fp32", "bf16", "fp16")
LAYOUTS = ("contiguous", "channels_last")
POLICIES = ("arena", "paper_wd")
PASSES = ("fprop", "dgrad", "wgrad")
DEFAULT_BATCH = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for, as given; each method says it in the terms of the module it is for."""

    batch: int | None
    device: str | None
    precision: str | None
    workspace: str | None
    batch_sizes: str
    rigor: str
    dtype: str
    layout: str
    deterministic: bool
    exclude: tuple[str, ...]

    def options(self) -> Options:
        """The planner's options. Raises :class:`BadInput`."""
        from tilewise.plan import parse_bytes
        from tilewise.planner import Options

        limit = None
        if self.workspace is not None and self.workspace != "none":
            with bad_input():
                limit = parse_bytes(self.workspace, "--workspace")
        with bad_input():
            return Options(
                limit, self.batch_sizes, self.rigor, self.deterministic, exclude=excluded_names(self.exclude)
            )

    def budget(self, total_workspace: str | None, policy: str | None) -> Budget | None:
        """The budget of all kernels together, if one was given. Raises :class:`BadInput`."""
        if total_workspace is None:
            if policy is not None:
                raise BadInput(f"--policy {policy!r}: it divides a --total-workspace; give one, such as 120MiB")
            return None
        from tilewise.nn.budget import make_budget
        from tilewise.plan import parse_bytes

        with bad_input():
            total = parse_bytes(total_workspace, "--total-workspace")
        return make_budget(total, policy or POLICIES[0], self.options().workspace)

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

    def set_precision(self, device: torch.device) -> str:
        """The precision of fp32 convolutions: as torch has it, or as asked for, and torch has it during the command."""
        from tilewise.device import conv_precision
        from tilewise.torch_state import fp32_precision

        if self.precision is not None:
            if device.type == "cuda":
                click.get_current_context().with_resource(fp32_precision("cuda", "conv", self.precision))
            return self.precision
        return conv_precision() if device.type == "cuda" else "ieee"


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


def devices_option(function: Function) -> Function:
    """Add ``--devices``; the command receives it as ``devices``, for :func:`make_planner`."""
    text = "Measure on these GPUs at once: all of the model, or numbers such as 0,1.  [default: on one]"
    return click.option("--devices", metavar="all|N,N", help=text)(function)


def make_planner(devices: str | None, device: torch.device) -> Planner:
    """The planner for ``device`` on all the devices asked for. Raises :class:`BadInput`."""
    from tilewise.device import device_name
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


def planning_options(function: Function) -> Function:
    """Add the shared options; the command receives them as ``settings``."""
    names = Settings.__dataclass_fields__

    @functools.wraps(function)  # click keeps a function's other options on the function
    def command(**values: Any) -> Any:
        settings = Settings(**{name: values.pop(name) for name in names})
        with enough_memory():
            return function(settings=settings, **values)

    wrapped: Any = command
    for option in reversed(_options()):
        wrapped = option(wrapped)
    result: Function = wrapped
    return result


def budget_options(function: Function) -> Function:
    """Add ``--total-workspace`` and ``--policy``, as the arguments ``total_workspace`` and ``policy``."""
    policy = click.option(
        "--policy",
        type=click.Choice(POLICIES),
        help="What adds up to the total: workspaces in use at once, or a segment for every layer and pass.  "
        "[default: arena]",
    )
    total = click.option(
        "--total-workspace",
        metavar="SIZE",
        help="Memory for the workspaces of all kernels together, such as 120MiB.  [default: none]",
    )
    wrapped: Function = total(policy(function))
    return wrapped


exclude_option = click.option(
    "--exclude",
    multiple=True,
    metavar="SOLVER",
    help="Leave this solver out of all plans; may be repeated. `tilewise info` lists them; aten is torch's own choice.",
)
"""``--exclude``; a command receives the names as ``exclude``, for :func:`excluded_names`."""


def excluded_names(given: Iterable[str]) -> tuple[str, ...]:
    """The solvers to leave out, checked. Raises :class:`BadInput` naming the option."""
    from tilewise.planner import Options

    with bad_input("--exclude"):
        return Options(exclude=tuple(given)).exclude


def _options() -> list[Callable[[Any], Any]]:
    def choice(name: str, values: tuple[str, ...], default: str | None, text: str) -> Callable[[Any], Any]:
        return click.option(name, type=click.Choice(values), default=default, show_default=bool(default), help=text)

    return [
        click.option(
            "--batch",
            type=click.IntRange(min=1),
            metavar="N",
            help=f"Mini-batch size.  [default: {DEFAULT_BATCH} for a network, a layer's own mb]",
        ),
        click.option("--device", metavar="NAME", help="cpu, cuda or cuda:N.  [default: a GPU if there is one]"),
        choice("--precision", PRECISIONS, None, "Products of fp32 convolutions.  [default: as torch is set]"),
        click.option(
            "--workspace",
            metavar="SIZE",
            help="Memory limit per kernel beyond operands and result, such as 64MiB.  [default: none]",
        ),
        choice("--batch-sizes", BATCH_SIZES, "powers_of_two", "Micro-batches that are tried."),
        choice("--rigor", RIGORS, "measure", "Effort spent on finding plans."),
        choice("--dtype", DTYPES, "fp32", "Type of the operands; a network is cast to it."),
        choice("--layout", LAYOUTS, "contiguous", "Memory order of images, filters and outputs."),
        click.option("--deterministic", is_flag=True, help="Only what gives the same bits every time."),
        exclude_option,
    ]
