"""``TILEWISE_*`` environment variables, which ``enable`` and ``enabled`` use where an option is not given."""

from __future__ import annotations

import os
from typing import cast

from tilewise.settings import OPTIONS, EnableOptions

__all__ = ["with_variables"]


def with_variables(given: EnableOptions) -> EnableOptions:
    """The options ``given``, and the environment's values for options that were not given.

    Raises ``ValueError`` naming the variable at fault, its value and what would do.
    """
    values = dict(given)
    for option in OPTIONS.values():
        if option.variable and option.name not in given:
            text = os.environ.get(option.variable, "").strip()
            if text:
                values[option.name] = option.kind.read(option.variable, text)
    return cast("EnableOptions", values)
