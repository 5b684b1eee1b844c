"""Recurrent layers: torch's own call against the planned layer, microseconds a step, input's product included.

Cases are ``CELL:tTnNhH@MODE`` with MODE ieee or tf32 (fp32), bf16 or fp16. Each is run forward without gradients
(``inference``) and forward and backward with all gradients (``training``), as called and, on a GPU, as replays of a
CUDA graph on both. Sides are timed in turns; times are medians. torch's weights lie in one piece, as its modules keep
them. Bars hold for geometric means over cases (an H100; on a CPU over N up to 16).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness.ranks import graphed
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from steps import in_turns

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.planner import Options, Planner
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.recurrent._recurrent import RecurrentSolver
from tilewise.wisdom import Wisdom

SIZES = (
    "lstm:t512n16h768,lstm:t256n64h1024,lstm:t256n1h512,lstm:t100n32h1760,gru:t512n16h768,gru:t256n64h1024,"
    "gru:t100n32h1760,gru:t100n64h2560,rnn_tanh:t100n16h1760,rnn_tanh:t100n64h1760,rnn_tanh:t100n32h2560,"
    "rnn_tanh:t256n32h512"
)
CPU_SIZES = ",".join(
    f"{cell}:t100n{batch}h{hidden}" for cell in ("rnn_tanh", "gru", "lstm") for hidden in (256, 512, 1024)
    for batch in (1, 4, 16, 64)
)  # fmt: skip
DEFAULTS = {
    "sizes": "",
    "modes": "",
    "tasks": "inference,training",
    "rigor": "measure",
    "rounds": "11",
    "round_ms": "40",
}
QUICK = {"sizes": "lstm:t3n2h8", "modes": "ieee", "rigor": "estimate", "rounds": "1", "round_ms": "1"}
LEAST = {
    ("bf16", "inference"): 2.5, ("bf16", "training"): 2.2, ("fp16", "inference"): 2.5, ("fp16", "training"): 2.2,
    ("ieee", "inference"): 1.8, ("ieee", "training"): 1.8, ("tf32", "inference"): 2.0, ("tf32", "training"): 1.8,
}  # fmt: skip
CPU_LEAST = {"inference": 1.6, "training": 1.8}


def run(settings: Settings) -> Result:
    """One row a case, task and way of running."""
    rows: list[Row] = []
    sizes = settings.text("sizes") or (SIZES if settings.device.type == "cuda" else CPU_SIZES)
    modes = settings.text("modes") or ("bf16,fp16,ieee,tf32" if settings.device.type == "cuda" else "ieee")
    for mode in modes.split(","):
        for size in sizes.split(","):
            for task in settings.words("tasks"):
                found = rows_of(settings, size, mode, task)
                settings.say("  " + "; ".join(f"{row.group} {row.name} {row.ratio:.2f}" for row in found))
                rows += found
    return Result(rows, bars(settings, rows))


def problem_of(size: str, mode: str, task: str, device: torch.device) -> RecurrentProblem:
    """The problem of a case. Raises ``ValueError`` for text that is none."""
    cell, _, numbers = size.partition(":")
    values: dict[str, int] = {}
    for letter, after in (("t", "n"), ("n", "h"), ("h", "")):
        text = numbers.partition(letter)[2]
        digits = text.partition(after)[0] if after else text
        if not digits.isdigit():
            raise ValueError(f"sizes={size!r}: CELL:tTnNhH such as lstm:t512n16h768 would do")
        values[letter] = int(digits)
    dtype, precision = (mode, "ieee") if mode in ("bf16", "fp16") else ("fp32", mode)
    return RecurrentProblem(
        cell, values["t"], values["n"], values["h"], values["h"], task=task, dtype=dtype, precision=precision,
        device=device_name(device),
    )  # fmt: skip


def rows_of(settings: Settings, size: str, mode: str, task: str) -> list[Row]:
    """The rows of one case and task."""
    p = problem_of(size, mode, task, settings.device)
    with p.flags(deterministic=False):
        with tempfile.TemporaryDirectory(prefix="recurrent-") as folder:
            planner, options = Planner(Wisdom(Path(folder, "wisdom.sqlite3"))), Options(rigor=settings.text("rigor"))
            plan = planner.plan(p, options)
            solver = solvers.get(plan.solver)
            lost = reasons(planner, p, options) if solver.baseline else []
        assert isinstance(solver, RecurrentSolver)
        with on_a_stream(settings.device):
            calls = calls_of(p, solver.layer(p, plan.config))
            ways = {"called": calls}
            if settings.device.type == "cuda":
                torchs, ours = (graphed(settings.device, [call])[0] for call in calls.values())
                ways["graph"] = {"torch": torchs, "planned": ours}
            took = {way: in_turns(both, settings) for way, both in ways.items()}
    details = {"task": task, "mode": mode, "batch": p.batch, "error": None if plan.error is None else str(plan.error)}
    details |= {"lost": lost} if lost else {}
    rows = []
    for way, both in took.items():
        torchs, ours = (statistics.median(both[side]) * 1e3 / p.time for side in ("torch", "planned"))
        ran = f"{plan.solver} {plan.config}".strip()
        rows.append(Row(f"{size} {mode}", f"{task}, {way}", Side("torch", torchs),
                        Side(ran, ours), unit="us a step", replaced=not solver.baseline, details=details))  # fmt: skip
    return rows


def reasons(planner: Planner, p: RecurrentProblem, options: Options) -> list[str]:
    """Why others than torch's own choice are not used. What was measured is not measured again."""
    return [f"{m.solver} {m.config}: {m.reason}" for m in planner.explain(p, options) if m.reason and m.config]


@contextlib.contextmanager
def on_a_stream(device: torch.device) -> Iterator[None]:
    """A stream of its own on a GPU: autograd's nodes stay on the stream that they were made on, which is captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def calls_of(p: RecurrentProblem, layer: Any) -> dict[str, Callable[[], object]]:
    """Both sides of a case as calls without arguments."""
    device = torch.device("cuda" if p.device_type == "cuda" else "cpu")
    kinds: dict[str, Any] = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    more = {} if p.cell in kinds else {"nonlinearity": p.cell.removeprefix("rnn_")}
    dtype = p.torch_dtype("x")
    module = kinds.get(p.cell, torch.nn.RNN)(p.inputs, p.hidden, device=device, dtype=dtype, **more)
    module.flatten_parameters()
    weights = list(module.parameters())
    x = torch.randn(p.shape("x"), device=device, dtype=dtype)
    states = [torch.randn(p.shape(role), device=device, dtype=dtype) * 0.5 for role in ("h0", "c0") if role in p.roles]
    dy = torch.randn(p.shape("y"), device=device, dtype=dtype)
    c0 = states[1] if len(states) == 2 else None
    if p.task == "inference":

        def torchs() -> object:
            with torch.no_grad():
                return module(x, tuple(states) if len(states) == 2 else states[0])

        def ours() -> object:
            with torch.no_grad():
                return layer.forward(x, states[0], c0, weights, keep=False)

        return {"torch": torchs, "planned": ours}
    leaves = [t.clone().requires_grad_() for t in (x, *states)]

    def torch_trains() -> object:
        y, _ = module(leaves[0], tuple(leaves[1:]) if len(states) == 2 else leaves[1])
        return torch.autograd.grad(y, [*leaves, *weights], dy)

    needs = (True, True, c0 is not None, *(True for _ in weights))

    def we_train() -> object:
        with torch.no_grad():
            *_, saved = layer.forward(x, states[0], c0, weights, keep=True)
            return layer.backward(saved, weights, dy, None, None, needs)

    return {"torch": torch_trains, "planned": we_train}


def bars(settings: Settings, rows: list[Row]) -> list[Bar]:
    """Geometric means and the least ratio, by mode, task and way."""
    on_gpu = settings.device.type == "cuda"
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        for mode in dict.fromkeys(str(row.details["mode"]) for row in rows):
            some = [row for row in rows if row.group == group and row.details["mode"] == mode]
            some = some if on_gpu else [row for row in some if int(row.details["batch"]) <= 16]
            if not some:
                continue
            task, _, way = group.partition(", ")
            least = LEAST[mode, task] if on_gpu else CPU_LEAST[task]
            if way == "called" and on_gpu:
                least = {"inference": 6.0, "training": 5.0}[task] if mode == "bf16" else least
            mean = math.exp(statistics.fmean(math.log(row.ratio) for row in some))
            found.append(
                Bar(f"geometric mean over torch, {mode}, {group}", mean, least=least, applies=not settings.quick)
            )
            worst = min(row.ratio for row in some)
            found.append(Bar(f"least over torch, {mode}, {group}", worst, least=0.97, applies=not settings.quick))
    return found
