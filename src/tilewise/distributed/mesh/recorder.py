"""Records every operator of a step as a kernel, while torch runs the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tilewise.distributed.mesh.events import Array, Event, Gradient, Kernel
from tilewise.distributed.mesh.step_memory import StepMemory
from tilewise.distributed.mesh.windows import window_of
from tilewise.distributed.parts.ghosts import Reader, Sliding
from tilewise.nn.layers.geometry import Geometry, Role
from tilewise.problems.base import ALIGNMENT, DTYPE_NAMES, layout_of
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["Recorder", "UnsupportedModel"]

MEAN_ARGUMENT = {"batch_norm": 5, "group_norm": 2, "layer_norm": 3}
"""The operators that need a mean over space, and which argument of their backward the mean is."""
VIEWS_BY_PARTS = ("detach", "alias", "select", "slice", "split", "chunk", "expand")
"""Views that each rank can take of its own part."""


class UnsupportedModel(ValueError):
    """A convolution of the model cannot be expressed as a problem."""


class Recorder(TorchDispatchMode):
    """Records every operator below autograd, and memory as it is allocated and freed.

    Set ``backward`` when the forward pass is over.
    """

    def __init__(self, space: int, device: str, precision: str, weights: frozenset[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = False
        self._space = space
        self._memory = StepMemory(space, weights)
        self._convolutions = _Convolutions(self._memory, space, device, precision)
        self._norms = _Norms(self._memory)
        self._layers: list[str] = [""]
        """The names of the modules whose forward runs, the innermost last."""

    def register_hooks(self, model: nn.Module, over_all: Sequence[str] = ()) -> Callable[[], None]:
        """Have ``model`` report which layer runs and which gradient is complete; returns what removes the hooks.

        Layers named in ``over_all`` take statistics over the ranks of all images.
        """
        self._norms.over_all = frozenset(over_all)
        handles: list[Any] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._layers.append(name)))
            handles.append(module.register_forward_hook(lambda *_: self._leave_layer()))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles += [parameter.register_post_accumulate_grad_hook(self._gradient_complete) for parameter in trained]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _leave_layer(self) -> None:
        """Note that the innermost layer is over."""
        self._layers.pop()

    def _gradient_complete(self, parameter: torch.Tensor) -> None:
        """Note that the gradient of ``parameter`` is complete."""
        self._memory.append(Gradient(parameter.nbytes))

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count tensors that exist before the step."""
        for tensor in tensors:
            self._memory.hold(tensor, self.backward)

    def events(self) -> tuple[Event, ...]:
        """All events recorded so far."""
        return self._memory.events()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.hold(results)
        if is_view:
            self._record_view(name, operands, results)
        elif (
            results
            and any(tensor.numel() for tensor in (*operands, *results))
            and not name.startswith(("empty", "new_empty"))
        ):
            self._memory.append(self._kernel(func, name, args, kwargs, operands, results, out))
        return out

    def _record_view(self, name: str, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Record that a tensor is gathered where a view of it has no spatial dimensions left."""
        if self.backward or name in VIEWS_BY_PARTS:
            return
        before = self._memory.array(operands[0])
        if before.split and not any(self._memory.array(result).space for result in results):
            self._memory.append(Kernel(self._layers[-1], name, False, gathered=before))

    def _kernel(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        operands: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        out: Any,
    ) -> Kernel:
        """The kernel of an operator that ran with these arguments and returned ``out``."""
        layer = self._layers[-1]
        arrays = tuple(self._memory.array(tensor) for tensor in (*operands, *results))
        if name == "convolution":
            return self._convolutions.forward(layer, args, results[0], arrays)
        if name == "convolution_backward":
            return self._convolutions.backward(args, arrays)
        readers, halo = window_of(func, args, kwargs, operands, results, self._space)
        largest = max((*operands, *results), key=lambda tensor: tensor.nbytes)
        count_flops = flop_registry.get(func.overloadpacket)
        return Kernel(
            layer if not self.backward else "",
            name,
            self.backward,
            arrays,
            DTYPE_NAMES.get(largest.dtype, "fp32"),
            0 if count_flops is None else int(count_flops(*args, **kwargs, out_val=out)),
            readers=readers,
            halo=None if halo is None else self._memory.add_window(halo, readers),
            sums=self._summed_bytes(name, args, results, arrays[: len(operands)]),
            over_all=self._norms.is_over_all(name, args, results, layer, self.backward),
        )

    def _summed_bytes(self, name: str, args: Any, results: Sequence[torch.Tensor], operands: Sequence[Array]) -> int:
        """The bytes that ranks of one image add up for an operator: statistics of norms, and sums over space."""
        norm_bytes = self._norms.summed_bytes(name, args, results, self.backward)
        if norm_bytes is not None:
            return norm_bytes
        is_whole = not any(self._memory.array(result).split for result in results)
        if self.backward or not is_whole or not any(array.split for array in operands):
            return 0  # gradients of parameters are added up over all ranks at once
        return sum(result.nbytes for result in results)


class _Convolutions:
    """Makes kernels of convolutions, and remembers which layer each weight belongs to."""

    def __init__(self, memory: StepMemory, space: int, device: str, precision: str) -> None:
        self._memory, self._space, self._device, self._precision = memory, space, device, precision
        self._layer_of: dict[int, str] = {}
        """The name of the layer, by the address of the storage of its weight."""

    def forward(self, layer: str, args: Any, y: torch.Tensor, arrays: tuple[Array, ...]) -> Kernel:
        """The kernel of ``aten::convolution``, called with ``args``, whose result is ``y``."""
        x, w, bias, *options = args
        self._layer_of[w.untyped_storage()._cdata] = layer
        geometry = _geometry(layer, w, options[:6])
        problem = self._problem(geometry, Role.FORWARD, layer, x, w, y, bias is not None)
        readers = self._readers(problem, geometry)
        halo = self._memory.add_window(x, readers) if readers else None
        return Kernel(layer, "convolution", False, arrays, problem.dtype, 0, (problem,), readers, halo)

    def backward(self, args: Any, arrays: tuple[Array, ...]) -> Kernel:
        """The kernel of ``aten::convolution_backward``, called with ``args``."""
        dy, x, w, _, *options = args
        layer = self._layer_of.get(w.untyped_storage()._cdata, "")
        geometry = _geometry(layer, w, options[:6])
        output_mask = options[6]
        roles = [role for role, wanted in zip((Role.GRAD_INPUT, Role.GRAD_WEIGHT), output_mask, strict=False) if wanted]
        problems = tuple(self._problem(geometry, role, layer, x, w, dy, False) for role in roles)
        readers = self._readers(problems[0], geometry) if problems else ()
        halo = self._memory.array(x) if output_mask[0] and readers else None
        dtype = DTYPE_NAMES.get(x.dtype, "fp32")
        return Kernel(layer, "convolution_backward", True, arrays, dtype, 0, problems, readers, halo)

    def _problem(
        self, geometry: Geometry, role: Role, layer: str, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: bool
    ) -> ConvProblem:
        """The problem of one pass of a layer; raises :class:`UnsupportedModel` for a type that problems do not have."""
        dtype = DTYPE_NAMES.get(x.dtype)
        if dtype is None:
            raise UnsupportedModel(
                f"model: {layer!r} computes in {x.dtype}; {', '.join(DTYPE_NAMES.values())} would do"
            )
        layout_x, layout_w, layout_y = (layout_of(tensor.shape, tensor.stride()) for tensor in (x, w, y))
        return geometry.problem(
            role, tuple(x.shape), tuple(w.shape), dtype=dtype, precision=self._precision, bias=bias,
            layouts=(layout_x, layout_w, layout_y), alignment=(ALIGNMENT, ALIGNMENT, ALIGNMENT), device=self._device,
        )  # fmt: skip

    def _readers(self, problem: ConvProblem, geometry: Geometry) -> tuple[Reader, ...]:
        """The window of a convolution along each axis."""
        if problem.dims != self._space:
            return ()  # a 1-D layer in a network of images works on what was gathered
        return tuple(Sliding(axis, geometry.transposed) for axis in problem.axes)


def _geometry(layer: str, w: torch.Tensor, options: Sequence[Any]) -> Geometry:
    """The geometry of a convolution with weight ``w``, from the options of ``aten::convolution`` in their order."""
    stride, padding, dilation, transposed, output_padding, groups = options
    geometry = Geometry.of(
        w.dim() - 2, stride, padding, dilation, int(groups), w.shape[2:], bool(transposed), output_padding
    )
    if geometry is None:
        raise UnsupportedModel(
            f"model: {layer!r} is a convolution that has no problem here (output padding or strides)"
        )
    return geometry


class _Norms:
    """Knows what normalization layers add up over ranks. ``over_all`` names the layers that do so over all images."""

    def __init__(self, memory: StepMemory) -> None:
        self._memory = memory
        self.over_all: frozenset[str] = frozenset()
        self._means_over_all: set[int] = set()
        """Addresses of the storages of means over all images."""

    def summed_bytes(self, name: str, args: Any, results: Sequence[torch.Tensor], backward: bool) -> int | None:
        """Bytes of the statistics that ranks add up for a norm, a mean and a variance; ``None`` for other operators."""
        for norm, argument in MEAN_ARGUMENT.items():
            if norm in name:
                mean = args[argument] if backward else results[1] if len(results) > 1 else None
                if isinstance(mean, torch.Tensor) and not self._memory.array(mean).split:
                    return 2 * mean.nbytes
                return 0
        return None

    def is_over_all(self, name: str, args: Any, results: Sequence[torch.Tensor], layer: str, backward: bool) -> bool:
        """Whether an operator is a batch norm over all images; in backward its mean tells."""
        if "batch_norm" not in name:
            return False
        if backward:
            mean = args[MEAN_ARGUMENT["batch_norm"]]
            return isinstance(mean, torch.Tensor) and mean.untyped_storage()._cdata in self._means_over_all
        if layer not in self.over_all:
            return False
        self._means_over_all |= {mean.untyped_storage()._cdata for mean in results[1:2]}
        return True
