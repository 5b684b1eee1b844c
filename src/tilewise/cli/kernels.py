"""``tilewise kernels``: compiled kernels, made ahead and carried between machines in packs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewise.cli.given.early import check_asked
from tilewise.cli.given.exported_file import is_exported
from tilewise.cli.helped import Example, Helped, HelpedGroup
from tilewise.cli.program import INTERRUPTED, BadInput, bad_input, one_line
from tilewise.cli.settings import Asked, planning_options

if TYPE_CHECKING:
    from tilewise.kernels.building.target import Architecture
    from tilewise.kernels.packs.carry import Imported
    from tilewise.kernels.packs.manifest import Manifest
    from tilewise.problems.base import Problem

__all__ = [
    "command",
    "imported_text",
    "interruptible",
    "pack_errors",
    "stopping_between",
    "take_kernels",
    "written_text",
]

MOST_LIST_BYTES = 1 << 20
"""Most bytes of a file that lists layers."""
FILE = click.Path(path_type=Path, dir_okay=False)
OUTPUT = click.option("-o", "--output", metavar="PACK", required=True, type=FILE, help="The pack to write.")


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "build": (
        ("tilewise kernels build resnet50 --arch sm_90 -o h100.pack", "For a GPU that need not be here."),
        ("tilewise kernels build model.safetensors -o model.pack", "What an exported model loads, to ship it with."),
    ),
    "export": (
        ("tilewise kernels export -o mine.pack", "All that was compiled here."),
        ("tilewise kernels export -o /media/usb/mine.pack", "The same, to carry to an equal machine."),
    ),
    "import": (
        ("tilewise kernels import mine.pack --trust", "Take the kernels of a pack that you made."),
        ("tilewise kernels import h100.pack --trust --arch sm_90", "For a GPU that is not here yet."),
    ),
    "list": (
        ("tilewise kernels list", "What is compiled here."),
        ("tilewise kernels list mine.pack --json", "What a pack holds, as a document."),
    ),
}


@click.group("kernels", cls=HelpedGroup, short_help="Compile kernels ahead, and carry them between machines.")
def command() -> None:
    """Compile kernels ahead, and carry compiled ones between equal machines.

    A pack is code. What is imported runs later with your rights, so import only packs of people whom you trust.
    """


@command.command("build", cls=Helped, examples=EXAMPLES["build"])
@click.argument("targets", metavar="[NET|LAYER|KEY|FILE]...", nargs=-1)
@click.option(
    "--arch",
    metavar="ARCH",
    help="What to compile for: sm_90 or another GPU, which need not be here, or cpu, this processor.  "
    "[default: the GPU here, else cpu; cpu for exported models]",
)
@OUTPUT
@planning_options(without=("device", "share_with"))
def build(targets: tuple[str, ...], arch: str | None, output: Path, settings: Asked) -> None:
    """Compile what planning would try, without running anything, and write it to PACK.

    It is compiled for training steps of networks, for layers in benchdnn's notation, for problems given by their keys,
    and for what FILE lists, one of these in a line; without any for all built-in networks. What is compiled already is
    not compiled again, so an interrupted command goes on where it was. A planner decides by what it measures: on a GPU
    it may yet want kernels that no pack has, and compiles those itself.

    FILE may also be a model that tilewise.export wrote. Its plans are made, so options of planning do not concern it.
    It is loaded as a service loads it, and PACK gets what was compiled or read for that, and nothing else.
    """
    from tilewise.kernels.building.target import Architecture
    from tilewise.kernels.packs import carry, here
    from tilewise.planner.search.foreseen import compile_all, to_compile
    from tilewise.report.progress import progress_bar

    _check_folder(output)
    check_asked(settings)
    exported = tuple(dict.fromkeys(text for text in targets if is_exported(text)))
    others = tuple(text for text in targets if text not in exported)
    only_exported = bool(exported and not others)
    name = arch or ("cpu" if only_exported else next(iter(here.architectures()), "cpu"))
    with bad_input("--arch"):
        architecture = None if name == "cpu" else Architecture.named(name)
    if exported and architecture is not None:
        raise BadInput(f"--arch {name!r}: {exported[0]!r:.200} is an exported model, which runs on CPUs: "
                       "--arch cpu would do")  # fmt: skip
    _require_compilers(architecture)
    options = settings.options()
    with interruptible("what was compiled until now is kept; the same command goes on from there"):
        problems = [] if only_exported else _problems(others, settings, architecture)
        with progress_bar("looking for kernels", len(problems)) as step:
            candidates = to_compile(problems, options, architecture, step)
        with progress_bar("compiling", len(candidates)) as step:
            lost = compile_all(candidates, architecture, step)
        for candidate, reason in list(lost.items())[:1]:
            text = f"{len(lost)} candidates cannot be compiled; the first, {candidate}: {reason}"
            click.echo(f"tilewise: {text}", err=True)
        _load_exported(exported)
        if architecture is not None:
            _compile_launches()
        with pack_errors(output, "written"):
            kind = here.cpu_target() if architecture is None else architecture.name
            manifest = carry.export(output, carry.used(), (kind,))
    if missing := carry.not_in(manifest):
        click.echo(f"tilewise: {missing} kernels were compiled, could not be kept, and are not in the pack", err=True)
    click.echo(written_text(manifest, output))


@command.command("export", cls=Helped, examples=EXAMPLES["export"])
@OUTPUT
def export(output: Path) -> None:
    """Write all kernels that were compiled here to PACK, to carry to an equal machine."""
    from tilewise.kernels.packs import carry
    from tilewise.report.progress import progress_bar

    _check_folder(output)
    with interruptible(f"{output} is as it was"), pack_errors(output, "written"):
        names = list(carry.kept())
        with progress_bar("writing", len(names)) as step, stopping_between(step) as between:
            manifest = carry.export(output, names, step=between)
    click.echo(written_text(manifest, output))


@command.command("import", cls=Helped, examples=EXAMPLES["import"])
@click.argument("packs", metavar="PACK...", nargs=-1, required=True, type=FILE)
@click.option("--trust", is_flag=True, help="You trust whoever made PACK to run code here.")
@click.option(
    "--arch", multiple=True, metavar="ARCH", help="Take kernels for this GPU, such as sm_90, though there is none here."
)
def import_packs(packs: tuple[Path, ...], trust: bool, arch: tuple[str, ...]) -> None:
    """Copy the kernels of PACKs into your own caches, where planning and programs find them.

    All of a pack is verified before anything is written, and nothing in it is run. Kernels that are here already stay.
    """
    from tilewise.kernels.building.target import Architecture

    with bad_input("--arch"):
        wanted = tuple(Architecture.named(name).name for name in arch)
    for pack in packs:
        click.echo(imported_text(take_kernels(pack, trust, wanted), pack))


@command.command("list", cls=Helped, examples=EXAMPLES["list"])
@click.argument("pack", required=False, type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/kernels) instead of a table.")
def list_kernels(pack: Path | None, as_json: bool) -> None:
    """Say what PACK holds, or without one what is compiled here: how many files, for what, and of how many bytes."""
    from tilewise.kernels.packs.summary import held_here, held_in
    from tilewise.machine.cache import kernel_dir
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import kernels_document
    from tilewise.report.stores import kernels_table

    place = str(kernel_dir() if pack is None else pack)
    with pack_errors(Path(place), "read"):
        held = held_here() if pack is None else held_in(pack)
    if as_json:
        show_json(kernels_document(place, held))
    else:
        show(kernels_table(place, held))


def take_kernels(pack: Path, trust: bool, architectures: tuple[str, ...] = ()) -> Imported:
    """Import a pack, showing progress. Raises :class:`BadInput` where it is refused, with the reason."""
    from tilewise.kernels.packs.archive import opened
    from tilewise.kernels.packs.carry import import_pack
    from tilewise.report.progress import progress_bar

    then = "what was copied until now is whole; the same command copies the rest"
    with interruptible(then), pack_errors(pack, "imported"):
        with opened(pack) as known:
            count = len(known.manifest.entries)
        with progress_bar("importing", 2 * count) as step, stopping_between(step) as between:
            return import_pack(pack, trust=trust, architectures=architectures, step=between)
    raise AssertionError("an interrupted command has ended")


@contextlib.contextmanager
def pack_errors(pack: Path, done: str) -> Iterator[None]:
    """Turn what stands against a pack within into one line and exit code 2; ``done`` is what was to be done with it."""
    with bad_input():
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            place = f" ({error.filename})" if error.filename not in (None, str(pack)) else ""
            raise BadInput(f"{str(pack)!r} cannot be {done}: {reason}{place}") from error


@contextlib.contextmanager
def stopping_between(step: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """``step``, at which Ctrl-C stops, so that no file is left half written; pressed again, it stops at once."""
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def stop() -> None:
        if pressed:
            raise KeyboardInterrupt

    def stopping(name: str) -> None:
        stop()
        step(name)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _is_main_thread():
        yield step
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    stop()


def _is_main_thread() -> bool:
    """Whether this is the thread that may handle signals."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def interruptible(then: str) -> Iterator[None]:
    """Within, Ctrl-C ends the command with one line that says what ``then`` holds."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"tilewise: interrupted; {then}", err=True)
        click.get_current_context().exit(INTERRUPTED)


def written_text(manifest: Manifest, output: Path) -> str:
    """What a pack that was written holds, in one line."""
    from tilewise.plan import format_bytes

    targets = dict.fromkeys(entry.target for entry in manifest.entries if entry.target != "any")
    size = format_bytes(sum(entry.size for entry in manifest.entries))
    return f"{len(manifest.entries)} files ({size}) for {', '.join(targets) or 'any machine'} written to {output}"


def imported_text(imported: Imported, pack: Path) -> str:
    """What came of an import, in a line, and a line for each reason why something was left out."""
    lines = [f"{imported.written} kernels of {pack} are new here, {imported.kept} were here already"]
    lines += [f"{count} left out: {reason}" for reason, count in imported.left_out.items()]
    return "\n".join(lines)


def _check_folder(output: Path) -> None:
    """Raise :class:`BadInput` where the pack could not be written, before anything is compiled."""
    if not output.absolute().parent.is_dir():
        raise BadInput(f"-o: {str(output)!r} lies in no folder that there is")


def _require_compilers(architecture: Architecture | None) -> None:
    """Raise :class:`BadInput` where nothing can be compiled, and say what is left out where one compiler is missing."""
    import importlib.util
    import os

    from tilewise.kernels.cuda import launch
    from tilewise.kernels.packs import here

    if architecture is None:
        if not here.cpu_target():
            raise BadInput("--arch 'cpu': numba is not installed, which compiles for it; pip install 'tilewise[cpu]' "
                           "would do")  # fmt: skip
        return
    if importlib.util.find_spec("triton") is None:
        raise BadInput(f"--arch {architecture.name!r}: triton is not installed, which compiles for it; pip install "
                       "'tilewise[gpu]' would do")  # fmt: skip
    if os.environ.get("TRITON_INTERPRET"):
        raise BadInput("TRITON_INTERPRET: kernels are interpreted and not compiled; without the variable they are")
    if not here.nvrtc():
        why = launch.unavailable() or "NVRTC is not installed: pip install nvidia-cuda-nvrtc would do"
        click.echo(f"tilewise: kernels in CUDA C++ are left out: {why}", err=True)


def _compile_launches() -> None:
    """Compile the module that launches GPU kernels, for this machine's Python and C library. Says where it cannot."""
    from tilewise.kernels.native.building import load
    from tilewise.kernels.native.extension import Unavailable

    try:
        load()
    except Unavailable as error:
        click.echo(f"tilewise: the module that launches kernels is left out: {error}", err=True)


def _load_exported(files: tuple[str, ...]) -> None:
    """Load exported models as a service does, which compiles what their plans need. Says what cannot be compiled.

    Raises :class:`BadInput` for what is no exported model, and for one whose plans cannot run on this processor.
    """
    from tilewise.report.progress import progress_bar

    if not files:
        return
    from tilewise.nn.exported.loaded import load_exported
    from tilewise.solvers.base import SolverUnavailable

    with progress_bar("loading", len(files)) as step:
        for file in files:
            step(file)
            with bad_input("FILE"):
                try:
                    loaded = load_exported(file)
                except SolverUnavailable as error:  # this machine lacks what a plan's kernel needs
                    raise BadInput(one_line(f"FILE: {error}")) from error
                except OSError as error:
                    raise BadInput(f"FILE: {file!r:.200} cannot be read: {error.strerror or error}") from error
            if loaded.why_not_native:
                text = f"{file}: the module that runs programs is left out: {loaded.why_not_native}"
                click.echo(f"tilewise: {text}", err=True)


def _problems(targets: tuple[str, ...], settings: Asked, architecture: Architecture | None) -> list[Problem]:
    """The problems that ``targets`` pose on the device, each once. Raises :class:`BadInput`."""
    from tilewise.frontends.networks import builtin_networks
    from tilewise.machine.device import conv_precision
    from tilewise.report.progress import progress_bar

    device = "cpu" if architecture is None else f"cuda:{architecture.name}"
    precision = settings.precision or ("ieee" if architecture is None else conv_precision())
    as_here = replace(settings, device="cpu", precision=precision)
    texts = [line for text in targets or builtin_networks() for line in _lines(text)]
    found: dict[Problem, None] = {}
    with progress_bar("reading", len(texts)) as step:
        for text in texts:
            step(text)
            for problem in _posed(text, as_here):
                with bad_input(f"{text!r:.200}"):
                    found[problem.on(device)] = None
    if not found:
        raise BadInput(
            f"{' '.join(targets)!r:.200}: no convolution is in there; a network or a layer with one would do"
        )
    return list(found)


def _lines(text: str) -> list[str]:
    """What an argument stands for: the lines of a file of that name, or itself."""
    path = Path(text)
    try:
        if not path.is_file():
            return [text]
        with path.open("rb") as file:
            data = file.read(MOST_LIST_BYTES + 1)
        listed = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"FILE: {text!r:.200} cannot be read: {error}") from error
    if len(data) > MOST_LIST_BYTES:
        raise BadInput(f"FILE: {text!r} has more than {MOST_LIST_BYTES} bytes; a list of layers, one a line, would do")
    lines = (line.strip() for line in listed.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _posed(text: str, settings: Asked) -> Iterator[Problem]:
    """The problems that a network, a layer or a key stands for."""
    from tilewise.cli.target import resolve
    from tilewise.problems.kinds import from_key, kinds

    if text.split(" ", 1)[0] in kinds() and " " in text:
        with bad_input("KEY"):
            yield from_key(text)
        return
    for layer in resolve(text, settings).layers:
        yield from layer.problems
