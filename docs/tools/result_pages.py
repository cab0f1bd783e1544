"""What there is to say about each result: its question in words, its plot, and what to keep in mind when reading it."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

import svg

Rows = list[dict[str, Any]]


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One result. `quote` names a table of benchmarks/quote.py; without one the bars are the table."""

    title: str
    question: str
    plot: Callable[[Rows], list[svg.Bar]]
    plot_title: str
    unit: str
    caveats: Sequence[str]
    quote: str = ""


def medians(
    *keys: str, value: str, told: str = "{:.3g}", among: Callable[[dict[str, Any]], bool] = bool
) -> Callable[[Rows], list[svg.Bar]]:
    """Return a plot of the median, and the range, of a column by the others, in the order of the rows."""

    def plot(rows: Rows) -> list[svg.Bar]:
        groups: dict[str, list[float]] = {}
        for row in rows:
            if isinstance(row.get(value), int | float) and all(key in row for key in keys) and among(row):
                groups.setdefault(", ".join(str(row[key]) for key in keys), []).append(float(row[value]))
        return [
            (name, middle := statistics.median(found), min(found), max(found), told.format(middle))
            for name, found in groups.items()
        ]

    return plot


def race(rows: Rows) -> list[svg.Bar]:
    """Seconds to the target of every side, the soonest first; who missed it is last."""
    sides = [row for row in rows if "to_target_s" in row]
    sides.sort(key=lambda row: row["to_target_s"] or float("inf"))
    return [
        (row["side"], row["to_target_s"], row["from_s"], row["to_s"], _seconds(row["to_target_s"])) for row in sides
    ]


def _seconds(value: float | None) -> str:
    return "missed" if value is None else f"{value:.1f} s"


def tuned(rows: Rows) -> list[svg.Bar]:
    """Virtual seconds on the uneven cluster, each strategy in its best form, the soonest first."""
    fresh = [row for row in rows if row["task"] == "digits" and row["cluster"] == "uneven" and not row["tuning"]]
    groups: dict[tuple[str, float], list[float]] = {}
    for row in fresh:
        groups.setdefault((row["strategy"], row["momentum"]), []).append(row["reached_s"] or float("inf"))
    found: list[svg.Bar] = []
    for (strategy, momentum), seconds in groups.items():
        middle = statistics.median(seconds)
        if middle < float("inf"):
            name = strategy + ", no momentum" * (momentum == 0)
            found.append(
                (name, middle, min(seconds), None if max(seconds) == float("inf") else max(seconds), f"{middle:.2f} s")
            )
    return sorted(found, key=lambda row: row[1] or 0.0)


def levels(rows: Rows) -> list[svg.Bar]:
    """Seconds to the level by application and bound."""
    return [
        (
            f"{row['application']}, {row['strategy'].removeprefix('ssp:staleness=')}",
            row["seconds_to_level"],
            None,
            None,
            "never" if row["seconds_to_level"] is None else f"{row['seconds_to_level']:.1f} s",
        )
        for row in rows
    ]


def bounds(rows: Rows) -> list[svg.Bar]:
    """Seconds to the level by task and strategy, under stragglers by turns."""
    times = [row for row in rows if row.get("cluster") == "stragglers"]
    return [
        (
            f"{row['task']}, {_line(row['strategy'])}",
            row["seconds_to_level"],
            None,
            None,
            _time(row["seconds_to_level"]),
        )
        for row in times
    ]


def _line(strategy: str) -> str:
    return strategy.removeprefix("ssp:staleness=").replace(",cache=true", " with cache")


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def judged_at_published_rate(row: dict[str, Any]) -> bool:
    """Whether a row is of fresh seeds, at the learning rate of the publications."""
    return row.get("part") in ("growth", "load")


def saved(rows: Rows) -> list[svg.Bar]:
    """Share of the time that is saved: by bandwidth in virtual time, and on real processes."""
    found: list[tuple[str, float]] = [
        (f"{row['bandwidth']:g}{', overlapping' if row.get('overlap') else ''}", row["time_saved"])
        for row in rows
        if row.get("side") == "time"
    ]
    real = [row for row in rows if row.get("contest") == "real"]
    for line, overlap in dict.fromkeys((row["line"], row["overlap"]) for row in real):
        of = {
            (row["side"], row["seed"]): row["seconds"]
            for row in real
            if (row["line"], row["overlap"]) == (line, overlap)
        }
        ratios = [of["adaptive", seed] / seconds for (side, seed), seconds in of.items() if side == "baseline"]
        name = f"1, processes, {line} line{', overlapping' if overlap else ''}"
        found.append((name, 1 - statistics.geometric_mean(ratios)))
    return [(name, 100 * gain, None, None, f"{gain:.0%}") for name, gain in found]


def against_rival(rows: Rows) -> list[svg.Bar]:
    """Time over that of the best rival, by cell, with its interval."""
    sides = {"dasp": "dasp", "dasp_states": "dasp, states alone"}
    return [
        (
            f"{row['cell']}, {sides[row['side']]}",
            row["over_rival"],
            row["over_rival_low"],
            row["over_rival_high"],
            f"{row['over_rival']:.2f} of {row['rival']}",
        )
        for row in rows
        if row.get("part") == "fresh" and row.get("over_rival") and row["side"] in sides and row["cell"] != "equal"
    ]


def ratios(rows: Rows) -> list[svg.Bar]:
    """Samples per second over the rival's, by case."""
    made = [{**row, "ratio": row["paceline_per_s"] / row["rival_per_s"]} for row in rows if row.get("rival_per_s")]
    return medians("case", "rival", value="ratio", told="{:.2f}")(made)


def speeds(rows: Rows) -> list[svg.Bar]:
    """Pushes per second by the number of workers, beside SimPy's."""
    made = []
    for row in rows:
        made += [
            {"side": f"{side}, {row['workers']:,} workers", "per_s": 1e6 / row[key]}
            for side, key in (("paceline", "paceline_us"), ("SimPy", "simpy_us"))
            if row.get(key)
        ]
    return medians("side", value="per_s", told="{:,.0f}")(made)


def predicted(rows: Rows) -> list[svg.Bar]:
    """What stragglers leave of the undisturbed updates per second: as logged, with a line to what was predicted."""
    return [
        (
            row["log"].rpartition("/")[2],
            row["logged share"],
            min(row["logged share"], row["predicted share"]),
            max(row["logged share"], row["predicted share"]),
            f"{row['logged share']:.2f}, predicted {row['predicted share']:.2f}",
        )
        for row in rows
        if row["part"] == "straggler"
    ]


def found_after(rows: Rows) -> list[svg.Bar]:
    """Rounds until each planted divergence was named."""
    planted = [row for row in rows if row.get("planted")]
    return [
        (str(row["planted"]), row["after"], None, None, "never" if row["after"] is None else f"{row['after']:g}")
        for row in planted
    ]


def deaths(*columns: str, by: str) -> Callable[[Rows], list[svg.Bar]]:
    """Return a plot of some columns of every row."""

    def plot(rows: Rows) -> list[svg.Bar]:
        return [
            (f"{row[by]}: {column.removesuffix(' s')}", row[column], None, None, f"{row[column]:.2f} s")
            for row in rows
            for column in columns
            if row.get(column) is not None
        ]

    return plot


ONE_MACHINE = "One machine, whose cores are shared with others; runs of another day differ by some percent."
SLEPT = "Slowness is slept, not real: a batch is computed and the rest of its modelled time is slept."

PAGES: dict[str, Page] = {
    "uneven_real": Page(
        title="Time to a target on uneven processes",
        question="How soon does every strategy, DDP and hivemind reach a loss when one of four workers is four times slower?",
        plot=race,
        plot_title="Seconds to the target, median and range",
        unit="seconds; less is better",
        quote="uneven_real",
        caveats=[
            SLEPT,
            "A small net on digits. Larger models spend more of their time on transfers.",
            "Three seeds: sides that lie close to each other are not ranked by this.",
            ONE_MACHINE,
        ],
    ),
    "unevenness": Page(
        title="Unequal workers, many clusters",
        question="On which clusters of unequal workers is which strategy at the target first, and what of it is the batch's alone?",
        plot=against_rival,
        plot_title="Time to the target over that of the best of bsp, asp, ssp and dssp, with its 90 % interval",
        unit="1 is as soon as the rival; less is better",
        quote="unevenness unevenness_bars unevenness_why",
        caveats=[
            "Simulated: real gradients, virtual seconds. A small net on a part of MNIST, at constant rates.",
            "DASP's publication claims 16.9 to 82.1 % less time than mainstream strategies, on clusters of its own; the bars ask for the lower end against the best rival of each cell.",
            "A run that misses the target counts with the time that it had.",
            "Most of a lead at batch 64 is the batch's: where every side may choose it, asynchronous sides take 16, and `dasp` "
            "is only a little ahead of `asp` (part `free` of the rows, as far as it is measured).",
            "Growth to 64 workers and partitions are of workers that only cost time.",
            "Runs are kept and used again while the sources that they depend on are the same; the result says at which commits they were made.",
        ],
    ),
    "rivals": Page(
        title="Three hosts, one with a co-tenant",
        question="The same race on three hosts of a lab, where a real co-tenant makes one slow, against DDP, Ray Train, hivemind and torchft.",
        plot=race,
        plot_title="Seconds to the target, median and range",
        unit="seconds; less is better",
        caveats=[
            "The hosts are network namespaces of one machine with processor quotas: cables and shares are real, the machines are not.",
            "A rival that fails or is not measured is said so in the result, and is not counted as slow.",
            "hivemind raced hours after the others, on the same commit, while the machine was faster: the last two `speeds` in the rows are of that time. That is in its favour.",
            "DDP with batches split by hand is the strongest rival where speeds are known and stay the same.",
            ONE_MACHINE,
        ],
    ),
    "learning_rates": Page(
        title="Learning rates",
        question="Which learning rate and momentum suits each strategy on two small tasks, and how long does each take then?",
        plot=tuned,
        plot_title="digits, four workers at full speed, two at half, two at a quarter",
        unit="virtual seconds to the target; less is better",
        quote="uneven8 learned_digits learned_linreg",
        caveats=[
            "Simulated: real gradients, virtual seconds.",
            "Options that are shown were set by hand, with no search; five seeds do not rank close neighbours.",
            "The first two tables are of the task digits, the third is of linreg; [Learning rates](../concepts/learning-rates.md) describes both and says what follows.",
        ],
    ),
    "gossip": Page(
        title="Gossip by change",
        question="How many bytes does gossip save that sends what has changed enough, and what does it cost in accuracy?",
        plot=saved,
        plot_title="Time saved against gossip at every step, by bandwidth",
        unit="percent; bandwidths in units of the one that the result names",
        quote="gossip",
        caveats=[
            "Simulated nodes, but for the parts on real processes.",
            "Three quarters of the bytes are saved by sending int8, and the rest by sending when something has changed.",
            "Parts are measured at their own times: the table below names date and commit of each.",
        ],
    ),
    "mixed_gpus": Page(
        title="Mixed GPU generations",
        question="What does each strategy make of clusters of K80, P100 and V100, each as fast as it was measured?",
        plot=medians("job", "side", value="reached_s", told="{:.2f} s"),
        plot_title="Seconds to the target by job type, median and range of fresh seeds",
        unit="virtual seconds; less is better",
        caveats=[
            "Speeds are measured (Gavel), all else is simulated: the task is a small net on digits, the jitter is assumed and there is no network.",
            "A row is kept while the strategy behaves as it did: the result says at which commits its rows were measured.",
            "The interval is that of the seeds' chance alone; a strategy's rank on another task may be another.",
        ],
    ),
    "syncswitch": Page(
        title="Somebody else's stragglers",
        question="Does the simulator, fitted to public logs of undisturbed training, predict those with injected stragglers?",
        plot=predicted,
        plot_title="Updates per second with stragglers, as a share of those without; the line ends at the prediction",
        unit="share of the undisturbed rate of the same system",
        caveats=[
            "One group of authors, one program, one cloud: ten logs with stragglers, all of them of delayed messages.",
            "The number of workers of the logs with stragglers is inferred: the files do not say it.",
            "Whole rates are compared, not the course of a run; pauses for evaluations are in them.",
        ],
    ),
    "fastest_k": Page(
        title="Adapting k, and k and load",
        question="Do adaptive k, and adaptive k and load, keep what their publications claim on the publications' own "
        "regression, and what becomes of lastingly slow workers?",
        plot=medians("side", "communication", value="seconds", told="{:,.0f} s", among=judged_at_published_rate),
        plot_title="Seconds to the target, by side and mean communication",
        unit="virtual seconds; less is better; median and range of the seeds",
        quote="fastest_k",
        caveats=[
            "Simulated: virtual time, response times exponential as in the publications.",
            "The learning rate is the publications', three quarters of the largest that is stable, unless a row says more.",
            "The rule of adaptive k and load is a reconstruction: the publication's abstract is public, its pseudo-code is not.",
        ],
    ),
    "staleness": Page(
        title="Bounds of staleness on tables",
        question="What does each bound cost and buy on a topic model, a matrix factorization and Lasso?",
        plot=levels,
        plot_title="Seconds to the level by application and bound",
        unit="virtual seconds; less is better",
        quote="staleness",
        caveats=[
            "Simulated: eight equal workers, stragglers in turn, a line that is as slow as the computing.",
            "`asp` beats the best bound in some rows: those bars are missed.",
        ],
    ),
    "ssp": Page(
        title="Bounds of staleness, on tables and on models",
        question="What does a bound buy and cost on four tasks on tables and on a model with a cache, and does theory hold?",
        plot=bounds,
        plot_title="Seconds to the level by task and bound, under stragglers by turns",
        unit="virtual seconds; less is better",
        caveats=[
            "Simulated: eight workers on a line that is as slow as the computing.",
            "A lasting straggler sets the pace under every bound: see the rows of the cluster `lasting`.",
        ],
    ),
    "lab_runs": Page(
        title="Runs across hosts",
        question="Does a run on three hosts with real cables learn what one machine learns, in the time that the simulator predicts?",
        plot=medians("run", "network", value="real/simulated", told="{:.3f}"),
        plot_title="Seconds per version, measured over simulated",
        unit="1 is what the simulator said",
        caveats=["Hosts of a lab: network namespaces of one machine, with shaped cables.", SLEPT, ONE_MACHINE],
    ),
    "ray_runs": Page(
        title="Runs on a Ray cluster",
        question="Does a run that Ray has placed on several hosts learn what one machine learns?",
        plot=medians("run", value="seconds with start and end", told="{:.0f} s"),
        plot_title="Seconds with start and end",
        unit="seconds",
        caveats=[
            "The hosts are network namespaces of one machine; so start-up, which Ray dominates, is that of one machine, too.",
            ONE_MACHINE,
        ],
    ),
    "chaos": Page(
        title="Chaos in the simulator",
        question="Do random faults, the server's crashes among them, ever break what a journal must show?",
        plot=medians("strategy", value="lines judged", told="{:,.0f}"),
        plot_title="Lines of journals judged, by strategy",
        unit="lines",
        caveats=[
            "The journal is judged by a checker that shares no code with the package; what a journal cannot show is not judged.",
            "Faults of the simulator, not of real processes: those have [a page of their own](lab_chaos.md).",
        ],
    ),
    "lab_chaos": Page(
        title="Kills and cuts on three hosts",
        question="How long do the others wait when a worker or the server of a run on three hosts is killed again and again?",
        plot=deaths(
            "next version: median s",
            "others' pushes: median s",
            "after a server: median s",
            "longest without a version: s",
            by="run",
        ),
        plot_title="Seconds after a death",
        unit="seconds; less is better",
        caveats=["Ten minutes for each strategy, on a lab of one machine.", ONE_MACHINE],
    ),
    "shard_chaos": Page(
        title="Kills with several servers",
        question="The same with a model in several server processes, by join and on Ray.",
        plot=deaths(
            "next version: median s",
            "after a server: median s",
            "after a shard: median s",
            "longest without a version: s",
            by="run",
        ),
        plot_title="Seconds after a death",
        unit="seconds; less is better",
        caveats=[
            "After the death of a shard all go back to the last checkpoint; how often one is written decides how much is lost.",
            ONE_MACHINE,
        ],
    ),
    "hostile": Page(
        title="Hostile inputs",
        question="What do ten thousand malformed messages do to a run, most of them sent with a valid key?",
        plot=medians("kind", value="it hung up", told="{:.0f}"),
        plot_title="Connections that the server ended, by kind of message",
        unit="inputs",
        caveats=[
            "Mutations of messages that exist; a fuzzer finds what it tries.",
            "Who has the token is trusted with much: see `SECURITY.md`.",
        ],
    ),
    "strangers": Page(
        title="Strangers at the port",
        question="What do strangers who connect, dawdle and flood do to a run?",
        plot=medians("attack", "target", value="steps_per_s", told="{:.0f}"),
        plot_title="Steps per second of an honest worker",
        unit="steps per second; more is better",
        caveats=["A flood from many addresses at once was not tried.", ONE_MACHINE],
    ),
    "overhead": Page(
        title="Overhead beside PyTorch and DDP",
        question="What does one worker cost beside a plain loop, and two under bsp beside DDP?",
        plot=ratios,
        plot_title="Samples per second, paceline's over the rival's",
        unit="1 is as fast; more is better",
        quote="overhead",
        caveats=[
            "Processors only, DDP over Gloo. On GPUs with NCCL [DDP is the better choice](../howto/choose.md#equal-machines) for equal machines.",
            "The row `fixed_cost` is a model with next to no arithmetic: it shows the cost of a push, which small models feel.",
            ONE_MACHINE,
        ],
    ),
    "datapath": Page(
        title="The data path",
        question="How fast does a gradient get to the server and the next version back, compared with its own limit and with others?",
        plot=medians("side", value="round_ms", told="{:.1f} ms"),
        plot_title="Push, apply and pull of one round",
        unit="milliseconds; less is better",
        quote="datapath",
        caveats=[
            "One machine, shared memory; `paceline_tcp` and `bare_zeromq` go over TCP loopback.",
            "The bar of TCP is missed: the bare round trip that it is compared with applies nothing.",
            ONE_MACHINE,
        ],
    ),
    "hosts": Page(
        title="The data path between hosts",
        question="What does a round over TCP between two hosts take, encrypted and not, beside a bare round trip of the same bytes?",
        plot=medians(
            "side", "network", "curve", value="round_ms", told="{:,.0f} ms", among=lambda row: "idle" not in row
        ),
        plot_title="One round (`curve`: whether it is encrypted)",
        unit="milliseconds; less is better",
        caveats=[
            "Network namespaces of one machine: each host has half of its processors, or shares them with the other, as rows say.",
            ONE_MACHINE,
        ],
    ),
    "cuda": Page(
        title="The data path on a GPU",
        question="How close does a round with a model on a GPU come to one copy down, one step and one copy up?",
        plot=medians("side", "threads", value="round_ms", told="{:.0f} ms"),
        plot_title="One round, by side and host threads",
        unit="milliseconds; less is better",
        quote="cuda",
        caveats=[
            "One worker on one device. Several devices of one machine were not measured.",
            "The optimizer steps in main memory, which is what the limit does, too.",
        ],
    ),
    "shards": Page(
        title="Several servers",
        question="What does a second server process gain, and what does one coordinator have to do for many workers?",
        plot=medians(
            "where",
            "servers",
            value="round_ms",
            told="{:,.1f} ms",
            among=lambda row: row["where"] in ("one host", "two hosts"),
        ),
        plot_title="One round of 100 MB by number of servers",
        unit="milliseconds; less is better",
        quote="shards",
        caveats=[
            "Both hosts of `two hosts` are one machine, whose processor they share: that bar is missed.",
            "[How far one coordinator goes](../internals/scale.md) computes from these numbers what was not measured.",
        ],
    ),
    "startup": Page(
        title="Start-up",
        question="How long does it take from the command to the first batch?",
        plot=medians("start", value="first_batch_s", told="{:.1f} s"),
        plot_title="Seconds to the first batch of four workers",
        unit="seconds; less is better",
        quote="startup",
        caveats=["A script that imports little; its own imports and its data come on top.", ONE_MACHINE],
    ),
    "fidelity": Page(
        title="Simulator and real processes",
        question="Do real processes that emulate a scenario behave as the simulator says?",
        plot=medians("strategy", "workers", "nominal ms", value="s_per_version: local/sim", told="{:.3f}"),
        plot_title="Seconds per version, real over simulated (strategy, workers, ms)",
        unit="1 is what the simulator said",
        caveats=[
            "The emulation sleeps modelled times, so this checks the engines, not the model of a cluster.",
            "Nominal times are so long that two cores keep up; shorter ones overrun.",
        ],
    ),
    "simulator": Page(
        title="Speed of the simulator",
        question="How many pushes a second does the simulator make with light workers, beside the same model in SimPy?",
        plot=speeds,
        plot_title="Pushes per second",
        unit="pushes per second; more is better",
        quote="simulator",
        caveats=["Workers that only cost time. With real gradients the gradients are the limit.", ONE_MACHINE],
    ),
    "tables": Page(
        title="Speed of tables",
        question="What do reads and increments of table rows cost, beside bare arrays, Ray and Redis?",
        plot=medians("side", value="fetch_us", told="{:,.0f} µs"),
        plot_title="Fetching rows from another process",
        unit="microseconds; less is better",
        quote="tables",
        caveats=["One host. The bar against Ray is missed.", ONE_MACHINE],
    ),
    "gossip_speed": Page(
        title="Cost of a node",
        question="What does a node without a server cost beside plain PyTorch, and an exchange beside a copy in place?",
        plot=medians("what", value="node_per_s", told="{:.0f}"),
        plot_title="Steps per second of a node whose exchanges are off",
        unit="steps per second; more is better",
        quote="gossip_speed",
        caveats=[ONE_MACHINE],
    ),
    "guard": Page(
        title="The convergence guard",
        question="Does the guard name runs that diverge, and leave healthy ones alone?",
        plot=found_after,
        plot_title="Rounds from going wrong to being named, planted divergences",
        unit="rounds; less is better",
        caveats=[
            "Planted divergences; [the notes](../internals/guard.md) say which kinds it cannot see.",
            "It sees the loss alone, if the script reports one.",
        ],
    ),
    "scripts": Page(
        title="Scripts as people write them",
        question="How many lines does each kind of loop take to port, and does it then train as before?",
        plot=medians("loop", value="lines changed", told="{:.0f}"),
        plot_title="Changed lines, removed and added",
        unit="lines; less is better",
        caveats=[
            "Loops written for this, after the fashion of public ones; your script may do what none of them does."
        ],
    ),
    "suite": Page(
        title="The test suite",
        question="Do all tests pass under every supported Python?",
        plot=medians("python", value="seconds", told="{:.0f} s"),
        plot_title="Seconds of the suite by Python",
        unit="seconds",
        caveats=[
            "Tests that need a GPU are skipped there; `tests/cuda` is run on a machine that has one.",
            ONE_MACHINE,
        ],
    ),
    "pages": Page(
        title="The page of a long run",
        question="Does `paceline report` make a page of a million events soon, and does a browser open it at once?",
        plot=medians("strategy", value="report_s", told="{:.1f} s"),
        plot_title="Seconds of `paceline report` by strategy",
        unit="seconds; less is better",
        caveats=[
            "Journals of the simulator, whose models are numbers: evaluations and losses, of which curves are thinned, are missing.",
            "Of a thousand workers 64 have lanes, and their first spans are drawn; sums are of all.",
            ONE_MACHINE,
        ],
    ),
    "live_view": Page(
        title="Cost of the live view",
        question="How much processor time does the live view take of a run's?",
        plot=medians("case", "view", value="draws_s", told="{:.2f} s"),
        plot_title="Processor seconds of the launcher (case, with the view or without)",
        unit="seconds; less is better",
        caveats=[
            "A terminal that takes everything at once: what a terminal program spends on drawing is its own.",
            "Short runs: what the view costs at the start, such as loading it, weighs less in longer ones.",
            ONE_MACHINE,
        ],
    ),
    "walkthrough": Page(
        title="The first tutorial, followed",
        question="How long does it take from a fresh clone with empty caches to a comparison on one's own scenario?",
        plot=medians("command", value="seconds", told="{:.0f} s"),
        plot_title="Seconds of each command",
        unit="seconds",
        caveats=[
            "Commands are run one after the other; reading and typing are not counted.",
            "Packages, torch for processors among them, came from a mirror on the same machine: over a slow line, or with torch's CUDA libraries, installing takes longer.",
        ],
    ),
}
