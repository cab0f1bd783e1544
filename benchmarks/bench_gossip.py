"""What does exchanging by change save against exchanging at every step, and against a fixed period of equal traffic?

    python benchmarks/bench_gossip.py                 # writes results/gossip.md, .json and .png
    python benchmarks/bench_gossip.py --quick --json  # tiny sizes, one JSON object, writes nothing

Eight virtual nodes without a server train an MLP on MNIST under a learning rate that decays, by a cosine and by one
step. `gossip:period=1` is the baseline. `adaptive_gossip` and `gossip` with a longer period may spend so much of its
bytes; each gets the same number of trials (learning rates times triggers or periods) on one seed and is then run on
fresh seeds, paired. Times are virtual: sending does not overlap computing, as in the publication.
"""

import itertools
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import functional

import paceline
import results
from paceline import journal, scenario
from paceline.peer_events import Sent
from paceline.tasks import mnist
from sides import bars
from sides.bars import Bar

DATA = Path(__file__).parents[2] / "shared" / "data" / "mnist"
BASE = "gossip:period=1"
RATES = (0.2, 0.4, 0.8, 1.2, 1.6)
TRIGGERS = ("threshold=0.45", "threshold=0.6", "budget=0.075")
PERIODS = (13, 16, 20)
MOST_BYTES = 0.08  # of the baseline's
TUNING_SEED = 100
SECONDS_PER_SAMPLE = 0.001
COMMUNICATION = 0.565  # of the baseline's time, in the publication
BANDWIDTHS = (0.25, 0.5, 2.0, 4.0, 16.0)  # of the one at which communication has that share
PARTS = 10  # of a run, whose bytes are counted apart
MOST_RATES = 9


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    samples: int
    epochs: float
    repeats: int
    schedules: tuple[str, ...] = ("cosine", "step")
    workers: int = 8
    batch: int = 16
    hidden: int = 64
    test: int = 10_000


FULL = Size(samples=12_000, epochs=4, repeats=5)
QUICK = Size(samples=800, epochs=1, repeats=1, schedules=("cosine",), workers=3, hidden=8, test=500)


class Job(msgspec.Struct, frozen=True):
    """One run to be made."""

    strategy: str
    rate: float
    schedule: str
    seed: int
    size: Size
    mbps: float | None = None


class Ran(msgspec.Struct, frozen=True):
    """What became of it."""

    accuracy: float
    loss: float
    bytes: int
    exchanges: int
    seconds: float
    consensus: float
    course: list[int]  # bytes sent in each part of the run


def factor(schedule: str, progress: float) -> float:
    """Of the learning rate, after that share of the run."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return 1.0 if progress < 0.5 else 0.1


def run(job: Job) -> Ran:
    """Train once; a run that diverges has the accuracy of guessing."""
    torch.set_num_threads(1)
    size, lines = job.size, journal.Lines()
    bandwidth = "" if job.mbps is None else f"[network]\nbandwidth_mbps = {job.mbps}"
    cluster = scenario.parse(
        f"""
seed = {job.seed}
[compute]
seconds_per_sample = {SECONDS_PER_SAMPLE}
jitter = "lognormal:0.1"
{bandwidth}
[[workers]]
count = {size.workers}
""",
        "gossip",
        Path(),
    )
    done = paceline.launch(
        lambda: train(job), engine="sim", scenario=cluster, strategy=job.strategy, seed=job.seed, sink=lines,
        evaluate_every=f"{size.epochs:g}e",
    )  # fmt: skip
    report = done.summary
    consensus = report.peers.consensus if report.peers is not None else None
    return Ran(
        report.accuracy or 0.0, report.loss or math.inf, report.bytes_up, report.exchanges or 0, report.seconds,
        consensus or 0.0, course(lines, report.seconds),
    )  # fmt: skip


def train(job: Job) -> None:
    """The script of a node."""
    session, size = paceline.init(), job.size
    images, labels, test_images, test_labels = session.once("mnist", lambda: data(size))
    torch.manual_seed(job.seed)
    model = mnist.build("mlp", size.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.rate)
    rounds = math.ceil(size.samples * size.epochs / (size.batch * size.workers))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(job.schedule, step / rounds))

    def evaluate(module: torch.nn.Module) -> dict[str, float]:
        with torch.no_grad():
            scores = module(test_images)
        right = (scores.argmax(dim=1) == test_labels).float().mean()
        return {"accuracy": float(right), "loss": float(functional.cross_entropy(scores, test_labels))}

    model, optimizer = session.prepare(model, optimizer, scheduler=decay, evaluate=evaluate)
    rows = torch.utils.data.TensorDataset(images, labels)
    for x, y in session.batches(rows, batch_size=size.batch, epochs=size.epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
        decay.step()


def data(size: Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    folder = Path(os.environ.get("MNIST", str(DATA)))
    training, test = (mnist.load(folder, part).tensors for part in ("train", "t10k"))
    return (*(t[: size.samples] for t in training), *(t[: size.test] for t in test))  # type: ignore[return-value]


def course(lines: Iterable[journal.Line], seconds: float) -> list[int]:
    """Bytes that all nodes sent, by part of the run."""
    counts = [0] * PARTS
    for line in lines:
        if isinstance(line, journal.PeerDecision) and isinstance(line.event, Sent):
            counts[min(PARTS - 1, int(PARTS * line.event.at / seconds))] += line.event.bytes
    return counts


# -- trials ------------------------------------------------------------------------------------------------------------


def sides() -> dict[str, list[str]]:
    """What is compared, each with the settings that are tried of it."""
    return {
        "baseline": [BASE],
        "fixed": [f"gossip:period={period}" for period in PERIODS],
        "adaptive": [f"adaptive_gossip:{trigger},warmup=0,max_interval=200" for trigger in TRIGGERS],
    }


def tune(schedule: str, size: Size, pool: Executor) -> tuple[dict[str, Job], list[dict[str, Any]]]:
    """The best of each side's trials that spends no more than it may; and all trials.

    While anybody's best rate lies on the edge of those tried, everybody gets another one beyond it.
    """
    found: dict[Job, Ran] = {}
    rates, new = list(RATES), list(RATES)
    while new:
        jobs = [Job(s, rate, schedule, TUNING_SEED, size) for specs in sides().values() for s in specs for rate in new]
        found.update(zip(jobs, pool.map(run, jobs), strict=True))
        chosen, most = choose(found)
        new = []
        if len(rates) < MOST_RATES and any(job.rate == max(rates) for job in chosen.values()):
            new.append(1.5 * max(rates))
        if len(rates) < MOST_RATES and any(job.rate == min(rates) for job in chosen.values()):
            new.append(min(rates) / 2)
        rates += new
    rows = []
    for name, specs in sides().items():
        for job, ran in found.items():
            if job.strategy in specs:
                what = {"schedule": schedule, "side": name, "strategy": job.strategy, "lr": job.rate}
                rows.append({**what, "seed": TUNING_SEED, **row_of(ran, most)})
    return chosen, rows


def choose(found: dict[Job, Ran]) -> tuple[dict[str, Job], int]:
    """Of each side the most accurate trial that it may afford, and the bytes of the baseline's."""
    chosen: dict[str, Job] = {}
    most = 0
    for name, specs in sides().items():
        tried = [job for job in found if job.strategy in specs]
        allowed = [job for job in tried if name == "baseline" or found[job].bytes <= MOST_BYTES * most]
        chosen[name] = max(allowed or tried, key=lambda job: found[job].accuracy)
        most = most or found[chosen[name]].bytes
    return chosen, most


def row_of(ran: Ran, most: int) -> dict[str, Any]:
    return {
        "accuracy": ran.accuracy, "loss": ran.loss, "bytes_share": ran.bytes / most, "exchanges": ran.exchanges,
        "consensus": ran.consensus, "kB_by_tenth": " ".join(f"{n / 1000:.0f}" for n in ran.course),
    }  # fmt: skip


def measure(size: Size, pool: Executor) -> tuple[list[dict[str, Any]], list[Bar], dict[str, Any]]:
    """Every schedule, the time at every bandwidth, and what they say."""
    rows: list[dict[str, Any]] = []
    verdicts: list[Bar] = []
    for_plot: dict[str, Any] = {"courses": {}}
    for schedule in size.schedules:
        chosen, trials = tune(schedule, size, pool)
        jobs = [msgspec.structs.replace(job, seed=seed) for job in chosen.values() for seed in range(size.repeats)]
        made = list(pool.map(run, jobs))
        by_side = {name: made[i * size.repeats : (i + 1) * size.repeats] for i, name in enumerate(chosen)}
        most = statistics.median(ran.bytes for ran in by_side["baseline"])
        for (name, job), seed in itertools.product(chosen.items(), range(size.repeats)):
            rows.append({"schedule": schedule, "side": name, "strategy": job.strategy, "lr": job.rate, "seed": seed,
                         **row_of(by_side[name][seed], round(most))})  # fmt: skip
        rows += trials
        verdicts += judge(schedule, by_side)
        for_plot["courses"][schedule] = by_side["adaptive"][0].course
        if schedule == size.schedules[0]:
            curve = gains(chosen, size, pool)
            for_plot["gains"] = curve
            verdicts += judge_time(curve)
            rows += [{"schedule": schedule, "side": "time", "bandwidth": b, "time_saved": gain} for b, gain in curve]
    return rows, verdicts, for_plot


def judge(schedule: str, by_side: dict[str, list[Ran]]) -> list[Bar]:
    """What must hold of accuracy and bytes."""
    base, fixed, ours = (by_side[name] for name in ("baseline", "fixed", "adaptive"))
    saved = 1 - statistics.median(a.bytes / b.bytes for a, b in zip(ours, base, strict=True))
    behind = statistics.mean(b.accuracy - a.accuracy for a, b in zip(ours, base, strict=True))
    ahead = [a.accuracy - f.accuracy for a, f in zip(ours, fixed, strict=True)]
    lower = [f.loss - a.loss for a, f in zip(ours, fixed, strict=True)]
    early, late = (statistics.mean(sum(r.course[part]) for r in ours) for part in (slice(0, 2), slice(-2, None)))
    return [
        Bar(f"{schedule}_bytes_saved", saved, 0.92, True, f"{schedule}: share of the baseline's bytes not sent"),
        Bar(f"{schedule}_behind", 100 * behind, 0.5, False, f"{schedule}: points of accuracy behind the baseline"),
        Bar(f"{schedule}_ahead_of_fixed", _over_spread(ahead), 1.0, True,
            f"{schedule}: accuracy ahead of a fixed period that may send as much, over the spread of the pairs"),
        Bar(f"{schedule}_loss_below_fixed", _over_spread(lower), 1.0, True,
            f"{schedule}: loss below that of the fixed period, over the spread of the pairs"),
        Bar(f"{schedule}_dense_early", early / max(1.0, late), 1.0, True,
            f"{schedule}: bytes sent in the first fifth of the run over those of the last"),
    ]  # fmt: skip


def _over_spread(differences: Sequence[float]) -> float:
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    mean = statistics.mean(differences)
    return mean / spread if spread else math.copysign(math.inf, mean) if mean else 0.0


def gains(chosen: dict[str, Job], size: Size, pool: Executor) -> list[tuple[float, float]]:
    """Time saved at several bandwidths, in units of the one at which the baseline spends the publication's share."""
    base, ours = (msgspec.structs.replace(chosen[name], seed=0) for name in ("baseline", "adaptive"))
    model_bits = 8 * sum(p.nbytes for p in mnist.build("mlp", size.hidden).parameters())
    compute_s = SECONDS_PER_SAMPLE * size.batch
    usual = model_bits / (compute_s * COMMUNICATION / (1 - COMMUNICATION)) / 1e6
    scales = sorted({1.0, *BANDWIDTHS} if size.repeats > 1 else {1.0})
    jobs = [msgspec.structs.replace(job, mbps=usual * scale, strategy=f"{job.strategy},overlap=false")
            for scale in scales for job in (base, ours)]  # fmt: skip
    made = list(pool.map(run, jobs))
    return [(scale, 1 - made[2 * i + 1].seconds / made[2 * i].seconds) for i, scale in enumerate(scales)]


def judge_time(curve: list[tuple[float, float]]) -> list[Bar]:
    """What must hold of time."""
    at = dict(curve)
    gains_in_order = [gain for _, gain in sorted(curve)]
    rises = max((later - earlier for earlier, later in itertools.pairwise(gains_in_order)), default=0.0)
    return [
        Bar("time_saved", at[1.0], 0.52, True,
            f"time saved where communication is {COMMUNICATION:.1%} of the baseline's"),
        Bar("time_falls_with_bandwidth", rises, 0.005, False, "the gain falls as bandwidth grows; largest rise"),
    ]  # fmt: skip


def plot(found: dict[str, Any], path: Path) -> None:
    """The gain by bandwidth, and when exchanges happen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6))
    axes[0].plot(*zip(*found["gains"], strict=True), marker="o")
    axes[0].set(xscale="log", title="time saved by bandwidth", xlabel="bandwidth (1: communication is 56.5 %)")
    for schedule, counts in found["courses"].items():
        axes[1].plot(range(1, len(counts) + 1), counts, marker="o", label=schedule)
    axes[1].set(title="bytes sent by adaptive_gossip in each tenth of the run", xlabel="tenth")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("exchanges by change against a fixed period")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; their seconds are virtual")
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    size = msgspec.structs.replace(size, repeats=options.repeats)
    if not Path(os.environ.get("MNIST", str(DATA))).is_dir():
        raise SystemExit(f"MNIST is missing: {DATA}; set the variable MNIST to its folder")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        rows, verdicts, found = measure(size, pool)
    if not options.quick:
        plot(found, (options.out or results.FOLDER) / "gossip.png")
    bars.tell("gossip", options, verdicts, rows, notes(size), ("matplotlib",))


def notes(size: Size) -> str:
    """What the numbers mean."""
    return f"""
{size.workers} virtual nodes, an MLP with {size.hidden} hidden units on {size.samples:,} images of MNIST,
{size.epochs:g} epochs, batches of {size.batch}; accuracy and loss on the test images are those of the average of all
nodes' models. Rows of seed {TUNING_SEED} are trials: the same learning rates for all, with {len(TRIGGERS)} triggers
for `adaptive`, {len(PERIODS)} periods for `fixed`. These two may send {MOST_BYTES:.0%} of the baseline's bytes, and the
most accurate of those that do is chosen. `bytes_share` is of the baseline's bytes, `kB_by_tenth` what all nodes sent in
each tenth of the run.

In an earlier run with the thresholds 0.45, 0.6 and 0.8 alone `adaptive` saved 91.96 % of the bytes under the cosine,
and under the step it was behind the fixed period; a budget was tried in place of 0.8 after that.

Left out: the control with a fixed period for each tensor, 16 nodes, CIFAR, `adaptive_elastic`, and dying nodes.

![time saved by bandwidth, and the course of exchanges](gossip.png)
"""


if __name__ == "__main__":
    main()
