"""Shares of a batch that were measured on several devices, as a sweep: the share of each beside the time of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape

from tilewise.plan import Measurement
from tilewise.report.sheet import Sheet
from tilewise.report.tables import light_table
from tilewise.report.words import format_ms, format_ratio

__all__ = ["MeasuredShare", "measured_shares", "shares_table"]

FOUND = {
    "flops": "the rule: by peak rates",
    "rates": "by measured rates",
    "alone": "one device alone",
    "search": "moved on",
    "sweep": "sweep",
}
"""What found a share, in words."""


@dataclass(frozen=True)
class MeasuredShare:
    """The images of each device by its place, the milliseconds of all together, and what found this share."""

    images: dict[str, int]
    time_ms: float
    found: str


def measured_shares(tried: Sequence[Measurement]) -> list[MeasuredShare]:
    """The shares among ``tried`` that have a time: those with the most images where the tensors lie come first.

    All images there is what the fastest other candidate takes. Empty where nothing was shared.
    """
    found: list[MeasuredShare] = []
    for m in tried:
        devices, images = m.config.get("devices"), m.config.get("images")
        if m.time_ms is None or m.reason or not isinstance(devices, str) or not isinstance(images, tuple):
            continue
        by_place = dict(zip(devices.split("; "), images, strict=True))
        found.append(MeasuredShare(by_place, m.time_ms, str(m.config.get("found", "chosen"))))
    others = [m.time_ms for m in tried if m.time_ms is not None and not m.reason and m.solver != "devices"]
    if found and others:
        found.append(MeasuredShare({"here": sum(found[0].images.values())}, min(others), "alone"))
    return sorted(found, key=lambda share: (-share.images.get("here", 0), share.time_ms))


def shares_table(shares: Sequence[MeasuredShare]) -> Sheet:
    """A row for each share: the percentage and the images of each device, the time, and the time over the best one."""
    places = list(dict.fromkeys(place for share in shares for place in share.images))
    places.sort(key=lambda place: place != "here")
    table = light_table(
        *((escape(place.partition("=")[0]), "right") for place in places),
        ("ms", "right"), ("over the best", "right"), ("found", ""),
        title="shares of the batch",
    )  # fmt: skip
    best = min(share.time_ms for share in shares)
    for share in shares:
        whole = sum(share.images.values())
        cells = (f"{share.images.get(p, 0) / whole:.0%} ({share.images.get(p, 0)})" for p in places)
        told = FOUND.get(share.found, share.found)
        table.add_row(*cells, format_ms(share.time_ms), format_ratio(share.time_ms / best), told)
    return table
