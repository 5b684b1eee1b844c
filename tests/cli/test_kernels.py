"""``tilewise kernels`` and packs with wisdom: what is built here is found there, and nothing is half done."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.conftest import share_kernels
from tests.forked import run_script
from tests.kernels.packs.crafted import cpu_file, pack_of, triton_files
from tests.nn.regions.kept import First, net
from tests.sampling import EVERY

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

import tilewise
from tilewise import solvers
from tilewise.kernels.building import code_files
from tilewise.kernels.packs.archive import opened
from tilewise.nn.regions import ways
from tilewise.plan import Measurement
from tilewise.planner.search.leaves import leaf_plan
from tilewise.wisdom import Wisdom

LAYER = "g4mb2ic4ih6oc4oh4kh3"
OTHERS = ("depthwise_fft", "fft", "fused_lowering", "lowering_type1", "lowering_type2", "lowering_type3", "winograd")
NARROW = (*(word for name in OTHERS for word in ("--exclude", name)), "--batch-sizes", "undivided")
"""Of the kernels for this layer those that many tests use."""
PATIENCE_S = 120
TILEWISE = (sys.executable, "-m", "tilewise", "kernels")


def done(*arguments: str) -> str:
    """What a command prints in a process of its own; it must end well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = run_script("-m", "tilewise", *arguments, environment=environment, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def files_of(folder: Path) -> dict[Path, int]:
    """All files below a folder, with the time of their last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_pack_that_is_built_leaves_nothing_to_compile(run, tmp_path, kernels, monkeypatch, check_document):
    """In three processes: the pack is built, it is imported into an empty cache, and there the layer is planned."""
    pack, listed = tmp_path / "layers.pack", tmp_path / "layers.txt"
    key = "conv dgrad fp32 ieee g4mb2ic4oc4ih8kh3sh1dh0ph0,0iw8kw3sw1dw0pw0,0 x:co16w:co16y:co16 cuda:elsewhere"
    listed.write_text(f"# layers\n\n{LAYER}\n{key}\n")
    share_kernels(tmp_path / "built", kernels)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "built"))
    assert " files (" in done("kernels", "build", str(listed), "--arch", "cpu", *NARROW, "-o", str(pack))
    with opened(pack) as found:
        names = {entry.path.partition("-")[0] for entry in found.manifest.entries}
    assert names == {"cpu/direct_4", "cpu/rows_4", "cpu/sums_4"}

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "empty"))
    assert f"{len(found.manifest.entries)} kernels of {pack} are new here" in done(
        "kernels", "import", str(pack), "--trust"
    )
    imported = files_of(tmp_path / "empty" / "kernels")
    assert len(imported) == len(found.manifest.entries)
    explained = json.loads(done("explain", LAYER, "--device", "cpu", "--pass", "wgrad", *NARROW, "--json"))
    assert "depthwise" in {candidate["solver"] for candidate in explained["candidates"]}, explained
    assert files_of(tmp_path / "empty" / "kernels") == imported, "planning compiled nothing"
    document = check_document(run("kernels", "list", str(pack), "--json").stdout)
    assert [(held["kind"], held["files"], held["obstacle"]) for held in document["held"]] == [
        ("cpu", len(imported), "")
    ]


LOADED = """
import json, sys, torch, tilewise
from tilewise.kernels.building.noted import noted
program = tilewise.load_exported(sys.argv[1])
found = program(torch.ones(1, 3, 9, 7))
torch.save(found, sys.argv[2])
print(json.dumps([list(noted()), program.why_not_native]))
"""


class Ours(First):
    """Plans by kernels of ours where these can compute a problem."""

    def plan(self, problem, options=None):
        solver = solvers.get("indirect")
        if not isinstance(problem, solver.solves) or solver.unsupported(problem):
            return super().plan(problem, options)
        config = next(iter(solver.configs(problem)))
        return leaf_plan(problem, Measurement(solver.name, solver.version, config, 0.1, 0))


def loaded(model: Path, result: Path, **variables: str) -> tuple[set[str], str]:
    """Load an exported model and call it, in a process of its own: the kernels it asked for, and why not native."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    ended = run_script("-c", LOADED, str(model), str(result), environment=environment, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    names, reason = json.loads(ended.stdout.splitlines()[-1])
    return set(names), reason


@pytest.mark.skipif(not EVERY, reason="compiles a module in C++ anew, for half a minute where cores are busy")
def test_a_pack_of_an_exported_model_leaves_nothing_to_compile(tmp_path, kernels, monkeypatch):
    """In processes: it is packed, the pack is imported into an empty cache, and there the model is loaded and called.

    The pack holds what loading asks for and nothing else, the module that runs programs among it.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    model, pack = tmp_path / "model.safetensors", tmp_path / "model.pack"

    def of(times: object, key: object, run: object) -> float:
        """Plans of ours are told to be the fastest, so that they are taken."""
        return 0.0 if isinstance(key, tuple) and getattr(key[-1], "solver", "") == "indirect" else 1.0

    monkeypatch.setattr(ways.Times, "of", of)
    tilewise.export(net(), torch.ones(1, 3, 9, 7), model, planner=Ours())
    share_kernels(tmp_path / "built", kernels)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "built"))
    assert " files (" in done("kernels", "build", str(model), "-o", str(pack))
    with opened(pack) as found:
        names = {entry.path for entry in found.manifest.entries}

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "empty"))
    assert f"{len(names)} kernels of {pack} are new here" in done("kernels", "import", str(pack), "--trust")
    imported = files_of(tmp_path / "empty" / "kernels")
    asked, why_there = loaded(model, tmp_path / "there", CXX=str(tmp_path / "no compiler"))
    assert files_of(tmp_path / "empty" / "kernels") == imported, "loading compiled nothing"
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "built"))
    asked_here, why_here = loaded(model, tmp_path / "here")
    assert asked_here == asked
    assert torch.equal(torch.load(tmp_path / "here"), torch.load(tmp_path / "there"))
    assert any(name.startswith("cpu/") for name in asked)
    if not why_here:
        assert not why_there
        assert any(name.startswith("native/program_call-") for name in asked)
        assert asked == names


def exported_elsewhere(path: Path, change) -> None:
    """An exported model whose document is changed."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        document, tensors = json.loads(file.metadata()["tilewise"]), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    change(document)
    save_file(tensors, path, metadata={"tilewise": json.dumps(document)})


def of_another_processor(document) -> None:
    """Have a plan that this processor does not offer, as one for other hardware is."""
    document["environment"] = "cpu abacus"
    step = next(step for step in document["programs"][0]["program"]["steps"] if "plan" in step)
    step["plan"]["plan"] |= {"solver": "cudnn", "version": solvers.get("cudnn").version}


def test_exported_models_of_which_no_pack_can_be_made(run, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    monkeypatch.chdir(tmp_path)
    tilewise.export(net(), torch.ones(1, 3, 9, 7), "model.safetensors", planner=First())
    for name in ("other.safetensors", "damaged.safetensors", "cut.safetensors"):
        shutil.copy("model.safetensors", name)
    exported_elsewhere(Path("other.safetensors"), of_another_processor)
    exported_elsewhere(Path("damaged.safetensors"), lambda document: document.update(programs=[]))
    os.truncate("cut.safetensors", os.path.getsize("cut.safetensors") - 1000)
    save_file({"x": torch.ones(3)}, "plain.safetensors")
    for name, *more, words in (
        ("other.safetensors", r"cudnn cannot solve .* exported with environment 'cpu abacus'; here it is"),
        ("damaged.safetensors", r"programs=\[\]: a list of them would do"),
        ("cut.safetensors", "not a file that tilewise.export wrote"),
        ("plain.safetensors", "holds tensors and no exported model"),
        ("model.safetensors", "--arch", "sm_90", "'model.safetensors' is an exported model, which runs on CPUs"),
    ):
        result = run("kernels", "build", name, *more, "-o", "a.pack")
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert re.search(words, line), line
        assert not Path("a.pack").exists()


@pytest.mark.skipif(not EVERY, reason="Triton compiles for half a minute where cores are busy")
def test_a_pack_for_a_gpu_is_built_and_taken_without_one(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pack, options = tmp_path / "gpu.pack", ("--exclude", "fft", "--batch-sizes", "undivided")
    for name in ("here", "there"):
        monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / name / "tilewise"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name / "triton"))
        if name == "here":
            subprocess.run([*TILEWISE, "build", LAYER, *options, "--arch", "sm_90", "-o", str(pack)], check=True)
        else:
            subprocess.run([*TILEWISE, "import", str(pack), "--trust", "--arch", "sm_90"], check=True)
    with opened(pack) as found:
        names = [entry.path for entry in found.manifest.entries if entry.kind == "triton"]
    assert names
    assert all((tmp_path / "there" / name).is_file() for name in names)


def many(path: Path, count: int) -> None:
    """A pack of crafted kernels, so many that copying them takes a while."""
    pack_of(path, [cpu_file(f"a{n}_8", bytes([n % 256]) * 500) for n in range(count)])


def kernels_in(cache: Path) -> dict[str, bytes | None]:
    """The kernels that are kept, ``None`` where one is not whole."""
    return {path.name: code_files.load(path) for path in (cache / "kernels" / "cpu").glob("*")}


def interrupted(start, pack: Path, cache: Path) -> tuple[int, str]:
    """The exit status and the errors of an import that is interrupted once it has begun to write."""
    process = start("kernels", "import", str(pack), "--trust")
    deadline = time.monotonic() + PATIENCE_S
    while not (cache / "kernels" / "cpu").is_dir() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, err


@pytest.mark.slow
def test_ctrl_c_leaves_whole_kernels_and_the_rest_can_follow(start, tmp_path, monkeypatch):
    pack = tmp_path / "many.pack"
    for count in (1000, 4000, 16000):  # on a busy machine a small one may be taken before the interruption comes
        cache = tmp_path / f"cache{count}"
        many(pack, count)
        monkeypatch.setenv("TILEWISE_CACHE_DIR", str(cache))
        status, err = interrupted(start, pack, cache)
        if status != 0:
            break
    assert status == 130
    last = err.splitlines()[-1]  # before it there may be lines of progress
    assert last == "tilewise: interrupted; what was copied until now is whole; the same command copies the rest"
    found = kernels_in(cache)
    assert 0 < len(found) < count
    assert None not in found.values()
    rest = count - len(found)
    assert f"{rest} kernels of {pack} are new here" in done("kernels", "import", str(pack), "--trust")
    assert len(kernels_in(cache)) == count


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="takes signals")
def test_the_first_ctrl_c_stops_at_the_next_file_and_the_second_at_once():
    from tilewise.cli.kernels import stopping_between

    def copied(presses: int, *names: str) -> list[str]:
        """What is told and written where Ctrl-C is pressed while the first file is being written."""
        told: list[str] = []
        with contextlib.suppress(KeyboardInterrupt), stopping_between(told.append) as step:
            for number, name in enumerate(names):
                step(name)
                for _ in range(0 if number else presses):
                    signal.raise_signal(signal.SIGINT)
                told.append(f"{name} written")
            return [*told, "all"] if presses == 0 else told
        return [*told, "stopped"]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert copied(0, "a", "b") == ["a", "a written", "b", "b written", "all"]
        assert copied(1, "a", "b") == ["a", "a written", "stopped"]
        assert copied(1, "a") == ["a", "a written", "stopped"]
        assert copied(2, "a", "b") == ["a", "stopped"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_two_imports_at_once_are_as_one(tmp_path, monkeypatch):
    pack, cache, count = tmp_path / "many.pack", tmp_path / "cache", 200
    many(pack, count)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(cache))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        both = [threads.submit(done, "kernels", "import", str(pack), "--trust") for _ in range(2)]
    assert all(f" kernels of {pack} are new here" in each.result() for each in both)
    found = kernels_in(cache)
    assert len(found) == count
    assert None not in found.values()


@pytest.mark.skipif(not EVERY, reason="compiles anew what other tests share")
def test_ctrl_c_while_building_writes_no_pack(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    process = start("kernels", "build", LAYER, "--arch", "cpu", *NARROW, "-o", str(tmp_path / "layers.pack"))
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "cache" / "kernels" / "cpu").is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    last = err.splitlines()[-1]  # before it there may be lines of progress
    assert last == "tilewise: interrupted; what was compiled until now is kept; the same command goes on from there"
    assert None not in kernels_in(tmp_path / "cache").values()
    assert not list(tmp_path.glob("*.pack*"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("import", "sound.pack"), "holds code (.*--trust would take it"),
        (("import", "none.pack", "--trust"), "'none.pack' cannot be imported: No such file"),
        (("import", "other.pack", "--trust"), "nothing for this machine: kernels are for sm_80"),
        (("import", "sound.pack", "--trust", "--arch", "hopper"), "--arch: 'hopper' is no GPU architecture"),
        (("import", "text.pack", "--trust"), "does not end as a pack does"),
        (("list", "text.pack"), "does not end as a pack does"),
        (("list", "none.pack"), "'none.pack' cannot be read: No such file"),
        (("build", "-o", "no/such.pack"), "lies in no folder that there is"),
        (("build", "-o", "a.pack", "--arch", "sm_9"), "such as sm_90, would do"),
        (("build", "-o", "a.pack", "--arch", "cpu", "no_such_network"), "no_such_network"),
        (("build", "-o", "a.pack", "--arch", "cpu", "conv none"), "KEY: problem 'conv none': not a problem's key"),
        (("build", "-o", "a.pack", "--arch", "cpu", "binary.txt"), "FILE: 'binary.txt' cannot be read"),
        (("build", "-o", "a.pack", "--arch", "cpu", "empty.txt"), "no convolution is in there"),
        (("export", "-o", "no/such.pack"), "lies in no folder that there is"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_line(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    pack_of(Path("sound.pack"), [cpu_file()])
    pack_of(Path("other.pack"), triton_files(capability=80))
    Path("text.pack").write_text("no pack " * 10)
    Path("binary.txt").write_bytes(b"\xff\xfe")
    Path("empty.txt").write_text("# nothing\n")
    result = run("kernels", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), line)
    assert not Path("a.pack").exists()


def test_kernels_are_not_compiled_where_they_are_interpreted(run, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = run("kernels", "build", LAYER, "--arch", "sm_90", "-o", str(tmp_path / "a.pack"))
    assert result.exit_code == 2
    assert "TRITON_INTERPRET: kernels are interpreted" in result.stderr


@pytest.fixture
def packed(run, tmp_path, monkeypatch) -> Path:
    """Wisdom of a layer with one crafted kernel beside it, written where both are kept."""
    monkeypatch.setattr("tilewise.machine.cache.kernel_dir", lambda: Path(os.environ["TILEWISE_CACHE_DIR"]) / "kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    pack_of(tmp_path / "one.pack", [cpu_file()])
    assert run("kernels", "import", str(tmp_path / "one.pack"), "--trust").exit_code == 0
    assert run("plan", LAYER, "--device", "cpu", "--pass", "fprop", *NARROW, "--exclude", "depthwise").exit_code == 0
    file = tmp_path / "wisdom.pack"
    assert "written to" in run("wisdom", "export", "--with-kernels", str(file)).stdout
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "elsewhere"))
    return file


def rows() -> int:
    """Measurements and plans that are kept."""
    return sum(summary.plans + summary.measurements for summary in Wisdom().summary())


def test_wisdom_and_kernels_are_carried_together(run, packed):
    assert rows() == 0
    result = run("wisdom", "import", str(packed), "--trust")
    assert "1 kernels of" in result.stdout
    assert rows() > 0
    (kernel,) = Path(os.environ["TILEWISE_CACHE_DIR"], "kernels", "cpu").iterdir()
    assert code_files.load(kernel) == cpu_file()[1]


def test_wisdom_is_data_and_kernels_are_not(run, packed, tmp_path):
    result = run("wisdom", "import", str(packed))
    assert result.exit_code == 2
    assert "holds code beside wisdom" in result.stderr
    assert rows() == 0
    assert run("wisdom", "import", str(packed), "--trust", "--no-kernels").exit_code == 2
    assert run("wisdom", "import", str(packed), "--no-kernels").exit_code == 0
    assert rows() > 0
    assert not Path(os.environ["TILEWISE_CACHE_DIR"], "kernels").exists()
    result = run("wisdom", "import", str(tmp_path / "one.pack"), "--trust")
    assert "holds kernels and no wisdom" in result.stderr
    result = run("wisdom", "merge", str(packed), "-o", str(tmp_path / "merged.json"))
    assert "is a pack, whose wisdom lies beside code" in result.stderr
    with pytest.raises(ValueError, match="is a pack, whose wisdom lies beside code"):
        Wisdom().import_(packed)


def test_wisdom_that_is_not_valid_keeps_the_kernels_out(run, packed, tmp_path):
    from tilewise.kernels.packs.manifest import WISDOM, Entry

    bad = tmp_path / "bad.pack"
    pack_of(bad, [cpu_file(), (Entry("wisdom", "any", WISDOM, 0, ""), b'{"kind": "other"}')])
    result = run("wisdom", "import", str(bad), "--trust")
    assert result.exit_code == 2
    assert "expected a document of kind" in result.stderr
    assert not Path(os.environ["TILEWISE_CACHE_DIR"], "kernels").exists()
