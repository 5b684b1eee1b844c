"""A training step as a list of kernels, allocations and gradients, found by running it on tensors without data."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from tilewise.axis import Axis
from tilewise.distributed.ghosts import Reader, Resized, Sliding
from tilewise.nn.geometry import Geometry, Role
from tilewise.nn.record import arguments_of
from tilewise.nn.step import loss_of
from tilewise.problem import ALIGNMENT, DTYPE_NAMES, ConvProblem, layout_of

__all__ = ["Allocated", "Array", "Freed", "Gradient", "Kernel", "StepTrace", "trace_step"]


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor's ``shape``, bytes an element and how many of its last axes are space (0: it is no activation)."""

    shape: tuple[int, ...]
    itemsize: int
    space: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its spatial extents."""
        return self.shape[len(self.shape) - self.space :]

    @property
    def split(self) -> bool:
        """Whether ranks may hold parts of it: an activation of more than one position."""
        return math.prod(self.sizes) > 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator of the step.

    ``problems`` are a convolution's passes, ``readers`` the axes of what a window slides over, and ``halo`` the tensor
    that is exchanged for it (backward: whose ghost zones are added up). ``sums`` are bytes that all ranks which share
    an image add up, or with ``over_all`` those of all images; ``gathered`` is a tensor that each of them needs whole.
    ``arrays`` are read and written, for ``flops`` operations.
    """

    layer: str
    operator: str
    backward: bool
    arrays: tuple[Array, ...] = ()
    dtype: str = "fp32"
    flops: int = 0
    problems: tuple[ConvProblem, ...] = ()
    readers: tuple[Reader, ...] = ()
    halo: Array | None = None
    sums: int = 0
    over_all: bool = False
    gathered: Array | None = None


@dataclass(frozen=True, slots=True)
class Allocated:
    """Memory number ``index``; ``readers`` are all windows that slide over it and so need ghost zones in it."""

    index: int
    nbytes: int
    array: Array
    readers: tuple[tuple[Reader, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Freed:
    """Memory number ``index`` is given back."""

    index: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter's gradient of ``nbytes`` is complete."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A step in its order. ``parameters`` counts buffers, too, ``gradients`` those of all that is trained, in bytes.

    ``space`` is the number of spatial axes.
    """

    events: tuple[Kernel | Allocated | Freed | Gradient, ...]
    batch: int
    space: int
    parameters: int
    gradients: int


def trace_step(
    model: nn.Module, example: Any, *, device: str, precision: str = "ieee", training: bool = True
) -> StepTrace:
    """Forward, a loss and backward of ``model`` on inputs shaped as ``example``, or with ``training`` off a forward.

    ``example`` is what the model is called with, as for :func:`tilewise.optimize`; its tensors may lie on the meta
    device. The first one's shape is (batch, channels, *sizes). Problems are for the device called ``device``. Nothing
    is computed. Raises ``ValueError`` where the model needs data to run or computes in another type than fp32, bf16
    and fp16.
    """
    args, kwargs = arguments_of(example)
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not inputs or inputs[0].dim() < 3:
        shapes = [tuple(t.shape) for t in inputs]
        raise ValueError(f"example has tensors of {shapes}: a first one of (batch, channels, *sizes) would do")
    space = min(inputs[0].dim() - 2, 3)
    tensors = (*model.parameters(), *model.buffers())
    if any(nn.parameter.is_lazy(t) for t in tensors):
        raise ValueError("model has lazy parameters: run it once before")
    place = tensors[0].device if tensors else torch.device("cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {id(t): fake.from_tensor(t) for t in tensors}
    synchronized = {name: m for name, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)}
    memo |= {id(m.process_group): m.process_group for m in synchronized.values()}
    twin = copy.deepcopy(model, memo)
    for name in synchronized:
        twin.get_submodule(name).__class__ = _Alone
    recorder = Recorder(space, device, precision, frozenset(tuple(p.shape) for p in model.parameters()))
    try:
        with ExitStack() as stack:
            stack.enter_context(fake)
            empty: Callable[[torch.Tensor], torch.Tensor] = lambda t: torch.empty(  # noqa: E731
                t.shape, dtype=t.dtype, device=place
            )
            args, kwargs = tree_map_only(torch.Tensor, empty, (args, kwargs))
            stack.enter_context(torch.set_grad_enabled(training))
            stack.callback(recorder.watch(twin, [n for n, m in synchronized.items() if m.process_group is None]))
            stack.enter_context(recorder)
            recorder.hold([t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
            loss = loss_of(twin(*args, **kwargs))
            recorder.backward = True
            if training and loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
    except Unsuited:
        raise
    except Exception as error:  # whatever the model's own code raises
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"model does not run on tensors without data shaped {tuple(inputs[0].shape)}: {text}"
        ) from error
    trained = [p for p in model.parameters() if p.requires_grad] if training else []
    return StepTrace(
        recorder.trace(),
        batch=int(inputs[0].shape[0]),
        space=space,
        parameters=sum(t.nbytes for t in tensors),
        gradients=sum(p.nbytes for p in trained),
    )


class Unsuited(ValueError):
    """A model whose kernels have no problem here."""


class _Alone(nn.modules.batchnorm._BatchNorm):
    """A SyncBatchNorm that asks no other ranks, in a job of several too."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


NORMS = {"batch_norm": 5, "group_norm": 2, "layer_norm": 3}
"""Operators that need a mean over space, and where their backward takes it."""
TAPS = {"nearest": 1, "nearest_exact": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}


@dataclass
class _Memory:
    nbytes: int
    array: Array
    readers: dict[tuple[Reader, ...], None] = field(default_factory=dict)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down every operator under autograd, and memory as it comes and goes."""

    def __init__(self, space: int, device: str, precision: str, weights: frozenset[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = False
        self._space, self._device, self._precision, self._weights = space, device, precision, weights
        self._events: list[Kernel | int | Freed | Gradient] = []
        self._memory: list[_Memory] = []
        self._places: dict[int, int] = {}
        self._layers: list[str] = [""]
        self._owners: dict[int, str] = {}
        self._over_all: frozenset[str] = frozenset()
        self._means: set[int] = set()

    def watch(self, model: nn.Module, over_all: Sequence[str] = ()) -> Callable[[], None]:
        """Have layers' names and the moments of gradients told; returns what ends that.

        Layers ``over_all`` take statistics over the ranks of all images.
        """
        self._over_all = frozenset(over_all)
        handles: list[Any] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._layers.append(name)))
            handles.append(module.register_forward_hook(lambda *_: self._leave()))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles += [p.register_post_accumulate_grad_hook(self._graded) for p in trained]  # type: ignore[no-untyped-call]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def _leave(self) -> None:
        self._layers.pop()

    def _graded(self, parameter: torch.Tensor) -> None:
        self._events.append(Gradient(parameter.nbytes))

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count tensors that are there before the step."""
        for tensor in tensors:
            self._hold(tensor)

    def trace(self) -> tuple[Kernel | Allocated | Freed | Gradient, ...]:
        """All that was taken down."""
        return tuple(self._allocated(event) if isinstance(event, int) else event for event in self._events)

    def _allocated(self, index: int) -> Allocated:
        found = self._memory[index]
        return Allocated(index, found.nbytes, found.array, tuple(found.readers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        for tensor in results:
            self._hold(tensor)
        if views:
            self._viewed(name, operands, results)
        elif results and any(t.numel() for t in (*operands, *results)) and not name.startswith(("empty", "new_empty")):
            self._events.append(self._kernel(func, name, args, kwargs, operands, results, out))
        return out

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._places or not storage.nbytes():
            return
        index = self._places[place] = len(self._memory)
        self._memory.append(_Memory(storage.nbytes(), self._array(tensor)))
        # A gradient of a parameter is counted with the parameter, which has it in the steps to come as well.
        if not (self.backward and tuple(tensor.shape) in self._weights):
            self._events.append(index)

            def freed() -> None:
                if self._places.get(place) == index:
                    del self._places[place]
                self._events.append(Freed(index))

            weakref.finalize(storage, freed).atexit = False
        else:
            weakref.finalize(storage, self._places.pop, place, None).atexit = False

    def _array(self, tensor: torch.Tensor) -> Array:
        shape = tuple(map(int, tensor.shape))
        space = self._space if len(shape) >= self._space + 2 and shape not in self._weights else 0
        return Array(shape, tensor.element_size(), space)

    def _viewed(self, name: str, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        if self.backward or name in ("detach", "alias", "select", "slice", "split", "chunk", "expand"):
            return
        before = self._array(operands[0])
        if before.split and not any(self._array(t).space for t in results):
            self._events.append(Kernel(self._layers[-1], name, False, gathered=before))

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
        layer = self._layers[-1]
        arrays = tuple(self._array(t) for t in (*operands, *results))
        if name == "convolution":
            self._owners[args[1].untyped_storage()._cdata] = layer
            return self._convolution(layer, args[0], args[1], results[0], args[2] is not None, args[3:9], arrays)
        if name == "convolution_backward":
            return self._convolution_backward(args, arrays)
        readers, halo = self._readers(name, named_arguments(func, args, kwargs), operands, results)
        largest = max((*operands, *results), key=lambda t: t.nbytes)
        count = flop_registry.get(func.overloadpacket)
        return Kernel(
            layer if not self.backward else "",
            name,
            self.backward,
            arrays,
            DTYPE_NAMES.get(largest.dtype, "fp32"),
            0 if count is None else int(count(*args, **kwargs, out_val=out)),
            readers=readers,
            halo=None if halo is None else self._ghosted(halo, readers),
            sums=self._sums(name, args, results, arrays[: len(operands)]),
            over_all=self._is_over_all(name, args, results),
        )

    def _ghosted(self, tensor: torch.Tensor, readers: tuple[Reader, ...]) -> Array:
        index = self._places.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._memory[index].readers[readers] = None
        return self._array(tensor)

    def _convolution(
        self,
        layer: str,
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        bias: bool,
        options: Sequence[Any],
        arrays: tuple[Array, ...],
    ) -> Kernel:
        geometry = self._geometry(layer, w, options)
        problem = self._problem(geometry, Role.FORWARD, layer, x, w, y, bias)
        readers = self._slides(problem, geometry)
        halo = self._ghosted(x, readers) if readers else None
        return Kernel(layer, "convolution", False, arrays, problem.dtype, 0, (problem,), readers, halo)

    def _convolution_backward(self, args: Any, arrays: tuple[Array, ...]) -> Kernel:
        dy, x, w, _, *options = args
        layer = self._owners.get(w.untyped_storage()._cdata, "")
        geometry = self._geometry(layer, w, options[:6])
        mask = options[6]
        roles = [role for role, wanted in zip((Role.GRAD_INPUT, Role.GRAD_WEIGHT), mask, strict=False) if wanted]
        problems = tuple(self._problem(geometry, role, layer, x, w, dy, False) for role in roles)
        readers = self._slides(problems[0], geometry) if problems else ()
        halo = self._array(x) if mask[0] and readers else None
        dtype = DTYPE_NAMES.get(x.dtype, "fp32")
        return Kernel(layer, "convolution_backward", True, arrays, dtype, 0, problems, readers, halo)

    def _geometry(self, layer: str, w: torch.Tensor, options: Sequence[Any]) -> Geometry:
        stride, padding, dilation, transposed, output_padding, groups = options
        found = Geometry.of(
            w.dim() - 2, stride, padding, dilation, int(groups), w.shape[2:], bool(transposed), output_padding
        )
        if found is None:
            raise Unsuited(f"model: {layer!r} is a convolution that has no problem here (output padding or strides)")
        return found

    def _problem(
        self, geometry: Geometry, role: Role, layer: str, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: bool
    ) -> ConvProblem:
        dtype = DTYPE_NAMES.get(x.dtype)
        if dtype is None:
            raise Unsuited(f"model: {layer!r} computes in {x.dtype}; {', '.join(DTYPE_NAMES.values())} would do")
        lx, lw, ly = (layout_of(t.shape, t.stride()) for t in (x, w, y))
        return geometry.problem(
            role, tuple(x.shape), tuple(w.shape), dtype=dtype, precision=self._precision, bias=bias,
            layouts=(lx, lw, ly), alignment=(ALIGNMENT, ALIGNMENT, ALIGNMENT), device=self._device,
        )  # fmt: skip

    def _slides(self, problem: ConvProblem, geometry: Geometry) -> tuple[Reader, ...]:
        if problem.dims != self._space:
            return ()  # a 1-D layer in a network of images works on what was gathered
        return tuple(Sliding(axis, geometry.transposed) for axis in problem.axes)

    def _readers(
        self, name: str, named: dict[str, Any], operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> tuple[tuple[Reader, ...], torch.Tensor | None]:
        """Windows of pooling and interpolation, and the tensor that is exchanged for them."""
        back = name.endswith("_backward")
        if name.startswith(("max_pool", "avg_pool")):
            x = named["self"]
            kernel = named["kernel_size"]
            readers = self._pool(
                x,
                named["grad_output"] if back else results[0],
                kernel,
                named["stride"] or kernel,
                named["padding"],
                named.get("dilation", 1),
            )
            return readers, results[0] if back else x
        if name.startswith(("upsample_", "_upsample_")):
            kind = name.strip("_").removeprefix("upsample_").removesuffix("_backward").rstrip("0123456789d")
            taps = TAPS.get(kind, 4)
            small, large = (results[0], named["grad_output"]) if back else (operands[0], results[0])
            sizes = zip(small.shape[2:], large.shape[2:], strict=True)
            return tuple(Resized(int(n), int(m), taps) for n, m in sizes), small
        return (), None

    def _pool(
        self, x: torch.Tensor, y: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any
    ) -> tuple[Reader, ...]:
        dims = self._space
        if x.dim() != dims + 2:
            return ()

        def each(value: Any) -> list[int]:
            values = [value] if isinstance(value, int) else list(value)
            return values * dims if len(values) == 1 else values

        readers = []
        rows = zip(x.shape[2:], y.shape[2:], each(kernel), each(stride), each(padding), each(dilation), strict=True)
        for size, out, k, s, p, d in rows:
            after = (out - 1) * s + (k - 1) * d + 1 - size - p  # as ceil_mode asks for
            readers.append(Sliding(Axis(int(size), k, s, d, p, int(after))))
        return tuple(readers)

    def _sums(self, name: str, args: Any, results: Sequence[torch.Tensor], operands: Sequence[Array]) -> int:
        for norm, place in NORMS.items():
            if norm in name:
                mean = args[place] if self.backward else results[1] if len(results) > 1 else None
                known = isinstance(mean, torch.Tensor) and not self._array(mean).split
                return 2 * mean.nbytes if known else 0  # type: ignore[union-attr]
        whole = not any(self._array(t).split for t in results)
        if self.backward or not whole or not any(array.split for array in operands):
            return 0  # gradients of parameters are added up over all ranks at once
        return sum(t.nbytes for t in results)

    def _is_over_all(self, name: str, args: Any, results: Sequence[torch.Tensor]) -> bool:
        """Of a batch norm: whether its layer is; backward, whether the mean that it reads is of such a layer."""
        if "batch_norm" not in name:
            return False
        if self.backward:
            mean = args[NORMS["batch_norm"]]
            return isinstance(mean, torch.Tensor) and mean.untyped_storage()._cdata in self._means
        if self._layers[-1] not in self._over_all:
            return False
        self._means |= {mean.untyped_storage()._cdata for mean in results[1:2]}
        return True


def named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """An operator's arguments by name; those at their defaults are left out of ``args``."""
    found = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    found |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    found |= kwargs
    return found
