"""Every solver of matrix products against float64, on drawn sizes, storage and gaps: a new file needs no edit here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.products import fill, memory_of, products

from tilewise.machine.device import device_name
from tilewise.machine.torch_state import fp32_precision
from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import Solver, SolverUnavailable, Split, get, solving

LEAVES = [solver for solver in solving(GemmProblem) if not isinstance(solver, Split)]
GUARD = 512
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
CONFIGS = 4


def cases() -> list[Any]:
    """Every device, type and precision of every solver."""
    found = []
    for solver in LEAVES:
        for device in sorted(solver.devices):
            for dtype in sorted(solver.dtypes):
                if dtype not in dtypes_on(solver, device):
                    continue
                marks = [pytest.mark.gpu] if device == "cuda" else []
                for precision in ("ieee", "tf32") if device == "cuda" and dtype == "fp32" else ("ieee",):
                    name = f"{solver.name}-{dtype}-{precision}-{device}"
                    found.append(pytest.param(solver, dtype, precision, device, id=name, marks=marks))
    return found


def dtypes_on(solver: Solver, device: str) -> list[str]:
    """The types that it takes on a device, by some product."""
    able = []
    for dtype in sorted(solver.dtypes):
        for op in ("NN", "NT", "TN"):
            p = GemmProblem(8, 64, 4096, op, dtype=dtype, device="cpu" if device == "cpu" else "cuda:any")
            if not [reason for reason in solver.why_not(p) if "takes fp32" in reason]:
                able.append(dtype)
                break
    return able


def poisoned(size: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A workspace of exactly ``size`` bytes in which every number is NaN, and the buffer that holds it and a guard."""
    buffer = torch.full((size + GUARD + 256,), 0xFF, dtype=torch.uint8, device=device)
    start = -buffer.data_ptr() % 256
    buffer = buffer[start : start + size + GUARD]
    return (buffer[:size] if size else None), buffer


def check(solver: Solver, p: GemmProblem, c: Config, offsets: tuple[int, int, int]) -> bool:
    """Compute ``p`` into memory full of NaN and compare; whether the config can be bound."""
    a, b = (fill(memory_of(p, role, offset)[0], i) for i, (role, offset) in enumerate(zip("ab", offsets, strict=False)))
    out, base = memory_of(p, "c", offsets[2])
    want, scale = p.reference(a, b), p.reference(a.double().square(), b.double().square()).sqrt()
    if p.accumulate:
        fill(out, 5)
        want, scale = want + out.double(), scale + out.double().abs()
    bias = []
    if p.bias:
        whole = torch.empty(p.n + 3, dtype=p.torch_dtype("c"), device=a.device)
        bias = [fill(whole, 6)[3:]]
        want, scale = want + bias[0].double(), scale + bias[0].double().abs()
    outside = torch.ones_like(base, dtype=torch.bool)
    outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    try:
        run = solver.bind(p, c, a, b, None if solver.own_output else out)
    except SolverUnavailable:
        assert p.device_type == "cuda"
        return False
    workspace, buffer = poisoned(solver.workspace(p, c), a.device)
    with fp32_precision(p.device_type, "matmul", p.precision):
        result = run(a, b, None if solver.own_output else out, workspace, *bias)
    assert bool((buffer[-GUARD:] == 0xFF).all()), "wrote past its workspace"
    assert bool(base[outside].isnan().all()), "wrote outside of its result"
    if not solver.own_output:
        assert result.data_ptr() == out.data_ptr()
    gap = (result.double() - want).abs()
    scale = torch.maximum(scale, want.abs())  # a result of many standard deviations is rounded by its own size
    bound = solver.error_bound[p.precision] if p.dtype == "fp32" else 4 * ROUNDING[p.dtype]
    assert bool((gap <= bound * (scale + 1e-3)).all()), f"{p.key} {c}: {float((gap / (scale + 1e-3)).max()):.1e}"
    return True


@pytest.mark.parametrize(("solver", "dtype", "precision", "device"), cases())
def test_a_solver_computes_what_it_supports(solver: Solver, dtype: str, precision: str, device: str) -> None:
    name = device if device == "cpu" else device_name(torch.device("cuda"))
    bound = []

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
    @given(data=st.data(), p=products(dtype, name, precision, thin=solver.name.startswith("thin"), deep=True))
    def drawn(data: st.DataObject, p: GemmProblem) -> None:
        p = replace(p, alignment=(p.torch_dtype("a").itemsize,) * 3)
        if data.draw(st.booleans(), "dense"):
            p = replace(p, leading=(0, 0, 0), batch=0, alignment=(16, 16, 16))
        if solver.accumulates and data.draw(st.booleans(), "accumulate"):
            p = replace(p, accumulate=True, out_dtype="fp32")
        if solver.why_not(p):
            return
        configs = list(solver.configs(p))[:CONFIGS]
        if not configs:
            return
        c = data.draw(st.sampled_from(configs))
        p = replace(p, bias=solver.does_add_bias(p, c) and data.draw(st.booleans(), "bias"))
        aligned = p.alignment[0] == 16
        offsets = tuple(0 if aligned else data.draw(st.sampled_from((0, 1, 3))) for _ in range(3))
        bound.append(check(solver, p, c, (offsets[0], offsets[1], offsets[2])))

    drawn()
    assert any(bound), "nothing was drawn that it can solve"


@pytest.mark.parametrize("solver", LEAVES, ids=lambda s: s.name)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(p=st.one_of(products(), products(thin=True)))
def test_declarations_agree(solver: Solver, p: GemmProblem) -> None:
    if solver.why_not(p):
        return
    for c in solver.configs(p):
        assert Config.from_key(c.key) == c
        assert solver.workspace(p, c) >= 0
        cost = solver.cost(p, c)
        assert cost.flops >= p.flops
        assert 0 < cost.efficiency <= 1
        assert not solver.declarations().get("passes")


@pytest.mark.parametrize("op", ["NN", "NT", "TN"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_thin_products_with_vectors_of_every_length(op: str, lanes: int) -> None:
    solver = get("thin_gemm")
    for m, n, k, columns in ((3, 70, 33, 1), (70, 13, 90, 0), (1, 1, 1, 1), (5, 129, 2100, 1), (130, 17, 3, 0)):
        p = GemmProblem(m, n, k, op, bias=True)
        for tile in ((3, 2), (1, 1), (2, 4)):
            c = Config(lanes=lanes, tile=tile, columns=columns, threads=2, team="own")
            assert check(solver, p, c, (0, 0, 0))


def test_a_thin_product_gives_the_same_bits_on_any_number_of_threads() -> None:
    solver, p = get("thin_gemm"), GemmProblem(17, 512, 300, "NT")
    a, b = (fill(memory_of(p, role)[0], 1) for role in "ab")
    results = []
    for threads in (1, 2, 3):
        out = torch.full(p.shape("c"), math.nan, dtype=torch.float32)
        c = Config(lanes=8, tile=(3, 4), columns=1, threads=threads, team="own")
        results.append(solver.bind(p, c, a, b, out)(a, b, out, None))
    assert all(torch.equal(result, results[0]) for result in results)


def test_nan_and_infinity_stay_where_they_are() -> None:
    solver, p = get("thin_gemm"), GemmProblem(5, 64, 40, "NN")
    a, b = (fill(memory_of(p, role)[0], 1) for role in "ab")
    a[1, 3], b[7, 9] = math.nan, math.inf
    for c in solver.configs(p):
        out = torch.zeros(p.shape("c"), dtype=torch.float32)
        got = solver.bind(p, c, a, b, out)(a, b, out, None)
        want = (a.double() @ b.double()).float()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize(
    ("p", "says"),
    [
        (GemmProblem(8, 8, 8, "TT"), "not TT"),
        (GemmProblem(8, 8, 8, batch=2), "not a batch"),
        (GemmProblem(300, 300, 8), "at most 128 rows or columns, not 300 and 300"),
        (GemmProblem(8, 8, 8, dtype="bf16"), "bf16"),
        (GemmProblem(80, 80, 8, device="cuda:Some GPU"), "at most 64 rows or columns on a GPU, not 80 and 80"),
    ],
)
def test_thin_products_say_what_they_do_not_take(p: Problem, says: str) -> None:
    assert any(says in reason for reason in get("thin_gemm").why_not(p))


@pytest.mark.parametrize("change", [{"lanes": 5}, {"tile": (9, 1)}, {"tile": 3}, {"columns": 2}, {"turned": 1}])
def test_configs_that_are_none_are_refused(change: dict[str, Any]) -> None:
    solver, p = get("thin_gemm"), GemmProblem(4, 64, 32, "NN")
    a, b, out = (memory_of(p, role)[0] for role in "abc")
    c = Config(**{"lanes": 8, "tile": (4, 3), "columns": 1, "threads": 1, **change})
    with pytest.raises(SolverUnavailable, match="is no config of"):
        solver.bind(p, c, a, b, out)
