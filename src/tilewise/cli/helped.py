"""Help of commands: options in groups, and examples at the end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from typing import Any

import click

__all__ = ["GROUPS", "Example", "HelpContext", "Helped", "HelpedGroup"]

Example = tuple[str, str]
"""A command line, and what it is for."""

GROUPS: dict[str, tuple[str, ...]] = {
    "What is computed": (
        "--pass", "--batch", "--dtype", "--layout", "--precision", "--device", "--arch", "--input-size",
    ),
    "Sizes of the layer": ("--hidden", "--cell", "--time", "--inputs", "--layers", "--directions"),
    "How plans are chosen": (
        "--rigor", "--batch-sizes", "--goal", "--deterministic", "--exclude", "--solver", "--schedule", "--share-with",
        "--devices", "--most-plans", "--wait", "--background-share",
    ),
    "Limits of memory": ("--workspace", "--total-workspace", "--policy", "--memory-limit", "--max-batch"),
    "Meshes of GPUs": (
        "--gpus", "--link-bandwidth", "--link-latency", "--gpus-per-node", "--node-bandwidth", "--node-latency",
    ),
    "How far to search": ("--within", "--batch-within", "--seconds"),
    "Output": (
        "--output", "--json", "--verbose", "--fronts", "--candidates", "--iterations", "--picture", "--report",
        "--trace",
    ),
}  # fmt: skip
"""Options by the heading under which help lists them. What is in none of these stands under "Options"."""
LAST = "Options"
LEAST, NARROW = 30, 60
"""The least columns that help is written for, and those below which the help of an option stands below its name."""
LONG = 1000
"""Letters that a command's first sentence may have."""
UNBROKEN = "\N{NON-BREAKING HYPHEN}"
HYPHEN = re.compile(r"(?<=[\w-])-(?=\w)|-(?=-)")


class _Formatter(click.HelpFormatter):
    """A formatter that breaks no line at a hyphen, as names of options have some, and fits narrow terminals."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        if width is None:  # click's own is 50 at the least
            width = max(min(shutil.get_terminal_size().columns, max_width or 80) - 2, LEAST)
        super().__init__(indent_increment, width, max_width)

    def write(self, string: str) -> None:
        """Write text, its hyphens as they were."""
        super().write(string.replace(UNBROKEN, "-"))

    def write_text(self, text: str) -> None:
        """Write a paragraph."""
        super().write_text(_unbroken(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **more: Any) -> None:
        """Write a list of options or commands with their help: below each where the terminal is narrow."""
        if self.width < NARROW:
            for name, text in rows:
                self.write_text(name)
                self.indent()
                self.write_text(text)
                self.dedent()
            return
        super().write_dl([(name, _unbroken(text)) for name, text in rows], *args, **more)


def _unbroken(text: str) -> str:
    """``text`` with such hyphens between its letters that lines are not broken at."""
    return HYPHEN.sub(UNBROKEN, text)


class HelpContext(click.Context):
    """The context of a command whose help is written by :class:`_Formatter`."""

    formatter_class = _Formatter


class Helped(click.Command):
    """A command whose help lists its options in :data:`GROUPS`, and then ``examples``."""

    context_class = HelpContext

    def __init__(self, *args: Any, examples: tuple[Example, ...] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, those that are in no group last."""
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*GROUPS, LAST)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                rows[_heading(param)].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, each as it is typed, and what it is for below."""
        if self.examples:
            with formatter.section("Examples"):
                for line, what in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
                    formatter.indent()
                    formatter.write_text(what)
                    formatter.dedent()
        super().format_epilog(ctx, formatter)


def _heading(option: click.Option) -> str:
    """The heading under which an option stands."""
    return next((heading for heading, flags in GROUPS.items() if any(o in flags for o in option.opts)), LAST)


class HelpedGroup(click.Group):
    """A group whose help is written like that of its commands, and says of each command its whole first sentence."""

    context_class = HelpContext

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click. A word that is no command is an error that names those there are."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"{args[0]!r} is not a command: {', '.join(self.list_commands(ctx))} would do")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with its sentence, which click would cut off at the end of a line."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(LONG)) for name, each in commands.items() if each is not None]
            )
