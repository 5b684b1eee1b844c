"""Products: every batching of images and groups, torch's precision flags kept and put back, scratch as configured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.buffers import Strided
from tilewise.solvers.common.matmul import add_over_images, as_matrix, at_precision, library_scratch, multiply, straight

PROBLEM = ConvProblem(Pass.FPROP, 2, 4, 4, (Axis(9, 3),))
read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    saved = torch.get_float32_matmul_precision()
    yield
    for backend in ("cuda", "mkldnn"):
        write(backend, "matmul", "none")
        write(backend, "all", "none")
    write("generic", "all", "none")
    torch.set_float32_matmul_precision(saved)


@settings(max_examples=60)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
    orders=st.tuples(*[st.permutations(range(4))] * 2),
    columns=st.booleans(),
    expanded=st.booleans(),
    add=st.booleans(),
)
def test_products_of_any_strides(
    sizes: tuple[int, ...], orders: tuple[list[int], list[int]], columns: bool, expanded: bool, add: bool
) -> None:
    n, g, rows, depth, cols = sizes

    def laid(shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
        """Memory in any order of images and groups, rows or columns innermost."""
        outer = [i for i in order if i < 2]
        inner = [2, 3] if order.index(2) < order.index(3) else [3, 2]
        memory = [*outer, *inner]
        tensor = torch.randn([shape[i] for i in memory])
        return tensor.permute([memory.index(i) for i in range(4)])

    a = laid((1 if expanded else n, g, rows, depth), orders[0]).expand(n, -1, -1, -1)
    b = laid((n, g, depth, cols), orders[1])
    out = torch.randn(n, g, cols, rows).mT if columns else torch.randn(n, g, rows, cols)
    want = a.double() @ b.double() + (out.double() if add else 0)
    if not add:
        out.fill_(torch.nan)
    other = out.clone()
    multiply(a, b, out, add)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    views = [Strided(tuple(t.shape), as_matrix(tuple(t.shape), t.stride())) for t in (a, b, other)]
    p = replace(PROBLEM, accumulate=add)
    assert straight(p, *views, a.device)(b, a, other, None) is other
    torch.testing.assert_close(other.double(), want, rtol=1e-5, atol=1e-5)
    total = torch.full((1, g, rows, cols), torch.nan)
    add_over_images(a, b, total, False)
    torch.testing.assert_close(total[0].double(), (a.double() @ b.double()).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("state", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("inherited", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_products_run_in_the_convolutions_precision(state: str, inherited: str, precision: str) -> None:
    p = replace(PROBLEM, precision=precision, device="cuda:any")
    write("generic", "all", inherited)
    write("cuda", "matmul", state)
    before = read("cuda", "matmul")
    seen = []

    def run(a: torch.Tensor, b: torch.Tensor, out: object, workspace: object) -> torch.Tensor:
        seen.append(read("cuda", "matmul"))
        return a

    a = torch.zeros(1)
    at_precision(p, run)(a, a, None, None)
    assert (seen == ["tf32"]) == (precision == "tf32")
    assert read("cuda", "matmul") == before
    write("generic", "all", "ieee")
    if state == "none":
        assert read("cuda", "matmul") == "ieee", "the link to the setting for all is kept"


def test_the_flag_is_put_back_when_a_product_raises() -> None:
    def run(a: torch.Tensor, b: torch.Tensor, out: object, workspace: object) -> torch.Tensor:
        raise RuntimeError("no such luck")

    write("mkldnn", "matmul", "bf16")
    with pytest.raises(RuntimeError, match="no such luck"):
        at_precision(PROBLEM, run)(torch.zeros(1), torch.zeros(1), None, None)
    assert read("mkldnn", "matmul") == "bf16"


def test_torchs_matmul_flag_does_not_reach_convolutions() -> None:
    from tilewise import solvers

    torch.set_float32_matmul_precision("medium")  # bf16 products on processors that have them
    p = ConvProblem(Pass.FPROP, 4, 64, 64, (Axis(16, 3), Axis(16, 3)))
    a, b = (torch.randn(p.shape(role)) for role in p.operands)
    want = p.reference(a, b)
    for name in ("lowering_type1", "fft"):
        solver = solvers.get(name)
        c = next(iter(solver.configs(p)))
        out = torch.empty(p.shape("y"))
        workspace = torch.empty(solver.workspace(p, c), dtype=torch.uint8)
        solver.bind(p, c, a, b, out)(a, b, out, workspace)
        assert float((out.double() - want).norm() / want.norm()) < 2e-6
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(
    ("config", "size"), [(":4096:8", 32 << 20), (":16:8", 128 << 10), (":4096:2:16:8", (8 << 20) + (128 << 10))]
)
def test_cublas_scratch_is_what_its_variable_says(config: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    p = replace(PROBLEM, device="cuda:any")
    assert library_scratch(p) == size
    assert library_scratch(p, streams=3) == 3 * size
