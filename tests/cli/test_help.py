"""Help: options in groups, two examples of every command, and nothing that waits for torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from tilewise.cli import cli
from tilewise.cli.helped import GROUPS, Helped

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]*")


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that computes or writes something, with the words that call it."""
    context = click.Context(group, info_name=group.name)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_shows_two_examples_that_it_takes(path: tuple[str, ...]) -> None:
    command = ALL[path]
    assert isinstance(command, Helped)
    assert len(command.examples) == 2
    for line, what in command.examples:
        words = shlex.split(line.rpartition("| ")[2])
        assert words[: 1 + len(path)] == ["tilewise", *path]
        assert what.endswith(".")
        assert len(line) <= 76
        command.make_context("x", words[1 + len(path) :])  # raises where the command does not take it


FLAGS = {flag for each in ALL.values() for param in each.params for flag in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_keeps_words_whole_and_to_the_width(path: tuple[str, ...], columns: int) -> None:
    command = ALL[path]
    text = command.get_help(command.context_class(command, info_name="tilewise", terminal_width=columns))
    assert "\N{NON-BREAKING HYPHEN}" not in text
    whole, _, examples = text.partition("Examples:")
    assert set(FLAG.findall(whole)) <= FLAGS | {"--help", "--mb", "--dir"}  # a flag cut at a hyphen is none
    assert all(len(line) <= columns or len(line.split()) <= 2 for line in whole.splitlines())
    assert examples


@pytest.mark.parametrize("path", [(), ("advise",), ("wisdom",), ("kernels",), ("caffe",)], ids=" ".join)
def test_commands_are_listed_with_whole_sentences(run, path: tuple[str, ...]) -> None:
    text = " ".join(run(*path, "--help").stdout.partition("Commands:")[2].split())
    assert "..." not in text
    assert text.endswith(".")


@pytest.mark.parametrize("path", [(), ("advise",), ("wisdom",), ("kernels",), ("caffe",)], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(run, path: tuple[str, ...]) -> None:
    bare, asked = run(*path), run(*path, "--help")
    assert bare.exit_code == 2  # click's status of a group without a command
    assert bare.stdout == ""
    assert bare.stderr == asked.stdout
    assert len(bare.stderr.splitlines()) > 5


def test_options_stand_in_groups(run) -> None:
    text = run("plan", "--help").stdout
    places = [text.index(f"{heading}:") for heading in GROUPS if f"{heading}:" in text]
    assert len(places) >= 5
    assert places == sorted(places)
    assert text.index("Limits of memory:") < text.index("--workspace") < text.index("Meshes of GPUs:")


@pytest.mark.parametrize(
    ("path", "absent"),
    [
        (("advise", "gemm"), ("--layout", "--batch", "wisdom_only")),
        (("advise", "rnn"), ("--layout",)),
        (("explain",), ("for a network", "--total-workspace", "--goal")),
        (("kernels", "build"), ("--device", "--share-with")),
    ],
)
def test_help_lists_only_what_applies(run, path: tuple[str, ...], absent: tuple[str, ...]) -> None:
    words = run(*path, "--help").stdout.split()
    for word in absent:
        assert word not in " ".join(words).split() if word.startswith("--") else word not in " ".join(words)
