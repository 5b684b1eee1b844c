"""Solvers under defaults that are not torch's own: another default type, and a default device without memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.caller import DEFAULTS, OTHER, caller
from tests.interpreter import interpreted
from tests.kernels.emulator import emulated
from tests.sampling import EVERY
from tests.solvers import test_solvers
from tests.solvers.test_solvers import Memory, check

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import Solver, Split, get, solving

PLAIN: Memory = (("contiguous", 0),) * 3
SAME = (Axis(28, 3, 1, 1, 1, 1),) * 2
SMALL = (Axis(8, 3, 1, 1, 1, 1),) * 2
CUT = (Axis(8, 2, 2),) * 2
LAYERS = (
    ((4, 16, 16, SAME), 1),
    ((4, 16, 16, SAME), 16),
    ((4, 16, 16, (Axis(12, 1), Axis(12, 1))), 1),
    ((4, 3, 16, (Axis(16, 4, 4), Axis(16, 4, 4))), 1),
    ((4, 2, 16, (Axis(27, 7, 2, 1, 3, 3), Axis(27, 7, 2, 1, 3, 3))), 1),
)  # fmt: skip
"""One of them is for every solver: ordinary, depthwise, pointwise, patches, a first layer with a stride."""
LEAVES = [solver for solver in solving(ConvProblem) if not isinstance(solver, Split)]


def one_of_each() -> list[Any]:
    """Of the generated cases of each solver and device one, the gradient of a filter where it has that."""
    found: dict[tuple[str, str], Any] = {}
    for case in test_solvers.cases():
        solver, pass_, _, _, _, device = case.values  # type: ignore[attr-defined]
        key = solver.name, device
        if key not in found or (pass_ is Pass.WGRAD and found[key].values[1] is not Pass.WGRAD):
            found[key] = case
    return list(found.values())


def generated() -> list[Any]:
    """Cases with the defaults they run under: all cases, each with one of the defaults in turn."""
    if not EVERY:
        return [pytest.param(*case.values, OTHER, id=case.id, marks=case.marks) for case in one_of_each()]
    names = itertools.cycle(("float64", "bfloat16", "meta"))
    return [
        pytest.param(*case.values, DEFAULTS[name], id=f"{case.id}-{name}", marks=case.marks)  # type: ignore[attr-defined]
        for case, name in zip(test_solvers.cases(), names, strict=False)
    ]


@pytest.mark.parametrize(("solver", "pass_", "dims", "dtype", "precision", "device", "defaults"), generated())
def test_generated_problems(
    solver: Solver, pass_: Pass, dims: int, dtype: str, precision: str, device: str, defaults: Any
) -> None:
    with caller(defaults):
        test_solvers.test_a_solver_computes_what_it_supports(solver, pass_, dims, dtype, precision, device)


def layer(solver: Solver, pass_: Pass) -> ConvProblem | None:
    """The first layer that ``solver`` takes on a CPU."""
    for dtype in sorted(solver.dtypes, reverse=True):
        for (batch, inputs, outputs, axes), groups in LAYERS:
            p = ConvProblem(pass_, batch, inputs, outputs, axes, groups, dtype=dtype)
            last = replace(p, layouts=("channels_last",) * 3, constant_weight=pass_ is Pass.FPROP)
            for form in (p, last):
                if not solver.why_not(form):
                    return form
    return None


@pytest.mark.parametrize("solver", [s for s in LEAVES if "cpu" in s.devices], ids=lambda s: s.name)
@pytest.mark.parametrize("pass_", list(Pass) if EVERY else [Pass.WGRAD], ids=lambda x: x.value)
def test_work_that_is_shared_out(solver: Solver, pass_: Pass) -> None:
    """On layers that are large enough for scratch of every kind, as the generated ones seldom are."""
    p = layer(solver, pass_)
    if p is None:
        pytest.skip(f"{solver.name} takes no such layer")
    configs = list(solver.configs(p))
    some = configs if EVERY else configs[:: max(1, len(configs) // 3)] + configs[-1:]
    with caller(OTHER):
        for c in some:
            check(solver, p, c, ((p.layout("x"), 0), (p.layout("w"), 0), (p.layout("y"), 0)), accumulate=False)


INTERPRETED = [
    ("direct_gemm", Pass.DGRAD, SMALL),
    ("polyphase", Pass.FPROP, CUT),
    ("implicit_gemm", Pass.FPROP, SMALL),
    ("winograd_gemm", Pass.FPROP, SMALL),
    ("implicit_gemm", Pass.WGRAD, SMALL),
    ("polyphase", Pass.WGRAD, CUT),
    ("winograd_gemm", Pass.WGRAD, SMALL),
]


@interpreted
@pytest.mark.parametrize(("name", "pass_", "axes"), INTERPRETED if EVERY else INTERPRETED[:2])
def test_kernels_of_gpus_in_the_interpreter(name: str, pass_: Pass, axes: tuple[Axis, ...]) -> None:
    solver, p = get(name), ConvProblem(pass_, 2, 8, 8, axes, device="cuda:any")
    c = next(iter(solver.configs(p)))
    with caller(OTHER):
        check(solver, replace(p, device="cpu"), c, PLAIN, accumulate=False)


@emulated
@pytest.mark.skipif(not EVERY, reason="compiles CUDA C++ for a CPU")
@pytest.mark.parametrize("pass_", list(Pass), ids=lambda x: x.value)
def test_kernels_of_gpus_emulated(pass_: Pass) -> None:
    from tests.solvers import test_summed_fft as emulation

    p = ConvProblem(pass_, 2, *emulation.CHANNELS["few outputs"], (Axis(14, 5), Axis(14, 5)))
    with caller(OTHER):
        emulation.check_config(p, next(iter(emulation.SOLVER.configs(p))), backwards=False)


@pytest.mark.parametrize("solver", [s for s in LEAVES if "cpu" in s.devices], ids=lambda s: s.name)
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_tensor_of_another_type_is_not_bound(solver: Solver, wrong: int) -> None:
    """Kernels take addresses: a type that is not the problem's would be read as if it were."""
    p = next(filter(None, (layer(solver, pass_) for pass_ in Pass)), None)
    if p is None:
        pytest.skip(
            f"{solver.name}: {test_solvers.lacking(solver, next(iter(solver.passes))) or 'takes no such layer'}"
        )
    roles = (*p.operands, p.result)
    tensors = [torch.zeros(p.shape(role), dtype=p.torch_dtype(role)) for role in roles]
    tensors[wrong] = tensors[wrong].double()
    with pytest.raises(ValueError, match=f"{solver.name}: {roles[wrong]} is torch.float64, in the problem torch."):
        solver.bind_checked(p, next(iter(solver.configs(p))), *tensors)
