"""What runs the steps of one recurrent layer in one direction, as the layers around it call it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Recurrence", "Saved"]

Saved = Any
"""What a recurrence keeps between forward and backward: an object of its own."""


class Recurrence(Protocol):
    """The steps of one layer in one direction, for a fixed cell, T steps, N sequences, H hidden units, type and device.

    G is the number of gates. ``gx`` (T, N, G*H) is what the input gives each gate, W x + b_ih, and b_hh too but for the
    n gate of a GRU. ``u`` (G*H, H) is ``weight_hh`` as torch keeps it. ``own`` is what the cell has beside it: of a GRU
    the part of b_hh of its n gate (H), of an LSTM with a projection W_hr (P, H); ``None`` where there is none. ``h0``
    and ``c0`` (N, H) are contiguous. ``y`` (T, N, H) is a view whose last dimension is contiguous and whose rows may
    lie apart. All have the problem's type, as results have.

    Of a packed batch there are R rows in place of T and N, so that ``gx`` is (R, G*H) and ``y`` (R, H). N is the number
    of sequences then, and each goes through its own steps alone.

    With a projection h has P numbers: ``u`` is (G*H, P), ``h0`` (N, P), ``y`` (T, N, P).

    Sums, gates and c are fp32 whatever the type. h is rounded as it is written to ``y``, and the next step reads it
    from there. With ``reverse`` the steps run from T-1 to 0, and ``y[t]`` is the state after step t. Calls from several
    threads may run at once.
    """

    def forward(
        self,
        gx: torch.Tensor,
        u: torch.Tensor,
        own: torch.Tensor | None,
        h0: torch.Tensor,
        c0: torch.Tensor | None,
        y: torch.Tensor,
        /,
        *,
        reverse: bool,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
        """Write ``y``; return hn and cn (N, H) and what ``backward`` needs, which follows where ``keep``.

        It may overwrite ``gx``. cn is ``None`` unless the cell is an LSTM.
        """

    def backward(
        self,
        saved: Saved,
        u: torch.Tensor,
        own: torch.Tensor | None,
        h0: torch.Tensor,
        c0: torch.Tensor | None,
        y: torch.Tensor,
        dy: torch.Tensor,
        dhn: torch.Tensor | None,
        dcn: torch.Tensor | None,
        /,
        *,
        reverse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """The gradients of ``gx``, of what is the cell's own, of h0 and of c0.

        Of a GRU the second is that of U_n h + b_hn (T, N, H), of an LSTM with a projection that of W_hr (P, H).
        ``dy`` is a view like ``y``. ``dhn`` and ``dcn`` may be ``None`` for zero. The second and the last result are
        ``None`` for cells that have no such thing.
        """
