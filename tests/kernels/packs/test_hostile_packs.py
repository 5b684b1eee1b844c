"""Packs that are damaged or made to do harm: each is refused, and nothing is written."""

from __future__ import annotations

import json
import resource
import signal
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.forked import server
from tests.kernels.packs.crafted import Caches, contents, cpu_file, linked, pack_of, raw_pack, triton_files

pytest.importorskip("numba")
pytest.importorskip("triton")

from tilewise.kernels.packs import carry, here
from tilewise.kernels.packs.archive import write
from tilewise.kernels.packs.manifest import LIMITS, MOST_BYTES, MOST_ENTRIES, Manifest, PackError

GPU = ("sm_90",)
SOUND = {entry.path: content for entry, content in contents()}
FIRST = cpu_file()[0].path


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    return Caches(tmp_path / "caches", monkeypatch)


def refused(path: Path, caches: Caches, match: str) -> None:
    with pytest.raises(PackError, match=match):
        carry.import_pack(path, trust=True, architectures=GPU)
    assert not caches.folder.exists()


def test_every_truncation_is_refused(caches: Caches, tmp_path: Path) -> None:
    path, whole = tmp_path / "kernels.pack", tmp_path / "whole.pack"
    pack_of(whole)
    data = whole.read_bytes()
    for length in range(0, len(data), 29):
        path.write_bytes(data[:length])
        refused(path, caches, "cut short|has .* bytes")
    path.write_bytes(data + b"more")
    refused(path, caches, "does not end as a pack does")
    path.write_bytes(b"more" + data)
    refused(path, caches, "does not end as a pack does")


@pytest.mark.parametrize("name", ["../escaped.o", "/etc/escaped.o", "cpu/../../escaped.o", "cpu\\..\\escaped.o",
                                  "cpu/sub/moves_8.o", "cpu/moves 8.o", "wisdom.json", "code/x.so", "cpu/", ".",
                                  "triton/KEY/kernel.so", f"{FIRST}\n", f"./{FIRST}"])  # fmt: skip
def test_names_that_are_not_known_are_refused(caches: Caches, tmp_path: Path, name: str) -> None:
    path = tmp_path / "kernels.pack"
    raw_pack(path, [(FIRST, SOUND[FIRST]), (name, b"\x7fELF")])
    refused(path, caches, "no known name|one of cpu|is no regular file|nothing or otherwise")
    raw_pack(path, [(FIRST, SOUND[FIRST]), (name, b"\x7fELF")], manifest=manifest_of([FIRST]))
    refused(path, caches, "nothing or otherwise|is no regular file")
    assert not list(tmp_path.parent.rglob("escaped*"))


def manifest_of(paths: list[str], **changed: Any) -> bytes:
    """A manifest of sound entries, with its members ``changed``."""
    with tempfile.TemporaryDirectory() as folder:
        whole = pack_of(Path(folder) / "kernels.pack")
    entries = [entry for entry in whole.entries if entry.path in paths]
    return json.dumps({**json.loads(Manifest(whole.tilewise, whole.sources, whole.versions, tuple(entries)).to_bytes()),
                       **changed}).encode()  # fmt: skip


def changed_entry(**changed: Any) -> bytes:
    """A manifest of one entry, which is ``changed``."""
    (entry,) = json.loads(manifest_of([FIRST]))["entries"]
    return manifest_of([FIRST], entries=[{**entry, **changed}])


def test_members_without_a_name_are_refused(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "kernels.pack"
    raw_pack(path, [(FIRST, SOUND[FIRST]), ("x", b"\x7fELF")], manifest_of([FIRST]))
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"PK\x01\x02"))
    struct.pack_into("<HH", data, place + 28, 0, 1)  # its name is taken for what may follow names
    path.write_bytes(data)
    refused(path, caches, "of which the manifest says nothing|is no archive")


def test_members_that_are_no_plain_files_are_refused(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "kernels.pack"
    raw_pack(path, [(linked(FIRST), SOUND[FIRST])], manifest_of([FIRST]))
    refused(path, caches, "is no regular file")
    raw_pack(path, [(FIRST, SOUND[FIRST])])
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02")
    data[place + 8] |= 1  # encrypted
    path.write_bytes(data)
    refused(path, caches, "is encrypted, or compressed in another way")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("manifest.json", manifest_of([FIRST]))
        archive.writestr(FIRST, SOUND[FIRST])
    refused(path, caches, "is encrypted, or compressed in another way")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_are_there_twice_are_refused(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "kernels.pack"
    raw_pack(path, [(FIRST, SOUND[FIRST]), (FIRST, b"\x7fELF")], manifest_of([FIRST]))
    refused(path, caches, "a name is there more than once")
    (entry,) = json.loads(manifest_of([FIRST]))["entries"]
    raw_pack(path, [(FIRST, SOUND[FIRST])], manifest_of([FIRST], entries=[entry, entry]))
    refused(path, caches, "is there more than once")
    text = manifest_of([FIRST]).decode()
    raw_pack(path, [(FIRST, SOUND[FIRST])], text.replace("{", '{"format": 1, ', 1).encode())
    refused(path, caches, "a member is there more than once")


def test_what_the_manifest_does_not_say_is_refused(caches: Caches, tmp_path: Path) -> None:
    path, (other, content) = tmp_path / "kernels.pack", cpu_file("rows_8", b"more")
    raw_pack(path, [(FIRST, SOUND[FIRST]), (other.path, content)], manifest_of([FIRST]))
    refused(path, caches, "of which the manifest says nothing")
    raw_pack(path, [(FIRST, SOUND[FIRST])], manifest_of([FIRST, other.path]))
    refused(path, caches, "the manifest names it, and it is missing")
    raw_pack(path, [(FIRST, SOUND[FIRST][:-1] + b"X")], manifest_of([FIRST]))
    refused(path, caches, "damaged or changed on the way")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(FIRST, SOUND[FIRST])
    refused(path, caches, r"has no manifest\.json")
    (code, metadata) = triton_files()
    raw_pack(path, [(code[0].path, code[1])])
    refused(path, caches, r"one \.json and one \.cubin")
    raw_pack(path, [(one.path.replace(".", f"{n}."), data) for n, (one, data) in enumerate((code, metadata))])
    refused(path, caches, r"one \.json and one \.cubin")


def test_more_than_a_pack_may_have_is_refused_before_it_is_read(caches: Caches, tmp_path: Path) -> None:
    """Bombs: a small file that says, or unpacks to, far more."""
    path = tmp_path / "kernels.pack"
    huge = bytes(LIMITS["cpu"] + 1)
    raw_pack(path, [(FIRST, huge)])
    assert path.stat().st_size < LIMITS["cpu"] / 100
    refused(path, caches, "bytes would do for 'cpu'")
    raw_pack(path, [(FIRST, huge)], manifest_of([FIRST]))
    refused(path, caches, "of which the manifest says nothing or otherwise")
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02")
    struct.pack_into("<L", data, place + 24, len(SOUND[FIRST]))  # says less than it has
    path.write_bytes(data)
    refused(path, caches, "is damaged|damaged or changed")
    names = [f"cpu/a{n}-{'0' * 24}.o" for n in range(MOST_BYTES // LIMITS["cpu"] + 1)]
    (entry,) = json.loads(manifest_of([FIRST]))["entries"]
    target = {"target": f"cpu:{'0' * 24}", "size": LIMITS["cpu"]}
    raw_pack(path, [], manifest_of([], entries=[{**entry, **target, "path": name} for name in names]))
    refused(path, caches, "bytes in all; at most")
    pack_of(path)
    data = bytearray(path.read_bytes())
    for place, count in ((-14, MOST_ENTRIES + 2), (-12, MOST_ENTRIES + 2)):
        struct.pack_into("<H", data, len(data) + place, count)
    path.write_bytes(data)
    refused(path, caches, "files in a directory of")
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    refused(path, caches, "bytes; a pack has more than")


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "says nothing of kind"),
        (b'{"kind": "tilewise wisdom"}', "says nothing of kind"),
        (manifest_of([FIRST], format=2), "this version reads format 1"),
        (manifest_of([FIRST], format=True), "this version reads format 1"),
        (manifest_of([FIRST], more=1), "where entries, format, kind"),
        (manifest_of([FIRST], sources="x"), "no known name"),
        (manifest_of([FIRST], versions=[]), "an object of up to"),
        (manifest_of([FIRST], versions={"a": "b\n"}), "a text of up to"),
        (manifest_of([FIRST], versions={str(n): "1" for n in range(33)}), "an object of up to"),
        (manifest_of([FIRST], tilewise=1), "a text of up to"),
        (manifest_of([FIRST], entries={}), "a list of at most"),
        (manifest_of([FIRST], entries=[1]), "an object of kind, path, sha256, size, target"),
        (changed_entry(more=1), "an object of kind, path, sha256, size, target"),
        (changed_entry(kind="code"), "one of cpu, triton"),
        (changed_entry(kind=[]), "one of cpu, triton"),
        (changed_entry(size=0), "bytes would do"),
        (changed_entry(size=-1), "bytes would do"),
        (changed_entry(size=True), "bytes would do"),
        (changed_entry(size=1e3), "bytes would do"),
        (changed_entry(sha256="0" * 63), "no known name"),
        (changed_entry(target="sm_90"), "for the kind 'cpu'"),
        (changed_entry(target="cpu:"), "no known name"),
        (changed_entry(target=f"cpu:{'0' * 24}"), "another machine"),
        (changed_entry(path=7), "no known name"),
        (manifest_of([FIRST]).replace(b'"format": 1', b'"format": NaN'), "is no JSON"),
    ],
)
def test_manifests_that_say_anything_else_are_refused(
    caches: Caches, tmp_path: Path, manifest: bytes, match: str
) -> None:
    path = tmp_path / "kernels.pack"
    raw_pack(path, [(FIRST, SOUND[FIRST])], manifest)
    refused(path, caches, match)


def test_what_is_no_archive_is_refused(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "kernels.pack"
    path.write_text("tilewise " * 100)
    refused(path, caches, "does not end as a pack does")
    with pytest.raises(IsADirectoryError):
        carry.import_pack(tmp_path, trust=True)
    with pytest.raises(FileNotFoundError):
        carry.import_pack(tmp_path / "none.pack", trust=True)
    raw_pack(path, [(FIRST, SOUND[FIRST])])
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    path.write_bytes(data[:end] + b"PK\x06\x07" + bytes(16) + data[end:])
    refused(path, caches, "does not end as a pack does|files in a directory of")


PACK: list[bytes] = []
"""A sound pack, made once."""


def sound_pack() -> bytes:
    if not PACK:
        with tempfile.TemporaryDirectory() as folder:
            pack_of(Path(folder) / "kernels.pack")
            PACK.append((Path(folder) / "kernels.pack").read_bytes())
    return PACK[0]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A sound pack with some bytes set, left out, doubled or moved."""
    data = bytearray(sound_pack())
    for _ in range(draw(st.integers(1, 3))):
        directory = max(0, len(data) - 900)
        place = draw(st.one_of(st.integers(0, len(data) - 1), st.integers(directory, len(data) - 1)))
        length = draw(st.integers(1, 40))
        kind = draw(st.sampled_from(("set", "flip", "cut", "double", "swap")))
        if kind == "set":
            data[place : place + length] = draw(st.binary(min_size=length, max_size=length))
        elif kind == "flip":
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place : place + length]
        elif kind == "double":
            data[place:place] = data[place : place + length]
        else:
            other = draw(st.integers(0, len(data) - 1))
            data[place], data[other] = data[other], data[place]
        if not data:
            break
    return bytes(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(mutations())
@example(sound_pack())
def test_a_changed_pack_is_refused_or_leaves_what_the_sound_one_holds(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    """Whatever bytes differ: of a name, of a length, of the content or of what nobody reads."""
    folder = tmp_path_factory.mktemp("changed")
    path = folder / "kernels.pack"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        caches = Caches(folder / "caches", patch)
        try:
            carry.import_pack(path, trust=True, architectures=GPU)
        except PackError:
            assert not caches.folder.exists()
        else:
            assert caches.files() == SOUND
    assert data != sound_pack() or caches.files() == SOUND


def limited(work: Callable[[], object], most: int) -> str:
    """What ``work`` raises in a process that may write no file of more than ``most`` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        work()
    except OSError as error:
        return type(error).__name__
    return "nothing"


def fills_up(folder: str) -> None:
    """Import and write packs where the disk takes no more after some bytes."""
    with pytest.MonkeyPatch.context() as patch:
        caches, path = Caches(Path(folder) / "caches", patch), Path(folder) / "kernels.pack"
        outcome = [limited(lambda: carry.import_pack(path, trust=True, architectures=GPU), 2000)]
        sizes = {name: len(content) for name, content in caches.files().items()}
        outcome.append(limited(lambda: write(Path(folder) / "out.pack", here.head(), large()), 2000))
    left = [str(file) for file in Path(folder).rglob("*") if file.is_file()]
    (Path(folder) / "outcome").write_text(json.dumps([outcome, sizes, left])[:2000])


def large() -> list[Any]:
    """A small kernel and one that a full disk does not take."""
    import random

    return [cpu_file(), cpu_file("products_8", random.Random(0).randbytes(5000))]


def test_a_full_disk_leaves_whole_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "kernels.pack"
    pack_of(path, large())
    process = server().Process(target=fills_up, args=(str(tmp_path),))
    process.start()
    process.join(60)
    outcome, sizes, left = json.loads((tmp_path / "outcome").read_text())
    assert outcome == ["OSError", "OSError"]
    assert sizes == {FIRST: len(SOUND[FIRST])}
    assert {Path(name).name for name in left} == {"kernels.pack", Path(FIRST).name}
