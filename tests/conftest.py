"""What every test gets: its own wisdom, its share of the cores, and no GPU test where there is no GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tests import interpreter as interpreter  # before anything imports Triton: what is defined without it compiles
from tests.sampling import EVERY, fewer_examples, is_narrowed, sample
from tests.seeds import SEED, SEEDS, seed_all, use_profile

import tilewise
from tilewise.kernels.native import autograd, programs
from tilewise.kernels.native.extension import Extension, Unavailable
from tilewise.kernels.native.extension import load as load_native
from tilewise.machine import load
from tilewise.planner.caches import rates
from tilewise.planner.measuring import cold
from tilewise.planner.search.estimate import Profile, measure_profile

use_profile()


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to draw the same again."""
    if SEEDS:
        return f"every test is drawn with the seeds {SEEDS[0]} to {SEEDS[-1]}"
    return "draws are fixed" if SEED is None else f"TILEWISE_SEED={SEED} draws the same"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with every seed that is asked for."""
    if SEEDS:
        metafunc.parametrize("_seeded", SEEDS, indirect=True, ids=lambda seed: f"seed{seed}")


@pytest.fixture(autouse=True)
def _host_of_unknown_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No host is busy, whatever runs beside the tests: what is measured on a busy one is measured again later."""
    monkeypatch.setattr(load, "SYSTEM", tmp_path / "no stat")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Draws that do not depend on what ran before."""
    seed_all(request.node.name, getattr(request, "param", SEED))


def pytest_configure(config: pytest.Config) -> None:
    """Divide the cores among the workers of pytest-xdist, here and in processes that tests start."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests and most cases of sampled ones out, begin with the longest, skip GPU tests without a GPU."""
    if not EVERY and not is_narrowed(config):
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]
        for item in items:
            test = getattr(item, "obj", None)
            fewer_examples(getattr(test, "__func__", test))
    # What takes a minute goes first, so that no worker is alone with it at the end.
    items.sort(key=lambda item: item.path.name != "test_demo.py")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those marked ``slow``, and of tests marked ``sampled(n)`` what :func:`tests.sampling.sample` leaves.

    Those for a GPU all run.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("gpu"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("gpu")]
    for each in cases.values():
        marker = each[0].get_closest_marker("sampled")
        assert marker is not None
        kept = sample([_parameters(item) for item in each], marker.args[0], marker.kwargs.get("each", ()))
        found += [item for i, item in enumerate(each) if i not in kept]
    return found


def _parameters(item: pytest.Item) -> dict[str, object]:
    """A case's parameters by name, as text that is the same in every process."""
    spec = getattr(item, "callspec", None)
    return {} if spec is None else named(spec.params)


def named(parameters: Mapping[str, object]) -> dict[str, object]:
    """Parameters of a case as :func:`tests.sampling.sample` takes them: solvers by name."""
    return {name: getattr(value, "name", value) for name, value in parameters.items()}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what lasts as long as the session away from the collector: it would be visited again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Likewise what a file's tests leave: planning under a limit collects often, a second each time at the end."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


WHOLE = 2000
"""Tests of a run that is worth compiling what many of them use before it begins."""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Share out among the workers of a whole run what many of its tests would each begin by compiling."""
    if len(session.items) < WHOLE or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folder = kernel_folder(factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewise.machine.cache.kernel_dir", lambda: folder)
        for number, job in enumerate(_jobs()):
            if _is_first(factory.getbasetemp().parent / f"compiles {number}"):
                job()


def _is_first(path: Path) -> bool:
    """Make a file; whether no other worker had made it."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def _native(module: Extension) -> None:
    """Compile a native module; where that is not possible, the tests that need it say why."""
    with contextlib.suppress(Unavailable):
        load_native(module)


def _jobs() -> list[Callable[[], object]]:
    """What compiles the native modules and the CPU kernels, each into the folder of kernels: the longest first."""
    jobs: list[Callable[[], object]] = [functools.partial(_native, each.EXTENSION) for each in (autograd, programs)]
    if importlib.util.find_spec("numba") is None:
        return jobs
    from tilewise.kernels.cpu import compiling
    from tilewise.solvers.common.cpu_run import WIDEST

    widest = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
    for lanes in dict.fromkeys((widest, 4)):
        jobs += [functools.partial(load, lanes) for load in (compiling.load, compiling.load_direct)]
    for finishes in (False, True):
        jobs.append(functools.partial(compiling._winograd, widest, finishes))
        jobs.append(functools.partial(compiling._fused_lowering, finishes))
    return jobs


def kernel_folder(factory: pytest.TempPathFactory) -> Path:
    """Where all tests, of all workers, keep what they compile.

    It lies beside pytest's own folders of the last runs, and later runs with the same kernels' text find it. Where
    ``--basetemp`` is given it lies there.
    """
    base = factory.getbasetemp()
    of_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    of_user = of_run.parent
    if not of_user.name.startswith("pytest-of-"):
        found = of_run / "kernels"
    else:
        found = of_user / f"kernels-{_text_of_kernels()}"
        for other in of_user.glob("kernels-*"):
            if other != found and time.time() - other.stat().st_mtime > 7 * 24 * 3600:
                shutil.rmtree(other, ignore_errors=True)
    found.mkdir(exist_ok=True, mode=0o700)
    os.utime(found)
    return found


@functools.cache
def _text_of_kernels() -> str:
    """A hash of all files that kernels are made from."""
    digest = hashlib.sha256()
    for path in sorted(Path(tilewise.__file__).parent.glob("kernels/**/*.*")):
        if path.suffix != ".pyc" and path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def share_kernels(cache: Path, kernels: Path) -> None:
    """Have processes that keep their cache in ``cache`` find what the tests compile, and add to it."""
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "kernels").exists():
        (cache / "kernels").symlink_to(kernels)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests, of all workers, keep what they compile."""
    return kernel_folder(tmp_path_factory)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests from reading or writing the user's wisdom, and each other's; they share what they compile."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: kernels)


@pytest.fixture(scope="session", autouse=True)
def _quick_measurements() -> Iterator[None]:
    """Plans are measured as ever, but for two things, which take most of the time where layers are as small as here.

    Between the timed runs a part of the caches is filled with other data, not all of a server's. And the rates of the
    CPU are measured once, not by every planner that begins without wisdom.
    """
    threads, found = torch.get_num_threads(), measure_profile("cpu")

    def rates_of(device: str) -> Profile:
        known = device == "cpu" and torch.get_num_threads() == threads
        return dict(found) if known else measure_profile(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold, "MOST", 1 << 20)
        patch.setattr(rates, "measure_profile", rates_of)
        yield
