"""What a planned layer may keep of its weight from one call to the next."""

from __future__ import annotations

import enum

__all__ = ["Weights"]


class Weights(enum.Enum):
    """What may be kept of a weight between calls.

    Nothing where it changes; what was computed from it where it is constant, checked at every call or promised.
    """

    CHANGING = "changing"
    CHECKED = "checked"
    FROZEN = "frozen"

    @classmethod
    def of(cls, *, training: bool, frozen: bool) -> Weights:
        """The value for two arguments of ``optimize``. Raises ``ValueError`` where one is no bool or both are true."""
        for name, value in (("training", training), ("frozen", frozen)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r:.80}: True or False would do")
        if training and frozen:
            raise ValueError("frozen=True: training changes weights; training=False would do beside it")
        return cls.CHANGING if training else cls.FROZEN if frozen else cls.CHECKED
