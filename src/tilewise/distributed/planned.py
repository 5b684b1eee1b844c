"""Computes a rank's own convolutions by plans, which all ranks find together for the problems of one step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.comm.agreement import gather
from tilewise.comm.peer_choice import PeerChoice
from tilewise.distributed.norms.choice import NormChoice
from tilewise.distributed.passes.contracts import Axes, Terms
from tilewise.distributed.passes.halo_choice import Call, Chosen, choose
from tilewise.distributed.passes.share import Share
from tilewise.distributed.passes.torch_passes import PaddingSplit, TorchPasses, split_padding
from tilewise.machine.device import conv_precision, device_name
from tilewise.nn.layers.bound_pass import BoundPass
from tilewise.nn.layers.call import Operand
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.strides import suggested_layout
from tilewise.nn.progress import showing
from tilewise.nn.ranks.together import plan_together
from tilewise.planner.options import MEASURING
from tilewise.problems.base import DTYPE_NAMES, layout_of
from tilewise.problems.conv.problem import ConvProblem, Pass

__all__ = ["PlannedPasses"]

Key = tuple[Any, ...]
MOST_KEPT = 4096
"""Kinds of calls that are looked up by their tensors. Where shapes change every step, further ones are not kept."""


class PlannedPasses(TorchPasses):
    """Convolutions by the plans of ``plan_table``, and by torch where there is no plan or torch is faster.

    Problems may differ between ranks: a rank at the image's border pads on one side, one inside the image does not.
    What differs by side is padded first, as torch does it, and the problem is that of the padded image, so that plans
    can be measured against torch's own choice. Nothing is planned while a step runs, since other ranks would wait for
    it: :meth:`record` notes the problems of a step, and :meth:`plan` plans them.
    """

    def __init__(self, plan_table: PlanTable) -> None:
        self.plan_table = plan_table
        self._bound: dict[Key, BoundPass | None] = {}
        self._seen: dict[ConvProblem, torch.device] | None = None
        self._calls: dict[Key, Call] = {}
        self.halos: dict[Key, tuple[Call, Chosen]] = {}
        """What was chosen for the terms of each layer's boxes."""
        self.exchanges: PeerChoice | None = None
        """How halos are exchanged, once that was measured."""
        self.norms: NormChoice | None = None
        """What computes norms over ranks, once that was measured."""
        self._deterministic = False

    def record(self, step: Callable[[], object]) -> None:
        """Run ``step`` by torch and note its problems."""
        self._seen = {}
        try:
            step()
        except BaseException:
            self._seen = None
            raise

    def plan(self, deterministic: bool) -> None:
        """Plan what was recorded. Each rank measures a share of all ranks' problems.

        Every rank calls this. Raises :class:`~tilewise.comm.agreement.RankMismatch` where ranks end with different
        plans, and what :meth:`~tilewise.nn.layers.plan_table.PlanTable.plan` raises.
        """
        devices = {} if self._seen is None else self._seen
        self._seen = None

        def everyones() -> list[ConvProblem]:
            """The problems of all ranks, each once."""
            keys = [key for rank_keys in gather([p.key for p in devices]) for key in rank_keys]
            return [ConvProblem.from_key(key) for key in dict.fromkeys(keys)]

        plan_together(self.plan_table, everyones, deterministic)
        for problem, device in devices.items():
            self.plan_table.ready([problem], deterministic, device)
        self._bound.clear()
        self._deterministic = deterministic
        if self.plan_table.options.rigor in MEASURING:
            progress = self.plan_table.planner.progress
            with showing(progress):
                for done, (key, call) in enumerate(self._calls.items()):
                    if progress is not None:
                        progress(done, len(self._calls), "halos")
                    self.halos[key] = call, choose(call, self, self.plan_table.options)
        self._calls.clear()

    def terms(self, share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Terms:
        """The terms of a layer's boxes: by fused kernels where these were chosen, else by these passes."""
        if not x.is_cuda or not any(share.boxes):
            return super().terms(share, groups, x, w)
        # A share is kept with what was chosen for it, so that no other has its address.
        form = x.shape[:2], x.is_contiguous(), w.shape, w.stride(), x.dtype, x.device
        key = (id(share), groups, *form, conv_precision())
        if self._seen is not None:
            self._calls.setdefault(key, Call.of(share, groups, x, w))
        halo = self.halos.get(key)
        if halo is None or halo[1].terms is None:
            return super().terms(share, groups, x, w)
        return halo[1].terms

    def fprop(
        self, x: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of the convolution of ``x`` and ``w``, with the bias ``b``."""
        split = split_padding(axes)
        x = _padded(x, split)
        bound = self._bound_plan(Pass.FPROP, x, w, split.even, groups, b is not None)
        return super().fprop(x, w, split.even, groups, b) if bound is None else bound(x, w, b)

    def dgrad(self, y: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """The gradient of the input, from that of the result ``y`` and the weight ``w``."""
        split = split_padding(axes)
        bound = self._bound_plan(Pass.DGRAD, y, w, split.even, groups)
        dx = super().dgrad(y, w, split.even, groups) if bound is None else bound(y, w)
        return dx if split.pads is None else F.pad(dx, [-pad for pad in split.pads])

    def wgrad(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """The gradient of the weight, from the input ``x`` and the gradient of the result ``y``."""
        split = split_padding(axes)
        x = _padded(x, split)
        bound = self._bound_plan(Pass.WGRAD, x, y, split.even, groups)
        return super().wgrad(x, y, split.even, groups) if bound is None else bound(x, y)

    def _bound_plan(
        self, pass_: Pass, a: torch.Tensor, b: torch.Tensor, axes: Axes, groups: int, bias: bool = False
    ) -> BoundPass | None:
        """The bound plan for these operands; ``None`` where torch computes. While recording, the problem is noted."""
        precision = conv_precision() if a.is_cuda and a.dtype is torch.float32 else "ieee"
        key = (pass_, a.shape, a.stride(), b.shape, b.stride(), a.dtype, a.device, axes, groups, precision, bias)
        if self._seen is None and key in self._bound:
            return self._bound[key]
        problem = _problem(pass_, a, b, axes, groups, precision, bias)
        if self._seen is not None:
            if problem is not None:
                self._seen[problem] = a.device
            return None
        bound = None if problem is None else self.plan_table.bound(problem, self._deterministic, a.device)
        if len(self._bound) < MOST_KEPT:
            self._bound[key] = bound
        return bound


def _padded(x: torch.Tensor, split: PaddingSplit) -> torch.Tensor:
    """``x`` with the padding that torch's convolution cannot do itself."""
    return x if split.pads is None else F.pad(x, split.pads)


def _problem(
    pass_: Pass, a: torch.Tensor, b: torch.Tensor, axes: Axes, groups: int, precision: str, bias: bool
) -> ConvProblem | None:
    """The problem of two operands, in the layouts that they have or are copied to; ``None`` where torch must compute.

    ``axes`` are padded equally on both sides.
    """
    if a.dtype not in DTYPE_NAMES or a.dtype is not b.dtype or not a.numel() or not b.numel():
        return None
    channels_last = any(suggested_layout(tensor.shape, tensor.stride()) == "channels_last" for tensor in (a, b))
    layout = "channels_last" if channels_last else "contiguous"
    first, second = (Operand.of(tensor).dense(layout) for tensor in (a, b))
    if pass_ is Pass.FPROP:
        channels = b.shape[1] * groups, b.shape[0]
    elif pass_ is Pass.DGRAD:
        channels = b.shape[1] * groups, a.shape[1]
    else:
        channels = a.shape[1], b.shape[1]
    result = layout, 16
    operand_forms = [(layout_of(o.shape, o.strides), o.alignment) for o in (first, second)]
    places = {
        Pass.FPROP: (operand_forms[0], operand_forms[1], result),
        Pass.DGRAD: (result, operand_forms[1], operand_forms[0]),
    }
    x, w, y = places.get(pass_, (operand_forms[0], result, operand_forms[1]))
    return ConvProblem(
        pass_,
        batch=a.shape[0],
        in_channels=channels[0],
        out_channels=channels[1],
        axes=axes,
        groups=groups,
        dtype=DTYPE_NAMES[a.dtype],
        precision=precision,
        bias=bias,
        layouts=(x[0], w[0], y[0]),
        alignment=tuple(math.gcd(form[1], 16) for form in (x, w, y)),  # type: ignore[arg-type]
        device=device_name(a.device),
    )
