"""One direction of one recurrent layer: the products around its steps, all steps at once or a block of them at a time.

What does not depend on the step before is one matrix product for all steps of a block (Appleyard, Kocisky and Blunsom
2016, "Optimizing performance of recurrent neural networks on GPUs", section 3). Where a sequence is divided into
blocks, only the states between blocks are kept, and a backward computes each block's steps again (Chen et al. 2016,
"Training deep nets with sublinear memory cost"). So long sequences need memory for the gates of one block only. Or what
blocks keep is moved to the host (:mod:`._host_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise.problems.recurrent.packing import Packing
from tilewise.solvers.recurrent._host_copies import HostCopies, OnHost
from tilewise.solvers.recurrent._recurrence import Recurrence, Saved

__all__ = ["Direction", "KeptSteps", "Linear", "Span", "spans_of"]

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Span:
    """Steps that run at a time.

    ``part`` are their places along the first dimension of the input: steps, or rows of a packed batch. A recurrence
    sees them in the ``shape`` (steps, sequences), or as rows that lie as ``packing`` says. The first ``count``
    sequences take part.
    """

    part: slice
    shape: tuple[int, ...]
    count: int
    packing: Packing | None = None


def spans_of(time: int, batch: int, packing: Packing | None, block: int, *, level: bool) -> list[Span]:
    """All steps by ``block`` at a time, 0 for all at once, from the first to the last.

    Of a packed batch as many steps run at a time as have no more rows than ``block`` steps of all sequences: so what
    is allocated for one span serves for the next. With ``level`` they are also divided where sequences end, so that
    every span has all steps of its sequences, as a batch that is not packed.
    """
    if packing is None:
        ends = [(start, min(time, start + (block or time))) for start in range(0, time, block or time)]
        return [Span(slice(start, stop), (stop - start, batch), batch) for start, stop in ends]
    spans, start = [], 0
    while start < packing.time:
        first, count = packing.steps[start]
        stop = packing.time
        if level:
            stop = int(torch.searchsorted(-packing.sizes, 1 - count))
            stop = min(stop, start + block) if block else stop
        elif block:
            ends_of = packing.offsets[start + 1 :]
            stop = start + max(1, int(torch.searchsorted(ends_of, first + block * batch, right=True)))
        part = slice(first, int(packing.offsets[stop]))
        if level:
            spans.append(Span(part, (stop - start, count), count))
        else:
            within = packing if stop - start == packing.time else Packing(packing.sizes[start:stop])
            spans.append(Span(part, (within.rows,), count, within))
        start = stop
    return spans


@dataclass
class KeptSteps:
    """What a backward takes: each span in the order of the forward, with the states that it began with.

    The first span began with the first states, which whoever keeps this has: ``firsts`` are those of the others.
    ``saved`` is what its recurrence kept, on the device or on the host; nothing where its steps are computed again.
    """

    spans: list[Span] = field(default_factory=list)
    firsts: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    saved: list[Saved | OnHost] = field(default_factory=list)


@dataclass(frozen=True)
class Direction:
    """The steps of one direction of one layer, with the products of its input.

    ``recurrence`` makes what runs the steps of a span, ``linear`` computes the products with the inputs' weights as
    ``torch.nn.functional.linear`` does. The cell has ``hidden`` units and may be a ``gru``, or an LSTM that is
    ``projected``. Its ``weights`` are in torch's order, with biases or without, W_hr behind them.
    """

    hidden: int
    gru: bool
    projected: bool
    reverse: bool
    recurrence: Callable[[Packing | None], Recurrence]
    linear: Linear

    def forward(
        self, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], y: Tensor, spans: Sequence[Span],
        *, keep: bool, again: bool, copies: HostCopies | None = None,
    ) -> tuple[Tensor, Tensor | None, KeptSteps]:  # fmt: skip
        """Write the states to ``y``, and return the last h and c, and what ``backward`` takes where ``keep``.

        With ``again`` it will compute the steps again, and no more is kept than that takes. With ``copies`` what the
        spans keep is moved to the host.
        """
        kept, h, c = KeptSteps(), h0, c0
        for span in reversed(spans) if self.reverse else spans:
            first = _first(h, span.count), None if c is None else _first(c, span.count)
            hn, cn, saved = self._steps(span, first, x, weights, _of(span, y), keep=keep and not again)
            if keep:
                kept.firsts += [first] if kept.spans else []
                kept.spans.append(span)
                if copies is not None:
                    saved = copies.put(saved, y)
                kept.saved += [] if again else [saved]
            del saved  # before the next span has its own
            h, c = _carried(hn, h), None if cn is None else _carried(cn, c)
        if copies is not None:
            copies.settle()
        return h, c, kept

    def _steps(
        self, span: Span, first: tuple[Tensor, Tensor | None], x: Tensor, weights: Sequence[Tensor], y: Tensor,
        *, keep: bool,
    ) -> tuple[Tensor, Tensor | None, Saved]:  # fmt: skip
        """Run the steps of a span from its ``first`` states: the last ones, and what the recurrence keeps.

        States are written to ``y``, in the shape of the span.
        """
        w, u, biases, own_weight = self._parted(weights)
        b_x = self._bias_x(biases)
        gx = self.linear(_rows(_part(span, x)), w, b_x).view(*span.shape, -1)
        return self.recurrence(span.packing).forward(gx, u, own_weight, *first, y, reverse=self.reverse, keep=keep)

    def backward(
        self, kept: KeptSteps, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], y: Tensor,
        dy: Tensor, dhn: Tensor | None, dcn: Tensor | None, dx: Tensor | None, needs: Sequence[bool], *,
        zero: bool = False,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, list[Tensor | None]]:  # fmt: skip
        """The gradients of x, h0, c0 and the weights.

        The first of ``needs`` says whether that of x is needed, the others which of the weights' are. ``dx`` is what
        it is added to; ``None`` for nothing. With ``zero`` first states are zeros.
        """
        sums: list[Tensor | None] = [None] * len(weights)
        dh, dc, parts = dhn, dcn, list[tuple[Span, Tensor]]()
        batch = kept.spans[0].count if len(kept.spans) == 1 else max(span.count for span in kept.spans)
        for place in reversed(range(len(kept.spans))):
            span = kept.spans[place]
            first = kept.firsts[place - 1] if place else (
                _first(h0, span.count), None if c0 is None else _first(c0, span.count)
            )  # fmt: skip
            last_h, last_c = (None if end is None else _first(end, span.count).contiguous() for end in (dh, dc))
            d_x, d_h, d_c = self._steps_back(
                kept, place, first, x, weights, y, dy, last_h, last_c, dx, needs, sums, zero=zero and not place
            )
            dh = _carried(d_h, _zeros(d_h, batch) if dh is None and span.count < batch else dh)
            dc = None if d_c is None else _carried(d_c, _zeros(d_c, batch) if dc is None and span.count < batch else dc)
            parts += [] if d_x is None else [(span, d_x)]
        assert dh is not None
        found = [
            t if t is None or t.dtype is weight.dtype else t.to(weight.dtype)
            for t, weight in zip(sums, weights, strict=True)
        ]
        return self._joined(parts, x, dx), dh, dc, found

    def _steps_back(
        self, kept: KeptSteps, place: int, first: tuple[Tensor, Tensor | None], x: Tensor, weights: Sequence[Tensor],
        y: Tensor, dy: Tensor, dhn: Tensor | None, dcn: Tensor | None, dx: Tensor | None, needs: Sequence[bool],
        sums: list[Tensor | None], *, zero: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """The gradients of a span's x, first h and first c. Those of the weights are added to ``sums``."""
        span, own = kept.spans[place], _of(kept.spans[place], y)
        w, u, _, own_weight = self._parted(weights)
        if kept.saved:
            saved = kept.saved[place]
            if isinstance(saved, OnHost):
                saved = saved.fetched()
                before = kept.saved[place - 1] if place else None
                if isinstance(before, OnHost):
                    before.begin()
        else:
            own = torch.empty_like(own, memory_format=torch.contiguous_format)
            _, _, saved = self._steps(span, first, x, weights, own, keep=True)
        dgates, of_own, dh, dc = self.recurrence(span.packing).backward(
            saved, u, own_weight, *first, own, _of(span, dy), dhn, dcn, reverse=self.reverse
        )
        del saved
        flat = dgates.view(-1, dgates.shape[-1])
        if self.projected and of_own is not None and needs[-1]:
            _add(sums, len(sums) - 1, of_own)
        dstates, before = of_own if self.gru else None, None if zero else first[0]
        self._add_weight_gradients(span, x, own, before, flat, dstates, needs[1:], sums)
        if not needs[0]:
            return None, dh, dc
        if dx is None:
            return self.linear(flat, w.T, None), dh, dc
        return torch.addmm(dx[span.part].view(-1, w.shape[1]), flat, w), dh, dc

    def _joined(self, parts: list[tuple[Span, Tensor]], x: Tensor, dx: Tensor | None) -> Tensor | None:
        """The gradient of x from those of its spans, written into ``dx`` where there are several."""
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0][1].view(x.shape)
        whole = torch.empty_like(x) if dx is None else dx
        for span, part in parts:
            whole[span.part] = part.view(whole[span.part].shape)
        return whole

    def _add_weight_gradients(
        self, span: Span, x: Tensor, y: Tensor, h0: Tensor | None, flat: Tensor, dstates: Tensor | None,
        needs: Sequence[bool], sums: list[Tensor | None],
    ) -> None:  # fmt: skip
        """Add the gradients of the weights by a span to ``sums``; ``flat`` (R, G*H) are those of its gates."""
        if needs[0]:
            _add(sums, 0, flat.T @ _rows(_part(span, x)))
        # Gradients of what the state gives each gate.
        parts = [flat] if dstates is None else [flat[:, : 2 * self.hidden], dstates.view(-1, self.hidden)]
        if needs[1]:
            products = [self._from_states(span, y, h0, part) for part in parts]
            _add(sums, 1, products[0] if len(products) == 1 else torch.cat(products))
        if any(needs[2:4]) and len(needs) > 3:
            totals = [part.sum(0) for part in parts]
            if needs[2]:
                _add(sums, 2, totals[0] if dstates is None else flat.sum(0))
            if needs[3]:
                _add(sums, 3, totals[0].clone() if len(totals) == 1 else torch.cat(totals))

    def _from_states(self, span: Span, y: Tensor, h0: Tensor | None, part: Tensor) -> Tensor:
        """The sum over steps of ``part`` (rows, R), transposed, times the state before the step: (R, H).

        Without ``h0`` the first states are zeros.
        """
        if span.packing is not None:
            h0 = y.new_zeros((span.count, y.shape[-1])) if h0 is None else h0
            rows = span.packing.rows_before(reverse=self.reverse).to(y.device)
            return part.T @ torch.cat((h0, y))[rows]
        n = span.count
        before, at, later = (y[1:], part[-n:], part[:-n]) if self.reverse else (y[:-1], part[:n], part[n:])
        if h0 is None:
            rows = before.reshape(-1, y.shape[-1])
            return later.T @ rows if rows.shape[0] else part.new_zeros((part.shape[1], y.shape[-1]))
        product = at.T @ h0
        return product if y.shape[0] == 1 else torch.addmm(product, later.T, before.reshape(-1, y.shape[-1]))

    def _parted(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Tensor], Tensor | None]:
        """The weights of the input and of the state, both biases, and what :class:`Recurrence` takes as ``own``.

        The bias of a GRU's n gate is added to the product with the state, that of others to the one with the input.
        """
        w, u, *biases = weights
        if self.projected:
            return w, u, biases[:-1], biases[-1]
        return w, u, biases, biases[1][2 * self.hidden :] if biases and self.gru else None

    def _bias_x(self, biases: Sequence[Tensor]) -> Tensor | None:
        """What is added to the product with the input."""
        if not biases:
            return None
        of_x, of_h = biases
        if not self.gru:
            return of_x + of_h
        both = of_x.clone()
        both[: 2 * self.hidden] += of_h[: 2 * self.hidden]
        return both


def _of(span: Span, tensor: Tensor) -> Tensor:
    """A span's part of a tensor of all steps, as a view."""
    part = _part(span, tensor)
    return part if part.dim() == len(span.shape) + 1 else part.unflatten(0, span.shape)


def _part(span: Span, tensor: Tensor) -> Tensor:
    """A span's part of a tensor of all steps, in the tensor's dimensions."""
    return tensor if span.part.stop - span.part.start == tensor.shape[0] else tensor[span.part]


def _rows(tensor: Tensor) -> Tensor:
    """A tensor as a matrix of rows."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _first(states: Tensor, count: int) -> Tensor:
    """The states of the first ``count`` sequences."""
    return states if states.shape[0] == count else states[:count]


def _carried(new: Tensor, old: Tensor | None) -> Tensor:
    """A state after steps in which the first sequences took part."""
    return new if old is None or new.shape[0] == old.shape[0] else torch.cat((new, old[len(new) :]))


def _zeros(like: Tensor, batch: int) -> Tensor:
    """Gradients of last states that have none."""
    return like.new_zeros((batch, *like.shape[1:]))


def _add(sums: list[Tensor | None], place: int, value: Tensor) -> None:
    """Add to a sum, which is fp32 once it has several terms."""
    before = sums[place]
    sums[place] = value if before is None else before.float().add_(value)
