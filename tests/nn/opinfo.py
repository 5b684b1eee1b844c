"""PyTorch's own samples of every convolution, run by plans that may not be torch's; a process of its own prints JSON.

Importing torch's test utilities changes the process (flags of torch's may not be set any more) and costs seconds, so it
has one of its own:
``python -m tests.nn.opinfo conv2d``. :func:`wanted` says what results are held to.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tilewise
from tilewise.nn import functional
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem
from tilewise.wisdom import Wisdom

OPS: tuple[str, ...] = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
PLANNED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = Options(rigor="estimate", exclude=("aten",))
"""Every solver is right or a plan is refused, so that by estimate, in minutes, says as much as by measuring."""
NOTHING, BEYOND = "no elements", "output padding of a stride or more"
"""What of the types above is torch's own affair."""
TIMES = 2.0
"""An error may be so many times torch's own."""
Call = Callable[..., torch.Tensor]


@dataclass
class Found:
    """What came of the samples: how many results and gradients were compared, and what was not as it should be."""

    samples: int = 0
    compared: int = 0
    planned: int = 0
    """Calls that a plan computed."""
    torchs: dict[str, int] = field(default_factory=dict)
    """Calls that are torch's own affair, by why."""
    unplanned: list[str] = field(default_factory=list)
    """Calls that should have been planned and were not."""
    unsolved: dict[str, str] = field(default_factory=dict)
    """Problems that no solver but torch's own choice solves, with the reasons."""
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """One call: operands and arguments as an OpInfo gives them."""

    label: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return self.arguments[0].dtype  # type: ignore[no-any-return]

    def run(self, call: Call, change: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> list[torch.Tensor]:
        """The result and the gradients of the operands, each changed first, as of a loss with normal weights."""

        def own(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return change(value.detach()).requires_grad_(value.requires_grad)

        arguments, named = [own(value) for value in self.arguments], {k: own(v) for k, v in self.named.items()}
        result = call(*arguments, **named)
        leaves = [t for t in (*arguments, *named.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not leaves:
            return [result]
        generator = torch.Generator().manual_seed(self.seed)
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(self.dtype)
        gradients = torch.autograd.grad(result, leaves, change(weights))
        return [result, *gradients]


def samples(op: Any, dtype: torch.dtype) -> Iterator[Sample]:
    """Every sample of ``op``, dense and with operands that are not."""
    gradients = dtype.is_floating_point or dtype.is_complex
    for index, given in enumerate(op.sample_inputs("cpu", dtype, requires_grad=gradients)):
        for how, one in (("", given), (" not contiguous", given.noncontiguous())):
            label = f"{op.name.rpartition('.')[2]} {dtype} sample {index}{how}"
            yield Sample(label, (one.input, *one.args), one.kwargs, index)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def node_names(result: torch.Tensor) -> set[str]:
    """The names of what autograd will run."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def why_torchs(sample: Sample) -> str:
    """Why a call is torch's own affair; empty when it is to be planned."""
    if sample.dtype not in PLANNED_TYPES:
        return str(sample.dtype)
    if any(t.numel() == 0 for t in sample.arguments if isinstance(t, torch.Tensor)):
        return NOTHING
    extra, strides = sample.named.get("output_padding", 0), sample.named.get("stride", 1)
    pairs = zip(*(v if isinstance(v, tuple) else (v,) * 3 for v in (extra, strides)), strict=False)
    return BEYOND if any(e >= s for e, s in pairs) else ""


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The L2 norm of the difference."""
    return float((got.to(exact.dtype) - exact).abs().double().norm())


@dataclass(frozen=True)
class Wanted:
    """What torch computes of a sample, and what it should be."""

    own: list[torch.Tensor]
    exact: list[torch.Tensor]
    allowed: list[float]
    """Errors, as norms, that a result may have beside ``exact``."""


def wanted(sample: Sample, by_torch: Call) -> Wanted:
    """torch's result and gradients, those in float64, and twice torch's error.

    Where torch happens to err less than a single rounding of each term of the sums would, that counts as its error:
    the unit roundoff times the same convolution of absolute values.
    """
    own = sample.run(by_torch)
    if why_torchs(sample):
        return Wanted(own, own, [0.0] * len(own))
    exact = sample.run(by_torch, lambda t: t.to(wide(t.dtype)))
    terms = sample.run(by_torch, lambda t: t.to(wide(t.dtype)).abs())
    unit = torch.finfo(sample.dtype).eps / 2
    errors = [distance(t, e) for t, e in zip(own, exact, strict=True)]
    return Wanted(own, exact, [TIMES * max(e, unit * float(t.norm())) for e, t in zip(errors, terms, strict=True)])


def compare(found: Found, sample: Sample, want: Wanted, call: Call, how: str) -> None:
    """Hold results and gradients of ``call`` to what is wanted, and count who computed it."""
    names: set[str] = set()

    def noting(*arguments: Any, **named: Any) -> torch.Tensor:
        result = call(*arguments, **named)
        names.update(node_names(result))
        return result

    got = sample.run(noting)
    found.samples += 1
    why = why_torchs(sample)
    if why:
        found.torchs[why] = found.torchs.get(why, 0) + 1
    elif "PlannedConvBackward" in names and "ConvolutionBackward0" not in names:
        found.planned += 1
    else:
        found.unplanned.append(f"{sample.label}, {how}")
    for index, (mine, its, exact, allowed) in enumerate(zip(got, want.own, want.exact, want.allowed, strict=True)):
        what = f"{sample.label}, {how}, {'result' if not index else f'gradient {index}'}"
        found.compared += 1
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            found.wrong.append(f"{what}: {mine.dtype} {tuple(mine.shape)}, torch has {its.dtype} {tuple(its.shape)}")
            continue
        error = distance(mine, exact)
        if not error <= allowed:  # NaN is wrong, too
            found.wrong.append(f"{what}: error {error:.3e} over {allowed:.3e}")


def unsolved(plan_table: PlanTable) -> dict[str, str]:
    """The problems of ``plan_table`` that are torch's because nothing else solves them."""
    found: dict[ConvProblem, str] = {
        problem: plan_table.reasons[problem] for (problem, _), plan in plan_table._plans.items() if plan is None
    }
    return {problem.key: reason for problem, reason in found.items()}


def examined(names: list[str], most: int | None, plant: float = 1.0) -> Found:
    """Run at most ``most`` samples a type of the operators called so, spread evenly; results are times ``plant``."""
    from torch.testing._internal.common_methods_invocations import op_db

    # That import forbids to set torch's flags by assignment. Planning under that is another test's matter.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(Wisdom(Path(folder) / "wisdom.sqlite3"))
        plan_table = PlanTable(OPTIONS, "plan", planner)
        functional._defaults = functional.Table(plan_table)
        for op in op_db:
            name = op.name.rpartition(".")[2]
            if op.name != f"nn.functional.{name}" or name not in names:
                continue
            for dtype in sorted(op.dtypes, key=str):
                every = list(samples(op, dtype))
                step = 1 if most is None else max(1, math.ceil(len(every) / most))
                for sample in every[step // 2 :: step]:
                    _examine(found, sample, name, planner, plant)
        found.unsolved.update(unsolved(plan_table))
    return found


def _examine(found: Found, sample: Sample, name: str, planner: Planner, plant: float) -> None:
    """The sample through the functional operator, then through torch's own name while planning is enabled."""
    want = wanted(sample, functional.BY_TORCH[name])

    def through(call: Call, how: str) -> None:
        def planted(*arguments: Any, **named: Any) -> torch.Tensor:
            return call(*arguments, **named) * plant

        compare(found, sample, want, call if plant == 1.0 else planted, how)

    through(getattr(functional, name), "tilewise.nn.functional")
    with tilewise.enabled(wait=True, planner=planner, rigor=OPTIONS.rigor, exclude=OPTIONS.exclude) as session:
        sample.run(getattr(F, name))  # a step by torch, which is recorded
        through(getattr(F, name), "enabled")
    found.unsolved.update(unsolved(session.plan_table))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=OPS)
    parser.add_argument("--most", type=int)
    parser.add_argument("--plant", type=float, default=1.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # for a few numbers two would only wait for each other
    print(json.dumps(asdict(examined(asked.names, asked.most, asked.plant))))


if __name__ == "__main__":
    main()
