"""Both times, and the mark of a busy host, wherever times are shown: tables, documents, the page."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from tilewise.nn.report import CallReport, LayerReport, PassReport, Report
from tilewise.plan import Config, Measurement, Plan
from tilewise.planner.options import Options
from tilewise.planner.schedules.results import with_times
from tilewise.planner.schedules.results_json import head_json, layers_json, measurement_json
from tilewise.planner.schedules.schedule import Schedule
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import ConvProblem
from tilewise.report import tables
from tilewise.report.documents import explain_document, time_document
from tilewise.report.explained import Explained, explain_table
from tilewise.report.page import page
from tilewise.report.values import Layer, LayerResult, PassResult, summarize

LOADS = {"cpu": (0.05, 0.5), "cuda:H100": (0.5, 0.9)}
"""By device, the load of a quiet and of a busy host."""


def problem_on(device: str) -> ConvProblem:
    return parse_layer("mb8ic3ih12oc8oh12kh3ph1", device=device)


def planned(device: str, load: float | None) -> PassResult:
    """One pass whose plan was timed under ``load``."""
    problem, host_ms = problem_on(device), 0.0 if device == "cpu" else 0.125
    plan = Plan(problem.key, "fft", 1, Config(basis=16), time_ms=2.0, host_ms=host_ms, load=load)
    tried = Measurement("fft", 1, Config(basis=16), 2.0, 0, None, "", 8.0, None, host_ms, 2 * host_ms, 0.25, 7, load)
    return replace(with_times(PassResult(problem, plan), 8.0, 2 * host_ms), candidates=(tried,), front=(plan,))


def layer_of(result: PassResult) -> LayerResult:
    return LayerResult(Layer(("conv",), (result.problem,)), (result,))


def text_of(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    for renderable in renderables:
        console.print(renderable)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def head(device: str) -> dict[str, Any]:
    return head_json("net", device, "here", Options(), batch=8, dtype="fp32", precision="ieee", layout="contiguous")


def report_of(result: PassResult) -> Report:
    made = PassReport("forward", result.problem, result.plan, 8.0, True, torch_host_ms=result.framework_host_ms)
    return Report((LayerReport("conv", "Conv2d", (CallReport((8, 3, 12, 12), (made,)),)),))


SHOWN = {
    "plan": lambda result: text_of(tables.plan_table([layer_of(result)])),
    "time": lambda result: text_of(tables.time_table([layer_of(result)])),
    "explain": lambda result: text_of(explain_table(Explained(result, result.candidates))),
    "nn.report": lambda result: str(report_of(result)),
    "page": lambda result: page(
        time_document(head(result.problem.device), [layer_of(result)], summarize([layer_of(result)]), None)
    ),
}
"""What people read of one pass."""


@pytest.mark.parametrize("what", SHOWN)
@pytest.mark.parametrize("device", LOADS)
def test_times_of_a_busy_host_are_marked(device: str, what: str) -> None:
    quiet, busy = LOADS[device]
    for load, marked in ((quiet, False), (None, False), (busy, True)):
        assert ("(busy)" in SHOWN[what](planned(device, load))) is marked


@pytest.mark.parametrize("what", SHOWN)
@pytest.mark.parametrize("device", LOADS)
def test_the_hosts_times_are_shown_on_a_gpu_and_no_empty_column_on_a_cpu(device: str, what: str) -> None:
    text = SHOWN[what](planned(device, None))
    assert ("host ms" in text) is (device != "cpu")
    assert ("0.125" in text) is (device != "cpu")
    if what in ("time", "nn.report", "page"):
        assert ("0.250" in text) is (device != "cpu")


def test_the_totals_add_both_times_and_count_what_is_doubtful() -> None:
    results = [layer_of(planned("cuda:H100", load)) for load in LOADS["cuda:H100"]]
    total = summarize(results)
    assert (total.framework_ms, total.planned_ms) == (16.0, 4.0)
    assert (total.framework_host_ms, total.planned_host_ms, total.busy) == (0.5, 0.25, 1)
    text = tables.summary_text(total)
    assert "launching them takes the host: framework 0.500 ms, planned 0.250 ms" in text
    assert "kept the host busy while 1 of 2 were timed" in text
    unknown = layer_of(replace(planned("cuda:H100", None), planned_host_ms=None))
    total = summarize([*results, unknown])
    assert (total.planned_ms, total.planned_host_ms) == (6.0, None)
    assert "launching" not in tables.summary_text(total)
    assert "busy" not in tables.summary_text(summarize([layer_of(planned("cpu", 0.0))]))


@pytest.mark.parametrize("device", LOADS)
def test_documents_hold_both_times_and_how_sure_they_are(device: str) -> None:
    result = planned(device, LOADS[device][1])
    host_ms = 0.0 if device == "cpu" else 0.125
    (found,) = layers_json([layer_of(result)])[0]["passes"]
    assert (found["framework_ms"], found["framework_host_ms"]) == (8.0, 2 * host_ms)
    assert (found["planned_ms"], found["planned_host_ms"]) == (2.0, host_ms)
    assert (found["load"], found["busy"], found["plan"]["busy"]) == (LOADS[device][1], True, True)
    assert found["plan"]["host_ms"] == host_ms
    assert result.candidates is not None
    tried = measurement_json(result.candidates[0], device)
    assert (tried["time_ms"], tried["host_ms"], tried["framework_host_ms"]) == (2.0, host_ms, 2 * host_ms)
    assert (tried["dispersion"], tried["runs"], tried["load"], tried["busy"]) == (0.25, 7, LOADS[device][1], True)
    (explained,) = explain_document(head(device), Explained(result, result.candidates))["candidates"]
    assert explained == {**tried, "chosen": explained["chosen"], "why_not": explained["why_not"]}


def schedule_document(device: str) -> dict[str, Any]:
    layers = layers_json([layer_of(planned(device, LOADS[device][1]))])
    return {"schema": "tilewise/plan", "version": 1, **head(device), "layers": layers}


@pytest.mark.parametrize("device", LOADS)
def test_a_schedule_is_read_back_with_both_times(device: str) -> None:
    schedule = Schedule.from_json(json.loads(json.dumps(schedule_document(device))))
    assert schedule.layers[0].passes == (planned(device, LOADS[device][1]),)


def test_a_schedule_of_an_earlier_version_knows_neither() -> None:
    document = schedule_document("cuda:H100")
    (found,) = document["layers"][0]["passes"]
    added = ("host_ms", "framework_host_ms", "planned_host_ms", "dispersion", "runs", "load", "busy")
    for entry in (found, found["plan"], *found["front"], *found["candidates"]):
        for name in added:
            entry.pop(name, None)
    (read,) = Schedule.from_json(document).layers[0].passes
    assert (read.framework_ms, read.planned_ms, read.busy) == (8.0, 2.0, False)
    assert read.plan is not None
    assert read.candidates is not None
    unknown = (read.framework_host_ms, read.planned_host_ms, read.load, read.plan.host_ms, read.plan.load)
    assert unknown == (None,) * 5
    assert "host ms" in page({**document, "schema": "tilewise/time"})


@pytest.mark.parametrize(
    ("name", "value"), [("load", 1.5), ("load", "much"), ("planned_host_ms", -1.0), ("framework_host_ms", [])]
)
def test_a_schedule_with_junk_in_their_place_is_refused_by_name(name: str, value: object) -> None:
    document = schedule_document("cpu")
    document["layers"][0]["passes"][0][name] = value
    with pytest.raises(ValueError, match=rf"layers\[0\]\.passes\[0\]\.{name}"):
        Schedule.from_json(document)
