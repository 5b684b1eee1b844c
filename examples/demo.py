"""Plan, time and train a small network within a memory limit, on this machine: ``make demo``.

1. Every convolution of the built-in network is planned within a limit of workspace a kernel, and ``tilewise time
   photonet`` times torch and the plans side by side. Torch keeps no limit: where its own algorithm needs more, the plan
   is torch's algorithm in micro-batches, or another one.
2. The network is trained for a few steps on crops of two photographs that scikit-learn ships (which one is it?),
   from the same seed once as torch runs it and once with its layers planned, and the losses are compared.

Exits with 1 unless a layer was replaced, every plan keeps the limit, and the losses agree. Where the whole mini-batch
needs more than the limit, it is divided into micro-batches, each planned by itself, or into blocks that one algorithm
takes in turn. How many layers are divided depends on which kernels are fastest on the machine: it may be none.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images
from torch import nn

import tilewise
from tilewise.cli import cli
from tilewise.frontends.zoo import build_photonet
from tilewise.plan import Plan, format_bytes, parse_bytes
from tilewise.wisdom import Wisdom

NETWORK = "photonet"
CROP = build_photonet().input_shape[1]
TOLERANCE = 1e-3
"""Greatest difference of the losses, which start near 0.7. One pass differs from torch's by about 1e-6 of its result,
which training grows: in eight steps to about 1e-4."""
SEED = 7
KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 34),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""glibc's settings under which freed memory stays with the process: without them page faults would be timed too."""


@dataclass(frozen=True)
class Step:
    """One training step: its loss and how long it took."""

    loss: float
    ms: float


def main() -> int:
    """Run the demonstration; 0 when everything it promises came out."""
    given = arguments()
    keep_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe would get nothing before the end
    # A file or pipe has no width of its own: rows then stay on one line.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"Plans are kept in {Wisdom().path}, so that a second run need not search.\n", highlight=False)
    batches = list(crops(given.batch, given.steps))
    print(
        f"planning {NETWORK}: a minute or two the first time, five or more on a busy machine",
        file=sys.stderr,
        flush=True,
    )
    planned_net = planned_network(given, batches[0][0])
    document = timed(given)
    console.print(layer_table(document))
    print(f"Torch keeps no limit; every plan keeps {given.workspace}.\n")
    print(f"training {NETWORK} for {given.steps} steps, twice", file=sys.stderr, flush=True)
    unplanned = train(fresh_network(), batches)
    planned = train(planned_net, batches)
    console.print(loss_table(unplanned, planned))
    return verdict(given, document, unplanned, planned)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--batch", type=int, default=32, help="images a step (default 32)")
    parser.add_argument("--steps", type=int, default=8, help="training steps (default 8)")
    parser.add_argument("--workspace", default="8MiB", help="memory limit of each kernel (default 8MiB, as Caffe's)")
    parser.add_argument("--iterations", type=int, default=3, help="timed runs of each layer-pass (default 3)")
    return parser.parse_args()


def keep_memory() -> None:
    """Start again with :data:`KEEP` in the environment, which glibc reads once at the start; Linux only."""
    if sys.platform == "linux" and not set(KEEP) <= set(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**KEEP, **os.environ})


def timed(given: argparse.Namespace) -> dict[str, Any]:
    """What ``tilewise time`` measured, as its JSON document, by the plans that wisdom has by now."""
    words = ["time", NETWORK, "--batch", str(given.batch), "--workspace", given.workspace, "--device", "cpu"]
    words += ["--iterations", str(given.iterations)]
    print(f"$ tilewise {' '.join(words)}", file=sys.stderr, flush=True)
    # Here rather than in a process of its own, which would import everything once more.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            cli.main([*words, "--json"], prog_name="tilewise")
        except SystemExit as ended:
            if ended.code:
                raise
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document


def layer_table(document: dict[str, Any]) -> Table:
    """One row a layer and pass: torch's time, the plan's, and the plan."""
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "pass"):
        table.add_column(name)
    for name in ("torch ms", "planned ms", "speed-up", "workspace"):
        table.add_column(name, justify="right")
    table.add_column("plan")
    for layer in document["layers"]:
        for found in layer["passes"]:
            plan = Plan.from_json(found["plan"])
            table.add_row(layer["names"][0], found["problem"]["pass"], *cells(found, plan))
    return table


def cells(found: dict[str, Any], plan: Plan) -> tuple[str, ...]:
    """Times, workspace and plan of one layer-pass."""
    torch_ms = f"{found['framework_ms']:.2f}"
    if not found["replaced"]:
        return torch_ms, "same", "", "", "left to torch"
    parts = ", ".join(dict.fromkeys(leaf.solver for leaf in plan.leaves()))
    own = f"{plan.solver} {plan.label or plan.config}"
    what = f"{own}: {parts}" if plan.children else own
    return torch_ms, f"{found['planned_ms']:.2f}", f"{found['ratio']:.1f}x", format_bytes(plan.workspace), what


def crops(batch: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of random crops (N, 3, 96, 96) of two photographs, and which of the two each is from (N)."""
    photographs = np.stack(load_sample_images().images)  # (2, height, width, 3), bytes
    random = np.random.default_rng(SEED)
    height, width = photographs.shape[1] - CROP, photographs.shape[2] - CROP
    for _ in range(steps):
        labels = random.integers(len(photographs), size=batch)
        corners = zip(random.integers(height, size=batch), random.integers(width, size=batch), strict=True)
        images = [photographs[i, y : y + CROP, x : x + CROP] for i, (y, x) in zip(labels, corners, strict=True)]
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
        yield pixels.contiguous(), torch.from_numpy(labels)


def fresh_network() -> nn.Module:
    """The network with the same weights every time."""
    torch.manual_seed(SEED)
    return build_photonet().train()


def planned_network(given: argparse.Namespace, example: torch.Tensor) -> nn.Module:
    """The same network with its convolutions planned, with progress on stderr; wisdom has their plans from then on."""
    return tilewise.optimize(fresh_network(), (example,), workspace=given.workspace)


def train(network: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Step]:
    """Losses and times of plain gradient descent with momentum, one step a batch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    steps = []
    for images, labels in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps.append(Step(loss.item(), (time.perf_counter() - start) * 1e3))
    return steps


def loss_table(unplanned: list[Step], planned: list[Step]) -> Table:
    """Both runs, step by step."""
    table = Table(box=None, pad_edge=False)
    for name in ("step", "torch loss", "planned loss", "torch ms", "planned ms"):
        table.add_column(name, justify="right")
    for index, (a, b) in enumerate(zip(unplanned, planned, strict=True)):
        table.add_row(str(index + 1), f"{a.loss:.6f}", f"{b.loss:.6f}", f"{a.ms:.0f}", f"{b.ms:.0f}")
    return table


def replacements(document: dict[str, Any]) -> list[Plan]:
    """The plans that run in torch's place."""
    passes = [found for layer in document["layers"] for found in layer["passes"]]
    return [Plan.from_json(found["plan"]) for found in passes if found["replaced"]]


def takes_blocks(plan: Plan, batch: int) -> bool:
    """Whether one algorithm takes the mini-batch in blocks of images."""
    block = plan.config.get("block", batch)
    return plan.leaf and isinstance(block, int) and block < batch


def verdict(given: argparse.Namespace, document: dict[str, Any], unplanned: list[Step], planned: list[Step]) -> int:
    """Say what came out; 0 when all of it is as promised."""
    summary = document["summary"]
    apart = max(abs(a.loss - b.loss) for a, b in zip(unplanned, planned, strict=True))
    plans = replacements(document)
    print(f"\n{len(plans)} of {summary['passes']} layer-passes replaced.")
    print(f"{divisions(plans, given.batch)} The largest workspace is {largest_workspace(plans)} of {given.workspace}.")
    print(f"Losses agree within {apart:.1e} (allowed: {TOLERANCE:g}).")
    before, after = (statistics.median(step.ms for step in steps) for steps in (unplanned, planned))
    print(f"A training step takes {before:.0f} ms with torch, {after:.0f} ms planned: {before / after:.1f}x.")
    limit = parse_bytes(given.workspace)
    failures = {
        "no layer was replaced": not plans,
        f"a plan takes more workspace than {given.workspace}": any(plan.workspace > limit for plan in plans),
        "the losses do not agree": not apart <= TOLERANCE,
    }
    for text in (text for text, failed in failures.items() if failed):
        print(f"demo failed: {text}", file=sys.stderr)
    return int(any(failures.values()))


def divisions(plans: list[Plan], batch: int) -> str:
    """How many plans take the mini-batch in parts, in words."""
    micro_batches = sum(plan.solver == "micro_batch" for plan in plans)
    blocks = sum(takes_blocks(plan, batch) for plan in plans)
    if micro_batches + blocks == 0:
        return "None of them divides the mini-batch: the fastest kernels here fit the limit with all of it."
    return f"To keep the limit {micro_batches} take the mini-batch as micro-batches, {blocks} in blocks of images."


def largest_workspace(plans: list[Plan]) -> str:
    """The most memory that one of the plans takes beside its operands and result."""
    return format_bytes(max((plan.workspace for plan in plans), default=0))


if __name__ == "__main__":
    sys.exit(main())
