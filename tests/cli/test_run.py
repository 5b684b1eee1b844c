"""``tilewise run`` starts a program as python does: both are run, and what they see and say is compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.sampling import EVERY

from tilewise.cli.run import options_before

ROOT = Path(__file__).parents[2]

FACTS = '''"""Says all that it knows of its start."""
import atexit, inspect, json, multiprocessing, os, pickle, signal, sys

before = sys.modules.keys() & {"tilewise", "sitecustomize", "torch"}

class Own:
    """Pickled by its name in __main__."""

def own(queue):
    queue.put([Own.__module__, __name__])

def facts():
    main = sys.modules["__main__"]
    spec = None if __spec__ is None else [__spec__.name, __spec__.origin, __spec__.parent]
    arguments = open("/proc/self/cmdline").read() if os.path.exists("/proc/self/cmdline") else ""
    return {
        "file": globals().get("__file__"), "name": __name__, "package": __package__, "doc": __doc__, "spec": spec,
        "loader": type(__loader__).__name__, "cached": globals().get("__cached__"), "globals": sorted(globals()),
        "builtins": type(__builtins__).__name__, "main": main.__dict__ is globals(), "argv": sys.argv,
        "orig": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "warn": sys.warnoptions,
        "x": sys._xoptions, "executable": sys.executable, "process": arguments,
        "environment": sorted(os.environ.items()), "cwd": os.getcwd(),
        "source": inspect.getsource(Own) if "__file__" in globals() and os.path.exists(__file__) else "",
        "pickled": pickle.loads(pickle.dumps(Own)) is Own,
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "stack": len(inspect.stack()), "site": sorted(before - {"tilewise", "torch"}),
    }

if __name__ == "__main__":
    found = facts()
    atexit.register(print, "at exit")
    if "spawn" in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=own, args=(queue,))
        process.start()
        found["spawned"] = queue.get()
        process.join()
    import torch
    torch.manual_seed(3)
    found["drawn"] = torch.rand(2).tolist()
    if "planned" in os.environ.get("ASK", ""):
        print(type(torch.nn.functional.conv2d).__name__, file=sys.stderr)
    print(json.dumps(found))
'''


def both(
    words: list[str], folder: Path, *, options: tuple[str, ...] = (), stdin: str = "", **more: str
) -> list[subprocess.CompletedProcess[str]]:
    """The same words to python and to ``tilewise run``."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TILEWISE")}
    variables |= {"PYTHONPATH": str(ROOT / "src"), "TILEWISE_RIGOR": "wisdom_only", "OMP_NUM_THREADS": "1", **more}
    ways = ([sys.executable, *options], [sys.executable, *options, "-m", "tilewise", "run"])
    return [
        subprocess.run(
            [*way, *words], cwd=folder, env=variables, input=stdin, capture_output=True, text=True, check=False
        )
        for way in ways
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Programs of every kind that python takes."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "facts.py").write_text(FACTS)
    (tmp_path / "link.py").symlink_to("sub/facts.py")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(FACTS)
    (tmp_path / "package" / "module.py").write_text(FACTS)
    with zipfile.ZipFile(tmp_path / "archive", "w") as file:
        file.writestr("__main__.py", FACTS)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['SITE'] = __name__ + __file__\n")
    return tmp_path


STARTS = [
    ["sub/facts.py", "a", "--report", "-m", "spawn"],
    ["-m", "package.module", "b"],
    ["package"],
    ["archive", "c"],
    ["link.py"],
    ["-", "d"],
    ["-m", "package"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", STARTS if EVERY else STARTS[:1], ids=" ".join)
def test_a_program_sees_what_python_shows_it(folder: Path, words: list[str]) -> None:
    plain, planned = both(words, folder, stdin=FACTS)
    assert plain.returncode == planned.returncode == 0, planned.stderr
    left, right = (json.loads(done.stdout.splitlines()[0]) for done in (plain, planned))
    assert right == left
    assert plain.stdout.splitlines()[1:] == planned.stdout.splitlines()[1:] == ["at exit"]
    assert planned.stderr == plain.stderr


OPTIONS = [
    ("-O", "-B", "-X", "dev", "-Wignore"),
    ("-uP",),
    ("-Xutf8", "-W", "error::SyntaxWarning", "--check-hash-based-pycs", "never"),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS if EVERY else OPTIONS[:1], ids=" ".join)
def test_pythons_options_and_an_own_sitecustomize(folder: Path, options: tuple[str, ...]) -> None:
    path = f"{folder / 'site'}:{ROOT / 'src'}"
    plain, planned = both(["sub/facts.py"], folder, options=options, PYTHONPATH=path, ASK="planned")
    assert [json.loads(done.stdout.splitlines()[0]) for done in (planned,)] == [
        json.loads(plain.stdout.splitlines()[0])
    ], planned.stderr
    assert "SITE" in plain.stdout
    assert plain.stderr.splitlines()[-1] == "builtin_function_or_method"
    assert planned.stderr.splitlines()[-1] == "function"


ENDS = {
    "raise": "def fail():\n    raise LookupError('its own')\nfail()",
    "text": "import sys; sys.exit('some text')",
    "number": "import sys; sys.exit(7)",
    "nothing": "raise SystemExit",
    "syntax": "def :",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "at once": "import os; os._exit(9)",
}


@pytest.mark.parametrize("end", ENDS if EVERY else ["raise"])
def test_a_program_ends_as_under_python(tmp_path: Path, end: str) -> None:
    """Its exit status, its text, and a traceback that shows no frame of ours."""
    (tmp_path / "end.py").write_text(f"import atexit\natexit.register(print, 'at exit')\n{ENDS[end]}\n")
    plain, planned = both(["end.py"], tmp_path)
    assert (planned.returncode, planned.stdout, planned.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert end != "signal" or planned.returncode == -signal.SIGTERM


@pytest.mark.parametrize("option", ["-I", "-E"] if EVERY else ["-E"])
def test_options_that_forbid_it_are_told(tmp_path: Path, option: str) -> None:
    (tmp_path / "end.py").write_text("")
    words = [sys.executable, option, "-m", "tilewise", "run", "end.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "No module named tilewise" in done.stderr:
        pytest.skip("tilewise is not installed, but found by PYTHONPATH")
    assert done.returncode == 2
    assert done.stderr.startswith(f"tilewise: python {option if option == '-E' else '-'}")
    assert "would do" in done.stderr


@pytest.mark.parametrize(
    ("words", "without", "found"),
    [
        (["-m", "tilewise", "run", "-O"], "", []),
        (["-sP", "/bin/tilewise", "run"], "IEPs", []),
        (["-OBs", "/bin/tilewise", "run"], "IEPs", ["-OB"]),
        (["-OXdev", "-W", "error", "-bm", "tilewise"], "", ["-OXdev", "-W", "error", "-b"]),
        (["-mtilewise", "run"], "", []),
        (["--check-hash-based-pycs", "never", "-c", "-O"], "", ["--check-hash-based-pycs", "never"]),
    ],
)
def test_options_of_python(words: list[str], without: str, found: list[str]) -> None:
    assert options_before(words, without) == found
