"""Mini-batches of sequences of many lengths: how large they may be, and which sequences go together.

What training a recurrent layer keeps grows with time steps times sequences. So the longest sequences of a data set
bound the mini-batch of all others, unless mini-batches of long sequences are smaller. The rules are those of Elsen,
"Optimizing RNN performance" (Baidu SVAIL), section 5.1: sequences are grouped by length so that few steps are wasted
on padding, and the usual mini-batch is what the 95th to 99th percentile of the lengths allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from tilewise.plan import format_bytes, parse_bytes
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.rnn.step_memory import step_bytes

__all__ = ["Batches", "batch_for", "batches"]

Lengths = Sequence[int] | torch.Tensor
Step = int | str | RecurrentProblem | nn.RNN | nn.GRU | nn.LSTM


def batch_for(lengths: Lengths, memory: int | str, percentile: float = 95.0, *, step: Step) -> int:
    """The largest mini-batch that fits into ``memory`` with sequences as long as the ``percentile`` of ``lengths``.

    ``lengths`` are time steps, one whole number a sequence of the data set: a list or a tensor of one dimension.
    ``memory`` is what mini-batches may take, as a number of bytes or text such as ``"6GiB"``: of a device's memory what
    parameters, gradients of parameters and the optimizer leave. ``step`` is what one time step of one sequence takes of
    it in training, as bytes or text, or a recurrent layer (module or problem) of which :func:`step_bytes` measures it.
    A model of several layers takes the sum of its layers.

    All sequences of a mini-batch count as long as its longest one, since they are padded to it. ``percentile`` is above
    0 and at most 100: with 95 one sequence in twenty is longer, and needs smaller mini-batches (:func:`batches`) or is
    left out. The percentile is one of the lengths: the shortest that 95 % of the sequences do not exceed.

    Returns a number from 1 to the number of sequences. Raises ``ValueError`` naming the argument and what would do,
    also where one sequence of that length is over ``memory``.

    >>> batch_for([100, 200, 300, 400], "1MiB", 50, step=1024)  # of 5 sequences of 200 steps that fit
    4
    """
    sizes = _checked(lengths)
    if isinstance(percentile, bool) or not isinstance(percentile, (int, float)) or not 0 < percentile <= 100:
        raise ValueError(f"percentile={percentile!r}: a number above 0 and up to 100 would do, such as 95")
    limit = _Limit(memory, step)
    place = max(1, math.ceil(percentile / 100 * len(sizes))) - 1
    length = int(sizes.sort().values[place])
    most = limit.most(length)
    if not most:
        raise ValueError(
            f"memory={memory!r}: one sequence of {length} steps, the percentile {percentile:g} of lengths, takes "
            f"{format_bytes(length * limit.step)}; as much, or a lower percentile, would do"
        )
    return min(most, len(sizes))


def batches(
    lengths: Lengths,
    memory: int | str,
    percentile: float = 95.0,
    *,
    step: Step,
    batch: int | None = None,
    generator: torch.Generator | None = None,
) -> Batches:
    """The sequences of a data set grouped by length into mini-batches that fit into ``memory``, smaller for long ones.

    ``lengths``, ``memory``, ``percentile`` and ``step`` are those of :func:`batch_for`, which says how many sequences a
    mini-batch has at the most unless ``batch`` does. A mini-batch has fewer where its longest sequence times its
    number of sequences would take more than ``memory``.

    The result gives lists of indices into ``lengths``, each index once, and can be a ``batch_sampler`` of torch's
    ``DataLoader``. Without a ``generator`` mini-batches come in the order of their lengths, the shortest first, always
    the same. With a ``torch.Generator`` of the CPU they come in random order, and which of several equally long
    sequences are together is random, too: drawn anew in each pass over the result, and the same for the same seed.

    Raises ``ValueError`` naming the argument and what would do: as :func:`batch_for`, and for a sequence that alone is
    over ``memory``, by its index.

    >>> list(batches([5, 1, 5, 2], 10, step=1, batch=3))  # three sequences of 5 steps would take 15 bytes
    [[1, 3], [0, 2]]
    """
    sizes, limit = _checked(lengths), _Limit(memory, step)
    longest = int(sizes.argmax())
    if not limit.most(int(sizes[longest])):
        takes = format_bytes(int(sizes[longest]) * limit.step)
        raise ValueError(
            f"lengths[{longest}]={int(sizes[longest])}: this sequence alone takes {takes}, over memory={memory!r}; "
            f"at most {limit.memory // limit.step} steps would do, or more memory"
        )
    if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != "cpu"):
        raise ValueError(f"generator={generator!r:.80}: a torch.Generator of the CPU, or None, would do")
    if batch is None:
        batch = batch_for(sizes, limit.memory, percentile, step=limit.step)
    elif type(batch) is not int or batch < 1:
        raise ValueError(f"batch={batch!r}: a whole number of at least 1 would do, or None")
    return Batches(sizes, limit, batch, generator)


class Batches(Sampler[list[int]]):
    """Mini-batches of the sequences of a data set, as lists of indices: what :func:`batches` returns.

    ``len()`` is the number of mini-batches, the same in every pass. ``batch`` is how many sequences one has at most.

    >>> found = batches([5, 1, 5, 2], 10, step=1, batch=3)
    >>> len(found), found.batch
    (2, 3)
    """

    def __init__(self, lengths: torch.Tensor, limit: _Limit, batch: int, generator: torch.Generator | None) -> None:
        self.batch = batch
        self._lengths, self._generator = lengths, generator
        self._sizes = _sizes(lengths.sort().values.tolist(), limit, batch)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self._lengths)
        order = torch.arange(count, dtype=torch.int64, device="cpu")
        if self._generator is not None:
            order = self._drawn(count)
        # Stable, so that equally long sequences stay in the order that was drawn.
        order = order[self._lengths[order].sort(stable=True).indices]
        groups = list(order.split(self._sizes))
        if self._generator is not None:
            groups = [groups[place] for place in self._drawn(len(groups)).tolist()]
        for group in groups:
            yield group.tolist()

    def _drawn(self, count: int) -> torch.Tensor:
        """The numbers below ``count`` in random order."""
        return torch.randperm(count, generator=self._generator, dtype=torch.int64, device="cpu")


def _sizes(ascending: Sequence[int], limit: _Limit, batch: int) -> list[int]:
    """How many sequences each mini-batch has, of lengths in ascending order: as many as fit, from the longest down.

    From the longest down those that fill the memory are full, and what is left over are short sequences.
    """
    sizes: list[int] = []
    left = len(ascending)
    while left:
        sizes.append(min(left, batch, limit.most(ascending[left - 1])))
        left -= sizes[-1]
    return sizes[::-1]


class _Limit:
    """Memory in bytes, and what one time step of one sequence takes of it."""

    def __init__(self, memory: int | str, step: Step) -> None:
        self.memory = parse_bytes(memory, "memory")
        self.step = parse_bytes(step, "step") if isinstance(step, (int, str)) else step_bytes(step)
        if not self.step:
            raise ValueError(f"step={step!r:.80}: takes no memory; at least 1 byte would do")

    def most(self, length: int) -> int:
        """How many sequences of ``length`` steps fit."""
        return self.memory // (max(1, length) * self.step)


def _checked(lengths: Any) -> torch.Tensor:
    """``lengths`` as a tensor (sequences,) of int64. Raises ``ValueError`` naming the first that is no length."""
    values = lengths.tolist() if hasattr(lengths, "tolist") else lengths  # of a tensor or NumPy array
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"lengths={lengths!r:.80}: a list or 1-D tensor of at least one number of steps would do")
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"lengths[{index}]={value!r:.80}: a whole number of steps, not negative, would do")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
