"""Packs of compiled kernels: what is carried arrives whole, and nothing else is ever written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from tests.kernels.packs.crafted import Caches, contents, cpu_file, cubin, group, native_file, pack_of, triton_files

pytest.importorskip("numba")
pytest.importorskip("triton")

from tilewise.kernels.building import noted
from tilewise.kernels.packs import carry, here
from tilewise.kernels.packs.archive import is_pack, opened
from tilewise.kernels.packs.manifest import Entry, PackError
from tilewise.kernels.packs.summary import held_here, held_in

GPU = ("sm_90",)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    return Caches(tmp_path / "caches", monkeypatch)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    pack_of(tmp_path / "kernels.pack")
    return tmp_path / "kernels.pack"


def carried() -> dict[str, bytes]:
    """What :func:`contents` should arrive as."""
    return {entry.path: content for entry, content in contents()}


def test_kernels_arrive_as_they_were(caches: Caches, pack: Path) -> None:
    assert is_pack(pack)
    steps: list[str] = []
    done = carry.import_pack(pack, trust=True, architectures=GPU, step=steps.append)
    assert (done.written, done.kept, done.left_out) == (4, 0, {})
    assert caches.files() == carried()
    assert len(steps) == len(carried()) + 4, "each file as it is verified, each kernel as it is written"
    for path in caches.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_tritons_own_list_of_files_is_made_for_here(caches: Caches, pack: Path) -> None:
    assert group(caches) is None
    carry.import_pack(pack, trust=True, architectures=GPU)
    found = group(caches)
    assert found is not None
    assert set(found) == {"kernel.cubin", "kernel.json"}
    assert all(Path(path).is_relative_to(caches.triton) for path in found.values())


def test_what_is_here_already_stays_and_what_differs_is_replaced(caches: Caches, pack: Path) -> None:
    carry.import_pack(pack, trust=True, architectures=GPU)
    before = {path: path.stat().st_mtime_ns for path in caches.folder.rglob("*") if path.is_file()}
    done = carry.import_pack(pack, trust=True, architectures=GPU)
    assert (done.written, done.kept) == (0, 4)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    damaged = next(path for path in before if path.name.startswith("moves_8"))
    damaged.write_bytes(b"something else")
    (caches.triton / triton_files()[0][0].path.removeprefix("triton/")).unlink()
    assert group(caches) is None
    done = carry.import_pack(pack, trust=True, architectures=GPU)
    assert (done.written, done.kept) == (2, 2)
    assert caches.files() == carried()
    assert group(caches) is not None


def test_nothing_is_taken_without_trust(caches: Caches, pack: Path) -> None:
    with pytest.raises(PackError, match=r"holds code \(.*with your rights; --trust would take it"):
        carry.import_pack(pack, trust=False, architectures=GPU)
    assert not caches.folder.exists()


def test_the_same_kernels_make_the_same_pack(tmp_path: Path, pack: Path) -> None:
    assert pack_of(tmp_path / "again.pack") == pack_of(tmp_path / "turned.pack", contents()[::-1])
    assert (tmp_path / "again.pack").read_bytes() == pack.read_bytes()
    assert opened_entries(tmp_path / "turned.pack") == opened_entries(pack)


def opened_entries(path: Path) -> tuple[Entry, ...]:
    with opened(path) as found:
        return found.manifest.entries


def test_kernels_for_another_gpu_are_refused_by_name(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "other.pack"
    pack_of(path, [native_file(), *triton_files(capability=80)])
    with pytest.raises(PackError, match="nothing for this machine: kernels are for sm_80, the GPU here is sm_90"):
        carry.import_pack(path, trust=True, architectures=GPU)
    with pytest.raises(PackError, match="torch sees no GPU here; --arch sm_80 would take them"):
        carry.import_pack(path, trust=True)
    assert not caches.folder.exists()


def test_of_a_pack_for_several_machines_what_fits_is_taken(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "several.pack"
    pack_of(path, [*triton_files("first"), *triton_files("second", capability=80)])
    done = carry.import_pack(path, trust=True, architectures=GPU)
    assert done.written == 1
    assert done.left_out == {"kernels are for sm_80, the GPU here is sm_90": 1}
    assert set(caches.files()) == {entry.path for entry, _ in triton_files("first")}


def test_kernels_for_another_processor_are_refused_with_what_differs(caches: Caches, tmp_path: Path) -> None:
    entry, content = cpu_file()
    other = "0" * 24
    moved = Entry("cpu", f"cpu:{other}", f"cpu/moves_8-{other}.o", 0, "")
    assert entry.target != moved.target
    path = tmp_path / "other.pack"
    pack_of(path, [(moved, content)], versions={**here.versions(), "numba": "0.1", "processor": "abacus"})
    with pytest.raises(PackError, match=r"another machine \(processor abacus, here .*; numba 0\.1, here"):
        carry.import_pack(path, trust=True)
    pack_of(path, [(moved, content)])
    with pytest.raises(PackError, match=r"another machine \(another C library or setting\)"):
        carry.import_pack(path, trust=True)
    assert not caches.folder.exists()


def test_the_features_that_a_processor_lacks_are_named(caches: Caches, tmp_path: Path) -> None:
    content, other, path = cpu_file()[1], "0" * 24, tmp_path / "other.pack"
    entry = Entry("cpu", f"cpu:{other}", f"cpu/moves_8-{other}.o", 0, "")
    own = here.features()
    for features, words in (
        ((*own, *(f"unit{n}" for n in range(6))), "its processor has unit0, unit1, unit2, unit3 and 2 more, this one"),
        (own[:-1], f"this processor has {own[-1]}, its has not"),
    ):
        pack_of(path, [(entry, content)], versions={**here.versions(), "features": " ".join(features)})
        with pytest.raises(PackError, match=rf"another machine \({words}"):
            carry.import_pack(path, trust=True)
    pack_of(path, [(entry, content)], versions={n: v for n, v in here.versions().items() if n != "features"})
    with pytest.raises(PackError, match=r"another machine \(another C library or setting\)"):
        carry.import_pack(path, trust=True)
    assert not caches.folder.exists()


def test_every_native_module_is_carried(caches: Caches, tmp_path: Path) -> None:
    path, names = tmp_path / "native.pack", ("launches", "planned_call", "program_call")
    assert set(names) == set(here.native_modules())
    pack_of(path, [native_file(name=name) for name in names])
    assert carry.import_pack(path, trust=True).written == len(names)
    kept = {path for path in carry.kept() if path.startswith("native/")}
    assert kept == {native_file(name=name)[0].path for name in names}
    assert len(carry.export(tmp_path / "again.pack", kept).entries) == len(names)


def test_a_native_module_for_another_torch_stays_out(caches: Caches, tmp_path: Path) -> None:
    """Kernels beside it are taken. A module that does not call torch's libraries does not depend on its version."""
    path, other = tmp_path / "other.pack", "0" * 24
    moved = [Entry("native", f"native:{other}", f"native/{n}-{other}.so", 0, "") for n in ("launches", "program_call")]
    files = [cpu_file(), *((entry, native_file()[1]) for entry in moved)]
    pack_of(path, files, versions={**here.versions(), "torch": "1.0"})
    done = carry.import_pack(path, trust=True)
    assert done.written == 1
    launches, program = sorted(done.left_out)
    assert "the module launches is for another machine (another C library or setting)" in launches
    assert "the module program_call is for another machine (torch 1.0, here" in program
    assert set(caches.files()) == {cpu_file()[0].path}


def test_another_version_is_refused(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "other.pack"
    pack_of(path, tilewise="99.0")
    with pytest.raises(PackError, match=r"was made by tilewise 99\.0, and here is"):
        carry.import_pack(path, trust=True, architectures=GPU)
    pack_of(path, sources="0" * 64)
    with pytest.raises(PackError, match="whose kernels are others than those here"):
        carry.import_pack(path, trust=True, architectures=GPU)
    pack_of(path, triton_files(), versions={"triton": "1.0"})
    with pytest.raises(PackError, match=r"compiled by triton 1\.0, here is"):
        carry.import_pack(path, trust=True, architectures=GPU)
    assert not caches.folder.exists()


def test_content_of_another_kind_than_it_says_is_refused(caches: Caches, tmp_path: Path) -> None:
    path = tmp_path / "wrong.pack"
    (code, metadata), (other, other_metadata) = triton_files("first"), triton_files("second")
    for files, match in (
        ([(cpu_file()[0], b"no machine code")], "holds no machine code"),
        ([(native_file()[0], b"no machine code")], "holds no machine code"),
        ([(code[0], cubin(80)), metadata], "is for sm_80, and says sm_90"),
        ([(code[0], b"no machine code at all"), metadata], "is for no GPU, and says sm_90"),
        ([code, (metadata[0], other_metadata[1])], "are no metadata of this entry"),
        ([other, (other_metadata[0], b"[]")], "are no metadata of this entry"),
    ):
        pack_of(path, files)
        with pytest.raises(PackError, match=match):
            carry.import_pack(path, trust=True, architectures=GPU)
    assert not caches.folder.exists()


def test_caches_are_written_to_a_pack_and_read_from_it(caches: Caches, pack: Path, tmp_path: Path) -> None:
    """What is no whole kernel of this version stays behind."""
    carry.import_pack(pack, trust=True, architectures=GPU)
    (caches.kernels / "cpu/notes.txt").write_text("no kernel")
    (caches.kernels / "cpu" / f"old_8-{'0' * 24}.o").write_bytes(b"of another machine")
    (next((caches.kernels / "cpu").glob("rows_8-*"))).write_bytes(b"cut short")
    assert {name for name in carry.kept() if "old_8" not in name} == {
        entry.path for entry, _ in contents() if entry.kind != "triton"
    }, "a kernel of Triton's that is not called as one of this package is not ours"
    manifest = carry.export(tmp_path / "out.pack", carry.kept())
    assert {entry.path for entry in manifest.entries} == {cpu_file()[0].path, native_file()[0].path}
    with opened(tmp_path / "out.pack") as found:
        assert {entry.path: found.content(entry) for entry in found.manifest.entries} == {
            path: content for path, content in carried().items() if "moves_8" in path or "launches" in path
        }
    assert [(held.kind, held.files) for held in held_here()] == [("cpu", 1), ("native", 1)]


def test_what_a_pack_holds_is_told_without_trust(pack: Path) -> None:
    held = {each.kind: each for each in held_in(pack)}
    assert (held["cpu"].files, held["triton"].files) == (2, 2)
    assert held["cpu"].obstacle == ""
    assert held["cpu"].bytes == sum(len(content) for entry, content in contents() if entry.kind == "cpu")


def test_no_kernels_are_no_pack(caches: Caches, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="there are no kernels to write; planning or"):
        carry.export(tmp_path / "none.pack", carry.kept())
    assert not (tmp_path / "none.pack").exists()
    carry.export(tmp_path / "wisdom.pack", carry.kept(), wisdom=b"{}")
    assert carry.wisdom_of(tmp_path / "wisdom.pack") == b"{}"
    with pytest.raises(PackError, match="holds no kernels, wisdom alone; 'tilewise wisdom import' would do"):
        carry.import_pack(tmp_path / "wisdom.pack", trust=True)


def test_kernels_of_other_packages_are_not_taken(caches: Caches, tmp_path: Path) -> None:
    """Triton's cache is shared with all programs of a user, and kernels of any of them may be called as ours are."""
    import triton

    for name, place in (("peaks", "site-packages/tilewise/kernels/triton/layout.py"), ("pack", "somebody/else.py")):
        for entry, content in triton_files(name):
            path = caches.folder / entry.path
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.suffix == ".json":
                content = json.dumps({**json.loads(content), "triton_version": triton.__version__}).encode()
                path.with_suffix(".source").write_text(f'#loc = loc("/home/user/{place}":1:0)')
            path.write_bytes(content)
    assert {name.rpartition("/")[2] for name in carry.kept()} == {"peaks.cubin", "peaks.json"}
    manifest = carry.export(tmp_path / "out.pack", carry.kept())
    assert {entry.target for entry in manifest.entries} == {"sm_90"}
    assert len(manifest.entries) == 2


def test_what_was_compiled_and_could_not_be_kept_is_counted(
    caches: Caches, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noted, "_noted", {})
    carry.import_pack(pack, trust=True, architectures=GPU)
    ((code, _), _) = triton_files()
    for name in (cpu_file()[0].path, code.path.rpartition("/")[0], "triton/LOST", cpu_file("lost_8")[0].path):
        noted.note(name)
    manifest = carry.export(tmp_path / "out.pack", carry.used())
    assert [entry.path for entry in manifest.entries] == [cpu_file()[0].path]
    assert carry.not_in(manifest) == 3, "of Triton's no file is of its present version"


def test_a_device_is_not_replaced_by_a_pack(caches: Caches, pack: Path, tmp_path: Path) -> None:
    carry.import_pack(pack, trust=True, architectures=GPU)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackError, match="is no file; a new path or that of a file would do"):
        carry.export(tmp_path / "pipe", carry.kept())
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_folders_that_others_may_write_get_no_code(caches: Caches, pack: Path) -> None:
    caches.kernels.mkdir(parents=True)
    caches.kernels.chmod(0o777)
    with pytest.raises(OSError, match="may be written by other users"):
        carry.import_pack(pack, trust=True, architectures=GPU)
    assert not any(caches.kernels.rglob("*.o"))
