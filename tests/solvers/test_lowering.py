"""Lowering in any blocks: the generated tests see only the configs that small problems offer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.solvers.test_solvers import Memory, check
from tests.strategies import problems, with_memory

from tilewise import solvers
from tilewise.plan import Config
from tilewise.problem import ConvProblem
from tilewise.solvers._gather import Order

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
