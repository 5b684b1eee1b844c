"""Lowering in any blocks: the generated tests see only the configs that small problems offer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.solvers.test_solvers import Memory, check
from tests.strategies import problems, with_memory

from tilewise import solvers
from tilewise.plan import Config
from tilewise.planner.search.estimate import estimate_ms
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.lowering._gather import Order

TYPES = ("lowering_type1", "lowering_type2", "lowering_type3")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_block_of_images_and_rows(name: str, dtype: str, data: st.DataObject) -> None:
    solver = solvers.get(name)
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(problems(dtype=dtype), lambda p: not solver.why_not(p)), "problem"
    )
    p, forms = found
    order = data.draw(st.sampled_from([each.value for each in Order]), "order")
    images = data.draw(st.integers(1, p.batch), "images")
    rows = data.draw(st.integers(0, 6), "rows") if images == 1 and not Order(order).merges else 0
    c = Config(block=images, order=order, rows=rows) if rows else Config(block=images, order=order)
    check(solver, p, c, forms, accumulate=False)


@pytest.mark.parametrize("stride", [1, 3, 9])
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_kernel_as_large_as_the_image_is_one_product_without_a_copy(layout: str, pass_: Pass, stride: int) -> None:
    gemm, axis = solvers.get("gemm"), Axis(9, 9, stride)
    p = ConvProblem(pass_, 6, 4, 8, (axis, axis), layouts=(layout, layout, layout))
    assert not gemm.why_not(p)
    (config,) = gemm.configs(p)
    assert gemm.workspace(p, config) == 0
    assert gemm.cost(p, config).kernels == 1
    for accumulate in (False, True):
        check(gemm, replace(p, accumulate=accumulate), config, ((layout, 0),) * 3, accumulate=accumulate)


def test_one_window_of_a_larger_image_leaves_the_rest_of_its_gradient_zero() -> None:
    gemm = solvers.get("gemm")
    p = ConvProblem(Pass.DGRAD, 3, 2, 5, (Axis(7, 4, 5), Axis(6, 4, 4, 1, -1, 0)))
    for config in gemm.configs(p):
        check(gemm, p, config, (("contiguous", 0),) * 3, accumulate=False)


@pytest.mark.parametrize(("size", "kernel", "inputs", "outputs"), [(12, 3, 5, 7), (9, 4, 1, 3)])
def test_cost_counts_what_the_paper_counts(size: int, kernel: int, inputs: int, outputs: int) -> None:
    """Hadjis et al. 2015, Figure 6: places by lowered taps by lifted taps."""
    n, k, m, batch = size, kernel, size - kernel + 1, 3
    p = ConvProblem(Pass.FPROP, batch, inputs, outputs, (Axis(n, k), Axis(n, k)))
    for name, places in zip(TYPES, (m * m, n * m, n * n), strict=True):
        for c in solvers.get(name).configs(p):
            assert solvers.get(name).cost(p, c).flops == 2 * batch * places * k * k * inputs * outputs


def test_an_estimate_chooses_by_the_channel_ratio() -> None:
    """Appendix A: many inputs and few outputs favour lifting, the reverse lowering."""
    profile = {"copy": 25e6, "fp32": 150e6, "tf32": 150e6, "bf16": 150e6, "fp16": 150e6, "kernel": 1e-3}
    axis = Axis(27, 5, before=2, after=2)
    for inputs, outputs, best in ((256, 4, "lowering_type3"), (4, 256, "lowering_type1")):
        p = ConvProblem(Pass.FPROP, 16, inputs, outputs, (axis, axis))
        least = {
            name: min(estimate_ms(p, solvers.get(name).cost(p, c), profile) for c in solvers.get(name).configs(p))
            for name in TYPES
        }
        assert min(least, key=least.__getitem__) == best, least
