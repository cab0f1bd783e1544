"""How near is a table's cache to a bare array, and how far ahead of the usual ways to share rows is its server?

    python benchmarks/bench_tables.py                 # writes results/tables.md and .json
    python benchmarks/bench_tables.py --quick --json  # tiny sizes, one JSON object, writes nothing

Every repeat asks all contenders in turn, each in processes of its own with one thread. A contender's time is the median
of its rounds; a ratio is that of one repeat, and the median over the repeats counts. Redis is Debian's (apt-get install
redis-server), asked through its Python client.
"""

import importlib.util
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from contenders import bars
from contenders.bars import Bar
from contenders.isolation import ask
from contenders.questions import Gather, Sample

CORPUS = Path(__file__).parents[2] / "shared" / "data" / "lda_ap"
NO_RAY = "Ray is not installed: pip install 'paceline[bench]'"
NO_REDIS = "redis-server or its Python client is missing: apt-get install redis-server, pip install redis"
NO_CORPUS = "../shared/data/lda_ap is missing"


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    table_rows: int
    rows: int
    rounds: int
    passes: int
    topics: int
    repeats: int
    width: int = 20
    workers: int = 4


FULL = Size(table_rows=100_000, rows=10_000, rounds=200, passes=100, topics=50, repeats=5)
QUICK = Size(table_rows=2_000, rows=500, rounds=5, passes=2, topics=5, repeats=1)


def peers() -> dict[str, str]:
    """Rivals that are there, and why others are not."""
    ray = importlib.util.find_spec("ray") is not None
    redis = shutil.which("redis-server") is not None and importlib.util.find_spec("redis") is not None
    return {"rows_ray": "" if ray else NO_RAY, "rows_redis": "" if redis else NO_REDIS}


def measure(size: Size, repeat: int, folder: str | None) -> list[dict[str, Any]]:
    """One repeat: every contender once."""
    gather = Gather(size.table_rows, size.width, size.rows, size.rounds)
    rows: list[dict[str, Any]] = []
    for side in ("rows_plain", "rows_paceline", *(peer for peer, why in peers().items() if not why)):
        found = ask(side, gather).seconds
        rows.append(
            {"repeat": repeat, "side": side, **{f"{what}_us": 1e6 * statistics.median(s) for what, s in found.items()}}
        )
    for side, workers in (("rows_plain", 1), ("rows_paceline", size.workers)):
        rows.append({"repeat": repeat, "side": f"{side}_topics", **_sampled(side, workers, size, folder)})
    return rows


def _sampled(side: str, workers: int, size: Size, folder: str | None) -> dict[str, Any]:
    """What further passes take: starting, compiling and reading the corpus are in both runs."""
    short, long = (ask(side, Sample(folder, size.topics, passes, workers)) for passes in (1, 1 + size.passes))
    cpu_s, server_cpu_s = long.cpu_s - short.cpu_s, long.server_cpu_s - short.server_cpu_s
    tokens = (long.tokens - short.tokens) / (cpu_s + server_cpu_s)
    return {"tokens_per_cpu_s": tokens, "workers_cpu_s": cpu_s, "server_cpu_s": server_cpu_s, "loss": long.loss}


def judge(rows: list[dict[str, Any]], has_corpus: bool) -> list[Bar]:
    """One bar for each thing promised."""
    repeats = [{row["side"]: row for row in rows if row["repeat"] == n} for n in sorted({r["repeat"] for r in rows})]

    def middle(ratio: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(ratio(sides) for sides in repeats)

    def over(what: str) -> float:
        return middle(lambda s: s["rows_paceline"][what] / s["rows_plain"][what])

    missing = peers()
    ahead = [
        Bar(f"fetch_over_{peer.removeprefix('rows_')}",
            None if why else middle(lambda s, peer=peer: s[peer]["fetch_us"] / s["rows_paceline"]["fetch_us"]),
            5.0, True, f"a fetch through {peer.removeprefix('rows_').title()} over one from the server process", why)
        for peer, why in missing.items()
    ]  # fmt: skip
    sampled = middle(
        lambda s: s["rows_paceline_topics"]["tokens_per_cpu_s"] / s["rows_plain_topics"]["tokens_per_cpu_s"]
    )
    return [
        Bar("get_over_numpy", over("get_us"), 3.0, False, "a cached get over a bare fancy index of the same rows"),
        Bar("inc_over_numpy", over("inc_distinct_us"), 4.0, False, "inc of distinct rows over `a[rows] += deltas`"),
        Bar("inc_repeated_over_numpy", over("inc_repeated_us"), 2.0, False, "inc of repeated rows over `np.add.at`"),
        *ahead,
        Bar("topics_tokens", sampled if has_corpus else None, 0.8, True,
            "tokens per processor second of 4 workers and their server over the single process without tables",
            "" if has_corpus else NO_CORPUS),
    ]  # fmt: skip


def notes(size: Size) -> str:
    """What the numbers mean."""
    return f"""
{size.rows:,} of {size.table_rows:,} rows of {size.width} float32 numbers, others in every round, {size.rounds} rounds.
`rows_plain` is NumPy on an array of its own. paceline's `get` reads rows within the bound, `inc` finds an empty op-log
in every round (each ends with a clock, which is not timed), `fetch` is the first get of a clock under asp: a request to
the server's process, its answer through shared memory, and the rows in the worker's cache and in an array of the
caller's own. Ray is an actor asked with row numbers, Redis a key per row and one MGET. `topics` is the topic model of
the task of that name with {size.topics} topics, {size.passes} passes over the AP corpus, {size.workers} workers under
ssp with staleness 2, a clock for each pass over a worker's documents, against the same sampler in one process.
Processor seconds are those of all processes, the server's among them, less those of a run of one pass; compiling is not
counted.
"""


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("tables against bare arrays, a Ray actor and Redis").parse_args(arguments)
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    has_corpus = CORPUS.is_dir() or given.quick
    folder = str(CORPUS) if CORPUS.is_dir() and not given.quick else None
    rows = [row for repeat in range(options.repeats) for row in measure(size, repeat, folder)]
    bars.tell("tables", options, judge(rows, has_corpus), rows, notes(size), ("numpy", "numba"))


if __name__ == "__main__":
    main()
