"""The publications' claims, each beside what was measured here: read from committed results, never typed.

`publications.toml` names every claim, its figure in the publication, and the bars of results or the tests that ours is
read from. A bar that no result has is not measured yet; a verdict is as good as the bars that it is of:

- met: every bar is met and none is wanting, or tests alone hold it; missed: none of the bars is met;
- partly: some are missed, or some are still to be measured; not measured: there is neither a bar nor a test.

A result that judges strategies has digests of their sources. Where a strategy has changed since, its claims say so.
"""

import fnmatch
import itertools
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

import results
from contenders.strategy_code import strategy_code
from paceline import strategies

SOURCE = Path(__file__).with_suffix(".toml")
ROOT = Path(__file__).parents[1]
BRACES = re.compile(r"\{([^{}]*)\}")
NAMED = re.compile(r"\(`([\w.]+)`\)")
Verdict = Literal["met", "partly", "missed", "not measured"]
Unit = Literal["", "share", "none"]  # of a claim's values: shares are shown as percent; none: what is met says it all
VERDICTS: tuple[Verdict, ...] = ("met", "partly", "missed", "not measured")


class Measured(msgspec.Struct, frozen=True):
    """One bar of a committed result."""

    result: str
    bar: str
    value: str
    bound: str
    passed: bool


class Claim(msgspec.Struct, frozen=True):
    """A claim, as it stands."""

    claim: str
    figure: str
    verdict: Verdict
    measured: tuple[Measured, ...]
    wanting: tuple[str, ...]  # `result: bar` that no committed result has
    tests: tuple[str, ...]
    unit: Unit = ""
    earlier: tuple[str, ...] = ()  # results that were measured with other sources of the strategy

    @property
    def ours(self) -> str:
        """What was measured, in a line."""
        parts = [told(self.measured, self.unit)] if self.measured else []
        if self.tests:
            parts.append(f"held by {len(self.tests)} test{'s' * (len(self.tests) > 1)}")
        if self.wanting:
            among = sorted({each.partition(":")[0] for each in self.wanting})
            counted = len(self.wanting) > 1 and not any("*" in each for each in self.wanting)
            many = f"{len(self.wanting)} bars " if counted else ""
            parts.append(f"{many}not measured yet in {', '.join(among)}")
        if self.earlier:
            parts.append(f"measured with an earlier version of the strategy in {', '.join(self.earlier)}")
        return "; ".join(parts)

    @property
    def sources(self) -> tuple[str, ...]:
        """The results that this is read from."""
        return tuple(dict.fromkeys(each.result for each in self.measured))


class Publication(msgspec.Struct, frozen=True):
    """A publication, the strategies that follow it, and its claims."""

    name: str
    strategies: tuple[str, ...]
    claims: tuple[Claim, ...]

    @property
    def citation(self) -> str:
        """As the strategies cite it."""
        cited = [strategies.describe(strategies.machine_class(name)).citation for name in self.strategies]
        return "; ".join(dict.fromkeys(cited))

    def count(self, verdict: Verdict) -> int:
        """How many claims stand so."""
        return sum(claim.verdict == verdict for claim in self.claims)


def read(source: Path = SOURCE, folder: Path = results.FOLDER) -> list[Publication]:
    """Every publication with its claims as the committed results have them."""
    declared = tomllib.loads(source.read_text(encoding="utf-8"))["publication"]
    known: dict[str, dict[str, Measured]] = {}
    found = []
    for each in declared:
        claims = tuple(judged(claim, folder, known, each["strategies"]) for claim in each["claim"])
        found.append(Publication(each["name"], tuple(each["strategies"]), claims))
    return found


def judged(
    declared: dict[str, Any], folder: Path, known: dict[str, dict[str, Measured]], of: Sequence[str] = ()
) -> Claim:
    """A claim on these strategies with its bars looked up; `known` has the results that were read already."""
    unknown = set(declared) - {"claim", "figure", "bars", "tests", "unit"}
    if unknown:
        raise ValueError(f"{declared.get('claim')}: unknown {', '.join(sorted(unknown))}")
    found: list[Measured] = []
    wanting = []
    for each in itertools.chain.from_iterable(map(spelled_out, declared.get("bars", ()))):
        result, _, names = each.partition(": ")
        if result not in known:
            known[result] = bars_of(folder / f"{result}.json")
        fitting = [bar for name, bar in known[result].items() if fits(name, names)]
        found += [bar for bar in fitting if number_of(bar.value) is not None and bar not in found]
        # A result of the runs that are there says of a bar without all of its runs why it has no number.
        lacking = [f"{result}: {bar.bar}" for bar in fitting if number_of(bar.value) is None]
        wanting += [other for other in lacking if other not in wanting] if fitting else [each]
    tests = tuple(declared.get("tests", ()))
    read_from = dict.fromkeys(each.result for each in found)
    return Claim(
        declared["claim"], declared["figure"], verdict_of(found, wanting, tests), tuple(found), tuple(wanting), tests,
        msgspec.convert(declared.get("unit", ""), Unit),
        tuple(result for result in read_from if is_earlier(folder / f"{result}.json", of)),
    )  # fmt: skip


def spelled_out(names: str) -> list[str]:
    """What `a{b,c}` stands for: `ab` and `ac`."""
    found = BRACES.search(names)
    if found is None:
        return [names]
    return [each for part in found[1].split(",")
            for each in spelled_out(names[: found.start()] + part + names[found.end() :])]  # fmt: skip


def fits(name: str, names: str) -> bool:
    """Whether a bar is one of those that `name !but !not !these` means; `*` stands for anything."""
    wanted, *others = names.split()
    return fnmatch.fnmatchcase(name, wanted) and not any(
        fnmatch.fnmatchcase(name, other.removeprefix("!")) for other in others
    )


def bars_of(path: Path) -> dict[str, Measured]:
    """The bars of a result by their names; none if there is no result."""
    if not path.exists():
        return {}
    raw = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for verdict in raw["verdicts"]:
        if name := NAMED.search(verdict["name"]):
            found[name[1]] = Measured(path.stem, name[1], verdict["value"], verdict["bar"], verdict["passed"])
    return found


def is_earlier(path: Path, of: Sequence[str]) -> bool:
    """Whether a result says that it is of other sources of one of these strategies; not all results say which."""
    code = json.loads(path.read_text(encoding="utf-8")).get("strategy_code", {})
    return any(name in code and code[name] != strategy_code(name) for name in of)


def verdict_of(found: Sequence[Measured], wanting: Sequence[str], tests: Sequence[str]) -> Verdict:
    """How a claim stands by its bars; where it has none, by its tests, which hold or the suite fails."""
    if found:
        if all(bar.passed for bar in found):
            return "partly" if wanting else "met"
        return "partly" if any(bar.passed for bar in found) else "missed"
    if wanting:
        return "partly" if tests else "not measured"
    return "met" if tests else "not measured"


def told(found: Sequence[Measured], unit: Unit = "") -> str:
    """Some bars in a line: one by its value, more by how many are met and their range."""
    met = f"{sum(bar.passed for bar in found)} of {len(found)} bars met"
    if unit == "none":
        return met
    parts = [met] if len(found) > 1 else []
    for bound in dict.fromkeys(bar.bound for bar in found):
        bars = [bar for bar in found if bar.bound == bound]
        values = [number for bar in bars if (number := number_of(bar.value)) is not None]
        low_high = dict.fromkeys(number_text(each, unit) for each in (min(values), max(values))) if values else ()
        lacking = dict.fromkeys(bar.value for bar in bars if number_of(bar.value) is None)
        parts.append(f"{' to '.join(low_high) or '; '.join(lacking)} (bar {bound_text(bound, unit)})")
    return ", ".join(parts)


def number_text(number: float, unit: Unit) -> str:
    """A value as it is shown: nothing that only rounding left."""
    number = 0.0 if abs(number) < 1e-9 else number
    return f"{number:.1%}".replace("%", " %") if unit == "share" else f"{number:.4g}"


def bound_text(bound: str, unit: Unit) -> str:
    """A bar as it is shown, `>= 0.92`."""
    sign, _, number = bound.partition(" ")
    value = number_of(number)
    return bound if unit != "share" or value is None else f"{sign} {100 * value:g} %"


def number_of(value: str) -> float | None:
    """The number of a bar's value; None if it was not measured."""
    try:
        return float(value.replace(",", ""))
    except ValueError:
        return None


def command_of(result: str, folder: Path = results.FOLDER) -> tuple[str, str]:
    """The command that measured a result, and its date and commit.

    A result that does not say which version of a strategy it is of may be of an earlier one without anybody noticing.
    """
    raw = json.loads((folder / f"{result}.json").read_text(encoding="utf-8"))
    unmarked = "" if "strategy_code" in raw else "; strategies may have changed since"
    return raw["command"], f"{raw['date'].split()[0]}, commit {raw['commit']}{unmarked}"


def standing(publication: Publication) -> str:
    """How its claims stand, in words."""
    counted = [(publication.count(verdict), verdict) for verdict in VERDICTS]
    return ", ".join(f"{count} {verdict}" for count, verdict in counted if count)


def table(publications: Sequence[Publication]) -> str:
    """A row for each publication."""
    rows = [
        {
            "strategy": ", ".join(f"`{name}`" for name in each.strategies),
            "publication": each.name,
            "claims": str(len(each.claims)),
            **{verdict: str(each.count(verdict) or "") for verdict in VERDICTS},
        }
        for each in publications
    ]
    return results.table(rows)


def beside(question: str, source: Path = SOURCE) -> str:
    """For a result's page: the claims that are read from it, their figures, and which of its bars say what is here."""
    rows = []
    for publication in tomllib.loads(source.read_text(encoding="utf-8"))["publication"]:
        for claim in publication["claim"]:
            named = [each.partition(": ") for each in claim.get("bars", ())]
            bars = [f"`{bar}`" for result, _, bar in named if result == question]
            if bars:
                rows.append({
                    "publication": publication["name"], "its claim": claim["claim"], "its figure": claim["figure"],
                    "here": ", ".join(bars),
                })  # fmt: skip
    return results.table(rows)


def page(publications: Sequence[Publication]) -> str:
    """docs/results/publications.md."""
    parts = [
        "# Claim by claim",
        "What the publications claim of their strategies, and what was measured here. Figures of ours are read from "
        "committed results, each with its command, date and commit, by `docs/tools/write_publications.py`; none is "
        "typed. A claim is met if every bar that it is read from is met, partly if some are or some are still to be "
        "measured, missed if none is. Clusters and tasks are ours, not the publications': a bar says what was asked "
        "for here. What was measured with an earlier version of a strategy says so, if its result says which version "
        "it is of.",
        table(publications),
    ]
    for each in publications:
        parts.append(f"## {each.name}: {', '.join(f'`{name}`' for name in each.strategies)}\n\n*{each.citation}*")
        parts.append(results.table([_line(claim) for claim in each.claims]))
    parts.append("## How each was measured")
    parts.append("\n".join(_sources(publications)))
    parts.append("## Tests")
    names = dict.fromkeys(test for each in publications for claim in each.claims for test in claim.tests)
    parts.append("\n".join(f"- `{name}`" for name in names))
    return "\n\n".join(parts) + "\n"


def _line(claim: Claim) -> dict[str, str]:
    told = "" if not claim.sources else ", ".join(f"[{name}]({name}.md)" for name in claim.sources)
    return {
        "claim": claim.claim,
        "publication": claim.figure,
        "measured here": claim.ours,
        "by": told,
        "verdict": claim.verdict if claim.verdict in ("met", "not measured") else f"**{claim.verdict}**",
    }


def _sources(publications: Sequence[Publication]) -> list[str]:
    used = dict.fromkeys(name for each in publications for claim in each.claims for name in claim.sources)
    wanted = dict.fromkeys(
        each.partition(":")[0] for publication in publications for claim in publication.claims for each in claim.wanting
    )
    lines = []
    for name in used:
        command, when = command_of(name)
        lines.append(f"- `{name}`: `{command}` ({when})")
    lines += [
        f"- `{name}`: *no result yet; `python benchmarks/bench_{name}.py` is to write it*"
        for name in wanted
        if name not in used
    ]
    return lines


def packaged(publications: Sequence[Publication]) -> str:
    """What `paceline strategies` says, by strategy: the package has this file."""
    made: dict[str, Any] = {}
    for each in publications:
        said = {
            "publication": each.name,
            "standing": standing(each),
            "claims": [
                {"claim": claim.claim, "figure": claim.figure, "ours": claim.ours, "verdict": claim.verdict}
                for claim in each.claims
            ],
            "commands": [" · ".join((name, *command_of(name))) for name in
                         dict.fromkeys(name for claim in each.claims for name in claim.sources)],
        }  # fmt: skip
        made |= dict.fromkeys(each.strategies, said)
    return json.dumps(made, indent=1) + "\n"
