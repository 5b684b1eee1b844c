"""Where the output goes: a pipe that is closed, a disk that is full, and files of layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.cli.given.batch_file import read_batch
from tilewise.cli.program import BadInput
from tilewise.cli.settings import Asked

PROGRAM = [sys.executable, "-c", "from tilewise.cli import main; main()"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize(
    "words", [("wisdom", "show"), ("wisdom", "show", "--json"), ("plan", "--help"), ("--help",)], ids=" ".join
)
def test_a_closed_pipe_is_no_error(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run([*PROGRAM, *words], stdout=closed, stderr=subprocess.PIPE, text=True, env=environment())
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full disk to write to")
@pytest.mark.parametrize("words", [("wisdom", "show"), ("wisdom", "show", "--json"), ("plan", "--help")], ids=" ".join)
def test_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 1
    assert done.stderr == "tilewise: stdout cannot be written: No space left on device\n"


LAYERS = """
# a net
mb4ic3ih12oc8oh12kh3ph1n"first"  # with a name
--mb=2 --dir=FWD_B,BWD_W
mb4ic8ih12oc8oh12kh3ph1

--reset --dt=bf16
16x32:32x8
--stag=axb mb4ic3ih12oc8oh12kh3ph1
"""


def test_options_hold_from_their_line_on(tmp_path: Path) -> None:
    file = tmp_path / "layers.txt"
    file.write_text(LAYERS)
    lines = read_batch(str(file), Asked(), ())
    assert [(line.number, line.text) for line in lines] == [
        (3, "mb4ic3ih12oc8oh12kh3ph1nfirst"),
        (5, "mb4ic8ih12oc8oh12kh3ph1"),
        (8, "16x32:32x8"),
        (9, "mb4ic3ih12oc8oh12kh3ph1"),
    ]


def test_what_holds_is_said_by_each_line(tmp_path: Path) -> None:
    file = tmp_path / "layers.txt"
    file.write_text(LAYERS)
    lines = read_batch(str(file), Asked(precision="ieee"), ())
    assert [line.passes for line in lines] == [(), ("fprop", "wgrad"), (), ()]
    assert [line.settings.batch for line in lines] == [None, 2, None, None]
    assert [line.settings.dtype for line in lines] == ["fp32", "fp32", "bf16", "bf16"]
    assert [line.settings.layout for line in lines] == [*["contiguous"] * 3, "channels_last"]
    assert all(line.settings.precision == "ieee" for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no layer in it"),
        ("# nothing\n", "there is no layer in it"),
        ("mb4ic3ih12oc8kh3\nalexnet\n", "line 2: 'alexnet' is not a layer"),
        ("mb4ic3ih12oc8kh", "line 1: layer 'mb4ic3ih12oc8kh': cannot read 'kh'"),
        ("\n--attr-post-ops=relu mb4ic3ih12oc8kh3", "line 2: --attr-post-ops: no option of a line; --mb, --dir"),
        ("--mb=many mb4ic3ih12oc8kh3", "line 1: --mb='many': a whole number would do"),
        ("--dir=FWD mb4ic3ih12oc8kh3", "line 1: --dir='FWD': one of FWD_D"),
        ("--dt=f32:bf16:f32 mb4ic3ih12oc8kh3", "line 1: --dt='f32:bf16:f32': one of f32, bf16, f16 would do, the same"),
        ("--dir=BWD_D 16x32:32x8", "line 1: --pass 'dgrad': 16x32:32x8 has nn, nt, tn, tt"),
        ('mb4ic3ih12oc8kh3n"one', "line 1: a quotation mark has no other one"),
        ("\udcff", "is no text in UTF-8"),
    ],
)
def test_a_mistake_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "layers.txt"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput) as error:
        read_batch(str(file), Asked(), ())
    assert words in error.value.message


@pytest.mark.slow
def test_a_file_is_planned_and_timed(run, tmp_path: Path, check_document) -> None:
    file = tmp_path / "layers.txt"
    file.write_text('mb2ic3ih8oc4kh3n"a"\n--dir=FWD_D\nmb2ic3ih8oc4kh3\nmb1ic4ih8oc4kh1\n')
    asked = ("plan", str(file), "--device", "cpu", "--rigor", "estimate", "--batch-sizes", "undivided")
    result = run(*asked)
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("pass min ms median ms workspace error plan") for line in lines)
    for name in ("a mb2ic3ih8oc4oh6kh3ph0", "line 3 mb2ic3ih8oc4oh6kh3ph0", "line 4 mb1ic4ih8oc4oh8kh1ph0"):
        assert name in lines
    (total,) = [line for line in lines if line.startswith("all together: min ")]
    least, middle = (float(total.split(f"{word} ")[1].split()[0]) for word in ("min", "median"))
    assert 0 < least <= middle
    document = check_document(run(*asked, "--json").stdout)
    assert [(layer["names"], len(layer["passes"])) for layer in document["layers"]] == [
        (["a"], 3),
        (["line 3"], 1),
        (["line 4"], 1),
    ]
    runs = [one["runs"] for layer in document["layers"] for one in layer["passes"]]
    assert all(each["count"] > 0 and 0 < each["least_ms"] <= each["median_ms"] for each in runs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory-limit", "1GiB"), "--memory-limit: it is of a network's step"),
        (("--gpus", "4"), "--gpus: it is of a network's step"),
        (("--json",), "a document has one type and layout"),
    ],
)
def test_what_a_file_cannot_have_is_said(run, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    file = tmp_path / "layers.txt"
    file.write_text("mb2ic3ih8oc4kh3\n--dtype=bf16 mb2ic3ih8oc4kh3\n")
    result = run("plan", str(file), "--device", "cpu", *options)
    assert result.exit_code == 2
    assert words in result.stderr
