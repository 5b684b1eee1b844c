"""Several ranks, each a process, compare the steps of their program together and keep the same passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.step.test_post import TCP
from tests.nn.test_ranks import run

from tilewise.nn.step.lead import is_by_torch
from tilewise.nn.step.leading import Chief

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

SETUP = """
import json, os, signal, time
from tests.nn.step.test_live import Program
class Named(str):
    @property
    def key(self):
        return str(self)
class Ranked(Program):
    '''All ranks take their steps at once, by clocks of their own.'''
    def __init__(self, promised, true, torch_ms=10.0):
        named = lambda gains: {Named(key): gain for key, gain in gains.items()}
        super().__init__(named(promised), named(true), torch_ms)
    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
        dist.barrier()
    def told_as_json(self):
        step = self.live.report
        print(json.dumps({
            "step": step.to_json(), "text": str(step), "withheld": sorted(key for key, _ in self.withheld),
            "ways": self.ways, "told": len(self.told), "by_torch": self.by_torch, "over": self.live.over,
        }))
"""


def told(script: str, tmp_path: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank's program came to."""
    outputs = run(SETUP + script, tmp_path, ranks)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_run_the_same_way_at_each_step_and_keep_what_gains(ranks: int, tmp_path: Path) -> None:
    first, *others = told(
        """
program = Ranked({"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 1.0})
assert program.live.report.pending
for _ in range(300):
    program.step()
program.told_as_json()
""",
        tmp_path,
        ranks,
    )
    assert first["step"]["kept"]
    assert first["step"]["least"] > 1.0
    assert first["step"]["pairs"] >= 20
    assert first["step"]["predicted_ms"] == pytest.approx(4.0)
    assert first["step"]["ranks"] == ranks
    assert f"step of {ranks} ranks: " in first["text"]
    assert first["withheld"] == []
    assert 0 < sum(first["ways"]) < 150
    for other in others:
        assert other == first


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    """On rank 0 alone plans would win."""
    first, second = told(
        """
program = Ranked({"a": 3.0}, {"a": 3.0 if rank == 0 else -3.0})
for _ in range(300):
    program.step()
program.told_as_json()
""",
        tmp_path,
    )
    assert first == second
    assert not first["step"]["kept"]
    assert first["step"]["planned_ms"] == pytest.approx(13.0, rel=0.05)
    assert first["withheld"] == ["a"]


def test_passes_are_taken_back_on_all_ranks_alike(tmp_path: Path) -> None:
    """Each rank has a plan that the other does not have."""
    first, second = told(
        """
gains = {**dict.fromkeys("abcdef", 0.5), "y": 3.0, "z": 3.0, f"own {rank}": 0.4}
program = Ranked(gains, {**dict.fromkeys(gains, -1.0), "y": 3.0, "z": 3.0}, 14.0)
for _ in range(1000):
    program.step()
program.told_as_json()
""",
        tmp_path,
    )
    assert first["step"] == second["step"]
    assert first["ways"] == second["ways"]
    assert first["step"]["kept"]
    assert first["step"]["taken_back"] >= 3
    own = {"own 0", "own 1"}
    assert set(first["withheld"]) - own == set(second["withheld"]) - own
    assert {"y", "z"}.isdisjoint(first["withheld"])


def test_a_rank_that_evaluates_alone_and_one_whose_last_batch_is_smaller(tmp_path: Path) -> None:
    first, second = told(
        """
program = Ranked({"a": 2.0}, {"a": 2.0})
trained = []
for index in range(600):
    program.step("smaller" if rank == 1 and index % 50 == 49 else "train")
    trained.append(program.ways[-1])
    if rank == 0 and index % 50 == 49:
        for _ in range(30):
            Program.step(program, "evaluation", gradients=False, ms=100.0)
program.ways = trained
program.told_as_json()
""",
        tmp_path,
    )
    assert first["step"] == second["step"]
    assert first["step"]["kept"]
    assert first["step"]["torch_ms"] == pytest.approx(10.0, rel=0.05)
    differ = [index for index, ways in enumerate(zip(first["ways"], second["ways"], strict=True)) if len({*ways}) > 1]
    assert all(index % 50 == 0 for index in differ)  # what comes after an evaluation is not known before it begins
    assert True in first["ways"]


def test_alternating_kinds_of_steps(tmp_path: Path) -> None:
    first, second = told(
        """
program = Ranked({"a": 2.0}, {"a": 2.0})
for _ in range(400):
    program.step()
    program.step("other", ms=3.0)
program.told_as_json()
""",
        tmp_path,
    )
    assert first == second
    assert first["step"]["kept"]
    assert first["step"]["torch_ms"] == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_is_waited_for_no_longer_than_some_steps(absent: int, tmp_path: Path) -> None:
    outputs = told(
        f"""
program = Ranked({{"a": 2.0}}, {{"a": 2.0}})
for _ in range(850):
    dist.barrier() if rank == {absent} else program.step()
program.told_as_json()
""",
        tmp_path,
    )
    made = outputs[1 - absent]
    assert made["over"]
    assert (
        made["step"]["reason"] == ("no answer of rank 1 for 401 steps", "no word of rank 0 for 801 steps")[1 - absent]
    )
    assert made["told"] == 0
    assert made["withheld"] == []
    assert not any(made["ways"])


def test_a_rank_that_leaves_in_the_middle_is_told_of_on_the_others(tmp_path: Path) -> None:
    """It calls nothing any more, and the ranks that go on let plans run."""
    outputs = told(
        """
program = Ranked({"a": 2.0}, {"a": 2.0})
for index in range(700):
    dist.barrier() if rank == 1 and index > 60 else program.step()
program.told_as_json()
""",
        tmp_path,
        ranks=3,
    )
    for made in (outputs[0], outputs[2]):
        assert made["step"]["reason"].removeprefix("rank 0: ") == "no answer of rank 1 for 401 steps"
        assert True in made["ways"]
        assert not made["by_torch"]
    assert outputs[1]["over"] is False


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_holds_nobody_up(dies: int, tmp_path: Path) -> None:
    """Steps without collectives go on; by a store that rank 0 keeps its end is known at once."""
    outputs = told(
        TCP
        + f"""
program = Ranked({{"a": 2.0}}, {{"a": 2.0}})
for _ in range(50):
    program.step()
if rank != {dies}:
    time.sleep(1.0)
    for _ in range(900):
        Program.step(program)
program.told_as_json()
sys.stdout.flush()
os._exit(0)
""",
        tmp_path,
    )
    made = outputs[1 - dies]
    assert made["over"]
    assert not made["by_torch"]
    expected = "no answer of rank 1 for 401 steps" if dies else "the ranks' store does not answer"
    assert made["step"]["reason"].startswith(expected)


def test_a_rank_whose_comparison_fails_ends_that_of_all(tmp_path: Path) -> None:
    outputs = told(
        """
import warnings
warnings.simplefilter("ignore")
program = Ranked({"a": 2.0}, {"a": 2.0})
def failing(*_):
    raise ArithmeticError("no switch")
for index in range(300):
    if rank == 1 and program.live._now.blocks is not None:
        program.live._now.blocks._switches = failing, failing
    program.step()
program.told_as_json()
""",
        tmp_path,
    )
    assert outputs[1]["step"]["reason"] == "comparing raised ArithmeticError: no switch"
    assert outputs[0]["step"]["reason"] == "rank 1: comparing raised ArithmeticError: no switch"
    assert not outputs[0]["by_torch"]


@pytest.mark.parametrize("has", [0, 1])
def test_new_plans_of_one_rank_let_all_begin_anew(has: int, tmp_path: Path) -> None:
    first, second = told(
        f"""
program = Ranked({{"a": 2.0}}, {{"a": 2.0}})
for index in range(500):
    program.step()
    if rank == {has} and index == 60:
        program.promised[Named("b"), False] = 1.0
        program.true[Named("b"), False] = 1.0
        program.live.reopen()
program.told_as_json()
""",
        tmp_path,
    )
    assert first["step"] == second["step"]
    assert first["step"]["kept"]
    assert first["step"]["predicted_ms"] == pytest.approx(3.0)


def test_new_plans_of_all_ranks_after_the_decision_are_compared_as_well(tmp_path: Path) -> None:
    first, second = told(
        """
program = Ranked({"a": 2.0}, {"a": 2.0})
for index in range(800):
    program.step("train" if index < 400 else "with the new shape")
    if index == 400:
        assert program.live.over
        program.promised[Named("b"), False] = 1.0
        program.true[Named("b"), False] = -4.0
        program.live.reopen()
program.told_as_json()
""",
        tmp_path,
    )
    assert first == second
    assert first["told"] == 2
    assert first["withheld"] == ["b"]
    assert first["step"]["kept"]


@pytest.mark.parametrize(
    ("gains", "reason"),
    [
        ("{}", "no pass runs by plan"),
        ('{"a": float("nan") if rank else 1.0}', "there are plans that were not chosen by their times"),
    ],
)
def test_what_cannot_be_compared_says_why_on_all_ranks(gains: str, reason: str, tmp_path: Path) -> None:
    first, second = told(
        f"""
program = Ranked({gains}, {{}})
for _ in range(60):
    program.step()
program.told_as_json()
""",
        tmp_path,
    )
    assert first == second
    assert first["step"]["reason"] == reason
    assert first["withheld"] == []
    assert not any(first["ways"])


def test_steps_that_ranks_never_take_together_are_left_as_they_are(tmp_path: Path) -> None:
    """Rank 1 is somewhere else in its counting each time."""
    first, second = told(
        """
program = Ranked({"a": 2.0}, {"a": 2.0})
for index in range(1000):
    program.step()
    if rank == 1:
        program.live._step.numbers[True] += 300
program.told_as_json()
""",
        tmp_path,
    )
    assert first["step"]["reason"] == "steps are too irregular (0 of 20 pairs after 401 steps)"
    assert second["step"]["reason"] == f"rank 0: {first['step']['reason']}"
    assert first["withheld"] == []


def test_ranks_that_answer_without_times_are_asked_a_few_times_each_time_later() -> None:
    chief = Chief()
    plans = {"gains": {"a": 2.0}, "counted": 2, "stretch": 1, "at": 10}
    message = chief.after([plans, plans])
    ahead = []
    while "trial" in message:
        trial = message["trial"]
        ahead.append(trial["begin"] - 10)
        nothing = {"times": [[None] * trial["counted"]] * (2 * trial["pairs"]), "at": 10}
        message = chief.after([nothing, nothing])
    assert ahead == [8, 16, 32, 64]
    reason = "ranks do not take the same steps at the same time (0 of 20 pairs)"
    assert message["verdict"]["report"]["reason"] == reason


def test_a_choice_that_is_surely_slower_is_timed_by_few_pairs() -> None:
    chief = Chief()
    plans = {"gains": {"a": 2.0}, "counted": 2, "stretch": 1, "at": 10}
    first = chief.after([plans, plans])["trial"]
    assert (first["before"], first["wanted"], first["pairs"]) == (0, 20, 10)
    slow = {"times": [[1.0 if is_by_torch(block) else 2.0] * 2 for block in range(20)], "at": 80}
    assert "verdict" in chief.after([slow, slow])  # one problem: there is nothing else to try


def test_answers_to_different_questions_are_refused() -> None:
    chief = Chief()
    plans = {"gains": {"a": 2.0}, "counted": 2, "stretch": 1, "at": 10}
    chief.after([plans, plans])
    with pytest.raises(ValueError, match=r"longer|shorter"):
        chief.after([{"times": [[1.0, 1.0]], "at": 10}, {"times": [[1.0]], "at": 10}])


def test_ctrl_c_in_a_step_changes_nothing_but_that_step(tmp_path: Path) -> None:
    first, second = told(
        """
program = Ranked({"a": 2.0}, {"a": 2.0})
for index in range(300):
    try:
        if rank == 1 and index % 40 == 30:
            program.live.boundary(torch.device("cpu"))
            program.live.called("train", with_gradients=True)
            program.ways.append(program.by_torch)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
        else:
            Program.step(program)
    except KeyboardInterrupt:
        pass
    dist.barrier()
program.told_as_json()
""",
        tmp_path,
    )
    assert first["step"] == second["step"]
    assert first["ways"] == second["ways"]
    assert first["step"]["kept"]


def test_ranks_that_meet_in_the_middle_begin_anew_together(tmp_path: Path) -> None:
    first, second = told(
        """
dist.destroy_process_group()
program = Ranked({"a": 2.0}, {"a": 2.0})
for _ in range(40):
    Program.step(program)
assert not program.live.over
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}.new", rank=rank, world_size=ranks)
for _ in range(300):
    program.step()
program.told_as_json()
""",
        tmp_path,
    )
    assert first == second
    assert first["step"]["ranks"] == 2
    assert first["step"]["kept"]
