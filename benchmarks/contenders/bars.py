"""What a comparison has to show, how it is asked for on the command line, and how it is told.

Every bar is one number with a bound: most are ratios of two contenders measured in the same run. A bar that could not
be measured counts as missed and says why.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import results
import sources
from sources import Sources


class Bar(msgspec.Struct, frozen=True):
    """A number and the bound it is held to; `ratio` None: not measured, `why` says for what reason."""

    name: str
    ratio: float | None
    bound: float
    at_least: bool
    meaning: str
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether it was measured and is within its bound."""
        if self.ratio is None:
            return False
        return self.ratio >= self.bound if self.at_least else self.ratio <= self.bound

    @property
    def spelt(self) -> str:
        """The bound, as `>= 5`."""
        return f"{'>=' if self.at_least else '<='} {self.bound:,g}"

    @property
    def value(self) -> str:
        """What was found."""
        return f"not measured: {self.why}" if self.ratio is None else f"{self.ratio:,.4g}"


class Asked(msgspec.Struct, frozen=True):
    """What the command line asks of a comparison."""

    quick: bool
    json: bool
    repeats: int
    out: Path | None
    of: Sources | None = None  # what is measured; None: nothing is going to be written


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every comparison has."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works; writes no result")
    found.add_argument("--json", action="store_true", help="print one JSON object: a ratio and a verdict per bar")
    found.add_argument("--repeats", type=int, help="how often every contender is measured; medians count")
    found.add_argument("--out", type=Path, help="folder of the result, instead of benchmarks/results")
    sources.add_options(found)
    return found


def asked(given: argparse.Namespace, repeats: int) -> Asked:
    """The common options, with `repeats` where none was given."""
    if given.repeats is not None and given.repeats < 1:
        raise SystemExit(f"--repeats must be >= 1, not {given.repeats}")
    part = given.quick or getattr(given, "only", None)  # of a benchmark: no result by itself
    of = sources.checked(given) if given.out is not None or not part else None
    return Asked(given.quick, given.json, given.repeats or (1 if given.quick else repeats), given.out, of)


def tell(
    question: str, options: Asked, bars: Sequence[Bar], rows: Sequence[dict[str, Any]], notes: str,
    packages: Sequence[str] = (), facts: Mapping[str, float] | None = None, code: Mapping[str, str] | None = None,
    flags: str = "",
) -> None:  # fmt: skip
    """Print what was found; a full run also writes its dated result.

    `facts` are numbers that no bar holds, `code` the digests of the strategies that are judged, for the raw file,
    `flags` what else the command line had.
    """
    numbers = dict(facts or {})
    if options.json:
        told: dict[str, Any] = {bar.name: as_data(bar) for bar in bars}
        print(
            json.dumps(
                {**told, **numbers, "machine": results.machine(), "repeats": options.repeats, "rows": list(rows)}
            )
        )
    else:
        print(results.table(rows))
        print("".join(f"{name}: {number:,.4g}\n" for name, number in numbers.items()), end="")
        for bar in bars:
            print(f"{bar.name}: {bar.value} ({bar.spelt}): {'met' if bar.passed else 'MISSED'}; {bar.meaning}")
    if options.of is None:
        return
    command = f"python benchmarks/bench_{question}.py --repeats {options.repeats}" + " --quick" * options.quick + flags
    verdicts = [results.Verdict(f"{bar.meaning} (`{bar.name}`)", bar.value, bar.spelt, bar.passed) for bar in bars]
    folder = options.out or results.FOLDER
    details = {"strategy_code": dict(code)} if code else None
    page = results.write(question, command, verdicts, rows, notes, options.of, folder, packages, details)
    if not options.json:
        print(f"written to {page}")


def as_data(bar: Bar) -> dict[str, Any]:
    """A bar in the JSON object."""
    verdict = "not measured" if bar.ratio is None else "met" if bar.passed else "missed"
    told = {"ratio": bar.ratio, "bar": bar.spelt, "verdict": verdict, "meaning": bar.meaning}
    return {**told, "why": bar.why} if bar.why else told
