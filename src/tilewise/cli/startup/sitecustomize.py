"""What a Python that ``tilewise run`` starts imports before the program, by ``site``: it enables planning.

Its folder comes first on ``PYTHONPATH`` of that process alone. It removes every trace of that, runs the
``sitecustomize`` that there would have been, and hands over to Python, which starts the program itself.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys

TOLD = "TILEWISE_RUN"
HERE = os.path.dirname(os.path.abspath(__file__))


def _leave_no_trace(path: str | None) -> None:
    """What the program sees of its environment and its path is what it would see without us."""
    del os.environ[TOLD]
    if path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != HERE]
    sys.path_importer_cache.pop(HERE, None)


def _run_own() -> bool:
    """Run the ``sitecustomize`` of this environment, in this one's place; whether there is any."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return False
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    return True


def _enable(root: str, options: dict[str, object], tell: bool) -> None:
    """Enable planning; ends the process where that cannot be: ``site`` would take errors for its own."""
    absent = root not in sys.path  # only the current directory made the package importable
    if absent:
        sys.path.append(root)
    try:
        from tilewise.cli.given.enabling import enable

        enable(options, tell)
    finally:
        if absent:
            sys.path.remove(root)


told = os.environ.get(TOLD)
if told is not None:
    what = json.loads(told)
    _leave_no_trace(what["path"])
    own = _run_own()
    _enable(what["root"], what["options"], what["tell"])
    if not own:
        # As site expects it of an environment that has none; and the name is not taken.
        raise ImportError("there is no sitecustomize", name="sitecustomize")
