"""torch's flags set for a while and put back, whatever comes in between, and the modes of a caller left out."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import share_kernels
from tests.factories import full_name, imported, python_files
from tests.forked import run_script
from tests.sampling import EVERY
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.machine import torch_state
from tilewise.machine.torch_state import (
    BENCHMARK,
    DETERMINISTIC,
    FITTING,
    fp32_precision,
    framework_flags,
    put_aside,
    setting,
    undisturbed,
    without_benchmark,
)

FLAGS = [("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "rnn"), ("cuda", "conv")]


def flags() -> tuple[object, ...]:
    """What torch tells of its flags, as they are and as they would be if the general ones were different."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    seen = [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, *(get(*where) for where in FLAGS)]
    general = get("generic", "all")
    for value in ("ieee", "tf32"):
        put("generic", "all", value)
        seen += [get(*where) for where in FLAGS]
    put("generic", "all", general)
    return tuple(seen)


@pytest.fixture
def _flags() -> Iterator[None]:
    saved = []
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    for where in FLAGS:
        saved.append(torch._C._get_fp32_precision_getter(*where))
        torch._C._set_fp32_precision_setter(*where, "none")
    yield
    torch._C._set_cudnn_benchmark(benchmark)
    torch._C._set_cudnn_deterministic(deterministic)
    for where, value in zip(FLAGS, saved, strict=True):
        torch._C._set_fp32_precision_setter(*where, value)


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("conv", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("everything", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("user", [(True, False), (False, True)])
def test_flags_are_as_they_were(user: tuple[bool, bool], everything: str, conv: str) -> None:
    """Also where the user's old and new flags disagree, and after an exception."""
    torch._C._set_cudnn_benchmark(user[0])
    torch._C._set_cudnn_deterministic(user[1])
    torch._C._set_fp32_precision_setter("generic", "all", everything)
    torch._C._set_fp32_precision_setter("cuda", "conv", conv)
    before = flags()
    for precision, deterministic in itertools.product(("ieee", "tf32"), (False, True)):
        with contextlib.suppress(KeyError), framework_flags("cuda", precision, deterministic=deterministic):
            during = flags()
            raise KeyError
        assert during[:2] == (True, deterministic)
        assert during[6] in FITTING[precision]
        assert flags() == before


@pytest.mark.usefixtures("_flags")
def test_a_cpu_has_no_flags_to_set() -> None:
    before = flags()
    with framework_flags("cpu", "ieee", deterministic=True), without_benchmark("cpu"):
        assert flags() == before


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_threads_leave_flags_as_they_were_in_whatever_order_they_end(first_to_end: int) -> None:
    before, inside = flags(), threading.Barrier(3)
    leave = [threading.Event(), threading.Event()]

    def plan(number: int) -> None:
        with framework_flags("cuda", ("ieee", "tf32")[number], deterministic=bool(number)):
            inside.wait(10)
            assert leave[number].wait(10)

    threads = [threading.Thread(target=plan, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    for number in (first_to_end, 1 - first_to_end):
        assert torch.backends.cudnn.benchmark
        leave[number].set()
        threads[number].join(10)
        if number == first_to_end:
            assert torch.backends.cudnn.deterministic is bool(1 - number), "the other one's is left"
    assert flags() == before


@pytest.mark.usefixtures("_flags")
def test_many_threads_leave_flags_as_they_were() -> None:
    torch._C._set_fp32_precision_setter("generic", "all", "tf32")
    before, faults = flags(), []

    def plan(number: int) -> None:
        draw = random.Random(number)
        try:
            for _ in range(200):
                with framework_flags("cuda", draw.choice(("ieee", "tf32")), deterministic=draw.random() < 0.5):
                    pass
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=plan, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert flags() == before
    assert not torch_state._held


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("at", range(10))
def test_an_interrupt_at_any_write_leaves_flags_as_they_were(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C may come while flags are set or put back."""
    torch._C._set_fp32_precision_setter("generic", "all", "tf32")
    before, written = flags(), 0

    def interrupted(write: Any) -> Any:
        def call(*arguments: Any) -> None:
            nonlocal written
            write(*arguments)
            written += 1
            if written == at + 1:
                raise KeyboardInterrupt

        return call

    monkeypatch.setattr(torch_state, "write_precision", interrupted(torch_state.write_precision))
    torch_state._precision_flag.cache_clear()
    chosen = [torch_state.Flag(f.name, f.own, interrupted(f.write)) for f in (BENCHMARK, DETERMINISTIC)]
    monkeypatch.setattr(torch_state, "BENCHMARK", chosen[0])
    monkeypatch.setattr(torch_state, "DETERMINISTIC", chosen[1])
    with contextlib.suppress(KeyboardInterrupt), framework_flags("cuda", "ieee", deterministic=True):
        pass
    monkeypatch.undo()
    torch_state._precision_flag.cache_clear()
    assert written > at, "all writes are met"
    assert flags() == before
    assert not torch_state._held


def test_matrix_products_of_a_cpu_have_a_flag_of_their_own() -> None:
    read = torch._C._get_fp32_precision_getter
    before = read("mkldnn", "matmul")
    with setting(torch_state._precision_flag("mkldnn", "matmul"), "bf16"):
        with fp32_precision("cpu", "matmul", "ieee"):
            assert read("mkldnn", "matmul") == "ieee"
        assert read("mkldnn", "matmul") == "bf16"
    assert read("mkldnn", "matmul") == before


class Functions(torch.overrides.TorchFunctionMode):
    """Tells ``seen`` of what reaches it."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """The same below torch's functions."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [Functions, pytest.param(Operators, marks=pytest.mark.skipif(not EVERY, reason="torch imports for seconds"))],
)
def test_no_mode_of_the_caller_sees_what_runs_undisturbed(mode: Any) -> None:
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with mode(seen), torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
        x.add(1)
        assert seen
        seen.clear()
        with undisturbed():
            y = torch.mm(torch.ones(2, 2), torch.ones(2, 2)) + x
        assert not seen
        x.add(1)
        assert seen
    assert y.device.type == "cpu"
    assert y.dtype is torch.float32
    assert not y.is_inference()
    assert not y.requires_grad


ROOT = Path(__file__).parents[2]
SETTERS = (
    "torch._C._set_",
    "torch._C._cuda_set",
    "torch.backends.cudnn.set_flags",
    "torch.set_deterministic_debug_mode",
    "torch.set_float32_matmul_precision",
    "torch.use_deterministic_algorithms",
)


def sets_flags(text: str) -> list[int]:
    """Lines of ``text`` that set a flag of torch's for good, or name what sets one."""
    tree = ast.parse(text)
    names = dict(imported(tree))
    for node in ast.walk(tree):  # cudnn = torch.backends.cudnn
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and full_name(node.value, names):
            names[node.targets[0].id] = full_name(node.value, names)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.ctx, ast.Store) and full_name(node, names).startswith("torch.backends."))
            or full_name(node, names).startswith(SETTERS)
        )
    ]


def test_flags_are_set_in_one_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("src", "benchmarks", "examples", "tools")
        for path in python_files(ROOT / folder)
        for line in sets_flags(path.read_text("utf-8"))
        if path.name != "torch_state.py"
    ]
    assert not found
    assert sets_flags((ROOT / "src" / "tilewise" / "machine" / "torch_state.py").read_text("utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "import torch\ncudnn = torch.backends.cudnn\ncudnn.allow_tf32, other = True, 1",
        "from torch.backends import cudnn\ncudnn.deterministic = True",
        "import torch\ntorch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "import torch\nput = torch._C._set_cudnn_benchmark",
        "import torch\ntorch.set_float32_matmul_precision('high')",
    ],
)
def test_every_way_to_set_a_flag_is_seen(line: str) -> None:
    assert len(sets_flags(line)) == 1
    assert not sets_flags("import torch\nif torch.backends.cudnn.benchmark: pass\ntorch.backends.mkl.is_available()")


FROZEN = """
import torch

torch.backends.disable_global_flags()
flags = lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.flags_frozen(),
                 *(torch._C._get_fp32_precision_getter(b, o) for b in ("cuda", "mkldnn") for o in ("conv", "matmul")))
before = flags()

from click.testing import CliRunner
import tilewise
from tilewise.cli import cli
from tilewise.planner import Planner, Options
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

layer = torch.nn.Conv2d(4, 4, 3, padding=1).to({device!r})
x = torch.randn(2, 4, 8, 8, device={device!r}, requires_grad=True)
with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
    want = layer.double()(x.double())
layer.float()
tilewise.optimize(layer, x, rigor="estimate")
tilewise.nn.restore(layer)
with tilewise.enabled(wait=True, rigor="estimate"):
    for _ in range(2):
        got = layer(x)
        got.sum().backward()
assert (got.double() - want).norm() <= 2e-3 * want.norm()
assert flags() == before, flags()
for words in (["plan"], ["time", "--iterations", "2"]):
    words += [NOTATION, "--device", {device!r}, "--rigor", "estimate", "--precision", "ieee"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
    assert flags() == before, words
try:
    torch.backends.cudnn.benchmark = True
except RuntimeError:
    print("still frozen")
""".replace("NOTATION", repr("mb2ic4ih8oc4kh3ph1"))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_everything_works_after_flags_are_frozen(device: str, tmp_path: Path, kernels: Path) -> None:
    """Importing torch's own test utilities freezes them."""
    share_kernels(tmp_path / "cache", kernels)
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path / "cache")}
    done = run_script("-c", FROZEN.format(device=device), environment=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "still frozen" in done.stdout


@pytest.mark.usefixtures("_flags")
def test_flags_are_put_aside_and_set_again_by_the_thread_that_set_them() -> None:
    before = flags()
    with framework_flags("cuda", "tf32", deterministic=True), setting(BENCHMARK, False):
        within = flags()
        with put_aside():
            assert flags() == before
            torch.backends.cudnn.benchmark = True  # the program's own, meanwhile
            with setting(DETERMINISTIC, True):
                pass
        assert flags() == within
        other = threading.Thread(target=lambda: put_aside().__enter__())
        other.start()
        other.join()
        assert flags() == within
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = bool(before[0])
    assert flags() == before
