"""Groups of ranks, forked from one server process that has imported torch once."""

from __future__ import annotations

import copy
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.models import Case
from tests.forked import server
from torch.distributed.device_mesh import init_device_mesh

from tilewise.distributed import Shard, SpatialParallel, layers

layers.load()


def _rank(
    pipe: Connection, function: Callable[..., Any], rank: int, ranks: int, store: str, device: str, args: Any
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        # Without a host name to look up, whatever the network here.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device == "cuda":
            torch.cuda.set_device(rank)
            torch.set_default_device("cuda")
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
        )
        if backend == "gloo":
            dist.barrier()  # a rank that is done closes its connections, maybe before another has made its own
        torch.manual_seed(0)  # generators of GPUs begin at random: ranks would draw different weights
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        # Other ranks may be gone: what closes connections in order would wait for them.
        os._exit(0)


def run(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    may_die: bool = False,
    without: int | None = None,
    device: str = "cpu",
) -> list[Any]:
    """What ``function(*args)`` gives on each rank; a hang is a failure.

    A rank that may die, and the one that is done without, give ``None``.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = server().Pipe(duplex=False)
            process = server().Process(
                target=_rank,
                args=(theirs, function, rank, ranks, str(Path(folder) / "store"), device, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        found: dict[int, Any] = {} if without is None else {without: (True, None)}
        deadline = time.monotonic() + timeout
        try:
            while len(found) < ranks:
                waiting = [pipe for i, pipe in enumerate(pipes) if i not in found]
                ready = wait(waiting, deadline - time.monotonic())
                assert ready, f"ranks {sorted(set(range(ranks)) - set(found))} of {ranks} hang, others: {found}"
                for pipe in ready:
                    rank = pipes.index(pipe)  # type: ignore[arg-type]
                    try:
                        found[rank] = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        found[rank] = (may_die, None if may_die else "the process ended")
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [f"rank {rank}: {found[rank][1]}" for rank in range(ranks) if not found[rank][0]]
    assert not failures, "\n".join(failures)
    return [found[rank][1] for rank in range(ranks)]


_parallels: dict[Any, SpatialParallel] = {}


def parallel(module: torch.nn.Module, shape: tuple[int, ...], dims: tuple[str, ...]) -> SpatialParallel:
    """``module`` on a mesh of all ranks; connections are made once for a mesh, as they take longest."""
    key = (shape, dims)
    if key not in _parallels:
        mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=dims)
        _parallels[key] = SpatialParallel(torch.nn.Identity(), mesh, dims, timeout=20)
    made = SpatialParallel.__new__(SpatialParallel)
    torch.nn.Module.__init__(made)
    made.__dict__.update(
        {k: v for k, v in _parallels[key].__dict__.items() if k in ("space", "dims", "_agreed", "_copies")}
    )
    made._wrap(module)
    return made


def local(value: Any) -> torch.Tensor:
    return value.local if isinstance(value, Shard) else value


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def against_one_device(case: Case, what: str) -> None:
    torch.manual_seed(0)
    plain, layer = case.layer, copy.deepcopy(case.layer)
    full = torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
    expected = plain(full)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    p = parallel(layer, *case.mesh)
    own = full.detach().clone().requires_grad_()
    y = p(p.scatter(own, case.cuts))
    what = f"{what} {plain} {case.shape} {case.cuts}"
    assert tuple(y.shape) == tuple(expected.shape), what
    found = p.gather(y) if isinstance(y, Shard) else y
    found.backward(upstream)
    close(found, expected, what)
    close(own.grad, full.grad, f"dx of {what}")
    for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        close(a.grad, b.grad, f"d {name} of {what}")
