"""Planning by several processes: real ones, on the CPU twice; and how work is shared, simulated."""

from __future__ import annotations

import heapq
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import toys
from tests.planner.simulated import PROFILE

from tilewise.machine.device import environment
from tilewise.planner import Options, Planner, WorkersWarning
from tilewise.planner import worker as worker_module
from tilewise.planner.processes import workers as workers_module
from tilewise.planner.processes.job_queue import TRIES, JobQueue
from tilewise.planner.processes.messages import Job, effort, options_from_json
from tilewise.planner.processes.places import environment_of, find_places
from tilewise.planner.processes.workers import Workers
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom

TINY = [
    ConvProblem(pass_, 4, 2, 2, (Axis(size, 3),), dtype="bf16", layouts=("contiguous",) * 3)
    for pass_ in Pass
    for size in (6, 7)
]
"""Planned in a few hundredths of a second each, and without compiling anything."""
RESNET_50 = [
    (64, 3, 224, 7, 2), (64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (256, 64, 56, 1, 1), (64, 256, 56, 1, 1),
    (128, 256, 56, 1, 1), (128, 128, 56, 3, 2), (512, 128, 28, 1, 1), (512, 256, 56, 1, 2), (128, 512, 28, 1, 1),
    (128, 128, 28, 3, 1), (256, 512, 28, 1, 1), (256, 256, 28, 3, 2), (1024, 256, 14, 1, 1), (1024, 512, 28, 1, 2),
    (256, 1024, 14, 1, 1), (256, 256, 14, 3, 1), (512, 1024, 14, 1, 1), (512, 512, 14, 3, 2), (2048, 512, 7, 1, 1),
    (2048, 1024, 14, 1, 2), (512, 2048, 7, 1, 1), (512, 512, 7, 3, 1),
]  # fmt: skip
"""Output and input channels, image, kernel, stride of its 23 distinct convolutions."""


def network(batch: int) -> list[ConvProblem]:
    return [
        ConvProblem(pass_, batch, ic, oc, (Axis(size, k, stride, before=k // 2, after=k // 2),) * 2)
        for oc, ic, size, k, stride in RESNET_50
        for pass_ in Pass
    ]


@given(toys.problems(), st.sampled_from([None, (0, 0), (2, 3)]), st.sampled_from([None, 4096]))
def test_jobs_go_over_a_pipe(problem: ConvProblem, share: tuple[int, int] | None, workspace: int | None) -> None:
    job = Job(problem, Options(workspace=workspace, batch_sizes="all", error_limit=1e-4), share)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


KEY = TINY[0].key
LAYOUTS = KEY[KEY.index("x:") : KEY.index("y:")]


@pytest.mark.parametrize(
    "problem",
    [
        KEY.replace(f"mb{TINY[0].batch}", "mb0"), KEY.replace(f"mb{TINY[0].batch}", f"mb0{TINY[0].batch}"), None, 3,
        KEY.replace(TINY[0].pass_.value, "sideways"), KEY.replace("kw", "k"), KEY.replace(LAYOUTS, ""), f"{KEY} more\n",
        KEY.replace("bf16", "fp8 "), KEY.replace("y:co16", "y:co3"), {"batch": 4},
    ],
)  # fmt: skip
def test_what_is_no_problem_is_refused(problem: object) -> None:
    assert problem != KEY
    with pytest.raises(ValueError, match=r".+"):
        Job.from_json({**Job(TINY[0], Options()).to_json(), "problem": problem})
    with pytest.raises(ValueError, match="rigor"):
        options_from_json({**Job(TINY[0], Options()).to_json()["options"], "rigor": "wild"})


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 200), st.sampled_from(["all", "undivided"])), max_size=9),
       st.randoms(use_true_random=False))  # fmt: skip
def test_everything_is_done_once_in_order_whoever_is_lost(processes: int, drawn: list[Any], random: Any) -> None:
    jobs = [
        Job(replace(TINY[0], batch=batch, in_channels=2 + i), Options(batch_sizes=sizes))
        for i, (batch, sizes) in enumerate(drawn)
    ]
    queue, done, lost, held = JobQueue(jobs, processes), [], {}, []
    while not queue.over:
        if held and (not queue.waiting or random.random() < 0.5):
            job = held.pop(random.randrange(len(held)))
            if random.random() < 0.2:
                queue.give_back(job, "lost")
                lost[job] = lost.get(job, 0) + 1
            else:
                queue.finish(job)
                done.append(job)
        elif (job := queue.take(block=False)) is not None:
            held.append(job)
    given_up = {job for job, count in lost.items() if count >= TRIES}
    assert len(done) == len(set(done))
    assert {job for job in done if job.share is None} | given_up >= set(jobs)
    settled = [*done]
    for job in jobs:
        shares = [other.share for other in settled if other.problem == job.problem and other.share is not None]
        if shares and job in done:
            assert all(settled.index(replace(job, share=share)) < settled.index(job) for share in shares)
            assert (0, 0) not in shares or shares[0] == (0, 0)
    news, faults = queue.wait_for_news(helping=True)
    assert set(news) == {job.problem for job in done if job.share is None}
    assert len(faults) == sum(lost.values())


def makespan(queue: JobQueue, processes: int, took: Any, begins: float) -> float:
    """Simulated time until all is done: this process begins at once, the others ``begins`` later."""
    free = [(0.0 if i == 0 else begins, i) for i in range(processes)]
    running: list[tuple[float, int, Job]] = []
    now = 0.0
    while not queue.over:
        while free and free[0][0] <= now and (job := queue.take(block=False)) is not None:
            _, who = heapq.heappop(free)
            heapq.heappush(running, (now + took(job), who, job))
        ends = [running[0][0]] if running else []
        starts = [at for at, _ in free if at > now] if queue.waiting else []
        now = min(ends + starts)
        while running and running[0][0] <= now:
            at, who, job = heapq.heappop(running)
            queue.finish(job)
            heapq.heappush(free, (at, who))
    return now


@pytest.mark.parametrize(("problems", "least"), [(network(32), 3.6), (network(256)[6:9], 2.5)])
def test_four_devices_are_kept_busy(problems: list[ConvProblem], least: float) -> None:
    """With times that follow the expected effort only by half: the rest is drawn from each problem's name."""
    options = Options(batch_sizes="all")

    def took(job: Job) -> float:
        uneven = 0.5 + (sum(job.problem.key.encode()) % 97) / 97
        whole = effort(job.problem, job.options) * uneven
        if job.share is None:
            return 0.1 * whole if divided else whole  # the finalists
        return 0.2 * whole if job.share[1] == 0 else 0.7 * whole / job.share[1]

    def total(processes: int) -> float:
        return makespan(JobQueue([Job(p, options) for p in problems], processes), processes, took, 0.0)

    divided = False
    alone = total(1)
    divided = len(problems) < 4
    assert alone / total(4) >= least


def test_devices() -> None:
    if not torch.cuda.is_available():
        assert [(place.name, place.own) for place in find_places("all")] == [("cpu", True)]
    assert [(place.name, place.own) for place in find_places(["cpu", "cpu"])] == [("cpu", True), ("cpu", False)]
    for devices in ([], ["meta"], ["nonsense"], "cuda:77", [77]):
        with pytest.raises(ValueError, match="devices"):
            Planner(devices=devices)


@pytest.mark.gpu
def test_a_process_is_held_to_one_gpu() -> None:
    places = find_places("all")
    assert places[0].own
    with pytest.raises(ValueError, match="twice"):
        find_places([0, 0])
    with pytest.raises(ValueError, match="cpu"):
        find_places(["cpu", 0])
    told = environment_of(places[0], 2)
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    out = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **told}, capture_output=True, text=True, check=True
    ).stdout.split()
    assert out[0] == "1"
    assert told["CUDA_VISIBLE_DEVICES"].removeprefix("GPU-") in (out[1], told["CUDA_VISIBLE_DEVICES"])


@pytest.mark.gpu
def test_all_gpus_give_plans_that_run(tmp_path: Path) -> None:
    if len(find_places("all")) < 2:
        pytest.skip("one GPU")
    planner = Planner(Wisdom(tmp_path / "w.sqlite3"), devices="all")
    name = planner.workers.name if planner.workers else ""
    problems = [replace(p, device=name, dtype="fp32", batch=16) for p in TINY]
    assert planner.workers is not None
    assert planner.workers.start() == len(planner.workers.places)
    plans = planner.plan_many(problems, Options(batch_sizes="all"))
    planner.close()
    assert plans.keys() == set(problems)


@pytest.fixture
def wisdom(tmp_path: Path) -> Wisdom:
    found = Wisdom(tmp_path / "wisdom.sqlite3")
    found.remember_profile(environment("cpu").key, PROFILE)
    return found


@pytest.fixture
def crew(wisdom: Wisdom) -> Iterator[Workers]:
    """Two devices: this process's and another, which is ready."""
    made = Workers(["cpu", "cpu"], wisdom.path)
    assert made.start() == 2
    yield made
    made.close()


def process(crew: Workers) -> subprocess.Popen[bytes]:
    (worker,) = crew._workers.values()
    return worker.process


def test_a_worker_plans_what_this_process_does_not(crew: Workers, wisdom: Wisdom) -> None:
    """One process through: many problems, shares of one, and what fails there."""
    own: list[Job] = []
    told: list[ConvProblem] = []

    def slowly(job: Job) -> None:
        own.append(job)
        if job.problem.device == "cpu":
            deadline = time.monotonic() + 120
            while len(told_by(wisdom)) < 5 and time.monotonic() < deadline:
                time.sleep(0.01)

    crew.plan([Job(problem, Options()) for problem in TINY], slowly, told.append)
    planned = told_by(wisdom)
    assert sorted(p.key for p in told) == sorted(p.key for p in TINY)
    assert len(own) == 1
    assert planned == {p.key for p in TINY} - {own[0].problem.key}
    text = "rigor=measure workspace=None batch_sizes=powers_of_two deterministic=False error_limit=None strict=False"
    assert all(kept.own for kept in wisdom.kept_plans(environment("cpu").key, planned, text).values())
    assert process(crew).poll() is None

    large = replace(TINY[0], batch=8)
    crew.plan([Job(large, Options(batch_sizes="all"))], lambda job: own.append(job), told.append)
    assert told[-1] == large
    assert large.key in told_by(wisdom, "all") or own[-1] == Job(large, Options(batch_sizes="all"))

    broken = [replace(p, device="cuda:no such thing") for p in TINY[:2]]
    own.clear()
    worker = process(crew)

    def failing(job: Job) -> None:
        own.append(job)
        worker.wait(120)

    with pytest.warns(WorkersWarning, match="device='cuda:no such thing'.*exit status 1.*planned elsewhere"):
        crew.plan([Job(p, Options()) for p in broken], failing, told.append)
    assert {job.problem for job in own} == set(broken)


def told_by(wisdom: Wisdom, sizes: str = "powers_of_two") -> set[str]:
    """Keys of the problems that have a plan in wisdom."""
    text = "rigor=measure workspace=None batch_sizes={} deterministic=False error_limit=None strict=False"
    keys = [p.key for p in (*TINY, replace(TINY[0], batch=8))]
    return set(wisdom.plans_many(environment("cpu").key, keys, text.format(sizes)))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("told", ["", "{", '{"device": "cpu", "wisdom": "none", "threads": 1}\n'])
def test_a_worker_whose_pipe_ends_at_once_says_nothing(told: str, tmp_path: Path) -> None:
    """Planning may be over before a worker has started."""
    command = [sys.executable, "-m", "tilewise.planner.worker", str(os.getpid())]
    found = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        for _ in range(4)
    ]
    for each in found:
        out, errors = each.communicate(told, timeout=60)
        assert (errors, each.returncode) == ("", 0)
        assert "ready" in out or not out


@pytest.mark.slow
def test_workers_that_hang_or_die_are_done_without(wisdom: Wisdom, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(wisdom, devices=["cpu"] * 3)
    crew = planner.workers
    assert crew is not None
    assert crew.start() == 3
    silent, killed = (worker.process for worker in crew._workers.values())
    monkeypatch.setattr(workers_module, "PATIENCE_S", 2.0)
    for worker in (silent, killed):
        os.kill(worker.pid, signal.SIGSTOP)
    threading.Timer(0.5, killed.kill).start()
    with pytest.warns(WorkersWarning) as caught:
        plans = planner.plan_many(TINY)
    said = sorted(str(warning.message) for warning in caught)
    assert list(plans) == TINY
    assert "the worker on cpu was lost (it ended; exit status -9) while it planned conv" in said[0]
    assert "the worker on cpu was lost (it has said nothing for 2 s; exit status -9)" in said[1]
    assert [worker.wait(60) for worker in (silent, killed)] == [-9, -9]


def test_an_interrupt_keeps_what_was_measured_and_ends_the_workers(crew: Workers, wisdom: Wisdom) -> None:
    ended = process(crew)
    slow = [replace(TINY[i], batch=7, axes=(Axis(4096, 3),), in_channels=32, out_channels=32) for i in (0, 2)]

    def interrupted(job: Job) -> None:
        time.sleep(2.0)  # until the other has measured something, which is kept when it is interrupted
        raise KeyboardInterrupt

    jobs = [Job(p, Options(rigor="patient", batch_sizes="all")) for p in slow]
    with pytest.raises(KeyboardInterrupt):
        crew.plan(jobs, interrupted, lambda problem: None)
    assert ended.wait(60) == 0
    measured = wisdom.measurements_many(environment("cpu").key, [p.key for p in slow])
    assert any(measured.values())


def test_a_parent_that_is_killed_leaves_no_worker() -> None:
    """Nor does one whose fork still holds the pipe."""
    code = (
        "import os, subprocess, sys, time\n"
        f"own = [sys.executable, {worker_module.__file__!r}, str(os.getpid())]\n"
        "worker = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "time.sleep(0.3)\n"
        "held = os.fork() or time.sleep(20) or os._exit(0)\n"
        "print(worker.pid, held, flush=True)\n"
        "time.sleep(20)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        worker, fork = map(int, parent.stdout.readline().split())
        assert is_running(worker)
        parent.kill()
        deadline = time.monotonic() + 20
        while is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(fork, signal.SIGKILL)
        assert not is_running(worker)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
