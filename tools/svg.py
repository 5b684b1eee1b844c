"""What the manual's pictures share: one style, in light and dark, and a few shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

__all__ = ["LINE", "Drawing", "number"]

LINE = 18
"""From one line of text to the next."""
STYLE = """
  text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2430 }
  .title { font-weight: 600 } .small { font-size: 12px } .dim { fill: #5b6472 }
  .card { fill: #ffffff; stroke: #dde1e7 } .box { fill: #f4f6f9; stroke: #c5ccd6 }
  .torch { fill: #b8c0cc } .ours { fill: #2563c9 } .loss { fill: #b45309 } .halo { fill: #f0b35a }
  .line { fill: none; stroke: #5b6472; stroke-width: 1.5 } .axis { fill: none; stroke: #c5ccd6 }
  .front { fill: none; stroke: #2563c9; stroke-width: 2 } .limit { fill: none; stroke: #b45309; stroke-width: 1.5 }
  .dashed { stroke-dasharray: 5 4 } .again { fill: #ffffff; stroke: #2563c9; stroke-width: 1.5 }
  .pale { fill: #dbe6f8 } .on { fill: #ffffff } .warn { fill: #b45309 } .head { fill: #5b6472 }
  .heat1 { fill: #cfe0fa } .heat2 { fill: #9cbdf2 } .heat3 { fill: #5f93e6 } .heat4 { fill: #2563c9 }
  .heat5 { fill: #123a80 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ee } .dim { fill: #9aa4b2 }
    .card { fill: #15181d; stroke: #30363f } .box { fill: #1e232a; stroke: #3d4651 }
    .torch { fill: #566173 } .ours { fill: #6ea0f5 } .loss { fill: #f0a04b } .halo { fill: #b97b22 }
    .line { stroke: #9aa4b2 } .axis { stroke: #3d4651 } .front { stroke: #6ea0f5 } .limit { stroke: #f0a04b }
    .again { fill: #15181d; stroke: #6ea0f5 } .pale { fill: #233555 } .on { fill: #15181d } .warn { fill: #f0a04b }
    .head { fill: #9aa4b2 } .heat1 { fill: #223a63 } .heat2 { fill: #2d559a } .heat3 { fill: #4479d0 }
    .heat4 { fill: #7fabf5 } .heat5 { fill: #cfe0fb }
  }
"""


def number(value: float) -> str:
    """A coordinate as text, to a tenth of a pixel.

    >>> number(12.0), number(0.26)
    ('12', '0.3')
    """
    return f"{round(value, 1):g}"


class Drawing:
    """An SVG picture that is built shape by shape. Every shape has a class of the style, or several.

    The picture lies on a card of its own colour, so that it can be read on any page.
    """

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height = width, height
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f"aria-label={quoteattr(label)}>",
            f"<style>{STYLE}</style>",
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, "card", radius=8)

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> None:
        """Text whose base line begins at ``x`` and ``y``; ``anchor`` is ``start``, ``middle`` or ``end``."""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style = f' class="{kind}"' if kind else ""
        self._lines.append(f'<text{style} x="{number(x)}" y="{number(y)}"{place}>{escape(words)}</text>')

    def lines(self, x: float, y: float, texts: Iterable[str], kind: str = "", *, anchor: str = "start") -> None:
        """Several lines of text, one below the other."""
        for index, words in enumerate(texts):
            self.text(x, y + LINE * index, words, kind, anchor=anchor)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, *, radius: float = 0) -> None:
        """A rectangle."""
        corner = f' rx="{number(radius)}"' if radius else ""
        size = f'width="{number(width)}" height="{number(height)}"'
        self._lines.append(f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" {size}{corner}/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        """A disc."""
        self._lines.append(f'<circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        joined = " L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._lines.append(f'<path class="{kind}" d="M{joined}"/>')

    def arrow(self, points: Sequence[tuple[float, float]]) -> None:
        """A line through points with a head at its end, along an axis of the picture."""
        (x0, y0), (x, y) = points[-2:]
        along, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        self.path([*points[:-1], (x - 6 * along, y - 6 * down)], "line")
        left, right = (
            (x - 8 * along - 5 * down, y - 8 * down - 5 * along),
            (x - 8 * along + 5 * down, y - 8 * down + 5 * along),
        )
        corners = " L".join(f"{number(a)} {number(b)}" for a, b in ((x, y), left, right))
        self._lines.append(f'<path class="head" d="M{corners} Z"/>')

    def __str__(self) -> str:
        """The picture as a file holds it."""
        return "\n".join([*self._lines, "</svg>", ""])
