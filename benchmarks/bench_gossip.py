"""What does exchanging by change save against exchanging at every step, and against fixed periods of equal traffic?

    python benchmarks/bench_gossip.py                        # all parts; writes results/gossip.md, .json and .png
    python benchmarks/bench_gossip.py --part mnist8          # one part; the page keeps the others as they were
    python benchmarks/bench_gossip.py --part cifar8 --minutes 9   # stop after so long; the same command goes on
    python benchmarks/bench_gossip.py --quick --json         # tiny sizes, one JSON object, writes nothing

Virtual nodes without a server train under a learning rate that decays. In each contest (contenders/gossip_trials.py) a
baseline exchanges at every step; a fixed period and a fixed period for each tensor send so much of its bytes; and the
adaptive side is what somebody gets who types its name. All sides tune rate and momentum over one grid on one seed and
then meet on fresh seeds, paired; partners are random on all sides. Further parts: partners that are exponential on all
sides, the time at each bandwidth with overlap and without, a slow node and nodes that die and come, and the time on
real processes (contenders/gossip_real.py).
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import publications
import results
from contenders import bars, gossip_disturbed, gossip_real, gossip_time, result_parts
from contenders.bars import Asked, Bar
from contenders.gossip_runs import FOLDERS, PARTS, Job, Size, folder
from contenders.gossip_time import BANDWIDTHS, COMMUNICATION
from contenders.gossip_trials import (
    FIRST_FRESH,
    MOST_BYTES,
    TUNING_SEED,
    Contest,
    Outcome,
    hold,
    judge,
    meet,
    of_partners,
    with_option,
)
from contenders.kept_runs import KeptRuns, OutOfTimeError
from contenders.result_parts import Part

RATES = (1.0, 2.0)  # of whole steps: lr = rate * (1 - momentum)
CIFAR_RATES = (0.3, 0.6)
# The shortest period whose bytes are 8 % of the baseline's at most, by what tensors are sent as.
PERIODS = {"float32": 13, "bfloat16": 7, "int8": 4}
POWERS = (2,)  # how much longer large tensors wait; an MLP has one large tensor, and more ways would be the same
CIFAR_POWERS = (1, 2)
FLOAT32_THRESHOLDS = (1.7, 2.2)
ALPHA = 0.5  # of everybody's tie to the centre: rare exchanges bear a strong one, and so does the baseline
DISTURBED_SEEDS = 3
REAL_SEEDS = 2

MNIST = Size(samples=12_000, epochs=4)
MNIST16 = Size(samples=12_000, epochs=4, workers=16)
CIFAR = Size(samples=3_000, epochs=16, test=4_000, task="cifar")
CIFAR16 = Size(samples=3_000, epochs=16, test=4_000, task="cifar", workers=16)
TINY = Size(samples=400, epochs=1, workers=4, hidden=8, test=500)

Measured = tuple[list[dict[str, Any]], list[Bar]]


def against(kind: str, wire: str, powers: Sequence[float] = POWERS) -> dict[str, list[str]]:
    """The sides of a contest, each with the settings that are tried of it; controls send what the defaults send."""
    tie = f",alpha={ALPHA}" if kind == "elastic" else ""
    control = f"{kind}:period={PERIODS[wire]},wire={wire}"
    return {
        "baseline": [f"{kind}:period=1{tie}"],
        "fixed": [f"{control}{tie}"],
        "per_tensor": [f"{control},scope=tensor,share_power={power}{tie}" for power in powers],
        "adaptive": [with_option(f"adaptive_{kind}", tie[1:]) if tie else f"adaptive_{kind}"],
    }


def by_change_alone() -> dict[str, list[str]]:
    """Sides that all send float32, so that change alone has to save the bytes."""
    triggers = [f"adaptive_gossip:wire=float32,threshold={threshold}" for threshold in FLOAT32_THRESHOLDS]
    return {**against("gossip", "float32"), "adaptive": triggers}


CONTESTS = {
    contest.name: contest
    for contest in (
        Contest("mnist8", "cosine", MNIST, against("gossip", "int8"), RATES),
        Contest("cifar8", "cosine", CIFAR, against("gossip", "int8", CIFAR_POWERS), CIFAR_RATES),
        Contest("mnist16", "cosine", MNIST16, against("gossip", "int8"), RATES),
        Contest("cifar16", "cosine", CIFAR16, against("gossip", "int8", CIFAR_POWERS), CIFAR_RATES),
        Contest("float32", "cosine", MNIST, by_change_alone(), RATES, limited=("fixed", "per_tensor", "adaptive")),
        Contest("step8", "step", MNIST, against("gossip", "int8"), RATES),
        Contest("elastic8", "cosine", MNIST, against("elastic", "bfloat16"), RATES),
    )
}
QUICK = {
    contest.name: contest
    for contest in (
        Contest("mnist8", "cosine", TINY, against("gossip", "int8"), (0.4,), (0.0,), 1),
        Contest("elastic8", "cosine", TINY, against("elastic", "bfloat16"), (0.4,), (0.0,), 1),
    )
}
OTHERS = ("partners", "time", "disturbed", "real", "shaped")  # parts that take what contests have chosen


class Measuring:
    """One call of this benchmark: what is measured, and what was found before."""

    def __init__(self, options: Asked, kept: KeptRuns, before: Mapping[str, Part]) -> None:
        """`before`: the parts that are on the page."""
        self.options, self.kept, self.before = options, kept, before
        self.contests = QUICK if options.quick else CONTESTS
        self.outcomes: dict[str, Outcome] = {}

    def part(self, name: str) -> Measured:
        """Measure one."""
        if name in self.contests:
            outcome = self.outcome(name)
            return outcome.rows, judge(self.contests[name], outcome.runs)
        others: dict[str, Callable[[], Measured]] = {
            "partners": self._partners, "time": self._time, "disturbed": self._disturbed,
            "real": lambda: self._real("emulated"), "shaped": lambda: self._real("shaped"),
        }  # fmt: skip
        return others[name]()

    def outcome(self, name: str) -> Outcome:
        """Hold a contest, or take its runs from those that are kept."""
        if name not in self.outcomes:
            self.outcomes[name] = hold(self.contests[name], self.options.repeats, self.kept)
        return self.outcomes[name]

    def _partners(self) -> Measured:
        """Exponential partners on all sides, at the rates that were chosen with random ones: reported, not judged."""
        rows = []
        for name in ("mnist8", "cifar8"):
            if name not in self.contests:
                continue
            contest = of_partners(self.contests[name], "exponential")
            chosen = {
                side: msgspec.structs.replace(job, strategy=with_option(job.strategy, f"peers={contest.peers}"))
                for side, job in self.outcome(name).chosen.items()
            }
            rows += meet(contest, chosen, self.options.repeats, self.kept).rows
        return rows, []

    def _chosen(self) -> Mapping[str, Job]:
        """What contest mnist8 has chosen; if that is on the page already, from there."""
        if "mnist8" in self.before and "mnist8" not in self.outcomes:
            return chosen_of(self.contests["mnist8"], self.before["mnist8"])
        return self.outcome("mnist8").chosen

    def _time(self) -> Measured:
        scales = (1.0,) if self.options.quick else BANDWIDTHS
        return gossip_time.measure(self._chosen(), scales, self.options.repeats, self.kept)

    def _disturbed(self) -> Measured:
        job = self._chosen()["adaptive"]
        repeats = min(self.options.repeats, DISTURBED_SEEDS)
        verdicts, rows = gossip_disturbed.disturb(job, repeats, gossip_time.usual_mbps(job.size), self.kept)
        return rows, verdicts

    def _real(self, line: str) -> Measured:
        repeats = min(self.options.repeats, REAL_SEEDS)
        return gossip_real.measure(self._chosen(), (line,), repeats, quick=self.options.quick)


def chosen_of(contest: Contest, part: Part) -> dict[str, Job]:
    """What the sides of a contest went on with that is on the page."""
    chosen = {}
    for row in part.rows:
        if row["seed"] == FIRST_FRESH:
            job = Job(row["strategy"], row["lr"], contest.schedule, TUNING_SEED, contest.size, row["momentum"])
            chosen[row["side"]] = job
    return chosen


def plot(parts: Mapping[str, Part], path: Path) -> None:
    """The gain by bandwidth, and when exchanges happen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6))
    for overlap, words in ((False, "sending holds computing up"), (True, "sending overlaps computing")):
        rows = [row for row in (parts["time"].rows if "time" in parts else ()) if row["overlap"] == overlap]
        axes[0].plot([row["bandwidth"] for row in rows], [row["time_saved"] for row in rows], marker="o", label=words)
    axes[0].set(xscale="log", title="time saved by bandwidth", xlabel="bandwidth (1: communication is 56.5 %)")
    axes[0].legend()
    for name in CONTESTS:
        rows = [row for row in (parts[name].rows if name in parts else ()) if row["side"] == "adaptive"]
        if rows:
            counts = [float(each) for each in rows[0]["kB_by_tenth"].split()]
            shares = [count / max(1.0, sum(counts)) for count in counts]
            axes[1].plot(range(1, len(counts) + 1), shares, marker=".", label=name)
    axes[1].set(title="bytes of the adaptive side over one run", xlabel="tenth", ylabel="share of all")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("exchanges by change against a fixed period")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; their seconds are virtual")
    parser.add_argument("--part", action="append", choices=[*CONTESTS, *OTHERS], help="this part alone; repeatable")
    parser.add_argument("--minutes", type=float, help="begin no run after so long; the same command then goes on")
    parser.add_argument(
        "--retell", action="store_true", help="measure nothing: explain the last result as it would now"
    )
    given = parser.parse_args(arguments)
    where = given.out or results.FOLDER
    if given.retell:
        print(f"written to {results.retell('gossip', notes(result_parts.load('gossip', where)), where)}")
        return
    options = bars.asked(given, 5)
    names = given.part or [name for name in (*CONTESTS, *OTHERS) if not options.quick or name in (*QUICK, *OTHERS[:3])]
    for task in sorted({(QUICK if options.quick else CONTESTS)[name].size.task for name in names if name in CONTESTS}):
        if not folder(task).is_dir():
            raise SystemExit(f"{task} is missing: {folder(task)}; set the variable {FOLDERS[task][0]} to its folder")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    verdicts: list[Bar] = []
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        before = {} if options.quick else result_parts.load("gossip", where)
        measuring = Measuring(options, KeptRuns("gossip", options.of, pool, given.minutes), before)
        for name in names:
            began = time.monotonic()
            try:
                new_rows, new_verdicts = measuring.part(name)
            except OutOfTimeError:
                raise SystemExit(
                    f"{given.minutes:g} minutes are over in part {name}: the same command goes on"
                ) from None
            rows, verdicts = rows + new_rows, verdicts + new_verdicts
            if not options.quick and options.of is not None:
                part = Part.of(new_verdicts, new_rows, options.of, (time.monotonic() - began) / 60)
                write(name, part, options, where)
    bars.tell("gossip", msgspec.structs.replace(options, of=None), verdicts, rows, "")


def write(name: str, part: Part, options: Asked, where: Path) -> None:
    """Put one part into the result."""
    assert options.of is not None
    parts = {**result_parts.load("gossip", where), name: part}
    parts = {known: parts[known] for known in (*CONTESTS, *OTHERS) if known in parts}
    plot(parts, where / "gossip.png")
    command = f"python benchmarks/bench_gossip.py --repeats {options.repeats}"
    result_parts.write("gossip", command, parts, notes, options.of, where, ("matplotlib",))


def notes(parts: Mapping[str, Part]) -> str:
    """What the numbers mean."""
    return f"""
A part is measured by `--part NAME`, which replaces that part of this page:

{result_parts.table(parts)}

The command above is that of the part measured last; how many seeds a part has is in its rows, and an interval of one
seed is that seed. A part that is not there has not been measured in this form. Parts that are no contests run with
what the contest on this page has chosen (`mnist8`). An earlier form, of 2026-11-16 (35 of
41 bars met, `git show d7a1d94:benchmarks/results/gossip.md`), had exponential partners against a baseline with random
ones, tuned triggers in place of the defaults, float32 on all sides, no momentum on MNIST, and nothing on the nodes'
own models.

Virtual nodes; `accuracy` and `loss` on the test images are those of the average of all nodes' models, `nodes` and
`worst_node` the mean and the least accuracy of the nodes' own models at the end. `mnist8`, `mnist16`: 8 and 16 nodes,
an MLP with {MNIST.hidden} hidden units on {MNIST.samples:,} images of MNIST, {MNIST.epochs:g} epochs, batches of
{MNIST.batch}, under a rate that falls by a cosine; `step8`: to a tenth in the middle. `cifar8`, `cifar16`: a small
convolutional net on {CIFAR.samples:,} images of CIFAR-10, {CIFAR.epochs:g} epochs, under the cosine. `elastic8`: as
`mnist8`, with `adaptive_elastic` against `elastic`, whose bytes are counted both ways; all with alpha={ALPHA}.

`adaptive` is what somebody gets who types the strategy's name, with no option (but that alpha); the baseline sends
float32, as published. `fixed` and `per_tensor` may send {MOST_BYTES:.0%} of the baseline's bytes and send what the
defaults send (int8; bfloat16 with a centre), at the shortest period with so few: {PERIODS["int8"]} steps of int8,
{PERIODS["bfloat16"]} of bfloat16, {PERIODS["float32"]} of float32; `per_tensor` lets large tensors wait longer
(`share_power` 2, on CIFAR also 1). In `float32` all sides send float32, so that change alone must save the bytes;
there `adaptive` has {len(FLOAT32_THRESHOLDS)} thresholds, under the controls' limit. Rows of seed {TUNING_SEED} are
trials: rates and momentum 0 or 0.9 are one grid for all sides, extended by a factor of 1.5 while anybody's best lies
on its edge, to at most 6 rates for each momentum; every trial runs to its end, and the most accurate (of controls:
that may be afforded) goes on. Seeds from {FIRST_FRESH} on are for comparing and were used for nothing before;
differences are of the same seed on both sides, and 90 % intervals those of Student's t. Partners are random on all
sides, as in the published baseline. Rows `mnist8_exponential` and so on have exponential partners on all sides, at
the rates chosen with random ones; they are not judged. `bytes_share` is of the baseline's bytes, `kB_by_tenth` what
all nodes sent in each tenth of the run.

`time`: `bandwidth` 1 is the line on which the baseline communicates for {COMMUNICATION:.1%} of its time if sending
holds computing up (`overlap` false), as published. Where sending overlaps computing, that line holds the baseline up
for {gossip_time.most_saved(overlap=True):.1%} of its time only, so no more can be saved there. At bandwidth 1 all
seeds are run, elsewhere the first.

`real` and `shaped`: 8 processes each with its node on the line of bandwidth 1, `seconds` until the last node's last
step, over as many seeds as there are rows (up to {REAL_SEEDS}). A step computes for {gossip_real.STEP_S * 1000:g} ms,
most of it slept, so that eight processes do not wait for two cores: `late` is the share of steps that took longer,
where that is counted. `emulated`: the local engine with a scenario, in which a node's link is a clock. `shaped`:
network namespaces whose cables the kernel limits (tc-tbf), with `paceline serve` and `join` over encrypted TCP. There
a message counts as sent when the kernel has taken it; its buffers hold several of these models, so that
`overlap=false` holds up less than on the emulated line. What a step takes beyond its computing and its line (the
grant, the decision, packing, and waiting for a processor that others use, too) is part of the time on both sides.
Those of commit 5ac4d26 had simulations of the lowest priority beside them, and on the emulated line all runs of seed
400 but its first, and the first of seed 401, a race of other processes as well.

Rows of `disturbed` are of the defaults under the cosine, over {DISTURBED_SEEDS} seeds: `even` and `one_slow` on the
line of bandwidth 1, with overlap; `pace` is steps per second of the 7 others together, `waiting` the share of their
time in which they waited for their own line. In `faults` 2 nodes are killed after 30 and 40 % of the run, and 2 join
after 50 and 60 %. In virtual time nobody can hold another node's step up, so that the bars on the slow node say that
the simulator keeps it so; real processes are asked in the tests.

What the publication claims, and which bars say the same of what was measured here (`{{a,b}}`: one for each):

{publications.beside("gossip")}

The defaults come from a search on seeds below 200 (docs/internals/gossip-defaults.md). Courses are counted in {PARTS}
parts of a run, of which the bar on the rate's fall compares single ones.

![time saved by bandwidth, and the course of exchanges](gossip.png)
"""


if __name__ == "__main__":
    main()
