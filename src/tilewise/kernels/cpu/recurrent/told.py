"""The numbers that kernels of recurrent layers are told, and the tiles that fit into registers, without Numba."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

__all__ = ["COUNT", "GATES", "LINE", "SYNC", "WORDS", "Told", "rows_of"]

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
"""The gates of each cell."""
LINE = 16
"""Numbers between two counters of a team, so that no two of them share a cache line: 128 bytes."""
SYNC = 6
"""The number of counters."""


def rows_of(lanes: int, vectors: int) -> int:
    """The most rows whose ``vectors`` sums each stay in registers, beside one line of the weights and one factor."""
    registers = 32 if lanes == 16 else 16
    return max(1, min(8, (registers - vectors - 1) // vectors))


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker is told. Distances are in bytes, names without a unit are addresses.

    The weights are packed into ``panels`` of ``vectors`` vectors a line: panel p has ``blocks`` blocks of units, as
    many as a vector has lanes each, and of the forward pass all gates of each. A step has as many rows as sequences
    take part in it, which are the first ones of the batch; ``offsets`` are the rows before each step, and at the end
    their sum. They are multiplied in tiles of at most ``most`` rows, by parts of ``part`` lines. ``products`` is a
    table with the functions for tiles of 1 row to ``most``: two for each, of which one sets sums and one adds to them.
    ``keep`` asks for what a
    backward pass reads. ``sums`` has ``sums_size`` bytes a thread, ``packed`` all panels of ``panel_size`` bytes.
    ``yielding`` is the function that gives the core away.

    ``x`` are the gates' inputs, and their values where they are kept, (R, G * H) for R rows of all steps. ``state`` is
    c of an LSTM, or U_n h + b_hn of a GRU: of all steps where values are kept. The forward pass reads the first c from
    ``c0``; the other one begins with ``dh`` and ``dc`` as gradients of the last h and c, and leaves those of the first
    there.

    The last six are of cells that a user states, see :mod:`.custom`: ``resets`` are bytes (T, N) in whole words.
    ``apart`` is the distance between the gradients of parameters that two threads sum, where each has its own.
    ``seed`` is that of random numbers.
    """

    threads: int
    time: int
    hidden: int
    panels: int
    blocks: int
    vectors: int
    panel_size: int
    offsets: int
    most: int
    products: int
    part: int
    yielding: int
    reverse: int
    keep: int
    y_row: int
    dy_row: int
    sums_size: int
    x: int
    u: int
    bias_n: int
    h0: int
    c0: int
    y: int
    state: int
    packed: int
    sums: int
    dx: int
    dx_n: int
    dy: int
    dh: int
    dc: int
    places: int = 0
    firsts: int = 0
    zeros: int = 0
    resets: int = 0
    apart: int = 0
    seed: int = 0

    def numbers(self) -> np.ndarray:
        """All numbers in the order of :data:`WORDS`, int64, and then a team's counters."""
        values = [getattr(self, field.name) for field in fields(self)]
        array = np.zeros(COUNT + (SYNC + 1) * LINE, dtype=np.int64)
        array[: len(values)] = values
        return array


WORDS = {field.name: place for place, field in enumerate(fields(Told))}
"""The index of each number."""
COUNT = len(WORDS)
"""The number of numbers; counters begin :data:`LINE` numbers behind the last."""
