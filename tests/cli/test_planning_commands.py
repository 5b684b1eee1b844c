"""``plan``, ``time`` and ``explain`` on real layers and networks."""

from __future__ import annotations

import json

import pytest
import torch
from tests.planner.simulated import PROFILE, Clock, simulated, torchs_own, world
from torch import nn

from tilewise import Schedule, Wisdom
from tilewise.machine.device import environment
from tilewise.nn import optimize
from tilewise.nn import report as nn_report

LAYER = "mb4ic3ih12oc8oh12kh3ph1"
"""Small enough that planning all its passes takes well under a second."""
HERE = __name__
FAST = ("--device", "cpu", "--batch-sizes", "undivided")


class Small(nn.Module):
    """Two equal layers, a transposed one, one of padding "same" and one in float64."""

    input_shape = (4, 10, 10)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.same = nn.Conv2d(2, 2, 4, padding="same", bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(self.up(self.second(self.second(self.first(x)))))


@pytest.fixture(scope="module", autouse=True)
def _factory():
    """The network can be named on the command line whatever pytest calls this module."""
    import sys
    import types

    module = types.ModuleType("some_networks")
    module.small = Small
    module.wrong = lambda: (nn.Sequential(nn.Conv2d(5, 4, 3)), (4, 10, 10))
    equal = [nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2)]
    module.equal = lambda: (nn.Sequential(*equal, nn.Conv2d(4, 2, 3, bias=False)), (4, 10, 10))
    module.shapeless = lambda: nn.Conv2d(3, 4, 3, stride=50)
    module.unfit = lambda: nn.Conv2d(5, 4, 3)
    module.none = lambda: (nn.Flatten(), (4, 10, 10))
    sys.modules["some_networks"] = module
    yield
    del sys.modules["some_networks"]


def test_plan_of_a_layer(run):
    result = run("plan", LAYER, *FAST)
    assert result.exit_code == 0
    for word in (LAYER, "fprop", "dgrad", "wgrad", "batch 4", "no workspace limit"):
        assert word in result.stdout
    assert "of 3 layer-passes replaced" in result.stdout
    assert result.stderr == ""


def test_plan_document(run, check_document):
    result = run("plan", LAYER + 'n"first"', *FAST, "--workspace", "64MiB", "--json")
    document = check_document(result.stdout)
    assert document["schema"] == "tilewise/plan"
    assert document["options"]["workspace"] == 64 * 2**20
    (layer,) = document["layers"]
    assert layer["names"] == ["first"]
    assert [found["problem"]["pass"] for found in layer["passes"]] == ["fprop", "dgrad", "wgrad"]
    for found in layer["passes"]:
        assert found["problem"]["layer"] == LAYER
        assert found["plan"]["workspace"] <= 64 * 2**20
        assert found["replaced"] == (found["plan"]["solver"] != "aten")
        assert found["framework_ms"] > 0
        assert found["planned_ms"] == (found["plan"]["time_ms"] if found["replaced"] else None)
        assert found["front"] is found["candidates"] is None
    assert document["summary"]["passes"] == 3
    assert document["summary"]["compared"] == 3
    assert document["budget"] is document["step_memory"] is None


def test_plan_writes_the_document_with_what_was_tried(run, check_document, tmp_path):
    path = tmp_path / "s.json"
    asked = ("--rigor", "estimate", "--candidates", "--fronts", "--pass", "fprop", "--json", "-o", str(path))
    Wisdom().remember_profile(environment("cpu").key, PROFILE)
    printed = run("plan", LAYER, *FAST, "--workspace", "1MiB", *asked).stdout
    document = check_document(printed)
    assert check_document(path.read_text("utf-8")) == document
    rates = {"bytes_per_second": 1e3 * PROFILE["copy"], "flops_per_second": 1e3 * PROFILE["fp32"]}
    assert document["rates"] == rates
    (found,) = document["layers"][0]["passes"]
    reasons = {candidate["solver"]: candidate["reason"] for candidate in found["candidates"]}
    assert "cudnn" in reasons
    assert "cuda" in reasons["cudnn"]
    assert any(not candidate["reason"] for candidate in found["candidates"])
    times = [plan["time_ms"] for plan in found["front"]]
    assert times == sorted(times)
    sizes = [plan["workspace"] for plan in found["front"]]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= 2**20
    assert Schedule.load(path).to_json() == document
    result = run("plan", LAYER, *FAST, "-o", str(tmp_path / "none" / "s.json"))
    assert result.exit_code == 2


@pytest.mark.slow
def test_time_by_a_schedule(run, check_document, tmp_path):
    path = tmp_path / "s.json"
    Wisdom().remember_profile(environment("cpu").key, PROFILE)
    run("plan", "some_networks:small", *FAST, "--batch", "2", "--rigor", "estimate", "-o", str(path))
    by = ("--device", "cpu", "--schedule", str(path), "--iterations", "1")
    document = check_document(run("time", "some_networks:small", *by, "--json").stdout)
    assert document["rates"]["flops_per_second"] == 1e3 * PROFILE["fp32"]
    assert (document["options"]["batch"], document["options"]["rigor"]) == (2, "estimate")
    planned = {key(found): found["plan"]["config"] for found in passes(json.loads(path.read_text("utf-8")))}
    assert {key(found): found["plan"]["config"] for found in passes(document)} == planned
    assert document["training_step"]["planned"]["loss"] == pytest.approx(document["training_step"]["framework"]["loss"])
    for arguments, said in (
        (("--workspace", "1MiB"), "--workspace: the schedule has its own"),
        (("--batch", "3"), "it has nothing for some_networks:small; it was made for some_networks:small, --batch 2"),
    ):
        result = run("time", "some_networks:small", *by, *arguments)
        assert result.exit_code == 2
        assert said in result.output
    path.write_text("{}")
    assert "schema=None" in run("time", LAYER, *by).output


def passes(document):
    return [found for layer in document["layers"] for found in layer["passes"]]


def key(found):
    return found["problem"]["key"]


def test_options_reach_the_problems(run, check_document):
    options = ("--dtype", "bf16", "--layout", "channels_last", "--batch", "2", "--pass", "wgrad", "--deterministic")
    document = check_document(run("plan", LAYER, *FAST, *options, "--json").stdout)
    (found,) = document["layers"][0]["passes"]
    assert found["problem"]["dtype"] == "bf16"
    assert found["problem"]["layouts"] == ["channels_last"] * 3
    assert "mb2" in found["problem"]["layer"]
    assert document["options"]["deterministic"] is True
    assert document["options"]["batch"] == 2


def test_plans_are_remembered(run, check_document):
    first = check_document(run("plan", LAYER, *FAST, "--json").stdout)
    again = check_document(run("plan", LAYER, *FAST, "--rigor", "wisdom_only", "--json").stdout)
    assert again["layers"] == first["layers"]


def test_no_plan_is_exit_1_with_the_reason(run, check_document):
    result = run("plan", LAYER, *FAST, "--rigor", "wisdom_only", "--json")
    assert result.exit_code == 1
    document = check_document(result.stdout)
    assert document["summary"]["unplanned"] == 3
    assert all("no wisdom" in found["reason"] for found in document["layers"][0]["passes"])
    result = run("plan", LAYER, *FAST, "--rigor", "wisdom_only")
    assert result.exit_code == 1
    assert "no wisdom" in result.stdout
    assert "3 without a plan" in result.stdout


def test_plan_of_a_network(run, check_document):
    result = run("plan", "some_networks:small", *FAST, "--batch", "2", "--json")
    document = check_document(result.stdout)
    layers = {name: layer for layer in document["layers"] for name in layer["names"]}
    assert list(layers) == ["first", "second", "second (call 2)", "up", "same"]
    assert layers["second"] is layers["second (call 2)"]
    passes = {name: [found["problem"]["pass"] for found in layer["passes"]] for name, layer in layers.items()}
    assert passes["first"] == ["fprop", "wgrad"]  # nobody needs the gradient of the network's input
    assert passes["second"] == ["fprop", "dgrad", "wgrad"]
    assert passes["up"] == ["dgrad", "fprop", "wgrad"]
    assert layers["up"]["transposed"]
    assert layers["up"]["passes"][0]["problem"]["layer"] == "mb2ic2ih20oc4oh10kh2sh2ph0"
    # An even kernel with padding="same": torch pads one side by a copy first, and so do planned layers.
    assert layers["same"]["passes"][0]["problem"]["layer"] == "mb2ic2ih21oc2oh20kh4ph1"
    assert document["summary"]["passes"] == 2 + 2 * 3 + 3 + 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_problems_are_those_that_optimize_plans(run, check_document, layout):
    arguments = ("some_networks:small", *FAST, "--batch", "2", "--layout", layout, "--json")
    document = check_document(run("plan", *arguments).stdout)
    shown = {found["problem"]["key"] for layer in document["layers"] for found in layer["passes"]}
    order = getattr(torch, "channels_last" if layout == "channels_last" else "contiguous_format")
    model = Small().to(memory_format=order)
    x = torch.randn(2, *Small.input_shape).contiguous(memory_format=order)
    made = nn_report(optimize(model, x, batch_sizes="undivided", rigor="wisdom_only"))
    assert shown == {one.problem.key for _, _, one in made.passes()}
    assert not any(one.reason for _, _, one in made.passes())


def test_explain(run, check_document):
    result = run("explain", LAYER, "--pass", "dgrad", *FAST, "--json")
    assert result.exit_code == 0
    document = check_document(result.stdout)
    assert document["problem"]["pass"] == "dgrad"
    assert document["plan"] is not None
    by_solver = {}
    for candidate in document["candidates"]:
        by_solver.setdefault(candidate["solver"], []).append(candidate)
        assert candidate["reason"] or candidate["time_ms"] is not None
        assert candidate["why_not"].startswith(candidate["reason"])
    chosen = [candidate for candidate in document["candidates"] if candidate["chosen"]]
    assert [candidate["solver"] for candidate in chosen] == [document["plan"]["solver"]]
    timed = [candidate for candidate in document["candidates"] if not candidate["reason"] and not candidate["chosen"]]
    reasons = (" slower", "faster", "as fast as")  # of two that are equally fast by chance
    assert all(any(words in candidate["why_not"] for words in reasons) for candidate in timed), timed
    assert "for dgrad" in document["answer"]
    assert "[" not in document["answer"]
    from tilewise.problems.conv.problem import ConvProblem
    from tilewise.solvers import solving

    assert by_solver["fft"][0]["estimate_ms"] > 0
    assert by_solver["micro_batch"][0]["estimate_ms"] is None  # a split has no time of its own
    assert set(by_solver) == {solver.name for solver in solving(ConvProblem)}
    result = run("explain", LAYER, "--pass", "dgrad", *FAST)
    for word in (*by_solver, "estimate ms", "varies", "workspace", "chosen"):
        assert word in result.stdout
    answer = " ".join(result.stdout.partition("\n\n")[0].split())
    assert "dgrad" in answer
    assert " were timed" in answer
    verbose = run("explain", LAYER, "--pass", "dgrad", *FAST, "--rigor", "wisdom_only", "--verbose").stdout
    assert verbose.count("\n") > result.stdout.count("\n")
    assert all(word in verbose for word in ("speed-up", "spread"))


def test_explain_measures_every_config_of_named_solvers(run, check_document):
    """By estimate alone the others are not run."""
    asked = ("explain", LAYER, *FAST, "--rigor", "estimate", "--solver", "lowering_type1", "--solver", "fft")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.stderr
    measured = [m for m in check_document(result.stdout)["candidates"] if m["error"] is not None and not m["reason"]]
    assert {m["solver"] for m in measured} >= {"fft", "lowering_type1"}
    from tilewise.problem import ConvProblem
    from tilewise.solvers import get

    problem = ConvProblem.from_key(check_document(result.stdout)["problem"]["key"])
    for name in ("fft", "lowering_type1"):
        assert sum(m["solver"] == name for m in measured) == len(set(get(name).configs(problem)))
    table = run(*asked).stdout
    assert "not run: estimated" in table


def test_time_of_a_layer(run, check_document):
    result = run("time", LAYER, *FAST, "--iterations", "1", "--json")
    document = check_document(result.stdout)
    assert document["training_step"] is None
    for found in document["layers"][0]["passes"]:
        assert found["framework_ms"] > 0
        assert (found["planned_ms"] is None) == (not found["replaced"])
        if not found["replaced"]:
            assert found["ratio"] == 1.0
    assert document["summary"]["compared"] == 3
    text = run("time", LAYER, *FAST, "--iterations", "1").stdout
    for word in ("framework ms", "planned ms", "speed-up", "geometric mean", "worst"):
        assert word in text


@pytest.mark.slow
def test_time_of_a_network(run, check_document):
    arguments = ("time", "some_networks:small", *FAST, "--batch", "2", "--iterations", "2")
    document = check_document(run(*arguments, "--json").stdout)
    step = document["training_step"]
    assert step["iterations"] == 2
    assert step["framework"]["loss"] == pytest.approx(step["planned"]["loss"], rel=1e-4)
    for side in ("framework", "planned"):
        assert step[side]["step_ms"] == pytest.approx(step[side]["forward_ms"] + step[side]["backward_ms"])
    text = run(*arguments).stdout
    for word in ("training step", "forward ms", "backward ms", "peak memory"):
        assert word in text


@pytest.mark.parametrize(
    ("target", "role", "own"),
    [
        (LAYER, "forward", {"fprop"}),
        (LAYER, "grad_input", {"dgrad"}),
        (LAYER, "grad_weight", {"wgrad"}),
        ("16x32:32x8", "forward", {"nt"}),
        ("16x32:32x8", "grad_input", {"nn"}),
        ("16x32:32x8", "grad_weight", {"tn"}),
        ("some_networks:small", "forward", {"fprop", "dgrad"}),  # of a transposed layer it is dgrad
    ],
)
def test_passes_by_their_names_in_torch(run, check_document, target, role, own):
    words = (*FAST, "--rigor", "wisdom_only", "--json", "--pass", role)
    layers = check_document(run("plan", target, *words).stdout)["layers"]
    assert {found["problem"].get("pass", found["problem"].get("op")) for x in layers for found in x["passes"]} == own
    if target == "16x32:32x8":  # as autograd computes a linear layer of 32 inputs and 8 outputs
        sizes = {"forward": "m16n8k32", "grad_input": "m16n32k8", "grad_weight": "m8n32k16"}
        assert sizes[role] in layers[0]["passes"][0]["problem"]["key"]
    if target == "some_networks:small":
        assert {found["problem"]["pass"] for found in layers[1]["passes"]} == {"dgrad"}


def test_only_some_passes_are_timed_without_training_steps(run, check_document):
    arguments = ("some_networks:small", *FAST, "--batch", "2", "--iterations", "1", "--pass", "wgrad", "--json")
    document = check_document(run("time", *arguments).stdout)
    assert document["training_step"] is None
    assert {found["problem"]["pass"] for layer in document["layers"] for found in layer["passes"]} == {"wgrad"}


def test_a_network_that_does_not_run_on_its_input_is_bad_input(run):
    result = run("plan", "some_networks:wrong", *FAST, "--batch", "2")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    for words in ("some_networks:wrong", "(2, 4, 10, 10)", "to have 5 channels"):
        assert words in line


@pytest.mark.parametrize(("batch", "words"), [("1", "1 input of 3x224x224"), ("2", "2 inputs of 3x224x224")])
def test_inputs_that_are_assumed_are_told(run, batch, words):
    arguments = (*FAST, "--rigor", "wisdom_only", "--batch", batch)
    (line,) = run("plan", "some_networks:shapeless", *arguments).stderr.splitlines()
    assert f"some_networks:shapeless does not say what it takes: {words} assumed" in line
    assert "returns module and shape" in line
    assert run("plan", "some_networks:small", *arguments).stderr == ""
    failed = run("plan", "some_networks:unfit", *arguments)
    assert failed.exit_code == 2
    (line,) = failed.stderr.splitlines()
    assert f"an input of ({batch}, 3, 224, 224), which was assumed" in line


def test_a_network_without_convolutions_has_an_empty_plan(run, check_document):
    document = check_document(run("plan", "some_networks:none", *FAST, "--json").stdout)
    assert document["layers"] == []
    assert document["summary"]["share_replaced"] == 0
    assert run("plan", "some_networks:none", *FAST).exit_code == 0


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_plan_on_a_gpu(run, device):
    result = run("plan", LAYER, "--device", device, "--batch-sizes", "undivided", "--rigor", "estimate")
    assert result.exit_code == 0, result.stderr
    assert "of 3 layer-passes replaced" in result.stdout


@pytest.fixture
def simulated_solvers():
    """A fast algorithm that wants a KiB an image and a slow one that wants 64 bytes; torch's takes more than both."""
    clock = Clock()
    fast = simulated(clock, "fft", lambda p, c: 1.0 + p.batch, bytes=lambda p, c: 1024 * p.batch, accumulates=True)
    slow = simulated(clock, "direct", lambda p, c: 8.0 * p.batch, bytes=lambda p, c: 64, accumulates=True)
    torchs = torchs_own(clock, lambda p, c: 100.0 * p.batch, bytes=lambda p, c: 2**16)
    with world(clock, fast, slow, torchs):
        Wisdom().remember_profile(environment("cpu").key, PROFILE)  # of one thread
        yield


@pytest.mark.parametrize(("policy", "total"), [("arena", "2KiB"), ("paper_wd", "9KiB")])
def test_a_budget_for_all_layers(run, check_document, simulated_solvers, policy, total):
    arguments = ("plan", "some_networks:equal", "--device", "cpu", "--batch", "2", "--policy", policy)
    document = check_document(run(*arguments, "--total-workspace", total, "--json").stdout)
    budget = document["budget"]
    assert (budget["policy"], budget["total"]) == (policy, 1024 * int(total[0]))
    passes = [(n, p) for layer in document["layers"] for n in layer["names"] for p in layer["passes"]]
    places = [(segment["layer"], segment["pass"]) for segment in budget["segments"]]
    assert sorted(places) == sorted((name, found["problem"]["pass"]) for name, found in passes)
    taken = [segment["workspace"] for segment in budget["segments"]]
    assert budget["used"] == (sum(taken) if policy == "paper_wd" else max(taken)) <= budget["total"]
    planned = [found["plan"]["workspace"] for _, found in passes]
    assert 64 < (sum(planned) if policy == "paper_wd" else max(planned)) <= budget["total"]
    result = run(*arguments, "--total-workspace", total)
    assert result.exit_code == 0
    for word in (f"of {total[0]}.0 KiB of workspace used", policy, "largest segments", "variables"):
        assert word in result.stdout
    least = budget["least"]
    assert least == (64 if policy == "arena" else 64 * len(taken))
    result = run(*arguments, "--total-workspace", f"{least - 1}B")
    assert result.exit_code == 1
    assert f"the least total that works is {least} bytes" in result.stderr
    assert run(*arguments, "--total-workspace", f"{least}B").exit_code == 0


def test_time_within_a_budget(run, check_document, simulated_solvers):
    arguments = ("--device", "cpu", "--batch", "2", "--total-workspace", "2KiB", "--iterations", "1", "--json")
    document = check_document(run("time", "some_networks:equal", *arguments).stdout)
    assert document["budget"]["policy"] == "arena"
    assert document["training_step"]["iterations"] == 1
    losses = [document["training_step"][side]["loss"] for side in ("framework", "planned")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
