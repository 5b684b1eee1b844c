"""A training step as a list of kernels, allocations and gradients, found by running it on tensors without data."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tilewise.distributed.mesh.events import StepTrace
from tilewise.distributed.mesh.recorder import Recorder, UnsupportedModel
from tilewise.nn.record import arguments_of
from tilewise.nn.step.step import loss_of

__all__ = ["trace_step"]


def trace_step(
    model: nn.Module, example: Any, *, device: str, precision: str = "ieee", training: bool = True
) -> StepTrace:
    """The trace of one step of ``model``: forward, a loss and backward, or with ``training`` off a forward alone.

    ``example`` is what the model is called with, as for :func:`tilewise.optimize`; its tensors may lie on the meta
    device. The first one's shape is (batch, channels, *sizes). Problems are for the device called ``device``, with
    fp32 products at torch's ``precision``. Nothing is computed. Raises ``ValueError`` where the model needs data to run
    or computes in another type than fp32, bf16 and fp16.
    """
    args, kwargs = arguments_of(example)
    inputs = _tensors_in(args, kwargs)
    if not inputs or inputs[0].dim() < 3:
        shapes = [tuple(tensor.shape) for tensor in inputs]
        raise ValueError(f"example has tensors of {shapes}: a first one of (batch, channels, *sizes) would do")
    space = min(inputs[0].dim() - 2, 3)
    parameters_and_buffers = (*model.parameters(), *model.buffers())
    if any(nn.parameter.is_lazy(tensor) for tensor in parameters_and_buffers):
        raise ValueError("model has lazy parameters: run it once before")
    model_device = parameters_and_buffers[0].device if parameters_and_buffers else torch.device("cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model, over_all = _fake_copy(model, fake)
    recorder = Recorder(space, device, precision, frozenset(tuple(p.shape) for p in model.parameters()))

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=model_device)

    try:
        with ExitStack() as stack:
            stack.enter_context(fake)
            args, kwargs = tree_map_only(torch.Tensor, empty, (args, kwargs))
            stack.enter_context(torch.set_grad_enabled(training))
            stack.callback(recorder.register_hooks(fake_model, over_all))
            stack.enter_context(recorder)
            recorder.hold(_tensors_in(args, kwargs))
            loss = loss_of(fake_model(*args, **kwargs))
            recorder.backward = True
            if training and loss is not None:
                loss.backward()
            del loss
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever the model's own code raises
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"model does not run on tensors without data shaped {tuple(inputs[0].shape)}: {text}"
        ) from error
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if training else []
    return StepTrace(
        recorder.events(),
        batch=int(inputs[0].shape[0]),
        space=space,
        parameters=sum(tensor.nbytes for tensor in parameters_and_buffers),
        gradients=sum(parameter.nbytes for parameter in trained),
    )


def _tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of a call."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _fake_copy(model: nn.Module, fake: FakeTensorMode) -> tuple[nn.Module, list[str]]:
    """A copy of ``model`` with tensors of ``fake``, and the names of its batch norms over all ranks of the job.

    No ``nn.SyncBatchNorm`` of the copy communicates.
    """
    memo: dict[int, Any] = {id(tensor): fake.from_tensor(tensor) for tensor in (*model.parameters(), *model.buffers())}
    synchronized = {name: module for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    memo |= {id(module.process_group): module.process_group for module in synchronized.values()}
    fake_model = copy.deepcopy(model, memo)
    for name in synchronized:
        fake_model.get_submodule(name).__class__ = _LocalBatchNorm
    return fake_model, [name for name, module in synchronized.items() if module.process_group is None]


class _LocalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A ``nn.SyncBatchNorm`` that does not communicate, even in a job of several ranks."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass
