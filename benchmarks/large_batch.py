"""A batch past 2^31 elements: time an image against the same layer at half the batch.

pytorch/pytorch issue 128936: Conv2d(128, 128, 3, stride=2) on (64, 128, 513, 513) in bf16 takes 60 times as long as
with 63 images, because its input has more elements than 32 bits can count. The baseline is the better of torch and the
planned layer at batch 32; ours is the planned layer at 64. Values are milliseconds an image.
"""

from __future__ import annotations

from harness.layers import PASSES, Layer
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Tensors, framework_call, plan_line, planned_call, race

from tilewise.plan import Plan
from tilewise.problems.conv.problem import ConvProblem

DEFAULTS = {
    "batch": "64",
    "size": "513",
    "channels": "128",
    "dtype": "bf16",
    "passes": "fprop,dgrad,wgrad",
    "rigor": "measure",
}
QUICK = {"batch": "4", "size": "33", "channels": "16", "dtype": "fp32", "passes": "fprop"}


def run(settings: Settings) -> Result:
    """One row a pass."""
    planner, rows = settings.planner(), []
    whole, channels = settings.integer("batch"), settings.integer("channels")
    layer = Layer("issue 128936", whole, channels, channels, settings.integer("size"), 3, stride=2)
    for pass_ in settings.chosen("passes", PASSES):
        problems = [
            layer.problem(pass_, settings.device, batch=batch, dtype=settings.text("dtype"))
            for batch in (whole, whole // 2)
        ]
        settings.say(f"planning {pass_.value} at batch {whole} and {whole // 2}")
        plans = planner.plan_many(problems, settings.planning())
        rows.append(_row(pass_.value, problems, plans))
    return Result(rows, bars(rows, settings))


def _row(name: str, problems: list[ConvProblem], plans: dict[ConvProblem, Plan]) -> Row:
    images = []
    for problem in problems:
        # One batch at a time: both together would need 25 GiB.
        tensors = Tensors(problem)
        calls = [planned_call(problem, plans[problem], tensors), framework_call(problem, tensors)]
        images.append([ms / problem.batch for ms in race(problem, calls)])
    (ours, torch_whole), (planned_half, torch_half) = images
    half = min(planned_half, torch_half)
    what = f"{'torch' if torch_half <= planned_half else 'planned'} at batch {problems[1].batch}"
    return Row(
        name,
        "time an image",
        Side(what, half),
        Side(plan_line(plans[problems[0]]), ours),
        unit="ms/image",
        details={
            "torch_ms_per_image": torch_whole,
            "torch_half_ms_per_image": torch_half,
            "planned_half_ms_per_image": planned_half,
            "over_torch": torch_whole / ours,
            "plan": plans[problems[0]].to_json(),
        },
    )


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """At most 1.3 times the time an image of half the batch."""
    applies = settings.device.type == "cuda" and not settings.quick
    return [
        Bar(f"{row.name}: time an image over half the batch", 1 / row.ratio, most=1.3, applies=applies) for row in rows
    ]
