"""Draw docs/concepts/*.svg from journals of the simulator: `python docs/tools/write_pictures.py`.

The cluster is examples/uneven4.toml, three workers of full speed and one of a quarter, with batches of 32. Its workers
cost time and compute nothing, so a second suffices for all pictures; strategy and journal are those of every run.
"""

from pathlib import Path

import svg
from paceline import scenario, strategies
from paceline.core.actions import Apply
from paceline.core.events import Pushed
from paceline.engines.sim.light import simulate
from paceline.records import Decision, Lines
from paceline.records.figures import NAMED
from paceline.records.history import KINDS, Span, fold

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "concepts"
CLUSTER = ROOT / "examples" / "uneven4.toml"
SHOWN = ("bsp", "ssp", "dasp", "balanced")  # timelines
WEIGHED = ("bsp", "asp", "dasp", "balanced")
AGED = ("bsp", "balanced", "dasp", "ssp", "asp")
SECONDS = 4.0  # of the run that are drawn: ten rounds of the slowest worker
WORK = 32  # samples of a batch
LEFT, TOP, LANE, WIDTH = 84.0, 44.0, 30.0, 760.0


def journal_of(strategy: str) -> Lines:
    """Return a journal under a strategy, all options at their defaults; it is longer than what is drawn of it."""
    lines, until = Lines(), 2 * SECONDS
    simulate(strategies.build(strategy, seed=0), scenario.load(CLUSTER), work=WORK, max_seconds=until, sink=lines)
    return lines


def drawn(*shown: str) -> str:
    """Return the picture of some strategies: what each worker did when, and when versions were made."""
    lanes = [timeline(strategy) for strategy in shown]
    parts, titles, top = [*svg.patterns()], [], 0.0
    for title, height, drawing in lanes:
        parts += [f'<g transform="translate(0 {top:g})">', *drawing, "</g>"]
        titles.append(title)
        top += height
    return svg.picture(WIDTH, top, "; ".join(titles), parts)


def timeline(strategy: str) -> tuple[str, float, list[str]]:
    """Return a strategy's title, the height of its drawing, and the drawing."""
    lines, workers = journal_of(strategy), scenario.load(CLUSTER).count
    spans = [span for span in fold(lines, 2 * SECONDS, workers).spans if span.begin < SECONDS]
    updates = versions_of(lines)
    scale, below = (WIDTH - LEFT - 16) / SECONDS, TOP + LANE * workers
    samples = sum(each for _, each, _ in updates)
    title = f"{strategy}: {len(updates)} updates of {samples:,} samples in {SECONDS:g} s"
    parts = [svg.text(12, 24, title, bold=True)]
    for tick in svg.ticks(SECONDS):
        x = LEFT + tick * scale
        parts += [svg.line(x, TOP - 6, x, below + 14), svg.text(x, below + 30, f"{tick:g} s", anchor="middle")]
    for worker in range(workers):
        parts.append(svg.text(LEFT - 8, TOP + LANE * worker + 16, f"worker {worker}", anchor="end"))
    kinds = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    for kind in kinds:
        parts.append(svg.filled(kind, [box(span, scale) for span in spans if span.kind == kind]))
    parts.append(svg.text(LEFT - 8, below + 12, "updates", anchor="end", faint=True))
    parts += [svg.line(LEFT + at * scale, below + 2, LEFT + at * scale, below + 14, "axis", 1.5) for at, *_ in updates]
    x = LEFT
    for kind in kinds:
        parts += [svg.filled(kind, [(x, below + 42, 14, 14)]), svg.text(x + 20, below + 54, NAMED[kind])]
        x += 40 + svg.CHARACTER * len(NAMED[kind])
    return title, below + 68, parts


def box(span: Span, scale: float) -> tuple[float, float, float, float]:
    """Return where a span is drawn, cut at the picture's end."""
    begin, end = max(0.0, span.begin), min(SECONDS, span.begin + span.seconds)
    return LEFT + begin * scale, TOP + LANE * span.worker, max(0.0, end - begin) * scale, LANE - 8


def versions_of(lines: Lines) -> list[tuple[float, int, float]]:
    """Return when each version of the model was made, of how many samples and with which mass."""
    held: dict[int, int] = {}
    made = []
    for line in lines:
        if not isinstance(line, Decision) or line.event.at > SECONDS:
            continue
        if isinstance(line.event, Pushed):
            held[line.event.push] = line.event.samples
        for action in line.actions:
            if isinstance(action, Apply) and sum(action.weights) > 0:
                made.append((line.event.at, sum(held.pop(push) for push in action.pushes), sum(action.weights)))
    return made


def masses() -> str:
    """Return the picture of the mass of every update, a row for each strategy."""
    left, top, row = 84.0, 44.0, 64.0
    scale = (WIDTH - left - 16) / SECONDS
    parts = [svg.text(12, 24, "The mass of every update: 1 is one whole optimizer step", bold=True)]
    for number, strategy in enumerate(WEIGHED):
        base = top + row * (number + 1) - 10
        found = versions_of(journal_of(strategy))
        told = f"{sum(mass for *_, mass in found):.1f} steps in {SECONDS:g} s"
        parts += [svg.text(left - 8, base - 12, strategy, anchor="end"), svg.line(left, base, WIDTH - 16, base, "axis")]
        parts += [svg.line(left, base - 40, WIDTH - 16, base - 40), svg.text(left - 8, base - 36, "1", anchor="end")]
        parts += [svg.mark(left + at * scale, base, -40 * mass) for at, _, mass in found]
        parts.append(svg.text(WIDTH - 16, base - 46, told, anchor="end", faint=True))
    below = top + row * len(WEIGHED)
    parts += [
        svg.text(left + at * scale, below + 12, f"{at:g} s", anchor="middle", faint=True) for at in svg.ticks(SECONDS)
    ]
    return svg.picture(WIDTH, below + 26, "The mass of every update", parts)


def ages() -> str:
    """Return the picture of how many updates the pushes of each strategy had missed."""
    rows: list[svg.Bar] = []
    for strategy in AGED:
        missed = fold(journal_of(strategy), 2 * SECONDS, scenario.load(CLUSTER).count).staleness
        count = sum(missed.values())
        mean = sum(age * times for age, times in missed.items()) / count
        rows.append((strategy, mean, min(missed), max(missed), f"{mean:.2f} on average, at most {max(missed)}"))
    return svg.bars("How many updates a push has missed", "updates; the line is the range", rows)


def pages() -> dict[Path, str]:
    """Return every file and its contents."""
    timelines = {FOLDER / f"{strategy}.svg": drawn(strategy) for strategy in SHOWN}
    timelines[FOLDER / "bsp-balanced.svg"] = drawn("bsp", "balanced")
    return {**timelines, FOLDER / "mass.svg": masses(), FOLDER / "staleness.svg": ages()}


if __name__ == "__main__":
    for path, contents in pages().items():
        path.write_text(contents, encoding="utf-8")
