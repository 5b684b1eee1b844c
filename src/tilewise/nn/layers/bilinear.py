"""``nn.Bilinear`` as a kind of modules: ``y = x1 W x2`` for every output, as one matrix product.

torch multiplies each output's matrix by itself, and its gradients element by element. The same sums are one product of
a linear layer, and what is left takes as many operations as that product has numbers on one side:

- ``outer``: the products of all pairs of numbers of a row of both inputs, times W as a matrix of outputs by pairs;
- ``last``: the second input times W as a matrix of outputs and first numbers by second numbers, whose result is
  multiplied by the first input.

The one that makes the smaller tensor is taken. Its product is planned as that of any linear layer. Where no plan gains,
torch's own product in this place may still be faster than torch's own function: that is measured for each call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from tilewise.comm.agreement import several_ranks
from tilewise.machine.device import is_capturing, matmul_precision
from tilewise.machine.recent import Recent
from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.call import autocast_dtype, disturbed, function_mode_watches, is_plain
from tilewise.nn.layers.kinds import Call, Layer, ModuleKind, register
from tilewise.nn.layers.layer import guard_of
from tilewise.nn.layers.linear.call import LinearCall
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.linear.run import BY_TORCH as LINEAR
from tilewise.nn.layers.overrides import stand_ins
from tilewise.nn.layers.plan_table import PlanTable, planning
from tilewise.nn.layers.swaps import copies_itself, swapped
from tilewise.nn.layers.weights import Weights
from tilewise.planner.measuring.times import interleaved
from tilewise.problems.base import ALIGNMENT, DTYPE_NAMES
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["BY_TORCH", "BilinearCall", "BilinearLayer", "Bilinears", "Latest", "by_product", "why_torchs"]

FORWARD = nn.Bilinear.forward
CODE = FORWARD.__code__
"""torch's own code, as it is when this file is imported."""
BY_TORCH: Any = torch._C._VariableFunctions.bilinear
"""torch's own function, whatever stands in its place."""
STAND_INS = stand_ins("bilinear")
"""What tilewise itself puts in the place of torch's function."""
MOST_BYTES = 64 << 20
"""Bytes of the tensor between the product and the rest. With more of them, calls are torch's."""
MARGIN = 0.95
"""The product takes torch's place where it takes less than this share of torch's time."""
BUDGET_MS, LEAST, MOST = 100.0, 3, 9
"""Milliseconds for timing one call, and the least and most rounds."""
MOST_CALLS = 256
FACT = "bilinear"
"""The name under which the report tells how many calls were timed, and how many run by products."""

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class BilinearCall:
    """One call of a bilinear layer, as far as plans depend on it.

    The weight is (``outputs``, ``first``, ``second``), and both inputs have ``rows`` as matrices. ``alignment`` is that
    of second input and weight in bytes. ``needs`` says which of first input, second input, weight and bias need
    gradients.
    """

    rows: int
    first: int
    second: int
    outputs: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool, bool, bool]
    deterministic: bool
    precision: str
    alignment: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first input as a matrix."""
        return self.rows, self.first

    @property
    def outer(self) -> bool:
        """Whether the pairs of both inputs' numbers are fewer than the second input's products with the weight."""
        return self.second <= self.outputs

    @property
    def between(self) -> int:
        """Bytes of the tensor between the product and the rest."""
        return self.rows * self.first * min(self.second, self.outputs) * self.dtype.itemsize

    @property
    def product(self) -> LinearCall:
        """The linear layer that is its product."""
        of_first, of_second, of_w, of_b = self.needs
        return LinearCall(
            shape=(self.rows, self.first * self.second if self.outer else self.second),
            outputs=self.outputs if self.outer else self.outputs * self.first,
            bias=self.bias and self.outer,
            dtype=self.dtype,
            device=self.device,
            needs=(of_second or (of_first and self.outer), of_w, of_b and self.outer),
            deterministic=self.deterministic,
            precision=self.precision,
            alignment=(ALIGNMENT if self.outer else self.alignment[0], self.alignment[1]),
        )


@dataclass(frozen=True, slots=True)
class BilinearRun:
    """Whether one kind of call runs by a product, of which some passes may run by plan."""

    planned: bool


@dataclass(slots=True)
class Latest:
    """Whether calls like the latest one run by a product, and a check that a call is like it."""

    by_product: bool
    guard: Callable[..., bool]
    has_bias: bool
    grad: bool
    deterministic: bool
    precision: str | None

    def is_like(self, x1: torch.Tensor, x2: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
        """Whether a call is of this kind, as torch is set now."""
        return (
            (self.guard(x1, x2, w, b) if self.has_bias else b is None and self.guard(x1, x2, w))
            and torch.is_grad_enabled() is self.grad
            and torch._C._get_deterministic_algorithms() is self.deterministic
            and forward_ad._current_level < 0
            and (self.precision is None or matmul_precision() == self.precision)
            and not (torch._C._is_torch_function_mode_enabled() and function_mode_watches())
        )


def why_torchs(x1: torch.Tensor, x2: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> str:
    """Why the bilinear layer of these tensors is left to torch; empty where it may be planned."""
    tensors = (x1, x2, w) if b is None else (x1, x2, w, b)
    if not all(is_plain(t) for t in tensors):
        return "called with a tensor of a class of its own"
    if x1.device.type not in ("cpu", "cuda") or any(t.device != x1.device for t in tensors):
        return "called with tensors on several devices, or on one that is neither a CPU nor CUDA"
    if x1.dtype not in DTYPE_NAMES or any(t.dtype is not x1.dtype for t in tensors):
        return f"computes in {x1.dtype}, or in several types"
    if autocast_dtype(x1.device) is not None:
        return "called under autocast"
    fits = w.dim() == 3 and x1.dim() > 0 and x1.shape[:-1] == x2.shape[:-1]
    if not fits or (x1.shape[-1], x2.shape[-1]) != w.shape[1:] or (b is not None and b.shape != w.shape[:1]):
        return "called with sizes that do not fit"
    if x1.numel() == 0 or x2.numel() == 0 or w.numel() == 0:
        return "called with an empty tensor"
    if not w.is_contiguous() or (b is not None and not b.is_contiguous()):
        return "called with a weight or bias that is not contiguous"
    call = describe(x1, x2, w, b)
    return "" if call.between <= MOST_BYTES else f"its products take {call.between >> 20} MiB between them"


def describe(x1: torch.Tensor, x2: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> BilinearCall:
    """The call of these tensors, which may be planned."""
    grad = torch.is_grad_enabled()
    asks = x1.device.type == "cuda" and x1.dtype is torch.float32
    outputs, first, second = w.shape
    return BilinearCall(
        rows=math.prod(x1.shape[:-1]),
        first=first,
        second=second,
        outputs=outputs,
        bias=b is not None,
        dtype=x1.dtype,
        device=x1.device,
        needs=(
            grad and x1.requires_grad,
            grad and x2.requires_grad,
            grad and w.requires_grad,
            grad and b is not None and b.requires_grad,
        ),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=matmul_precision() if asks else "ieee",
        alignment=(
            math.gcd(x2.data_ptr(), ALIGNMENT) if x2.is_contiguous() else ALIGNMENT,
            math.gcd(w.data_ptr(), ALIGNMENT),
        ),
    )


def by_product(
    x1: torch.Tensor, x2: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, product: Product = LINEAR
) -> torch.Tensor:
    """A bilinear layer as a linear one and what is left, with autograd; ``product(x, w, b)`` computes the linear one.

    ``x1`` is (..., first), ``x2`` (..., second), ``w`` (outputs, first, second), ``b`` (outputs) or ``None``, and the
    result (..., outputs).
    """
    outputs, first, second = w.shape
    leading = x1.shape[:-1]
    x1, x2 = x1.reshape(-1, first), x2.reshape(-1, second)
    if second <= outputs:
        pairs = (x1.unsqueeze(2) * x2.unsqueeze(1)).view(-1, first * second)
        y = product(pairs, w.view(outputs, first * second), b)
    else:
        of_second = product(x2, w.view(outputs * first, second), None).view(-1, outputs, first)
        y = torch.bmm(of_second, x1.unsqueeze(2)).squeeze(2)
        y = y if b is None else y + b
    return y.view(*leading, outputs)


class BilinearLayer:
    """A bilinear layer with plans in a table: ``layer(x1, x2, w, b)``, or ``NotImplemented`` where it is torch's.

    Copies of a module share it. It holds no tensor.
    """

    def __init__(self, plan_table: PlanTable) -> None:
        self.plan_table = plan_table
        self._linear = LinearLayer(plan_table)
        self._runs: Recent[BilinearCall, BilinearRun] = Recent(MOST_CALLS)
        self.latest: Latest | None = None

    @property
    def name(self) -> str:
        """The module's name in its model, for a profiler to show."""
        return self._linear.name

    @name.setter
    def name(self, name: str) -> None:
        self._linear.name = name

    def __call__(self, x1: torch.Tensor, x2: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        latest = self.latest
        if latest is None or not latest.is_like(x1, x2, w, b):
            latest = self.find(x1, x2, w, b)
            if latest is None:
                return NotImplemented
            self.latest = latest
        return by_product(x1, x2, w, b, self._product) if latest.by_product else NotImplemented

    def find(self, x1: torch.Tensor, x2: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Latest | None:
        """What is to be known of this call; ``None`` where it is torch's at this moment."""
        if disturbed() or why_torchs(x1, x2, w, b):
            return None
        call = describe(x1, x2, w, b)
        run = self.resolve(call)
        if run is None:
            return None
        asks = call.device.type == "cuda" and call.dtype is torch.float32
        return Latest(
            by_product=run.planned,
            guard=guard_of(x1, x2, w, b),
            has_bias=b is not None,
            grad=torch.is_grad_enabled(),
            deterministic=call.deterministic,
            precision=call.precision if asks else None,
        )

    def problems(self, call: BilinearCall) -> Mapping[str, GemmProblem]:
        """The products of a call by the name of the pass of its linear layer."""
        return self._linear.problems(call.product)

    def resolve(self, call: BilinearCall) -> BilinearRun | None:
        """What runs such a call; ``None`` where it cannot be planned at this moment."""
        run = self._runs.get(call)
        if run is None:
            linear = self._linear.resolve(call.product)
            if linear is None or is_capturing(call.device):
                return None
            run = self._runs[call] = BilinearRun(linear.planned or self._wins(call))
        return run

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self._linear.forget()
        self._runs.clear()
        self.latest = None

    def _product(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The linear layer, by plans where there are some."""
        y = self._linear(x, w, b)
        return LINEAR(x, w, b) if y is NotImplemented else y  # type: ignore[no-any-return]

    def _wins(self, call: BilinearCall) -> bool:
        """Whether torch's own product is faster than torch's own bilinear function.

        Where nothing is measured, and among ranks, which must do alike, it is taken to be with gradients.
        """
        if several_ranks() or self.plan_table.options.rigor in ("estimate", "wisdom_only"):
            return any(call.needs)
        won = _measured(call)
        counts = self.plan_table.facts.setdefault(FACT, {"compared": 0, "kept": 0})
        counts["compared"] += 1
        counts["kept"] += won
        return won


@functools.lru_cache(MOST_CALLS)
def _measured(call: BilinearCall) -> bool:
    """Whether one product takes less time than torch's function, with the gradients that the call needs."""
    with planning(), undisturbed(), torch.set_grad_enabled(any(call.needs)):
        tensors = _example(call)
        dy = torch.ones(call.rows, call.outputs, dtype=call.dtype, device=call.device)
        wanted = [t for t in tensors if t is not None and t.requires_grad]

        def timed(compute: Callable[..., torch.Tensor]) -> Callable[[], object]:
            """A step of ``compute``."""

            def run() -> object:
                y = compute(*tensors)
                return torch.autograd.grad(y, wanted, dy) if wanted else y

            return run

        ways = [timed(BY_TORCH), timed(by_product)]
        torch_ms, product_ms = interleaved(ways, call.device, budget_ms=BUDGET_MS, least=LEAST, most=MOST)
    return product_ms < MARGIN * torch_ms


def _example(call: BilinearCall) -> Operands:
    """Tensors as the call has them."""

    def make(*shape: int) -> torch.Tensor:
        """A tensor of ordinary numbers."""
        numbers = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32, device=call.device)
        return numbers.to(call.dtype).view(shape)

    x1, x2 = make(call.rows, call.first), make(call.rows, call.second)
    w, b = make(call.outputs, call.first, call.second), make(call.outputs) if call.bias else None
    for t, need in zip((x1, x2, w, b), call.needs, strict=True):
        if t is not None:
            t.requires_grad_(need)
    return x1, x2, w, b


class Bilinears(ModuleKind):
    """``nn.Bilinear`` itself. Classes derived from it may compute anything."""

    classes = (nn.Bilinear,)
    named = True
    under_limits = False  # the product's result is larger than anything that torch keeps
    problems = "gemm"
    in_its_own_way = True

    def obstacle(self, module: nn.Module) -> str:
        """Why this module cannot be swapped: another class, or a forward or a function that is not torch's own."""
        kind = type(module)
        if kind is not nn.Bilinear:
            return f"is a {kind.__name__}, which may compute otherwise than the Bilinear it is derived from"
        if not _runs_torch():
            return "nn.Bilinear.forward or torch.nn.functional.bilinear is not torch's own"
        if "forward" in module.__dict__ and swapped(module) is None:
            return "has a forward set on the instance"
        return copies_itself(module)

    def layers(self, plan_table: PlanTable, weights: Weights) -> BilinearLayer:
        """The layer of a module. Nothing is kept of its weight."""
        return BilinearLayer(plan_table)

    def calls(
        self,
        module: Any,
        layers: BilinearLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        gradients_later: bool,
    ) -> tuple[list[tuple[Layer, Call]], str]:
        """The one call of a bilinear layer, or why it is left to torch."""
        x1, x2 = _arguments(*args, **kwargs)
        w, b = module.weight, module.bias
        reason = why_torchs(x1, x2, w, b)
        if reason:
            return [], reason
        call = describe(x1, x2, w, b)
        if gradients_later:
            call = replace(call, needs=(True, True, w.requires_grad, b is not None and b.requires_grad))
        return [(layers, call)], ""

    def forward(self, module: Any, layers: BilinearLayer) -> Callable[..., torch.Tensor]:
        """The module's ``forward``, by a product where it still runs torch's own code."""

        def forward(self: Any, input1: torch.Tensor, input2: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_dynamo_compiling() and type(self) is nn.Bilinear and _runs_torch():
                y = layers(input1, input2, self.weight, self.bias)
                if y is not NotImplemented:
                    return y  # type: ignore[no-any-return]
            return type(self).forward(self, input1, input2)  # type: ignore[no-any-return]

        return forward


def _arguments(input1: Any, input2: Any) -> tuple[Any, Any]:
    """The arguments of a forward by their places."""
    return input1, input2


def _runs_torch() -> bool:
    """Whether ``nn.Bilinear`` runs torch's own code and function."""
    same = nn.Bilinear.forward is FORWARD and FORWARD.__code__ is CODE
    function = torch.nn.functional.bilinear
    return same and (function is BY_TORCH or function in STAND_INS)


register(Bilinears())
