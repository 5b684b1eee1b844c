"""Tables at any width: whole words, and nothing lost."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tilewise.report.sheet import Sheet


def lines(sheet: Sheet, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(sheet)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def sheet() -> Sheet:
    table = Sheet((("what", "text"), ("ms", "right"), ("workspace", "right"), ("why not", "note")), title="a title")
    table.add_row("[bold]fft[/]: basis 32 x 32, products batched", "1.250", "12.5 MiB", "")
    table.add_row("  3 x gemm", "10.00", "-", "needs one tap along h, and has three of them", style="dim")
    table.add_line("[bold]second[/] mb8ic3")
    table.add_row("x", "-", "", "two\nlines")
    return table


def test_beside_below_and_in_pairs() -> None:
    assert lines(sheet(), 120) == [
        "a title",
        "what                                     ms  workspace  why not",
        "fft: basis 32 x 32, products batched  1.250   12.5 MiB",
        "  3 x gemm                            10.00          -  needs one tap along h, and has three of them",
        "second mb8ic3",
        "x                                         -             two",
        "                                                        lines",
    ]
    assert lines(sheet(), 60) == [
        "a title",
        "what                                     ms  workspace",
        "fft: basis 32 x 32, products batched  1.250   12.5 MiB",
        "  3 x gemm                            10.00          -",
        "    needs one tap along h, and has three of them",
        "second mb8ic3",
        "x                                         -",
        "    two",
        "    lines",
    ]
    assert lines(sheet(), 30)[1:7] == [
        "fft: basis 32 x 32, products",
        "batched",
        "    ms 1.250,",
        "    workspace 12.5 MiB",
        "  3 x gemm",
        "    ms 10.00",
    ]


@pytest.mark.parametrize("width", range(24, 90, 3))
def test_no_line_is_too_long_and_no_word_broken(width: int) -> None:
    shown = lines(sheet(), width)
    assert max(map(len, shown)) <= width
    said = {word.strip(",") for line in shown for word in line.split()}
    assert {"basis", "products", "batched", "12.5", "MiB", "needs", "three", "second", "mb8ic3", "lines"} <= said


def test_a_number_is_never_without_its_heading() -> None:
    table = Sheet((("problems", "right"), ("measurements", "right"), ("environment", "note")))
    table.add_row("12", "345", "device=cpu torch=2.13.0")
    assert lines(table, 21) == [
        "    problems 12,",
        "    measurements 345",
        "    device=cpu",
        "    torch=2.13.0",
    ]


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="2 cells: 1 would do"):
        Sheet((("one", ""),)).add_row("a", "b")


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> str:
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
        console.print("[red]2.00x[/]", sheet())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in printed()
