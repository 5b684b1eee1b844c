"""Draw the README's table as bars, torch's time and tilewise's: ``draw_steps.py`` writes docs/pictures/steps.svg."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "steps.svg"
ROW = re.compile(r"^\| ([^|]+) \| ([\d.]+) (ms|us) \| ([\d.]+) (?:ms|us) \| \**([\d.]+)x\** \|", re.MULTILINE)
"""A row of the table: what is computed, torch's time with its unit, tilewise's, and the ratio."""
WIDTH, LEFT, RIGHT, TOP, PITCH, BAR = 860, 372, 132, 44, 34, 12
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2430 }
  .dim { fill: #5b6472 } .torch { fill: #b8c0cc } .ours { fill: #2563c9 } .loss { fill: #b45309 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ee } .dim { fill: #9aa4b2 } .torch { fill: #566173 } .ours { fill: #6ea0f5 }
    .loss { fill: #f0a04b }
  }
"""


class Row(NamedTuple):
    """A row of the table."""

    what: str
    torch: float
    unit: str
    ours: float
    ratio: str


def rows(markdown: str) -> list[Row]:
    """The rows of the first table of a page that has times in it. Raises ``ValueError`` where there is none."""
    found = [Row(what, float(a), unit, float(b), ratio) for what, a, unit, b, ratio in ROW.findall(markdown)]
    if not found:
        raise ValueError("no row of the table has the form: what, time, time, ratio")
    return found


def drawn(table: list[Row]) -> str:
    """The picture: for each row two bars, torch's as long as the column is wide, ours beside it in proportion."""
    height = TOP + PITCH * len(table) + 10
    span = WIDTH - LEFT - RIGHT
    longest = max(max(1.0, row.ours / row.torch) for row in table)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Times of torch and of tilewise, one pair of bars a row">',
        f"<style>{STYLE}</style>",
        f'<rect class="torch" x="{LEFT}" y="14" width="14" height="{BAR}"/>',
        f'<text class="dim" x="{LEFT + 20}" y="25">torch, or the best peer</text>',
        f'<rect class="ours" x="{LEFT + 190}" y="14" width="14" height="{BAR}"/>',
        f'<text class="dim" x="{LEFT + 210}" y="25">tilewise</text>',
    ]
    for number, row in enumerate(table):
        y = TOP + PITCH * number
        kind = "ours" if row.ours < row.torch else "loss"
        ours = span * row.ours / row.torch / longest
        lines += [
            f'<text x="0" y="{y + 17}">{escape(row.what.replace("`", ""))}</text>',
            f'<rect class="torch" x="{LEFT}" y="{y}" width="{span / longest:.1f}" height="{BAR}"/>',
            f'<rect class="{kind}" x="{LEFT}" y="{y + BAR + 1}" width="{ours:.1f}" height="{BAR}"/>',
            f'<text x="{LEFT + span + 8}" y="{y + 11}" class="dim">{row.torch:g} {row.unit}</text>',
            f'<text x="{LEFT + span + 8}" y="{y + 24}">{row.ours:g} {row.unit}, {row.ratio}x</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the picture of the README's table."""
    PICTURE.write_text(drawn(rows((ROOT / "README.md").read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
