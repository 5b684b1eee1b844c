"""The command group: commands loaded when called, and one line on stderr for whatever stops one."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from tilewise.cli.helped import HelpedGroup

__all__ = [
    "INTERRUPTED",
    "NO_PLAN",
    "PIPE_CLOSED",
    "Program",
    "bad_input",
    "enough_memory",
    "is_out_of_memory",
    "one_line",
]

COMMANDS = ("plan", "time", "explain", "advise", "report", "run", "wisdom", "kernels", "info", "schema", "caffe")
"""Each is ``command`` in the module of its name, in the order ``--help`` lists them."""
ALIKE = {"optimize": "plan", "tune": "plan", "bench": "time", "benchmark": "time", "profile": "time"}
"""Words of other tools, and the command that does what they do."""
NO_PLAN, INTERRUPTED = 1, 130
PIPE_CLOSED = 141
"""What shells report of a program that ended because nobody read on (128 and the number of SIGPIPE)."""
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed")
"""What torch says when memory runs out, by device and by how much was asked for."""


class Program(HelpedGroup):
    """A group that imports a command's module only when asked for it.

    Errors are one line each on stderr; the process exits with 2 for bad input, 130 when interrupted.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now; ``None`` where there is none."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tilewise.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click. A word that is no command is an error that names all commands."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            meant = [ALIKE[args[0]]] if args[0] in ALIKE else difflib.get_close_matches(args[0], COMMANDS, n=1)
            close = "".join(f"did you mean {name!r}? " for name in meant)
            ctx.fail(f"{args[0]!r} is not a command: {close}{', '.join(COMMANDS)} would do")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """As in click; ``--help`` is printed here."""
        with _pipe_open():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Where it is interrupted, say so and exit with 130."""
        try:
            with _pipe_open():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("tilewise: interrupted; what was measured is kept", err=True)
            ctx.exit(INTERRUPTED)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """As click's, with errors told in one line."""
        run: Callable[..., Any] = functools.partial(super().main, *args, **extra, standalone_mode=False)
        if not standalone_mode:
            return run()
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                code = run()
            sys.stdout.flush()  # here, where an error is still told
        except NoArgsIsHelpError as error:  # a group without a command: its help, which is no error's one line
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            click.echo(f"tilewise: {_plain(error.format_message())}{_where_to_look(error)}", err=True)
            code = error.exit_code
        except click.Abort:
            click.echo("tilewise: interrupted", err=True)
            code = INTERRUPTED
        except (PipeClosed, BrokenPipeError):  # whoever read the output has seen enough: no error to them
            _leave_stdout()
            code = PIPE_CLOSED
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _leave_stdout()
            click.echo(f"tilewise: {error.filename or 'stdout'} cannot be written: {error.strerror}", err=True)
            code = NO_PLAN
        if callable(code):  # a program of somebody else's: its errors and warnings are its own
            code = code()
        sys.exit(code if isinstance(code, int) else 0)


class PipeClosed(Exception):
    """Nobody reads the output any more. It is no ``OSError``, whose exit status click decides."""


@contextmanager
def _pipe_open() -> Iterator[None]:
    """Turn a closed pipe within into :class:`PipeClosed`."""
    try:
        yield
    except BrokenPipeError as error:
        raise PipeClosed from error


def _leave_stdout() -> None:
    """Let what still waits for stdout go nowhere: Python would try once more to write it as it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line, without the place in the code that Python adds."""
    click.echo(f"tilewise: warning: {one_line(str(message))}", err=True)


def _where_to_look(error: click.ClickException) -> str:
    """A pointer to the help of a command used wrongly; messages of ours already say what would do."""
    if isinstance(error, BadInput) or not isinstance(error, click.UsageError) or error.ctx is None:
        return ""
    return f" (see '{error.ctx.command_path} --help')"


class BadInput(click.UsageError):
    """Input that makes no sense; the message names it and says what would do."""


@contextmanager
def bad_input(argument: str = "") -> Iterator[None]:
    """Turn ``ValueError`` within into one line and exit code 2; ``argument`` names what was being read."""
    try:
        yield
    except ValueError as error:
        raise BadInput(one_line(f"{argument}: {error}" if argument else str(error))) from error


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn running out of memory within into one line and exit code 1."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(str(error).partition("\n")[0] or type(error).__name__)
        raise click.ClickException(f"out of memory: {reason}; a smaller --batch would do") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether ``error`` says that memory ran out; torch's CPU allocator has no class for it."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def _plain(text: str) -> str:
    """An error's ``text`` in one line. click calls a number that has bounds a range, as if 1-9 were asked for."""
    text = one_line(text).replace("is not a valid integer range", "is not a whole number")
    return text.replace("is not a valid float range", "is not a number")


def one_line(text: str) -> str:
    """``text`` with every run of white space, line ends included, made one blank."""
    return " ".join(text.split())
