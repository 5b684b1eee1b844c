"""Wisdom documents of a cluster merge to one, whatever their order."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from tests.wisdom.wisdom_workers import some_plan

from tilewise.cli import cli
from tilewise.plan import PlanFormatError
from tilewise.wisdom import Wisdom, document

RECORDED = st.sampled_from([0.0, 1.5, 2.5])
"""Few moments, so that many rows are of the same."""


def measurement(solver: str, time_ms: float, recorded: float) -> dict[str, Any]:
    return {
        "solver": solver, "version": 1, "config": {}, "time_ms": time_ms, "workspace": 4, "reason": "",
        "baseline_ms": None, "recorded": recorded, "error": None, "host_ms": None, "baseline_host_ms": None,
        "dispersion": None, "runs": None, "load": time_ms / 3 if solver == "fft" else None,
        "busy": solver == "fft" and time_ms == 3.0,
    }  # fmt: skip


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A document over two machines, two problems, two solvers."""
    environments = []
    for environment in draw(st.sets(st.sampled_from(["machine a", "machine b"]))):
        problems = []
        for problem in draw(st.sets(st.sampled_from(["problem 1", "problem 2"]))):
            rows = st.builds(measurement, st.sampled_from(["fft", "gemm"]), st.sampled_from([1.0, 2.0, 3.0]), RECORDED)
            plans = [
                {"constraints": "none", "plan": {**some_plan(problem).to_json(), "time_ms": time}, "recorded": recorded}
                for time, recorded in draw(st.lists(st.tuples(st.sampled_from([1.0, 2.0]), RECORDED), max_size=1))
            ]
            problems.append({"problem": problem, "measurements": draw(st.lists(rows, max_size=3)), "plans": plans})
        rates = st.dictionaries(st.sampled_from(["copy", "fp32"]), st.sampled_from([1.0, 2.0]))
        profile = draw(st.none() | st.fixed_dictionaries({"values": rates, "recorded": RECORDED}))
        environments.append({"environment": environment, "profile": profile, "problems": problems})
    return {"format": 1, "kind": "tilewise wisdom", "written_by": "a test", "environments": environments}


def merged(*sources: str | dict[str, Any]) -> str:
    """What merging gives, as text."""
    read = [document.parse(json.loads(s) if isinstance(s, str) else s) for s in sources]
    assert not any(faults for _, faults in read)
    return json.dumps(document.compose(document.merged(tables for tables, _ in read), "a test"))


@settings(max_examples=60)
@given(documents(), documents(), documents())
def test_order_and_repetition_change_nothing(a: Any, b: Any, c: Any) -> None:
    whole = merged(a, b, c)
    for order in itertools.permutations((a, b, c)):
        assert merged(*order) == whole
    assert merged(merged(a, b), c) == whole == merged(a, merged(b, c))
    assert merged(whole, whole, a) == whole
    check_newest(json.loads(whole), [a, b, c])


def check_newest(whole: dict[str, Any], sources: list[dict[str, Any]]) -> None:
    """Of each key there is one row, a newest of those given."""

    def rows(document: dict[str, Any]) -> list[tuple[tuple[str, ...], float, str]]:
        found = []
        for environment in document["environments"]:
            machine = environment["environment"]
            if environment["profile"] is not None:
                profile = environment["profile"]
                found.append(((machine,), profile["recorded"], json.dumps(profile, sort_keys=True)))
            for entry in environment["problems"]:
                where = machine, entry["problem"]
                named = [(row["solver"], row) for row in entry["measurements"]]
                named += [("plan", row) for row in entry["plans"]]
                found += [((*where, name), row["recorded"], json.dumps(row, sort_keys=True)) for name, row in named]
        return found

    given_rows = [row for source in sources for row in rows(source)]
    kept = rows(whole)
    assert {key for key, _, _ in kept} == {key for key, _, _ in given_rows}
    assert len(kept) == len({key for key, _, _ in kept})
    for key, recorded, text in kept:
        rivals = [row for row in given_rows if row[0] == key]
        assert recorded == max(row[1] for row in rivals)
        assert (key, recorded, text) in rivals


@settings(max_examples=15)
@given(st.lists(documents(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_store_that_imports_all_in_any_order_exports_the_same(sources: list[dict[str, Any]], random: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole = json.loads(merged(*sources))
        store = Wisdom(Path(name) / "wisdom.sqlite3")
        for source in random.sample(sources, len(sources)):
            store.merge(source)
        assert store.to_json()["environments"] == whole["environments"]
        assert store.merge(whole) == 0


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["wisdom", *arguments], prog_name="tilewise")

    files = []
    for i, solver in enumerate(("fft", "gemm")):
        rows = [measurement(solver, 1.0, 2.0), measurement("direct", 1.0 + i, 3.0 + i)]
        problem = {"problem": "p", "measurements": rows, "plans": []}
        environment = {"environment": "e", "profile": None, "problems": [problem]}
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps({"format": 1, "kind": "tilewise wisdom", "environments": [environment]}))
    names = [str(file) for file in files]
    out = tmp_path / "all.json"
    assert run("merge", *names, "-o", str(out)).output == f"3 rows written to {out}\n"
    direct = json.loads(out.read_text())["environments"][0]["problems"][0]["measurements"][0]
    assert (direct["solver"], direct["time_ms"]) == ("direct", 2.0)
    assert run("import", *names).output == "4 rows new or newer\n"
    assert run("import", str(out)).output == "0 rows new or newer\n"
    for arguments, what in (((str(tmp_path / "none.json"),), "none.json' cannot be read"), ((__file__,), "not JSON")):
        failed = run("merge", *arguments, "-o", str(out))
        assert failed.exit_code == 2
        assert what in failed.output
    unwritable = run("merge", *names, "-o", str(tmp_path / "no folder" / "out.json"))
    assert "cannot be written" in unwritable.output
    assert out.read_text().startswith("{")
    with pytest.raises(PlanFormatError, match="kind"):
        Wisdom(tmp_path / "w.sqlite3").merge({"kind": "else"})
