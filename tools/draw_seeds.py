"""Run the generated tests with many seeds, file by file, and go on where an earlier run was stopped.

``python tools/draw_seeds.py --seeds 100`` runs what draws its examples with hypothesis: every test marked so, and the
solvers' generated cases with a twentieth of the seeds. What is done is kept in ``.test-seeds.json``, for each file as
it is: one that has changed begins anew. Exits with 1 where a test has failed; the seed that its name ends in draws the
same again (``TILEWISE_SEED=7 make unit ARGS=tests/...``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tilewise.machine.files import whole_file

ROOT = Path(__file__).parents[1]
STATE = ROOT / ".test-seeds.json"
CHUNK = 10
"""Seeds of one process: what is lost when it is stopped."""
FEWER = 20
"""Of the solvers' cases, which take seconds each, one seed in so many is run."""
NOTHING_RUN = 5
"""pytest's exit status where no test was selected."""


@dataclass(frozen=True)
class Job:
    """Seeds ``first`` to ``last`` of one file's tests."""

    file: str
    first: int
    last: int

    def command(self) -> list[str]:
        """pytest, without the tests that draw nothing."""
        some = [] if is_of_solvers(self.file) else ["-m", "hypothesis and not gpu"]
        return [sys.executable, "-m", "pytest", self.file, "-q", "-n", "0", "--timeout", "1800", "--tb=short", *some]


def is_of_solvers(file: str) -> bool:
    """Whether the file's cases run solvers: they are few seeds' work each."""
    return file.startswith("tests/solvers/")


def digest(file: str) -> str:
    """The file as it is now."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def load(path: Path) -> dict[str, dict[str, object]]:
    """What is done, by file; nothing where there is no such file or it is not readable as one."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def done_of(state: dict[str, dict[str, object]], file: str) -> int:
    """How many seeds of ``file`` as it is are done."""
    entry = state.get(file, {})
    count = entry.get("done", 0)
    return count if entry.get("digest") == digest(file) and isinstance(count, int) else 0


def jobs(files: list[str], seeds: int, state: dict[str, dict[str, object]]) -> list[Job]:
    """What is left to run, the cheaper files first."""
    found = []
    for file in sorted(files, key=lambda name: (is_of_solvers(name), name)):
        last = -(-seeds // FEWER) if is_of_solvers(file) else seeds
        starts = range(done_of(state, file) + 1, last + 1, CHUNK)
        found += [Job(file, first, min(first + CHUNK - 1, last)) for first in starts]
    return found


def drawing_files() -> list[str]:
    """Files of tests that use hypothesis."""
    paths = (ROOT / "tests").rglob("test_*.py")
    return [str(path.relative_to(ROOT)) for path in paths if "from hypothesis" in path.read_text("utf-8")]


def run(job: Job, state: dict[str, dict[str, object]], path: Path) -> None:
    """Run the job and note it; what failed is printed."""
    environment = {**os.environ, "TILEWISE_SEEDS": f"{job.first}-{job.last}"}
    environment.pop("TILEWISE_EVERY_TEST", None)
    before = digest(job.file)
    result = subprocess.run(job.command(), cwd=ROOT, env=environment, capture_output=True, text=True)
    good = result.returncode in (0, NOTHING_RUN)
    entry = state.get(job.file, {})
    failed = entry.get("failed", []) if entry.get("digest") == before else []
    assert isinstance(failed, list)
    if not good:
        failed = [*failed, f"{job.first}-{job.last}"]
        print(result.stdout[-20000:], result.stderr[-4000:], flush=True)
    state[job.file] = {"digest": before, "done": job.last, "failed": failed}
    with whole_file(path) as file:
        json.dump(state, file, indent=1, sort_keys=True)
    lines = result.stdout.strip().splitlines()
    print(f"{job.file} seeds {job.first}-{job.last}: {lines[-1] if lines else 'no output'}", flush=True)


def main() -> int:
    """Run what is left; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="seeds of each test [100]; the solvers' have a 20th")
    parser.add_argument("--state", type=Path, default=STATE, help="where what is done is kept [.test-seeds.json]")
    parser.add_argument("files", nargs="*", help="files of tests [all that draw]")
    asked = parser.parse_args()
    state = load(asked.state)
    files = asked.files or drawing_files()
    left = jobs(files, asked.seeds, state)
    print(f"{len(files)} files, {len(left)} runs left", flush=True)
    for job in left:  # all of them, whatever fails
        run(job, state, asked.state)
    failed = {file: state[file].get("failed") for file in files if done_of(state, file)}
    for file, seeds in failed.items():
        if seeds:
            print(f"failed: {file} with seeds {seeds}")
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
