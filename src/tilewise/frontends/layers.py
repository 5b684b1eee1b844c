"""The convolution layers that a network runs, in order, with the shapes of their inputs.

>>> from tilewise.frontends.layers import CONVOLUTIONS, Layout
>>> torch.nn.Conv2d in CONVOLUTIONS
True
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tilewise.machine import random_states
from tilewise.nn.layers.overrides import base_of, override
from tilewise.nn.record import state_kept

__all__ = ["CONVOLUTIONS", "LayerCall", "Layout", "convolution_layers", "is_convolution"]

Layout = Literal["contiguous", "channels_last", "view"]

CONVOLUTIONS: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""torch's convolution layers."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a convolution layer in a network's forward.

    ``name`` is the layer's dotted name and ``module`` the layer itself. ``input_shape`` is the shape of the tensor it
    was given, batch included: (N, C, *sizes), or (C, *sizes) where the network leaves the batch out. ``dtype`` is the
    type it computes in: its input's, or autocast's. ``layout`` is ``contiguous`` where both dense orders fit.
    ``needs_input_grad`` says whether training computes the gradient of its input (DGRAD): a first layer whose input is
    data needs none. ``count`` is 1 for the layer's first call, 2 for its second and so on.

    >>> call = convolution_layers(torch.nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 32, 32))[0]
    >>> call.input_shape, call.layout, call.needs_input_grad
    ((2, 3, 32, 32), 'contiguous', False)
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    needs_input_grad: bool
    count: int = 1


def is_convolution(module: nn.Module) -> bool:
    """Whether ``module`` computes exactly what one of torch's convolution layers does.

    Subclasses count as long as they leave the forward alone (a parametrised layer does, for one).

    >>> is_convolution(torch.nn.Conv2d(3, 8, 3)), is_convolution(torch.nn.Linear(3, 8))
    (True, False)
    """
    return base_of(module) is not None and not override(module)


def convolution_layers(
    module: nn.Module, example_inputs: Tensor | Sequence[Any] | Mapping[str, Any]
) -> list[LayerCall]:
    """Calls of convolution layers in one forward of ``module``, in the order in which they run.

    ``example_inputs`` is what the module is called with: one tensor, a sequence of positional arguments or a mapping of
    keyword arguments. The module runs in its present mode (training or evaluation), under the caller's autocast and
    gradient mode: under ``torch.no_grad()`` no layer needs an input gradient.

    The forward runs on a copy with fake tensors, which have shapes but no data, so that it takes no memory and almost
    no time. Where the network does not allow that (control flow that reads data, code that leaves torch) it runs for
    real, once; buffers and random number generators are put back as they were.

    Raises what the module's forward raises for these inputs.

    >>> module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3))
    >>> [(call.name, call.input_shape) for call in convolution_layers(module, torch.zeros(2, 3, 32, 32))]
    [('0', (2, 3, 32, 32)), ('2', (2, 8, 30, 30))]
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Tensor):
        args = (example_inputs,)
    elif isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    else:
        args = tuple(example_inputs)
    if not any(is_convolution(child) for child in module.modules()):
        return []
    lazy = any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
    with eager():
        if not lazy:  # Those get their shapes from a real forward only.
            with contextlib.suppress(Exception):
                return fake_forward(module, args, kwargs)
        return real_forward(module, args, kwargs)


def fake_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LayerCall]:
    """The calls in a forward of a copy of ``module`` without data. Raises anything where that cannot be done."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    # A copy, because a module may keep tensors it made in its forward, and must not keep fake ones. The copy finds its
    # parameters and buffers in ``memo``, so that none is copied.
    memo = {id(tensor): mode.from_tensor(tensor) for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, memo)
    with random_states.kept(module.modules()), mode, recording(twin) as calls:
        twin(*args, **kwargs)
    return layer_calls(module, calls)


def real_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LayerCall]:
    """The calls in a forward of ``module`` itself, which is left as it was. Raises what the forward raises."""
    with state_kept(module, (args, kwargs)), recording(module) as calls:
        module(*args, **kwargs)
    return layer_calls(module, calls)


Record = tuple[str, tuple[int, ...], torch.dtype, Layout, bool, int]
"""A :class:`LayerCall` without its module."""


def layer_calls(module: nn.Module, records: list[Record]) -> list[LayerCall]:
    """The records together with the layers of ``module`` that they are of."""
    layers = dict(module.named_modules())
    return [
        LayerCall(name, layers[name], shape, dtype, layout, needs_grad, count)
        for name, shape, dtype, layout, needs_grad, count in records
    ]


@contextlib.contextmanager
def recording(module: nn.Module) -> Iterator[list[Record]]:
    """Yields a list to which calls of convolution layers in ``module`` are added within the context."""
    calls: list[Record] = []
    counts: Counter[str] = Counter()

    def hook_for(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            counts[name] += 1
            needs_grad = torch.is_grad_enabled() and x.requires_grad
            calls.append((name, tuple(map(int, x.shape)), compute_dtype(x), layout_of(x), needs_grad, counts[name]))

        return hook

    handles = [
        child.register_forward_pre_hook(hook_for(name), with_kwargs=True)
        for name, child in module.named_modules()
        if is_convolution(child)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a convolution of ``x`` is computed: autocast's where that is on and applies to ``x``."""
    kind = x.device.type
    casts = x.is_floating_point() and x.dtype is not torch.float64
    if casts and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def layout_of(x: Tensor) -> Layout:
    """Memory order of ``x``, whose channels are dimension 1: ``contiguous`` where both dense orders fit."""
    if x.is_contiguous():
        return "contiguous"
    if x.dim() >= 3 and x.movedim(1, -1).is_contiguous():
        return "channels_last"
    return "view"


def eager() -> contextlib.AbstractContextManager[object]:
    """A context in which compiled modules run uncompiled. Costs nothing where nothing was compiled yet."""
    if "torch._dynamo" in sys.modules:
        stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance
    return contextlib.nullcontext()
