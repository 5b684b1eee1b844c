"""Copies of operands, so that several short launches can be timed as one and each finds its data where a step has it.

A GPU's events tell times to a part of a microsecond and add some of their own, so one launch of a few microseconds
cannot be told from one that takes a tenth longer. The time of several launches one after the other can. If all read the
same tensors, every one but the first would find them in the second cache. So each has copies of its own, and the cache
is filled with other data once before the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise.problems.base import Problem
from tilewise.problems.operands import Tensors

__all__ = ["MOST_BYTES", "Copies"]

MOST_BYTES = 256 << 20
"""Bytes of all copies of a problem's operands at the most."""
SHARE = 16
"""They take at most this part of the device's free memory."""


class Copies:
    """Copies of the operands of ``problem``, as many as are asked for within :data:`MOST_BYTES`.

    Every launch has the same results, and the same operand of role ``shared``: the one that a step has just written,
    which stays in the second cache from launch to launch, as far as it fits. Copies lie in memory as the tensors do:
    with the same strides, and as far from a multiple of 512 bytes. They are made when first asked for, and are there
    as long as this object.

    Example::

        copies = Copies(problem, tensors)
        calls = copies.calls(bound, None, 8, new=True)
    """

    def __init__(self, problem: Problem, tensors: Tensors, shared: str | None = None) -> None:
        self._problem, self._shared = problem, shared
        self._made = [tensors]

    def of(self, count: int) -> list[Tensors]:
        """Tensors for ``count`` launches, the original ones first; for fewer where memory holds no more."""
        while len(self._made) < min(count, self.most):
            operands = tuple(map(self._copied, self._problem.operands, self._made[0].operands))
            self._made.append(self._made[0]._replace(operands=self._problem.arranged(operands)))
        return self._made[:count]

    def calls(
        self, bound: Callable[..., object], bias: torch.Tensor | None, count: int, *, new: bool
    ) -> list[Callable[[], object]]:
        """``count`` calls of ``bound``, or fewer, as :meth:`Tensors.call` makes them."""
        return [tensors.call(bound, bias, new=new) for tensors in self.of(count)]

    @property
    def most(self) -> int:
        """The most launches for which there are tensors. One where the plans may keep a prepared operand."""
        if self._problem.constant_operand:
            return 1
        pairs = zip(self._problem.operands, self._made[0].operands, strict=True)
        each = sum(_extent(t) * t.element_size() for role, t in pairs if role != self._shared)
        device, made = self._made[0].device, len(self._made)
        limit = MOST_BYTES
        if device.type == "cuda":
            limit = min(limit, torch.cuda.mem_get_info(device)[0] // SHARE + (made - 1) * each)
        return max(made, 1 + limit // max(each, 1))

    def _copied(self, role: str, t: torch.Tensor) -> torch.Tensor:
        """A copy that lies as ``t`` does; itself where launches share it, or where its elements overlap."""
        if role == self._shared or any(not step and size > 1 for size, step in zip(t.shape, t.stride(), strict=True)):
            return t
        before = t.data_ptr() % 512 // t.element_size()
        memory = torch.empty(before + _extent(t), dtype=t.dtype, device=t.device)
        return memory.as_strided(t.shape, t.stride(), before).copy_(t)


def _extent(t: torch.Tensor) -> int:
    """Elements from the first of a tensor to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
