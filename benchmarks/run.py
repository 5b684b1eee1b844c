"""Runs one benchmark, prints it and saves it: ``python benchmarks/run.py NAME``; ``--list`` names them all."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import process, registry

if TYPE_CHECKING:
    from harness.result import Result

RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when it ran, 1 when a bar that applies was missed and ``--strict`` asked, 2 for bad input.

    3 where there is nothing to measure, and the message says why.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.list:
        for entry in registry.entries():
            print(f"{entry.name:20} {entry.title}")
        return 0
    if given.draw is not None:
        return _redraw(given.draw)
    if given.name is None:
        parser.error("name a benchmark; --list has them")
    if given.device == "cpu":
        process.ensure_malloc_keeps_memory()
    from harness.settings import BadInput, NothingToMeasure

    try:
        document = _run(given)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NothingToMeasure as error:
        print(f"nothing to measure: {error}", file=sys.stderr)
        return 3
    _publish(document, given)
    missed = any(bar["met"] is False for bar in document["summary"]["bars"])
    return 1 if given.strict and missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=(__doc__ or "").split(":")[0])
    parser.add_argument("name", nargs="?", help="a benchmark")
    parser.add_argument("--list", action="store_true", help="name all benchmarks")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--out", type=Path, help=f"folder for results (default {RESULTS.name}/ here; none with --quick)"
    )
    parser.add_argument("--label", default="", help="appended to the file's name, to keep several settings apart")
    parser.add_argument("--quick", action="store_true", help="seconds on a CPU: checks that it runs, measures little")
    parser.add_argument("--fresh", action="store_true", help="plan with empty wisdom instead of the user's")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar that applies is missed")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the picture of a saved result, measure nothing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="one of its options")
    return parser


def _run(given: argparse.Namespace) -> dict[str, Any]:
    """The result document. Raises :class:`BadInput`."""
    import torch
    from harness import machine
    from harness.result import SCHEMA
    from harness.settings import BadInput, Settings

    device = _device(given.device)
    if device.type == "cpu":
        process.ensure_malloc_keeps_memory()
    try:
        benchmark = registry.load(given.name)
    except KeyError as error:
        raise BadInput(error.args[0]) from error
    options = {**benchmark.defaults, **(benchmark.quick if given.quick else {})}
    options |= _options(given.set, known=options)
    path = _path(given, benchmark.name, machine.slug(device))
    described = machine.describe(device)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def document(result: Result) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": benchmark.name,
            "title": benchmark.title,
            "date": started,
            "folder": machine.slug(device),
            "machine": described,
            "settings": {"quick": given.quick, "fresh": given.fresh, **options},
            "rows": [row.to_json() for row in result.rows],
            "summary": result.summary(),
        }

    def keep(result: Result) -> None:
        if path is not None:
            _save(document(result), path)

    wanted = {"schema": SCHEMA, "machine": described, "quick": given.quick}
    earlier, beside = _earlier(path, wanted), _beside(path, benchmark.name, wanted)
    settings = Settings(device, given.quick, given.fresh, options, earlier, keep, beside)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return document(benchmark.run(settings))


def _device(name: str) -> Any:
    """A torch device. Raises :class:`BadInput` for one that is not here."""
    import torch
    from harness.settings import BadInput

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device={name}: cpu, cuda or cuda:N would do") from error
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device={name}: cpu, cuda or cuda:N would do")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"--device={name}: there are {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _options(texts: list[str], known: dict[str, str]) -> dict[str, str]:
    from harness.settings import BadInput

    options = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name not in known:
            raise BadInput(f"--set {text}: NAME=VALUE would do, with one of {', '.join(known)}")
        options[name] = value
    return options


def _path(given: argparse.Namespace, name: str, folder: str) -> Path | None:
    """Where the result goes; nowhere in quick mode unless a folder is given."""
    out = given.out or (None if given.quick else RESULTS)
    if out is None:
        return None
    stem = "-".join(word for word in (name, given.label) if word)
    return Path(out) / folder / f"{stem}.json"


def _earlier(path: Path | None, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The document saved there, if it is of this machine with these versions; tilewise's own commit may differ."""
    from harness.settings import BadInput

    if path is None or not path.exists():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        machine, quick = document["machine"], document["settings"]["quick"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is no result of a benchmark ({error}): move it away") from error
    found = {"schema": document["schema"], "machine": _alike(machine), "quick": quick}
    return document if found == {**wanted, "machine": _alike(wanted["machine"])} else None


def _alike(machine: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in an earlier run. How many cores a GPU's host has does not count."""
    others = ("tilewise", "cores", "threads") if machine.get("cuda") else ("tilewise",)
    return {name: value for name, value in machine.items() if name not in others}


def _beside(path: Path | None, name: str, wanted: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """What runs of this benchmark with other labels left in the folder, of this machine with these versions."""
    files = [] if path is None else sorted(path.parent.glob(f"{name}*.json"))
    found = [_earlier(file, wanted) for file in files if file != path]
    return tuple(document for document in found if document is not None and document["benchmark"] == name)


def _save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that is killed while saving must not lose what was saved before.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def _draw(document: dict[str, Any], path: Path) -> None:
    """The picture beside a result, where its benchmark has one and there is matplotlib."""
    draw = registry.load(document["benchmark"]).draw
    if draw is None:
        return
    from harness import picture

    try:
        picture.save(draw(document), path.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; pip install 'tilewise[report]', then --draw {path}", file=sys.stderr)
    else:
        print(f"drew {path.with_suffix('.png')}", file=sys.stderr)


def _redraw(path: Path) -> int:
    try:
        document = json.loads(path.read_text())
        draw = registry.load(document["benchmark"]).draw
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: --draw {path}: {error}: a result of a benchmark would do", file=sys.stderr)
        return 2
    if draw is None:
        print(f"error: --draw {path}: {document['benchmark']} has no picture", file=sys.stderr)
        return 2
    _draw(document, path)
    return 0


def _publish(document: dict[str, Any], given: argparse.Namespace) -> None:
    path = _path(given, document["benchmark"], document["folder"])
    if path is not None:
        _save(document, path)
        print(f"saved {path}", file=sys.stderr)
        _draw(document, path)
    if given.json:
        print(json.dumps(document, indent=1))
        return
    from harness.table import show
    from rich.console import Console

    # A file or pipe has no width of its own: rows then stay on one line.
    show(document, Console(width=None if sys.stdout.isatty() else 200))


if __name__ == "__main__":
    sys.exit(main())
