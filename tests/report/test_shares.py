"""The table of shares: what each device computes beside the time, and where the rule by peak rates would land."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from tilewise.plan import Config, Measurement
from tilewise.report.shares import measured_shares, shares_table

GPU = "cuda:0=NVIDIA H100 80GB HBM3"


def share(devices: str, images: tuple[int, ...], time_ms: float | None, found: str, reason: str = "") -> Measurement:
    return Measurement("devices", 1, Config(devices=devices, images=images, found=found), time_ms, reason=reason)


TRIED = [
    Measurement("aten", 4, Config(), 20.0),
    Measurement("slow", 1, Config(), 5.0, reason="is wrong"),
    share(f"here; {GPU}", (8, 248), 9.0, "flops"),
    share(f"here; {GPU}", (64, 192), 6.0, "rates"),
    share(GPU, (256,), 8.0, "alone"),
    share(f"here; {GPU}", (60, 196), None, "search", "took too long"),
    Measurement("devices", 1, Config(), reason="not tried"),
]


def test_shares_are_a_sweep_from_the_tensors_own_device_to_the_others() -> None:
    shares = measured_shares(TRIED)
    assert [each.images.get("here", 0) for each in shares] == [256, 64, 8, 0]
    assert [each.time_ms for each in shares] == [20.0, 6.0, 9.0, 8.0]
    assert [each.found for each in shares] == ["alone", "rates", "flops", "alone"]
    text = StringIO()
    Console(file=text, width=120).print(shares_table(shares))
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert rows[1][:3] == ["here", "cuda:0", "ms"]
    assert rows[2][:6] == ["100%", "(256)", "0%", "(0)", "20.00", "3.33x"]
    assert rows[3][:6] == ["25%", "(64)", "75%", "(192)", "6.000", "1.00x"]
    assert "rule: by peak rates" in " ".join(rows[4])


def test_where_nothing_was_shared_there_is_no_table() -> None:
    assert measured_shares(TRIED[:2]) == []
    assert measured_shares([TRIED[-1]]) == []
