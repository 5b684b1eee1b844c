"""Matrix products: the problem, its notation, its value in float64."""

from tilewise.problems.gemm.checks import errors_of
from tilewise.problems.gemm.layouts import OPS
from tilewise.problems.gemm.notation import format_product
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.kinds import Kind, register


def _small_example(device: str) -> GemmProblem:
    return GemmProblem(4, 8, 8, "NT", device=device)


register(
    Kind(
        GemmProblem,
        "matrix products",
        "aten_gemm",
        errors_of,
        tasks=tuple(op.lower() for op in OPS),
        notation=format_product,
        small_example=_small_example,
    )
)
