"""Stream-K products in Triton's interpreter against float64: stretches that end anywhere, views between NaN."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.products import check_launches, fill, memory_of, with_gaps

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.gemm.layouts import OPS
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.gemm._stream_k import Work, launches, unsupported, work_of, workspace
from tilewise.solvers.gemm._stream_k_configs import config_of, configs

PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
ROUNDING = {"fp32": 2e-6, "fp16": 2e-3}
PRODUCT = {"fp32": "tf32x3", "fp16": "native"}


def run(work: Work, place: str, offset: int = 0) -> None:
    """Compute into memory full of NaN, and compare; nothing outside the result is written."""
    check_launches(launches, work, place, offset, size=workspace(work), bound=ROUNDING[work.p.dtype] * 4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", ["NN", "NT", "TN", "TT"])
@settings(max_examples=4, deadline=None)
@given(
    sizes=st.sampled_from([(1, 40, 70), (17, 33, 200), (50, 3, 129), (65, 16, 64), (5, 130, 31), (40, 40, 300)]),
    programs=st.sampled_from([1, 2, 3, 5, 7, 40]), gaps=st.tuples(*[st.sampled_from((0, 3, 8))] * 3),
    batch=st.sampled_from([0, 1, 3]), pack=st.sampled_from(["", "a", "b", "ab"]), bias=st.booleans(),
    accumulate=st.booleans(), dtype=st.sampled_from(["fp32", "fp16"]), activation=st.sampled_from(ACTIVATIONS),
    width=st.sampled_from([16, 48]),
)  # fmt: skip
def test_stream_k_products(
    place: str, op: str, sizes: tuple[int, int, int], programs: int, gaps: tuple[int, int, int], batch: int, pack: str,
    bias: bool, accumulate: bool, dtype: str, activation: str, width: int,
) -> None:  # fmt: skip
    p = GemmProblem(*sizes, op, batch, dtype=dtype, bias=bias, activation="none" if accumulate else activation,
                    accumulate=accumulate, out_dtype="fp32" if accumulate else "")  # fmt: skip
    p = with_gaps(p, *gaps, align=2)
    run(Work(p, (32, width, 32), programs, PRODUCT[dtype], 4, 2, pack=pack), place, offset=1)


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.sampled_from([(1, 40, 170), (17, 33, 200), (50, 3, 129), (65, 16, 64)]), op=st.sampled_from(OPS),
    splits=st.integers(2, 5), batch=st.sampled_from([0, 2]), pack=st.sampled_from(["", "a", "b", "ab"]),
    dtype=st.sampled_from(["fp32", "fp16"]), width=st.sampled_from([16, 48, 96]),
)  # fmt: skip
def test_tiles_in_equal_parts(
    place: str,
    sizes: tuple[int, int, int],
    op: str,
    splits: int,
    batch: int,
    pack: str,
    dtype: str,
    width: int,
) -> None:
    p = with_gaps(GemmProblem(*sizes, op, batch, dtype=dtype, bias=True, activation="silu"), 0, 3, 3, align=2)
    steps = -(-p.k // 32)
    work = Work(p, (32, width, 32), 0, PRODUCT[dtype], 4, 2, min(splits, steps), pack)
    run(work, place, offset=1)


@pytest.mark.parametrize("place", PLACES)
def test_long_sums_are_added_up_outside_of_matrix_units(place: str) -> None:
    for programs in (1, 3):
        for width in (32, 48):
            run(Work(GemmProblem(17, 40, 2500, "NT"), (32, width, 64), programs, "tf32x3", 4, 2), place)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("width", [48, 80, 96])
def test_tiles_of_every_width_by_the_instructions_of_warpgroups(rows: int, width: int) -> None:
    for dtype in ("fp16", "fp32"):
        depth = 64 if dtype == "fp16" else 32
        for op, pack in (("NN", "b"), ("NN", "ab"), ("TN", "ab")):
            p = GemmProblem(1280, 65, 1025, op, dtype=dtype)
            run(Work(p, (rows, width, depth), 0, PRODUCT[dtype], 4, 3, 2, pack), "cuda")


def test_uneven_tiles_are_refused_where_numbers_are_read_by_themselves() -> None:
    for n, pack, right in ((65, "", False), (65, "b", True), (64, "", True)):
        p = GemmProblem(256, n, 128, "NN", dtype="bf16", device="cuda:any")
        packed = {"pack": pack} if pack else {}
        c = Config(tile=(64, 80, 64), programs=4, share="tiles", warps=4, stages=3, **packed)
        if right:
            assert work_of(p, c).tile == (64, 80, 64)
        else:
            with pytest.raises(ValueError, match="a power of two as columns, or pack=b would do"):
                work_of(p, c)
        assert all(tile[1] & (tile[1] - 1) == 0 or pack for tile, pack in _tiles_of(p)) or n % 8 == 0


def _tiles_of(p: GemmProblem) -> list[tuple[tuple[int, int, int], str]]:
    return [(work.tile, work.pack) for work in (work_of(p, c) for c in configs(p))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["stream_k_gemm", "thin_gemm"])
def test_kernels_that_start_early_wait_for_what_they_read(name: str, dtype: str) -> None:
    """Replays of a graph in which the workspace is full of NaN before each product."""
    device = device_name(torch.device("cuda"))
    for m, n, op in ((512, 33, "NN"), (33, 512, "NT"), (512, 9, "NN")):
        p = GemmProblem(m, n, 2048, op, dtype=dtype, device=device)
        solver = get(name)
        a, b = (fill(memory_of(p, role)[0], i) for i, role in enumerate("ab"))
        want = p.reference(a, b)
        for c in list(solver.configs(p))[:8]:
            out = torch.empty(p.shape("c"), dtype=p.torch_dtype("c"), device="cuda")
            run = solver.bind(p, c, a, b, out)
            workspace = torch.empty(max(1, solver.workspace(p, c)), dtype=torch.uint8, device="cuda")
            run(a, b, out, workspace)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(10):
                    workspace.fill_(0xFF)
                    out.fill_(math.nan)
                    run(a, b, out, workspace)
            for _ in range(5):
                graph.replay()
                gap = (out.double() - want).abs().max() / math.sqrt(p.k)
                assert float(gap) < (0.02 if dtype == "bf16" else 1e-5), c


@given(
    m=st.integers(1, 300), n=st.integers(1, 300), k=st.integers(1, 3000), programs=st.integers(1, 300),
    tile=st.sampled_from([(16, 16, 32), (64, 32, 64), (128, 128, 32)]),
)  # fmt: skip
def test_every_step_of_a_tile_has_one_program_and_every_part_one_place(
    m: int, n: int, k: int, programs: int, tile: tuple[int, int, int]
) -> None:
    """The stretches that the kernels work out, worked out one step at a time."""
    work = Work(GemmProblem(m, n, k), tile, programs, "tf32x3", 4, 2)
    quotient, remainder = divmod(work.total, work.used)
    assert quotient >= 1
    starts = [i * quotient + min(i, remainder) for i in range(work.used + 1)]
    assert starts[0] == 0
    assert starts[-1] == work.total
    parts: dict[int, list[tuple[int, int]]] = {}
    places = set()
    for program, (start, end) in enumerate(itertools.pairwise(starts)):
        began = start // work.steps
        for at in range(began, (end - 1) // work.steps + 1):
            first, last = max(start - at * work.steps, 0), min(end - at * work.steps, work.steps)
            parts.setdefault(at, []).append((first, last))
            if last - first < work.steps:
                place = (program, at > began)
                assert place not in places
                places.add(place)
    assert sorted(parts) == list(range(work.grid[0] * work.grid[1]))
    for found in parts.values():
        assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
        assert found[-1][1] == work.steps
    assert bool(places) == work.shared


@pytest.mark.parametrize(("dtype", "precision"), [("fp32", "ieee"), ("fp32", "tf32"), ("bf16", "ieee")])
def test_configs_are_read_back(dtype: str, precision: str) -> None:
    for m, n, k in ((1, 4096, 512), (33, 2560, 2560), (1760, 9, 10240), (256, 1024, 512), (512, 512, 65)):
        p = GemmProblem(m, n, k, dtype=dtype, precision=precision, device="cuda:Some GPU")
        solver, found = get("stream_k_gemm"), list(configs(p))
        assert found
        for c in found:
            work = work_of(p, c)
            assert (work.tile, work.programs or work.splits) == (c["tile"], c.get("programs") or c["splits"])
            assert config_of(work) == c
            assert solver.cost(p, c).flops >= p.flops
        products = {"ieee": ["tf32x3 ", "bf16x6 "], "tf32": ["tf32 "]}[precision] if dtype == "fp32" else [""]
        known = {
            f"stream_k_gemm {product}{share}"
            for product in products
            for share in ("tiles", "steps", "parts", "parts last")
        }
        known |= {f"{name} uneven" for name in known}
        assert {solver.family(c) for c in found if "pack" not in c} <= known


def test_what_is_not_taken_is_said() -> None:
    assert not unsupported(GemmProblem(4, 5, 6, batch=2))
    assert any("counts to" in reason for reason in unsupported(GemmProblem(4, 2**28, 2**10)))
    assert get("stream_k_gemm").why_not(GemmProblem(4, 5, 6)) == ["runs on cuda, not cpu"]


@pytest.mark.parametrize(
    "change",
    [
        {"tile": (16, 64)}, {"tile": (16, 64, 5)}, {"tile": (256, 256, 32)}, {"programs": 4097}, {"programs": 0},
        {"warps": 3}, {"stages": 9}, {"product": "tf32"}, {"share": "steps"}, {"more": 1}, {"share": "parts"},
        {"pack": "c"}, {"adds": "last"}, {"adds": "first"}, {"share": "parts", "splits": 40},
    ],
)  # fmt: skip
def test_configs_that_are_none_are_refused(change: dict[str, object]) -> None:
    solver, p = get("stream_k_gemm"), GemmProblem(4, 64, 128, device="cuda:Some GPU")
    a, b, out = (torch.empty(p.shape(role), dtype=torch.float32, device="meta") for role in "abc")
    values = {
        "tile": (64, 16, 32),
        "programs": 1,
        "share": "tiles",
        "product": "tf32x3",
        "warps": 4,
        "stages": 3,
        **change,
    }
    with pytest.raises(SolverUnavailable, match="is no config of"):
        solver.bind(p, Config(**values), a, b, out)  # type: ignore[arg-type]
