"""Where random draws come from: the same on every machine and in every order of tests, or new ones from a seed.

``make test`` draws what it always draws. ``TILEWISE_SEED=7`` draws something else, the same for 7; ``make test-all``
takes a seed at random where none is given, and the head of its output says which. ``TILEWISE_SEEDS=3-12`` runs each
test once with every seed from 3 to 12.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import MutableMapping

import hypothesis
import hypothesis.core
import torch
from hypothesis.internal.conjecture import providers
from tests.sampling import EVERY

__all__ = ["SEED", "SEEDS", "chosen", "seed_all", "use_profile"]


def _range(text: str) -> list[int]:
    """``3-12`` or ``5`` as numbers."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def chosen(environment: MutableMapping[str, str], every: bool) -> int | None:
    """The run's seed, which processes that it starts find in ``environment``; ``None``: what is always drawn."""
    if every and "TILEWISE_SEED" not in environment:
        environment["TILEWISE_SEED"] = str(random.SystemRandom().randrange(1, 10**6))
    text = environment.get("TILEWISE_SEED", "")
    return int(text) if text else None


SEEDS = _range(os.environ["TILEWISE_SEEDS"]) if os.environ.get("TILEWISE_SEEDS") else []
SEED = chosen(os.environ, EVERY and not SEEDS)


def use_profile() -> None:
    """Have hypothesis draw by the run's seed, and nothing fail for being slow: a speed is never asserted in a test."""
    fixed = SEED is None and not SEEDS
    hypothesis.settings.register_profile(
        "tilewise",
        deadline=None,
        derandomize=fixed,
        database=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tilewise")
    if hasattr(providers, "_get_local_constants"):
        # Hypothesis also draws numbers that it finds in the modules loaded so far: then the order of tests would count,
        # and a seed would not draw the same again.
        providers._get_local_constants = providers.Constants
    hypothesis.core.global_force_seed = SEED


def seed_all(test: str, seed: int | None) -> None:
    """Begin a test: what it draws depends on its name and the seed alone."""
    if seed is not None:
        hypothesis.core.global_force_seed = seed
    number = zlib.crc32(f"{test} {seed or 0}".encode())
    random.seed(number)
    torch.manual_seed(number)
