"""Flags in the spelling of Google's library for them, which Caffe uses; what Caffe's commands have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tilewise.cli.helped import Helped
from tilewise.cli.program import BadInput, enough_memory, one_line

if TYPE_CHECKING:
    import torch

__all__ = [
    "FlagsCommand",
    "caffe_errors",
    "device_options",
    "devices_of",
    "flag",
    "option",
    "set_device",
    "state_options",
]

TRUE, FALSE = frozenset(("true", "t", "yes", "y", "1")), frozenset(("false", "f", "no", "n", "0"))
HELP = ("-h", "-help", "--help")
TOLD_TO_GLOG = ("logtostderr", "alsologtostderr")
"""Flags of Google's logging library that scripts give; lines go to stderr anyway."""


class FlagsCommand(Helped):
    """A command whose flags may have one dash or two, and whose switches may be written as gflags allows.

    ``-shuffle``, ``--shuffle``, ``-shuffle=true`` and ``--noshuffle`` are what they are for Caffe. A hyphen in a flag's
    name counts as an underscore.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As in click, with flags brought to one spelling."""
        options = [param for param in self.params if isinstance(param, click.Option)]
        switches = {str(param.name) for param in options if param.is_flag}
        valued = {str(param.name) for param in options} - switches
        found: list[str] = []
        rest = iter(args)
        for word in rest:
            name, has_value, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if word == "--":
                found += ["--", *rest]
            elif word in HELP:
                found.append("--help")
            elif word.startswith("-") and name in switches | {f"no{switch}" for switch in switches} | set(TOLD_TO_GLOG):
                found += _switch(name, value if has_value else "true", switches)
            elif word.startswith("-") and name in valued:
                found.append(f"--{name}={value}" if has_value else f"--{name}")
                # The next word is the value, whatever it looks like.
                found += [] if has_value else list(_first(rest))
            elif word.startswith("-") and name and not name[0].isdigit():
                known = ", ".join(f"-{each}" for each in sorted(switches | valued))
                raise BadInput(f"{word}: no such flag; {known} would do")
            else:
                found.append(word)
        return super().parse_args(ctx, found)


def _first(words: Iterator[str]) -> Iterator[str]:
    """The next word, if there is one."""
    for word in words:
        yield word
        return


def _switch(name: str, value: str, switches: set[str]) -> list[str]:
    """A switch as click takes it: there or not."""
    if value.lower() not in TRUE | FALSE:
        raise BadInput(f"-{name}={value!r}: true or false would do")
    on = value.lower() in TRUE
    if name in TOLD_TO_GLOG:
        return []
    if name not in switches:
        name, on = name.removeprefix("no"), not on
    return [f"--{name}"] if on else []


def option(name: str, *, help: str, kind: Any = str, default: Any = "", required: bool = False) -> Callable[[Any], Any]:
    """A flag with a value, written with one dash or two."""
    # To click a default, whichever, means that a flag may be missing.
    more: dict[str, Any] = {"required": True} if required else {"default": default, "show_default": bool(default)}
    return click.option(f"-{name}", f"--{name}", name, help=help, type=kind, **more)


def flag(name: str, *, help: str) -> Callable[[Any], Any]:
    """A switch."""
    return click.option(f"-{name}", f"--{name}", name, is_flag=True, help=help)


def device_options(function: Any) -> Any:
    """``-gpu``."""
    text = "GPUs to use, as 0 or 0,1, or all of them.  [default: the CPU]"
    return click.option("-gpu", "--gpu", "gpu", default="", metavar="LIST|all", help=text)(function)


def state_options(function: Any) -> Any:
    """``-level`` and ``-stage``, which choose layers by their rules."""
    level = option("level", default=0, kind=int, help="The net's level, by which layers are chosen.")
    return level(option("stage", help="The net's stages, with commas between them.")(function))


@contextmanager
def caffe_errors() -> Iterator[None]:
    """Turn what is wrong with files and networks into one line and exit code 2."""
    from tilewise.frontends.caffe.errors import CaffeError

    with enough_memory():
        try:
            yield
        except CaffeError as error:
            raise BadInput(one_line(str(error))) from error
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            raise BadInput(one_line(f"{name}{error.strerror or error}")) from error


def devices_of(gpu: str, otherwise: int | None = None) -> list[torch.device]:
    """The devices of ``-gpu``; without it the GPU ``otherwise``, if there is one, or the CPU.

    Raises ``BadInput`` for GPUs that are not there.
    """
    import torch

    count = torch.cuda.device_count()
    if not gpu:
        return [torch.device("cpu" if otherwise is None or otherwise >= count else f"cuda:{otherwise}")]
    if gpu == "all":
        wanted = list(range(count))
    else:
        words = gpu.split(",")
        if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
            raise BadInput(f"-gpu={gpu!r}: numbers with commas between them, or all, would do")
        wanted = list(dict.fromkeys(int(word) for word in words))
    missing = [index for index in wanted if index >= count]
    if missing or not wanted:
        raise BadInput(f"-gpu={gpu!r}: there are {count} GPUs here; none would use the CPU")
    return [torch.device("cuda", index) for index in wanted]


def set_device(device: torch.device) -> None:
    """Say which device is used, as Caffe does, and make it the current one."""
    import torch

    from tilewise.frontends.caffe.training.log import LOGGER

    if device.type == "cuda":
        LOGGER.info("Use GPU with device ID %d", device.index)
        LOGGER.info("GPU device name: %s", torch.cuda.get_device_name(device))
        torch.cuda.set_device(device)
    else:
        LOGGER.info("Use CPU.")
