"""Where Inductor finds the passes that others add: settings of the backend that Dynamo compiles a graph with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["after", "each_pass", "settings_of"]


def settings_of(compiler: Any) -> dict[str, Any] | None:
    """The settings of ``compiler``, a backend as Dynamo holds it; ``None`` where it is another than Inductor."""
    while not isinstance(getattr(compiler, "config", None), dict) and hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    settings = getattr(compiler, "config", None)
    return settings if isinstance(settings, dict) else None


def after(settings: dict[str, Any], name: str) -> Any:
    """The passes that run by now under ``name``: the backend's own, or else those of the process."""
    import torch._inductor.config

    return settings.get(name, getattr(torch._inductor.config, name))


def each_pass(passes: Any) -> Iterator[Any]:
    """The passes of a setting in order: Inductor takes one, several or none."""
    for each in passes if isinstance(passes, (list, tuple)) else [passes]:
        if each is not None:
            yield each
