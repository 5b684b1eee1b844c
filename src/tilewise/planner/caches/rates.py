"""The measured rates of devices, by which candidates' times are estimated."""

from __future__ import annotations

from tilewise.machine.device import environment, torch_device
from tilewise.machine.turns import in_turns
from tilewise.planner.search.estimate import Profile, arithmetic_name, is_profile, measure_profile
from tilewise.planner.search.foreseen import TYPICAL
from tilewise.wisdom import Wisdom

__all__ = ["Rates", "known_rates"]


class Rates:
    """The rates of each device: kept in memory, in ``wisdom``, and measured where neither has them.

    ``has_planned`` is set once a first problem was planned.
    """

    def __init__(self, wisdom: Wisdom) -> None:
        self._wisdom = wisdom
        self._profiles: dict[str, Profile] = {}
        self.has_planned = False

    @property
    def in_haste(self) -> bool:
        """Whether this is a first problem beside a program, which waits for a first layer to change."""
        return in_turns() and not self.has_planned

    def of(self, device: str) -> Profile:
        """The rates of the device with this name. In haste those of a typical one serve where none are known.

        Measuring takes as long as planning one problem, and estimates only say what is measured first.
        """
        key = environment(device).key
        if key not in self._profiles:
            rates = self._wisdom.profile(key)
            if rates is None or not is_profile(rates):
                if self.in_haste:
                    return TYPICAL[torch_device(device).type]
                rates = measure_profile(device)
                self._wisdom.remember_profile(key, rates)
            self._profiles[key] = rates
        return self._profiles[key]


def known_rates(wisdom: Wisdom, environment: str, dtype: str, precision: str) -> dict[str, float] | None:
    """What a device was measured to reach, for documents: bytes a second of a copy, and operations a second.

    The operations are those of a matrix product of operands of ``dtype``. ``environment`` is the device's key in
    ``wisdom``. ``None`` where it was never measured; nothing is measured here.
    """
    profile = wisdom.profile(environment)
    if profile is None or not is_profile(profile):
        return None
    copied, computed = profile["copy"], profile[arithmetic_name(dtype, precision)]
    return {"bytes_per_second": 1e3 * copied, "flops_per_second": 1e3 * computed}
