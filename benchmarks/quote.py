"""Tables of README and docs, taken from results and registry: `python benchmarks/quote.py` writes them anew.

A table stands between `<!-- quote: NAME -->` and `<!-- end -->`. A test fails while a page says something else than the
result it quotes.
"""

import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_shards as shards
import bench_uneven_real as race
import publications
import results
import tune_learning_rates as learning
from contenders.gossip_trials import TUNING_SEED
from paceline import strategies as registry

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/concepts/data-path.md",
    "docs/howto/gpus.md",
    "docs/internals/processes.md",
    "docs/internals/scale.md",
    "docs/reference/strategies.md",
)
BLOCK = re.compile(r"(<!-- quote: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
RULES = {
    "bsp": "everybody waits for the slowest, as with DDP",
    "asp": "nobody waits, gradients grow stale",
    "ssp": "a bounded lead over the slowest",
    "dssp": "a bounded lead that adapts",
    "adaptive_sync": "rounds paced by a performance monitor",
    "dasp": "a state and a load for each node",
    "fastest_k": "the fastest 6 of 8, the rest cancelled",
    "k_async": "whichever 4 of 8 come first",
    "adaptive_k": "the fastest k, k adapts",
    "adaptive_k_load": "the fastest k, k and load adapt",
    "balanced": "work in proportion to speed",
}
SIDES = {
    "baseline": "at every step",
    "adaptive": "by change",
    "fixed": "a fixed period",
    "per_tensor": "one for each tensor",
}
NAMES = {"ddp": "DDP over Gloo", "hivemind": "hivemind"}


def uneven8() -> str:
    """Every strategy on the uneven cluster in the form, with the momentum and at the rate that were best for it."""
    by_variant = learning.timed(learning.read_rows(_result("learning_rates")["rows"]), "digits")
    best: dict[str, learning.Variant] = {}
    for variant in by_variant:  # a strategy's best comes first
        best.setdefault(variant.spec.partition(":")[0], variant)
    uneven = {name: [row for row in by_variant[variant] if row.cluster == "uneven"] for name, variant in best.items()}
    times = {name: statistics.median(row.reached_s or float("inf") for row in rows) for name, rows in uneven.items()}
    rows = [
        {
            "strategy": f"`{best[name].spec}`" + ", no momentum" * (best[name].momentum == 0.0),
            "what it does": RULES[name],
            "seconds to 93 %": f"{seconds:.2f}",
            "against bsp": f"{times['bsp'] / seconds:.2f} x",
            "staleness": f"{statistics.median(row.staleness or 0.0 for row in uneven[name]):.1f}",
        }
        for name, seconds in sorted(times.items(), key=lambda entry: entry[1])
    ]
    return results.table(rows)


def learned(task: str) -> str:
    """Every variant of every strategy at its tuned learning rate."""
    return learning.times_table(learning.timed(learning.read_rows(_result("learning_rates")["rows"]), task))


def strategies() -> str:
    """Rule, source and options of every strategy, as the registry has them."""
    parts = []
    standing = {name: publications.standing(each) for each in publications.read() for name in each.strategies}
    for name in [*registry.names(), *registry.peer_names()]:
        told = registry.describe(registry.machine_class(name))
        parts.append(f"### `{name}`\n\n{told.rule}\n\n*{told.citation}*")
        if name in standing:
            parts.append(f"Its claims here: {standing[name]}; [claim by claim](../results/publications.md).")
        rows = [
            {
                "option": f"`{option.name}`",
                "type": option.type.replace("|", "or"),
                "default": "must be given" if option.default is None else f"`{option.default}`",
                "bounds": option.bounds,
                "meaning": option.description,
            }
            for option in told.options
        ]
        if rows:
            parts.append(results.table(rows))
    return "\n\n".join(parts)


def claims() -> str:
    """How many claims of each publication are met, as docs/results/publications.md has them one by one."""
    return publications.table(publications.read())


def bars(question: str) -> str:
    """Every bar of a benchmark and how it stands."""
    if not _path(question).exists():
        return f"*No result yet: `python benchmarks/bench_{question}.py` writes it.*"
    rows = [
        {
            "bar": f"{verdict['name']} {verdict['bar']}",
            "measured": verdict["value"],
            "": "met" if verdict["passed"] else "missed",
        }
        for verdict in _result(question)["verdicts"]
    ]
    return results.table(rows)


def uneven_real() -> str:
    """Every side of the race on real processes, the soonest first, against DDP."""
    if not _path("uneven_real").exists():
        return "*No result yet: `python benchmarks/bench_uneven_real.py` writes it.*"
    measured = _result("uneven_real")["rows"]
    sides = [row for row in measured if "to_target_s" in row]
    ddp = next(row["to_target_s"] for row in sides if row["side"] == "ddp")
    rows = []
    for row in sorted(sides, key=lambda row: row["to_target_s"] or float("inf")):
        seconds = row["to_target_s"]
        rows.append(
            {
                "side": _entry(row),
                "learning rate": f"{row['lr']:g}",
                "seconds to the target": "missed" if seconds is None else f"{seconds:.1f} ({_spread(row)})",
                "against DDP": "" if None in (seconds, ddp) else f"{ddp / seconds:.2f} x",
                "samples per second": f"{row['samples_per_s']:,.0f}",
            }
        )
    told = {row["side"]: row["to_target_s"] for row in sides}
    gains = [f"`{name}` {ddp / told[name]:.1f} times" for name in ("balanced", "dasp") if ddp and told.get(name)]
    headline = f"**{' and '.join(gains)} sooner than DDP.**\n\n" if gains else ""
    speeds = ", ".join(f"{speed:g}" for speed in race.SPEEDS)
    slept = textwrap.fill(
        f"Slowness is slept: a batch of {race.BATCH} takes {race.FULL.nominal_s:g} s at speed 1, the workers have "
        f"speeds {speeds}, and every side computes a batch and sleeps the rest of its time, so no core is the limit. "
        "Momentum is 0.9 unless shown. Ranges are over the seeds; a median later than the limit is missed.",
        120,
    )
    source = "([The result](benchmarks/results/uneven_real.md) has every run and its settings.)"
    return f"{headline}{results.table(rows)}\n\n{slept}\n{source}{_hasty(measured)}"


def _hasty(rows: list[dict[str, Any]]) -> str:
    """What to know of a race whose tuning gave rates up sooner than the benchmark does by now."""
    cut = given_up_at(rows)
    if cut is None or cut >= 0.9 * race.CUT:
        return ""
    missed = [row["side"] for row in rows if "to_target_s" in row and row["to_target_s"] is None]
    told = ", ".join(f"`{name}`" for name in missed)
    kept = f"; that {told} missed the target is true of the rate it was left with" if missed else ""
    text = (
        f"The tuning of this race gave a rate up at {cut:.2f} times the best so far, on one seed, which can throw good "
        f"rates away{kept}. The benchmark gives up at {race.CUT:g} times by now and is to be run again."
    )
    return "\n\n" + textwrap.fill(text, 120)


def given_up_at(rows: list[dict[str, Any]]) -> float | None:
    """At how many times the best so far of its settings the first race of a tuning was given up; None if none was."""
    best: dict[tuple[str, str, int], float] = {}
    cuts = []
    for row in rows:
        if not row.get("tuning"):
            continue
        key = row["side"], row["settings"], row["seed"]
        if row["reached_s"] is not None:
            best[key] = min(best.get(key, row["reached_s"]), row["reached_s"])
        elif key in best:
            cuts.append(row["seconds"] / best[key])
    return min(cuts, default=None)


def _entry(row: dict[str, Any]) -> str:
    """Who took part, with the settings that differ from the defaults."""
    settings = dict(part.split("=", 1) for part in row["settings"].split(", ") if part)
    spec = settings.pop("strategy", row["side"])
    name = f"`{spec}`" if row["side"] in RULES else NAMES[row["side"]]
    told = [f"{key[:-2]} {value} s" if key.endswith("_s") else f"{key} {value}" for key, value in settings.items()]
    return ", ".join([name, *told])


def _spread(row: dict[str, Any]) -> str:
    return " to ".join("missed" if row[end] is None else f"{row[end]:.1f}" for end in ("from_s", "to_s"))


def staleness() -> str:
    """What each bound costs and buys, and which of the publication's findings are not shown."""
    if not _path("staleness").exists():
        return "*No result yet: `python benchmarks/bench_staleness.py` writes it.*"
    found = _result("staleness")
    rows = [
        {
            "application": row["application"],
            "bound": row["strategy"].removeprefix("ssp:staleness="),
            "waiting": f"{row['waiting']:.0%}",
            "bytes fetched per clock": f"{row['bytes_per_clock']:,.0f}",
            "clocks to the level": "never" if row["clocks_to_level"] is None else f"{row['clocks_to_level']:,.0f}",
            "seconds to the level": "never" if row["seconds_to_level"] is None else f"{row['seconds_to_level']:.1f}",
            "loss at the end": f"{row['last_loss']:.4g}",
        }
        for row in found["rows"]
    ]
    return f"{results.table(rows)}\n\n{_met_and_missed(found)}"


def fastest_k() -> str:
    """What adapting k, and k and load, gains, and how it stands to the publications' claims."""
    if not _path("fastest_k").exists():
        return "*No result yet: `python benchmarks/bench_fastest_k.py` writes it.*"
    found = _result("fastest_k")
    rows = [
        {
            "claim or bar": re.sub(r" \(`\w+`\)", "", verdict["name"]),
            "measured": verdict["value"],
            "": "met" if verdict["passed"] else "**missed**",
        }
        for verdict in found["verdicts"]
    ]
    return results.table(rows)


def scale() -> str:
    """What one coordinator has to do for many workers, and what a push costs."""
    if not _path("shards").exists():
        return "*No result yet: `python benchmarks/bench_shards.py` writes it.*"
    facts = shards.facts_of(_result("shards")["rows"], shards.FULL)
    spent = (
        f"A push costs the server {facts['push_us_1']:.0f} µs beside its tensors; steps and copies of "
        f"{shards.FULL.parameters:,} parameters take {facts['data_ms']:.1f} ms of a core for each push."
    )
    return f"{spent}\n\n{shards.model_table(facts, shards.FULL)}"


def unevenness() -> str:
    """Each cell's best rival, and the time of the others over its time."""
    if not _path("unevenness").exists():
        return "*No result yet: `python benchmarks/bench_unevenness.py` writes it.*"
    ours = {
        "dasp": "dasp",
        "dasp_states": "dasp, states alone",
        "adaptive_sync": "adaptive_sync",
        "balanced": "balanced",
    }
    cells: dict[tuple[str, str], dict[str, str]] = {}
    kinds = {"fresh": "", "free": ", batch free"}
    for row in _result("unevenness")["rows"]:
        if row.get("over_rival") and row["part"] in kinds and row["side"] in ours:
            key = row["part"], row["cell"]
            told = cells.setdefault(key, {"cell": f"{row['cell']}{kinds[row['part']]}", "rival": row["rival"]})
            low, high = row["over_rival_low"], row["over_rival_high"]
            told[ours[row["side"]]] = f"{row['over_rival']:.2f} ({low:.2f}..{high:.2f})"
    return results.table(list(cells.values()))


def unevenness_why() -> str:
    """Why states alone are soon or late: pace and need of samples, over those of the best rival, and the states."""
    if not _path("unevenness").exists():
        return ""
    rows = [
        {
            "states alone": row["cell"],
            "time": f"{row['over_rival']:.2f} of {row['rival']}",
            "samples/s": f"{row['pace_over_rival']:.2f}",
            "samples needed": f"{row['samples_over_rival']:.2f}",
            "staleness": f"{row['staleness']:.1f}",
            "waiting": f"{row['waiting']:.0%}",
            "changes of state": f"{row['changes']:g}",
            "time in states": row["states"],
        }
        for row in _result("unevenness")["rows"]
        if row["part"] == "fresh" and row.get("over_rival") and row["side"] == "dasp_states"
    ]
    return "Over the rival, and what the journals have of the side itself:\n\n" + results.table(rows)


def gossip() -> str:
    """Each contest's sides on fresh seeds, what change gains on fixed periods, time, and which bars are missed."""
    if not _path("gossip").exists():
        return "*No result yet: `python benchmarks/bench_gossip.py` writes it.*"
    found = _result("gossip")
    values = {name: v["value"] for v in found["verdicts"] for name in re.findall(r"\(`(\w+)`\)", v["name"])}
    rows = []
    for contest in [name.removesuffix("_bytes_saved") for name in values if name.endswith("_bytes_saved")]:
        told = {"contest": f"`{contest}`"}
        for side, words in SIDES.items():
            runs = [row for row in found["rows"] if (row["contest"], row["side"]) == (contest, side)]
            fresh = [run for run in runs if run["seed"] != TUNING_SEED]
            told[words] = ", ".join(
                f"{100 * statistics.mean(run[key] for run in fresh):.2f}"
                for key in ("accuracy", "nodes")
                if key in fresh[0]
            )
        told["its bytes"] = f"{1 - float(values[f'{contest}_bytes_saved']):.1%}"
        for side in ("fixed", "per_tensor"):
            names = (f"{contest}_ahead_of_{side}", f"{contest}_loss_below_{side}")
            told[f"gain on {SIDES[side]}"] = " and ".join(f"{float(values[name]):.1f}" for name in names)
        rows.append(told)
    unit = "in units of the one at which the baseline communicates for 56.5 %"
    saved = "".join(
        f"Time saved at bandwidths {unit}{words}: {gains}.\n\n"
        for overlap, words in ((False, ""), (True, ", where sending overlaps computing"))
        if (gains := _gains(found["rows"], overlap))
    )
    said = "Accuracy in percent on fresh seeds: of the average of the models, and then the mean over the nodes' own."
    return f"{said}\n\n{results.table(rows)}\n\n{saved}{_met_and_missed(found)}"


def _gains(rows: Sequence[dict[str, Any]], overlap: bool) -> str:
    times = [row for row in rows if row["side"] == "time" and row.get("overlap", False) == overlap]
    return ", ".join(f"{row['time_saved']:.0%} at {row['bandwidth']:g}" for row in times)


def _met_and_missed(found: dict[str, Any]) -> str:
    met = sum(verdict["passed"] for verdict in found["verdicts"])
    missed = [f"- {v['name']}: {v['value']}, bar {v['bar']}" for v in found["verdicts"] if not v["passed"]]
    return f"{met} of {len(found['verdicts'])} bars are met" + (". Missed:\n\n" if missed else ".") + "\n".join(missed)


QUOTES: dict[str, Callable[[], str]] = {
    "claims": claims,
    "cuda": lambda: bars("cuda"),
    "datapath": lambda: bars("datapath"),
    "fidelity": lambda: bars("fidelity"),
    "gossip": gossip,
    "gossip_speed": lambda: bars("gossip_speed"),
    "learned_digits": lambda: learned("digits"),
    "learned_linreg": lambda: learned("linreg"),
    "overhead": lambda: bars("overhead"),
    "startup": lambda: bars("startup"),
    "simulator": lambda: bars("simulator"),
    "scale": scale,
    "shards": lambda: bars("shards"),
    "staleness": staleness,
    "fastest_k": fastest_k,
    "strategies": strategies,
    "tables": lambda: bars("tables"),
    "uneven8": uneven8,
    "uneven_real": uneven_real,
    "unevenness": unevenness,
    "unevenness_why": unevenness_why,
    "unevenness_bars": lambda: bars("unevenness"),
}


def quoted(text: str) -> str:
    """The page with every table as the results have it."""
    return BLOCK.sub(lambda match: f"{match[1]}{QUOTES[match[2]]()}\n{match[3]}", text)


def _path(question: str) -> Path:
    return results.FOLDER / f"{question}.json"


def _result(question: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_path(question).read_text())
    return data


def main() -> int:
    """Write the tables of every page anew."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(quoted(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
