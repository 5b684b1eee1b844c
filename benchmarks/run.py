"""Runs one benchmark, prints it and saves it: ``python benchmarks/run.py NAME``; ``--list`` names them all."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from harness import process, registry

RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when it ran, 1 when a bar that applies was missed and ``--strict`` asked, 2 for bad input."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.list:
        for entry in registry.entries():
            print(f"{entry.name:16} {entry.title}")
        return 0
    if given.name is None:
        parser.error("name a benchmark; --list has them")
    if given.device == "cpu":
        process.ensure_malloc_keeps_memory()
    from harness.settings import BadInput

    try:
        document = _run(given)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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
    settings = Settings(device, given.quick, given.fresh, options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    result = benchmark.run(settings)
    return {
        "schema": SCHEMA,
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "folder": machine.slug(device),
        "machine": machine.describe(device),
        "settings": {"quick": given.quick, "fresh": given.fresh, **options},
        "rows": [row.to_json() for row in result.rows],
        "summary": result.summary(),
    }


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


def _publish(document: dict[str, Any], given: argparse.Namespace) -> None:
    text = json.dumps(document, indent=1)
    out = given.out or (None if given.quick else RESULTS)
    if out is not None:
        stem = "-".join(word for word in (document["benchmark"], given.label) if word)
        path = out / document["folder"] / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        print(f"saved {path}", file=sys.stderr)
    if given.json:
        print(text)
        return
    from harness.table import show
    from rich.console import Console

    # A file or pipe has no width of its own: rows then stay on one line.
    show(document, Console(width=None if sys.stdout.isatty() else 200))


if __name__ == "__main__":
    sys.exit(main())
