"""The public names: each has an example that runs, its place in docs/api.md, and can be reached as the page says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tilewise.distributed.shards import shard
from tilewise.nn import functional

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text("utf-8")
PACKAGES = re.findall(r"^\| `(tilewise[\w.]*)` \|", PAGE, re.MULTILINE)
"""The public packages: those of the page's table, which is the one list of them."""
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)
REASON = re.compile(r"GPU|ranks", re.IGNORECASE)
"""What is not there in a test: an example that needs it says so in the line before it, and is marked with SKIP."""


def module_of(package: str) -> Any:
    """The module of that name, which is another one's attribute where it is defined elsewhere."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        parent, _, name = package.rpartition(".")
        return getattr(importlib.import_module(parent), name)


def public(package: str) -> list[str]:
    """The public names of a package."""
    names: list[str] = module_of(package).__all__
    return names


def value_of(package: str, name: str) -> Any:
    """What a public name of a package is."""
    return getattr(module_of(package), name)


def has_docstring(value: object) -> bool:
    """Whether Python gives such a value a docstring of its own: constants and types such as ``Literal`` have none."""
    return inspect.isclass(value) or inspect.ismodule(value) or inspect.isfunction(inspect.unwrap(value))  # type: ignore[arg-type]


NAMES = [(package, name) for package in PACKAGES for name in public(package)]
FIRST = {id(value_of(package, name)): (package, name) for package, name in reversed(NAMES)}
OWN = [place for place in NAMES if FIRST[id(value_of(*place))] == place or not has_docstring(value_of(*place))]
"""Each value once, under the first of its names; small constants may be one object and stay apart."""


def examples_in(text: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(text)


def test_packages_are_known() -> None:
    assert PACKAGES[0] == "tilewise"
    assert len(PACKAGES) == len(set(PACKAGES)) >= 20
    assert len(OWN) > 200


def test_packages_are_there_without_further_imports() -> None:
    """``import tilewise`` is enough for those right below it, whatever was imported here before."""
    for package in PACKAGES[1:]:
        if package.count(".") == 1:
            assert tilewise.__getattr__(package.removeprefix("tilewise.")) is module_of(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_has_an_example(package: str) -> None:
    """In its docstring; of a constant in its package's, where the example uses the name."""
    of_package = " ".join(example.source for example in examples_in(module_of(package).__doc__ or ""))
    without = []
    for name in public(package):
        value = value_of(package, name)
        if has_docstring(value):
            found = bool(examples_in(value.__doc__ or ""))
        else:
            found = re.search(rf"\b{name}\b", of_package) is not None
        if not found:
            without.append(name)
    assert without == []


def texts() -> Iterator[tuple[str, str, str]]:
    """The package, name and docstring of everything public that may have examples, methods included."""
    for package in PACKAGES:
        yield package, "", module_of(package).__doc__ or ""
    for package, name in OWN:
        value = value_of(package, name)
        if not has_docstring(value) or inspect.ismodule(value):
            continue
        yield package, name, value.__doc__ or ""
        if inspect.isclass(value):
            for method, member in vars(value).items():
                text = getattr(member, "__doc__", None)
                if not method.startswith("_") and isinstance(text, str) and ">>>" in text:
                    yield package, f"{name}.{method}", text


CASES = [(package, name, text) for package, name, text in texts() if ">>>" in text]


def runs(example: doctest.Example) -> bool:
    return not example.options.get(doctest.SKIP, False)


@pytest.fixture(scope="module")
def wisdom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all examples: a device's rates are measured once."""
    return tmp_path_factory.mktemp("wisdom")


LONG = {"export", "load_exported", "ExportReport", "Exported"}
"""Names whose examples measure for seconds what other tests measure, too."""


@pytest.mark.parametrize(
    ("package", "name", "text"),
    [
        pytest.param(*case, id=".".join(filter(None, case[:2])), marks=[pytest.mark.slow] if case[1] in LONG else [])
        for case in CASES
    ],
)
def test_examples_run(
    package: str, name: str, text: str, tmp_path: Path, wisdom: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch, tilewise and the names of the example's own package, and nothing that another example left."""
    if package == "tilewise.cpu" and not sys.platform.startswith("linux"):
        pytest.skip("glibc is Linux's")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(wisdom))
    monkeypatch.setattr(shard, "_handlers", dict(shard._handlers))
    # Functions that would plan on sight leave that to torch here: other tests plan, and these would take long.
    monkeypatch.setattr(functional, "_defaults", functional.Table(functional.PlanTable(tilewise.Options(), "torch")))
    # A package's own names are there, as after `from package import *`; `tilewise` and `tilewise.nn` are written out.
    own = {} if package in ("tilewise", "tilewise.nn") else {each: value_of(package, each) for each in public(package)}
    names = {**own, "torch": torch, "tilewise": tilewise, "__name__": "__main__"}
    test = doctest.DocTestParser().get_doctest(text, names, f"{package}.{name}".rstrip("."), None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_what_does_not_run_says_why() -> None:
    """A line before the example says that it needs a GPU or several ranks."""
    skipped = 0
    for package, name, text in CASES:
        pieces = doctest.DocTestParser().parse(text)
        said = ""
        for piece in pieces:
            if isinstance(piece, str):
                said = piece.strip() or said
            elif not runs(piece):
                skipped += 1
                assert REASON.search(said), f"{package}.{name}: {piece.source}"
    assert 0 < skipped < 60


def documented() -> set[tuple[str, str]]:
    """The public names that the page documents, each by the first of the names that its value has."""
    found = []
    for kind, path, options in DIRECTIVE.findall(PAGE):
        if kind == "module":
            left_out = re.search(r":exclude-members: (.*)", options)
            found += [
                (path, name) for name in set(public(path)) - set(left_out.group(1).split(", ") if left_out else ())
            ]
        else:
            package, _, name = path.rpartition(".")
            found.append((package, name))
    return {FIRST.get(id(value_of(*place)), place) if has_docstring(value_of(*place)) else place for place in found}


def test_the_page_begins_with_optimize() -> None:
    assert DIRECTIVE.search(PAGE).group(2) == "tilewise.optimize"  # type: ignore[union-attr]


def test_every_name_is_on_the_page() -> None:
    modules = {place for place in OWN if inspect.ismodule(value_of(*place))}
    assert set(OWN) - documented() - modules == {("tilewise", "__version__")}


def test_what_the_page_has_is_public() -> None:
    """But for results of schedules, which are what ``Schedule.layers`` holds."""
    paths = [path for kind, path, _ in DIRECTIVE.findall(PAGE) if kind == "module"]
    assert set(paths) - set(PACKAGES) == {"tilewise.planner.schedules.results"}
