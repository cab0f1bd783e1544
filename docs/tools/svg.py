"""Small pictures as SVG text: every byte follows from the numbers, so a test can compare a committed file with them.

A picture brings its own background, light or dark as the reader's system is: on a page of the other kind its text
stays readable. Colours are those of the report's page, and no colour stands alone: bars carry patterns and labels.
"""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from paceline.records.figures import COLOURS, LINES

FONT = 13
CHARACTER = 7.2  # pixels of an average one at that size
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.back { fill: #ffffff; } .grid { stroke: #d0d7de; } .axis { stroke: #57606a; } .faint { fill: #57606a; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .back { fill: #161b22; } .grid { stroke: #3d444d; } .axis { stroke: #9198a1; }
.faint { fill: #9198a1; }
}
"""
PATTERNS = {
    "transfer": '<path d="M0 6 L6 0" stroke="#ffffff" stroke-width="1.5"/>',
    "wait": '<circle cx="3" cy="3" r="1.2" fill="#ffffff"/>',
    "lost": '<path d="M0 0 L6 6 M0 6 L6 0" stroke="#ffffff" stroke-width="1"/>',
}

Bar = tuple[str, float | None, float | None, float | None, str]  # label, value, from, to, what is written beside it


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return a whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n"
        f'<rect class="back" width="{width:g}" height="{height:g}" rx="6"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", faint: bool = False, bold: bool = False) -> str:
    """Return one line of text."""
    more = f' text-anchor="{anchor}"' * (anchor != "start") + ' class="faint"' * faint
    more += ' style="font-weight:600"' * bold
    return f'<text x="{_short(x)}" y="{_short(y)}"{more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid", width: float = 1) -> str:
    """Return a straight line of the grid or of an axis."""
    where = f'x1="{_short(x1)}" y1="{_short(y1)}" x2="{_short(x2)}" y2="{_short(y2)}"'
    return f'<line class="{kind}" {where} stroke-width="{width:g}"/>'


def patterns() -> list[str]:
    """Return what bars of a timeline are filled with."""
    made = [
        f'<pattern id="{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{colour}"/>{PATTERNS.get(kind, "")}</pattern>'
        for kind, colour in COLOURS.items()
    ]
    return ["<defs>", *made, "</defs>"]


def filled(kind: str, boxes: Iterable[tuple[float, float, float, float]]) -> str:
    """Return all bars of a timeline that are of a kind, each as left, top, width and height."""
    drawn = "".join(f"M{_short(x)} {_short(y)}h{_short(w)}v{_short(h)}h-{_short(w)}z" for x, y, w, h in boxes)
    return f'<path d="{drawn}" fill="url(#{kind})"/>'


def mark(x: float, y: float, height: float) -> str:
    """Return a thick upright stroke."""
    return f'<path d="M{_short(x)} {_short(y)}v{_short(height)}" stroke="{LINES[0]}" stroke-width="2.5"/>'


def bars(title: str, unit: str, rows: Sequence[Bar], width: float = 760) -> str:
    """Return horizontal bars with their ranges, one row each, in the order given; without a value only the words."""
    fitting = int((width / 2 - 24) / CHARACTER)
    rows = [(name if len(name) <= fitting else f"{name[: fitting - 1]}…", *rest) for name, *rest in rows]
    left = min(width / 2, 24 + CHARACTER * max(len(row[0]) for row in rows))
    right = 20 + CHARACTER * max(len(row[4]) for row in rows)
    most = max([0.0, *(max(row[1] or 0.0, row[3] or 0.0) for row in rows)]) or 1.0
    scale = (width - left - right) / most
    top, step = 42.0, 24.0
    parts = [text(12, 24, title, bold=True)]
    for tick in ticks(most):
        x = left + tick * scale
        parts.append(line(x, top - 4, x, top + step * len(rows)))
        parts.append(text(x, top + step * len(rows) + 16, f"{tick:g}", anchor="middle", faint=True))
    parts.append(text(left, top + step * len(rows) + 34, unit, faint=True))
    for number, (label, value, low, high, told) in enumerate(rows):
        y = top + number * step
        parts.append(text(left - 8, y + 15, label, anchor="end"))
        end = left
        if value is not None:
            end = left + value * scale
            size = f'width="{_short(value * scale)}" height="16"'
            parts.append(f'<rect x="{_short(left)}" y="{_short(y + 3)}" {size} fill="{LINES[0]}"/>')
        if low is not None and high is not None and high > low:
            parts.append(line(left + low * scale, y + 11, left + high * scale, y + 11, "axis", 2))
            end = max(end, left + high * scale)
        parts.append(text(end + 8, y + 15, told, faint=True))
    return picture(width, top + step * len(rows) + 46, title, parts)


def ticks(most: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to the largest."""
    raw = most / count
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 1.0
    while power > raw:
        power /= 10
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= raw)
    return [round(number * step, 10) for number in range(int(most / step) + 1)]


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
