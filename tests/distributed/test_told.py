"""An error of one rank reaches the others with its text, wherever it is raised: forwards, backwards and between."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run
from tests.forked import server
from tests.sampling import EVERY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.comm.agreement import RankMismatch
from tilewise.comm.comparison import Comparison
from tilewise.comm.link import Link, PeerError
from tilewise.comm.texts import MOST_TOLD
from tilewise.distributed import SpatialParallel


def full() -> OSError:
    return OSError("the disk is full")


class Raising(torch.autograd.Function):
    """Somebody's own function, which fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise full()


def raising(error: Callable[[], BaseException] = full) -> Callable[..., Any]:
    def hook(*_: object) -> None:
        raise error()

    return hook


def on_model(model: nn.Module, p: SpatialParallel, kind: str) -> None:
    """Have something raise."""
    middle = model[1]
    {
        "forward hook": lambda: middle.register_forward_hook(raising()),
        "forward pre hook": lambda: middle.register_forward_pre_hook(raising()),
        "hook of the whole": lambda: p.register_forward_hook(raising()),
        "backward hook": lambda: middle.register_full_backward_hook(raising()),
        "backward pre hook": lambda: middle.register_full_backward_pre_hook(raising()),
        "parameter": lambda: middle.weight.register_hook(raising()),
        "accumulated": lambda: middle.weight.register_post_accumulate_grad_hook(raising()),
        "interrupt forward": lambda: middle.register_forward_hook(raising(KeyboardInterrupt)),
        "interrupt": lambda: middle.register_full_backward_hook(raising(KeyboardInterrupt)),
        "exit": lambda: middle.register_full_backward_hook(raising(lambda: SystemExit(3))),
    }.get(kind, lambda: None)()


KINDS = {
    "forward hook": "rank 1 failed in '1' (Conv2d): OSError: the disk is full",
    "forward pre hook": "rank 1 failed in '1' (Conv2d): OSError: the disk is full",
    "hook of the whole": "rank 1 failed in SpatialParallel: OSError: the disk is full",
    "backward hook": "rank 1 failed in the backward of '1' (Conv2d): OSError: the disk is full",
    "backward pre hook": "rank 1 failed in the backward of '1' (Conv2d): OSError: the disk is full",
    "parameter": "rank 1 failed in backward: OSError: the disk is full",
    "accumulated": "rank 1 failed in backward: OSError: the disk is full",
    "tensor": "rank 1 failed in backward: OSError: the disk is full",
    "loss": "rank 1 failed in backward: OSError: the disk is full",
    "interrupt forward": "rank 1 failed in '1' (Conv2d): KeyboardInterrupt",
    "interrupt": "rank 1 failed in the backward of '1' (Conv2d): KeyboardInterrupt",
    "exit": "rank 1 failed in the backward of '1' (Conv2d): SystemExit: 3",
    "step": "rank 1 failed in the optimizer's step: OSError: the disk is full",
}


def one(kind: str, mesh: Any) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3)))
    p = SpatialParallel(model, mesh, timeout=20)
    faulty = dist.get_rank() == 1
    if faulty:
        on_model(model, p, kind)
    x = torch.ones(1, 2, 12, 6, requires_grad=True)
    try:
        for _ in range(3):
            y = p(p.scatter(x))
            if kind == "tensor" and faulty:
                y.register_hook(raising())
            loss = y.square().mean()
            (Raising.apply(loss) if kind == "loss" and faulty else loss * 2).backward()
            with p.telling("the optimizer's step"):
                if kind == "step" and faulty:
                    raise full()
    except PeerError as error:
        return str(error) if error.ranks == (1,) else f"causes {error.causes}"
    except BaseException as error:
        return f"own {type(error).__name__}"
    return "nothing happened"


def all_kinds(kinds: list[str]) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("h",))
    return {kind: one(kind, mesh) for kind in kinds}


def test_an_error_is_told_with_its_text_wherever_it_is_raised() -> None:
    kinds = list(KINDS)[:: 1 if EVERY else 2]
    found = run(3, all_kinds, kinds, timeout=120)
    for kind in kinds:
        words = KINDS[kind]
        assert found[1][kind].startswith("own "), (kind, found[1][kind])
        for rank in (0, 2):
            assert found[rank][kind].startswith(words), (kind, found[rank][kind])


def another_graph() -> None:
    """An error in a backward that does not go over the ranks is nobody else's affair."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("h",))
    p = SpatialParallel(nn.Identity(), mesh, timeout=20)
    if dist.get_rank() == 1:
        with pytest.raises(OSError, match="full"):
            Raising.apply(torch.ones(1, requires_grad=True)).backward()
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    p(p.scatter(x)).sum().backward()
    assert x.grad is not None


def test_an_error_of_another_graph_breaks_nothing() -> None:
    run(2, another_graph)


def ending(rank: int, store: str, pipe: Any, kind: str) -> None:
    """Between steps: nobody catches it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    torch.manual_seed(0)
    p = SpatialParallel(nn.Conv2d(1, 1, 3, padding=1), mesh, timeout=20)
    x = torch.ones(1, 1, 6, 6)
    p(p.scatter(x)).sum().backward()
    if rank == 0:
        try:
            p(p.scatter(x)).sum().backward()
        except PeerError as error:
            pipe.send((error.ranks, str(error)))
        return
    sys.stderr = open(os.devnull, "w", encoding="ascii")  # noqa: SIM115
    if kind == "script":
        try:
            raise full()
        except OSError:
            sys.excepthook(*sys.exc_info())  # as Python does for a script
            os._exit(1)
    if kind == "error":
        raise full()
    if kind == "exit":
        sys.exit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    # "end": its program has fewer steps


ENDS = {
    "script": "rank 1 failed in its program: OSError: the disk is full",
    "error": "rank 1 failed in its program: OSError: the disk is full",
    "exit": "rank 1 failed in its program: SystemExit: 3",
    "interrupt": "rank 1 failed in its program: KeyboardInterrupt",
    "end": "rank 1 ended: its program came to its end",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ENDS)
def test_what_ends_a_program_between_steps_is_told(kind: str, tmp_path: Any) -> None:
    ours, theirs = server().Pipe(duplex=False)
    ranks = [server().Process(target=ending, args=(n, str(tmp_path / "store"), theirs, kind)) for n in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        assert ours.poll(60), "rank 0 hangs"
        causes, text = ours.recv()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert causes == (1,)
    assert text.startswith(ENDS[kind]), text


def compared(steps: int) -> tuple[int, int, str]:
    """Texts that stand in the store after ever new ones, those that are remembered, and how a difference is told."""
    link = Link(range(dist.get_world_size()), 30)
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    for step in range(steps):
        Comparison(link, f"size {step}\nmode", "their inputs").finish()
    dist.barrier()
    kept = store.num_keys() - before
    dist.barrier()
    try:
        for text in ("size 1\nmode", f"size {dist.get_rank()}\nmode"):  # one that was told long ago
            Comparison(link, text, "their inputs").finish()
    except RankMismatch as error:
        return kept, len(link.texts), str(error)
    return kept, len(link.texts), ""


def test_what_ranks_tell_of_their_sizes_does_not_grow() -> None:
    for kept, told, text in run(2, compared, 2 * MOST_TOLD):
        assert told <= MOST_TOLD
        assert kept <= 2 * MOST_TOLD + 8
        assert "size 0" in text, text
        assert "size 1" in text, text
