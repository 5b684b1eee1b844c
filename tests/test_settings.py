"""One list of options: functions, the command line, environment variables and the manual say of each what it says."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
import torch
from torch import nn

import tilewise
from tilewise.cli import explain, plan, run
from tilewise.cli import time as time_command
from tilewise.nn import set_defaults
from tilewise.plan import UNIT_FORGOTTEN
from tilewise.planner import Options, Planner
from tilewise.planner.budget.allocate import POLICIES
from tilewise.planner.options import BATCH_SIZES, RIGORS
from tilewise.settings import (
    OPTIONS,
    DefaultOptions,
    EnableOptions,
    LargestBatchOptions,
    ModelOptions,
    Option,
    PlanOptions,
    Settings,
    StepOptions,
)

DOCS = Path(__file__).parent.parent / "docs"
FUNCTIONS: list[tuple[Callable[..., Any], type]] = [
    (tilewise.optimize, ModelOptions),
    (tilewise.largest_batch, LargestBatchOptions),
    (tilewise.enabled, EnableOptions),
    (set_defaults, DefaultOptions),
    (tilewise.distributed.optimize, StepOptions),
]
COMMANDS: list[click.Command] = [plan.command, time_command.command, explain.command, run.command]
WRONG: dict[str, object] = {
    "workspace": "many",
    "total_workspace": -1,
    "policy": "mine",
    "memory_limit": "101%",
    "batch_sizes": "some",
    "rigor": "lazy",
    "training": 1,
    "frozen": "no",
    "regions": 1,
    "deterministic": 1,
    "error_limit": -1.0,
    "strict": None,
    "cuda_graphs": 0,
    "exclude": "fft",
    "share_with": "cpu",
    "unplanned": "later",
    "branches": "none",
    "goal": "speed",
    "graphs": "always",
    "most_plans": -1,
    "wait": 1,
    "background_share": 0.0,
}


def plain(text: str) -> str:
    """Text without the marks of code, line ends and capitals, to compare manuals by."""
    return " ".join(text.replace("`", "").split()).lower()


def shared(command: click.Command) -> dict[str, click.Option]:
    """The parameters of a command that are options of the list."""
    return {p.name: p for p in command.params if isinstance(p, click.Option) and p.name in OPTIONS}


def test_a_functions_options_have_the_types_of_the_list() -> None:
    types = get_type_hints(Settings)
    for _, taken in FUNCTIONS:
        assert get_type_hints(taken) == {name: types[name] for name in get_type_hints(taken)}
    names = {name for _, taken in FUNCTIONS for name in get_type_hints(taken)}
    assert names == set(OPTIONS) == set(types)


def test_the_planners_options_are_of_the_list() -> None:
    assert {f.name: f.default for f in dataclasses.fields(Options)} == {
        name: OPTIONS[name].default for name in PlanOptions.__annotations__
    }
    assert OPTIONS["rigor"].choices == RIGORS
    assert OPTIONS["batch_sizes"].choices == BATCH_SIZES
    assert OPTIONS["policy"].choices == POLICIES


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_checked_in_one_place(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}[=:].* would do|must not") as told:
        Settings(**{name: WRONG[name]})
    if name in PlanOptions.__annotations__:
        with pytest.raises(ValueError, match=f"^{re.escape(str(told.value))}$"):
            Options(**{name: WRONG[name]})


@pytest.mark.parametrize(("function", "taken"), FUNCTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_functions_show_their_options(function: Callable[..., Any], taken: type) -> None:
    parameters = inspect.signature(function).parameters
    document = plain(inspect.getdoc(function) or "")
    assert "{" not in document
    for name in get_type_hints(taken):
        assert parameters[name].default == OPTIONS[name].default
        assert plain(f"- {name}: {OPTIONS[name].help} {OPTIONS[name].more}") in document
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def test_settings_document_their_fields() -> None:
    document = plain(inspect.getdoc(Settings) or "")
    assert "{" not in document
    for option in OPTIONS.values():
        assert option.help.endswith(".")
        assert plain(f"- {option.name}: {option.help} {option.more}") in document


@pytest.mark.slow
def test_python_without_docstrings_has_the_functions() -> None:
    program = "import tilewise\nprint(tilewise.optimize.__doc__, tilewise.enabled().plan_table.most_plans)"
    words = [sys.executable, "-OO", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.split() == ["None", "512"], done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_commands_have_the_help_and_choices_of_the_list(command: click.Command) -> None:
    found = shared(command)
    assert {"workspace", "batch_sizes", "rigor", "deterministic", "exclude"} <= set(found)
    for name, parameter in found.items():
        option = OPTIONS[name]
        assert parameter.opts == [option.flag]
        assert str(parameter.help).startswith(option.help)
        if isinstance(parameter.type, click.Choice):
            assert tuple(parameter.type.choices) == option.choices


def row(option: Option) -> str:
    """The line of the manual's table for an option's variable."""
    default = False if option.name == "wait" else option.default  # that of the functions which ask variables
    shown = "none" if default is None or default == () else str(default)
    shown = {"True": "1", "False": "0"}.get(shown, shown)
    quoted = shown if shown == "none" and option.name != "workspace" else f"`{shown}`"
    return f"| `{option.variable}` | `{option.name}`: {option.help} Holds {option.kind.takes}. | {quoted} |"


def test_the_manuals_variables_are_those_of_the_list() -> None:
    lines = (DOCS / "environment.md").read_text("utf-8").splitlines()
    others = ("TILEWISE_CACHE_DIR", "TILEWISE_COMPILE_WORKERS", "TILEWISE_NATIVE", "TILEWISE_ENABLE")
    found = [line for line in lines if line.startswith("| `TILEWISE_") and not line[3:].startswith(others)]
    assert found == [row(option) for option in OPTIONS.values() if option.variable]
    assert {o.name for o in OPTIONS.values() if o.variable} == set(get_type_hints(EnableOptions))


def test_the_manual_has_the_help_of_every_shared_command_option() -> None:
    lines = (DOCS / "cli.md").read_text("utf-8").splitlines()
    told = {}
    for line in lines:
        if match := re.match(r"\| `(--[\w-]+)[^|`]*(?:\\\|[^|`\\]*)*`[^|]*\|(.*)\|$", line):
            told[match[1]] = plain(match[2])
    names = {name for command in COMMANDS if command is not run.command for name in shared(command)}
    assert len(names) >= 8
    for name in names:
        assert told[OPTIONS[name].flag].startswith(plain(OPTIONS[name].help).rstrip(".")), name


def test_the_manual_names_every_option_of_a_model() -> None:
    text = (DOCS / "torch.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`(\w+)", cell)}
    assert set(get_type_hints(ModelOptions)) <= named


def test_settings_are_a_value() -> None:
    settings = Settings(rigor="estimate", exclude=["fft", "aten", "fft"])
    assert settings.exclude == ("aten", "fft")
    assert settings == Settings(rigor="estimate", exclude=("aten", "fft"))
    assert hash(settings) == hash(dataclasses.replace(settings))
    assert Settings.of(settings.options()) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.rigor = "measure"  # type: ignore[misc]


def test_settings_are_used_and_options_replace_them() -> None:
    settings = Settings(workspace="1MiB", rigor="estimate", branches="sequence")
    assert tilewise.enabled(settings=settings).plan_table.options == Options(1 << 20, rigor="estimate")
    assert tilewise.enabled(settings=settings, workspace=None).plan_table.options == Options(rigor="estimate")
    model, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8, dtype=torch.float32, device="cpu")
    tilewise.optimize(model, x, settings=settings, rigor="wisdom_only", planner=Planner())
    assert tilewise.schedule(model).options == Options(1 << 20, rigor="wisdom_only")


def test_settings_given_ask_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_RIGOR", "lazy")
    assert tilewise.enabled(settings=Settings()).plan_table.options == Options()
    with pytest.raises(ValueError, match="TILEWISE_RIGOR"):
        tilewise.enabled()


def test_a_number_of_few_bytes_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match="workspace=64 is 64 bytes; workspace='64MiB' would do") as told:
        set_defaults(workspace=64)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=f"workspace={UNIT_FORGOTTEN - 1} is"):
        set_defaults(workspace=UNIT_FORGOTTEN - 1)
    for meant in ("64B", 0, None, UNIT_FORGOTTEN, "64MiB"):
        set_defaults(workspace=meant)
    set_defaults()
    assert not recwarn.list


def test_what_a_function_does_not_take_is_refused() -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="optimize does not take most_plans=7"):
        tilewise.optimize(model, x, settings=Settings(most_plans=7))
    with pytest.raises(ValueError, match="enabled does not take policy='paper_wd'"):
        tilewise.enabled(settings=Settings(policy="paper_wd"))
    with pytest.raises(ValueError, match=r"settings=\{\}: a tilewise.Settings"):
        tilewise.enabled(settings={})  # type: ignore[arg-type]
    for function in (tilewise.optimize, tilewise.enabled, tilewise.enable, set_defaults):
        given = (model, x) if function is tilewise.optimize else ()
        with pytest.raises(TypeError, match=rf"^{function.__name__}d?\(\) got an unexpected .* 'rigour'"):
            function(*given, rigour="measure")  # type: ignore[operator]


MISTAKES = {
    'tilewise.optimize(model, 0, rigor="mesure")': 'Argument "rigor" to "optimize"',
    'tilewise.optimize(model, 0, branchs="sequence")': 'did you mean "branches"?',
    'tilewise.enable(batch_sizes="any")': 'Argument "batch_sizes" to "enable"',
    'tilewise.enabled(policy="arena")': 'Unexpected keyword argument "policy"',
    'tilewise.largest_batch(model, range, 1, policy="mine")': 'Argument "policy" to "largest_batch"',
    'tilewise.Settings(unplanned="later")': 'Argument "unplanned" to "Settings"',
    'bad: Rigor = "hasty"': "Incompatible types in assignment",
}
RIGHT = """
import tilewise
from tilewise.settings import Rigor
from torch import nn
rigor: Rigor = "patient"
model = nn.Linear(1, 1)
tilewise.optimize(model, 0, rigor=rigor, branches="measured", settings=tilewise.Settings(policy="paper_wd"))
tilewise.enable(rigor=rigor, most_plans=3)
"""
TYPES = """
[mypy]
mypy_path = {src}
explicit_package_bases = True
follow_imports = silent
[mypy-torch.*,numpy.*,scipy.*,triton.*,numba.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.mark.slow
def test_a_type_checker_finds_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(TYPES.format(src=DOCS.parent / "src"), "utf-8")
    program = tmp_path / "program.py"
    program.write_text(RIGHT + "\n".join(MISTAKES), "utf-8")
    words = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "program.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    first = RIGHT.count("\n") + 1
    assert [int(line.split(":")[1]) for line in errors] == list(range(first, first + len(MISTAKES))), done.stdout
    for line, what in zip(errors, MISTAKES.values(), strict=True):
        assert what in line
