"""One host of three has a co-tenant that takes three quarters of it: what would a user have picked, and who is first?

    python benchmarks/bench_rivals.py --rivals .rivals/lab/bin/python --rows rows.jsonl    # 90 minutes on a free core
    python benchmarks/bench_rivals.py --rivals ... --rows rows.jsonl --lanes 2 --minutes 5  # a part of it; go on later
    python benchmarks/bench_rivals.py --quick --only balanced ddp                           # one race each, no result

The MNIST task's convolutional net on labs (tests/netlab) of three hosts with cables of 1 Gbit/s (rival_labs.py): by
paceline's serve and join, DDP over Gloo by torchrun, Ray Train, hivemind and torchft, each as its documentation advises
(contenders/rival_*.py). Rate and momentum of each side are tuned on one grid, extended while the best lies on its edge;
then all sides race on the same fresh seeds. Races that are over are kept in a file, from which a later call goes on.

The rivals live in an environment of their own:
    python3.11 -m venv .rivals/lab
    .rivals/lab/bin/pip install torch==2.13.0 hivemind==1.1.12 torchft==0.2.0 'ray[train]==2.60.0'
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import netlab
import rival_labs
import sources
from contenders import bars, lab_mnist
from contenders.bars import Bar
from rival_labs import BATCH, HOSTS, Ask, Outcome

DATA = Path(__file__).parents[2] / "shared" / "data" / "mnist"
RIVALS = Path(__file__).parents[1] / ".rivals" / "lab" / "bin" / "python"
HELPERS = ("tests/netlab", "tests/support/hosts.py", "tests/support/ray_clusters.py", "tests/support/warm_python.py")
PACKAGES = ("torch", "ray", "hivemind", "torchft")
MOMENTA = (0.9, 0.0)
RATES = (0.05, 0.1, 0.2)  # where every search begins; a factor of 2 apart
SMALLEST, LARGEST = 0.002, 4.0
TUNING_SEEDS = (100, 101)  # all choices on the first; those that are near the best on both
NEAR = 1.25  # times the best
SEEDS = (0, 1, 2, 3, 4)
LIMIT_S = 45.0  # of a race
CUT = 1.5  # a choice that takes so many times the best with its momentum so far is given up
PROBE_S = 5.0
QUARTER = (0.2, 0.3)  # what the slow host's speed must be of the others'
LEAST_SHARE = 0.7  # of a race in which the slow host had its share of the processor; else it was disturbed
TRIES = 3  # of a race that is disturbed
EQUAL = (BATCH,) * HOSTS
SPLIT = (171, 171, 42)  # as many samples, in the ratio of the speeds 4 : 4 : 1


class Side(msgspec.Struct, frozen=True):
    """One who takes part. `variants` are tried first, the best of them is tuned; `tuned_as`: has another's tuning."""

    name: str
    kind: str
    variants: tuple[dict[str, Any], ...] = ({},)  # `split`: batches in the ratio of the speeds
    tuned_as: str = ""


def _hivemind(target_batch: int, matchmaking_s: float, local_updates: bool) -> dict[str, Any]:
    return {"target_batch": target_batch, "matchmaking_s": matchmaking_s, "local_updates": local_updates}


OURS = ("balanced", "dasp")
SIDES = (
    Side("balanced", "paceline", ({"strategy": "balanced"},)),
    Side("dasp", "paceline", ({"strategy": "dasp"},)),
    Side("ddp", "ddp"),
    Side("ddp_split", "ddp", ({"split": True},), tuned_as="ddp"),
    Side(
        "torchft",
        "torchft",
        ({"sync_every": 4, "split": True}, {"sync_every": 4, "split": False}, {"sync_every": 16, "split": True}),
    ),
    Side("hivemind", "hivemind", (_hivemind(1536, 0.3, True), _hivemind(1536, 0.3, False), _hivemind(384, 0.3, False))),
    Side("bsp", "paceline", ({"strategy": "bsp"},), tuned_as="ddp"),
    Side("ray_train", "ray_train", tuned_as="ddp"),
)
LAST = ("hivemind",)
RIVALS_OF_OURS = ("ddp", "ddp_split", "ray_train", "hivemind", "torchft")


class Choice(msgspec.Struct, frozen=True):
    """What is tuned of a side."""

    variant: int
    momentum: float
    lr: float


class TimeIsUpError(Exception):
    """The minutes that this call was given are over."""


# -- races that are kept ---------------------------------------------------------------------------------------------


class Ledger:
    """Races, each made once: rows of a file, to which new ones are added."""

    def __init__(self, path: Path | None, race: Callable[[Ask], Outcome], commit: str, until: float) -> None:
        self._path, self._race, self._commit, self._until = path, race, commit, until
        self._lock = threading.Lock()
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def seconds(self, side: Side, choice: Choice, seed: int, limit_s: float, *, tuning: bool) -> float:
        """Seconds to the target; infinite where it was not reached."""
        key = {
            "side": side.name, "settings": _spelt(side, choice), "momentum": choice.momentum, "lr": choice.lr,
            "seed": seed, "tuning": tuning,
        }  # fmt: skip
        row = self._known(key, limit_s) or self._raced(key, side, choice, limit_s)
        return math.inf if row["reached_s"] is None else row["reached_s"]

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row."""
        row = {**row, "commit": self._commit}
        with self._lock:
            self.rows.append(row)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        return row

    def _known(self, key: Mapping[str, Any], limit_s: float) -> dict[str, Any] | None:
        for row in self.rows:
            same = all(row.get(name) == value for name, value in key.items())
            if same and (row["reached_s"] is not None or row["limit_s"] >= limit_s):
                return row
        return None

    def _raced(self, key: dict[str, Any], side: Side, choice: Choice, limit_s: float) -> dict[str, Any]:
        options = side.variants[choice.variant]
        sizes = SPLIT if options.get("split") else EQUAL
        ask = Ask(side.kind, choice.lr, choice.momentum, key["seed"], sizes, options, limit_s)
        for attempt in range(TRIES):
            if time.monotonic() > self._until:
                raise TimeIsUpError
            try:
                found = self._race(ask)
            except RuntimeError as error:  # the side failed; that is its result
                return self.add({**key, "reached_s": None, "limit_s": limit_s, "error": str(error)[-500:]})
            if found.full_share >= LEAST_SHARE or attempt == TRIES - 1:
                break
        row = self.add({**key, **msgspec.to_builtins(found), "limit_s": limit_s})
        print(row, file=sys.stderr, flush=True)
        return row


def _spelt(side: Side, choice: Choice) -> str:
    return ", ".join(f"{name}={value}" for name, value in side.variants[choice.variant].items() if value != side.name)


# -- tuning ----------------------------------------------------------------------------------------------------------


Timed = Callable[[Choice, int, float], float]  # seconds of a choice on a seed, at most so many


def tune(variants: int, timed: Timed, limit_s: float = LIMIT_S) -> Choice:
    """The choice that reaches the target first, on the grid, beyond its edges, and on both seeds if it is close."""
    found: dict[Choice, float] = {}

    def attempt(choice: Choice) -> None:
        if choice not in found:
            best = min((found[c] for c in found if c.momentum == choice.momentum), default=math.inf)
            found[choice] = timed(choice, TUNING_SEEDS[0], min(limit_s, CUT * best))

    for variant in range(variants):
        attempt(Choice(variant, MOMENTA[0], RATES[0]))
    variant = min(found, key=lambda choice: found[choice]).variant
    for momentum in MOMENTA:
        for lr in reversed(RATES):
            attempt(Choice(variant, momentum, lr))
        while (lr := beyond({c.lr: s for c, s in found.items() if (c.variant, c.momentum) == (variant, momentum)})) > 0:
            attempt(Choice(variant, momentum, lr))
    best = min(found.values())
    near = [choice for choice in found if found[choice] <= NEAR * best]
    if math.isinf(best) or len(near) == 1:
        return near[0]
    return min(near, key=lambda choice: found[choice] + timed(choice, TUNING_SEEDS[1], limit_s))


def beyond(seconds: Mapping[float, float]) -> float:
    """The next rate to try beyond the edge that the best lies on; 0 if it lies inside, or if none got there."""
    best = min(seconds, key=lambda lr: (seconds[lr], lr))
    if math.isinf(seconds[best]):
        return 0.0
    if best == min(seconds) and best / 2 >= SMALLEST:
        return best / 2
    return best * 2 if best == max(seconds) and best * 2 <= LARGEST else 0.0


def search(side: Side, ledger: Ledger) -> Choice:
    """Tune one side."""
    return tune(
        len(side.variants), lambda choice, seed, limit: ledger.seconds(side, choice, seed, limit, tuning=True)
    )  # fmt: skip


def measure(ledger: Ledger, sides: Sequence[Side], seeds: Sequence[int]) -> None:
    """Tune each side, then race it on all seeds. Sides take turns on the labs; the longest runs come last."""
    for group in ([side for side in sides if (side.kind in LAST) == last] for last in (False, True)):
        with ThreadPoolExecutor(2 * len(group) + 1) as pool:
            chosen = {side.name: pool.submit(search, side, ledger) for side in group if not side.tuned_as}

            def finish(side: Side, chosen: Mapping[str, Future[Choice]] = chosen) -> None:
                choice = chosen[side.tuned_as or side.name].result()
                for seed in seeds:
                    ledger.seconds(side, choice, seed, LIMIT_S, tuning=False)

            list(pool.map(finish, group))


# -- verdicts --------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each side's tuned choice and seconds over the timed seeds; a target that was missed counts as later than any."""
    found = []
    for name in dict.fromkeys(row["side"] for row in rows if "side" in row and not row["tuning"]):
        timed = [row for row in rows if row.get("side") == name and not row["tuning"]]
        reached = [math.inf if row["reached_s"] is None else row["reached_s"] for row in timed]
        low, middle, high = (_finite(f(reached)) for f in (min, statistics.median, max))
        found.append({
            "side": name, "settings": timed[0]["settings"], "momentum": timed[0]["momentum"], "lr": timed[0]["lr"],
            "seeds": len(timed), "to_target_s": middle, "from_s": low, "to_s": high,
            "samples": _finite(statistics.median(row.get("samples") or math.inf for row in timed)),
        })  # fmt: skip
    return found


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why the rows are no comparison; empty if they are one."""
    timed = [row for row in rows if "side" in row and not row["tuning"]]
    names = list(dict.fromkeys(row["side"] for row in timed))
    found = []
    tuned = {row["seed"] for row in rows if "side" in row and row["tuning"]}
    if both := tuned & {row["seed"] for row in timed}:
        found.append(f"seeds {sorted(both)} were tuned on as well")
    for name in names:
        if len({(row["settings"], row["momentum"], row["lr"]) for row in timed if row["side"] == name}) > 1:
            found.append(f"{name} raced with several choices")
    speeds = [row["speeds"] for row in rows if "speeds" in row]
    slow = statistics.median(each[-1] / statistics.mean(each[:-1]) for each in speeds) if speeds else math.nan
    if not QUARTER[0] <= slow <= QUARTER[1]:
        found.append(f"the slow host had {slow:.3g} of the others' speed, not {QUARTER[0]:g} to {QUARTER[1]:g}")
    if disturbed := [row for row in timed if row.get("full_share", 1.0) < LEAST_SHARE]:
        found.append(f"{len(disturbed)} races were disturbed")
    return found


def judge(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Our better one against every rival, by the geometric mean over the seeds of the ratio of their times."""
    why = "; ".join(problems(rows))
    times = {side["side"]: side["to_target_s"] for side in summary(rows)}
    best = min(OURS, key=lambda name: times.get(name) or math.inf)
    found = []
    for rival in RIVALS_OF_OURS:
        unfit = why or unlike(rows, rival, best)
        ratio = None if unfit else mean_ratio(rows, rival, best)
        bound = 2.0 if rival == "ddp" else 1.0
        missed = unfit or ("" if ratio is not None else f"{best} missed the target on a seed")
        meaning = f"time to target of {rival} over that of {best}, our best"
        found.append(Bar(f"{rival}_over_ours", ratio, bound, True, meaning, missed))
    return found


def unlike(rows: Sequence[dict[str, Any]], rival: str, ours: str) -> str:
    """Why a rival's seeds cannot be compared with ours; empty if they can."""
    theirs, own = (
        sorted(row["seed"] for row in rows if row.get("side") == name and not row["tuning"]) for name in (rival, ours)
    )
    if not theirs or not own:
        return f"{ours if theirs else rival} took no part"
    if theirs != own:
        return f"{rival} raced on different seeds, {theirs} instead of {own}"
    return "fewer than 3 seeds" if len(own) < 3 else ""


def mean_ratio(rows: Sequence[dict[str, Any]], rival: str, ours: str) -> float | None:
    """Geometric mean over the seeds. A rival that never got there took at least as long as it was given."""
    logs = []
    for row in rows:
        if row.get("side") == ours and not row["tuning"]:
            if row["reached_s"] is None:
                return None
            (other,) = (
                each for each in rows
                if each.get("side") == rival and not each["tuning"] and each["seed"] == row["seed"]
            )  # fmt: skip
            logs.append(math.log((other["reached_s"] or other["limit_s"]) / row["reached_s"]))
    return math.exp(statistics.mean(logs))


# -- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser: argparse.ArgumentParser = bars.parser("time to target beside a co-tenant, against what a user would pick")
    parser.add_argument("--only", nargs="+", default=[], metavar="SIDE", help="these alone; writes nothing")
    parser.add_argument("--rivals", type=Path, default=RIVALS, help="the python that has torchft, hivemind and Ray")
    parser.add_argument("--rows", type=Path, help="file of the races; those in it are not made again")
    parser.add_argument("--lanes", type=int, default=1, help="races side by side, each on a processor of its own")
    parser.add_argument("--labs", type=int, default=1, help="per lane: while one races the others start")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after these; --rows keeps what was found")
    parser.add_argument("--data-dir", type=Path, default=DATA, help="MNIST's four files")
    given = parser.parse_args(arguments)
    if given.labs < 1:
        parser.error(f"--labs must be >= 1, not {given.labs}")
    if not 1 <= given.lanes <= (os.cpu_count() or 1):
        parser.error(f"--lanes must be from 1 to {os.cpu_count()}, the number of processors, not {given.lanes}")
    reason = netlab.why_not(cores=True) or missing(given.rivals, given.data_dir)
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return
    options = bars.asked(given, len(SEEDS))
    commit = sources.look(measured=(*sources.MEASURED, *HELPERS)).commit
    if options.of is not None:
        sources.checked(given, measured=(*sources.MEASURED, *HELPERS))
    ledger = race_all(given, commit, options)
    rows = [*summary(ledger.rows), *ledger.rows]
    bars.tell("rivals", options, judge(ledger.rows), rows, notes(ledger.rows, given), ("pyzmq",))


def race_all(given: argparse.Namespace, commit: str, options: bars.Asked) -> Ledger:
    """All races, or as many as there was time for."""
    sides = [side for side in SIDES if not given.only or side.name in given.only]
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        data = Path(folder) / "mnist.pt"
        lab_mnist.save(data, given.data_dir)
        until = time.monotonic() + 60 * given.minutes
        with rival_labs.Lanes(range(given.lanes), given.labs, data, given.rivals.absolute(), PROBE_S) as lanes:
            ledger = Ledger(given.rows, lanes.race, commit, until)
            foreign(ledger.rows, commit)
            try:
                if options.quick:
                    for side in sides:
                        ledger.seconds(side, Choice(0, MOMENTA[0], RATES[0]), SEEDS[0], LIMIT_S, tuning=False)
                else:
                    measure(ledger, sides, SEEDS[: options.repeats])
            except TimeIsUpError:
                print(f"stopped after {given.minutes:g} minutes: call again with the same --rows", file=sys.stderr)
    for speeds in lanes.speeds:
        ledger.add({"speeds": speeds})
    return ledger


def foreign(rows: Iterable[dict[str, Any]], commit: str) -> None:
    """SystemExit if rows are of other sources than these: commits may differ in what makes no race."""
    measured = ("src", "benchmarks/contenders", "benchmarks/rival_labs.py", *HELPERS)  # this file chooses, and judges
    for other in {row["commit"] for row in rows} - {commit}:
        words = ["git", "diff", "--quiet", other, commit, "--", *measured]
        if subprocess.run(words, cwd=sources.ROOT, check=False).returncode:
            raise SystemExit(
                f"--rows has races of commit {other}, whose sources differ from {commit}'s: name another file"
            )


def missing(python: Path, data: Path) -> str | None:
    """What is not here; None if all is."""
    if not data.is_dir():
        return f"there is no MNIST in {data}"
    if not python.exists():
        return f"there are no rivals at {python}: the head of bench_rivals.py says how to install them"
    done = subprocess.run([python, "-c", f"import {', '.join(PACKAGES)}"], capture_output=True, text=True, check=False)
    return f"{python} cannot import the rivals: {done.stderr[-300:]}" if done.returncode else None


def notes(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """What the numbers mean."""
    speeds = [row["speeds"] for row in rows if "speeds" in row]
    steps = [statistics.median(each[host] for each in speeds) for host in range(HOSTS)]
    versions = subprocess.run(
        [given.rivals, "-c", "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in "
         f"{PACKAGES!r}))"], capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    hosts = ", ".join(f"{each:.3g}" for each in steps)
    shares = [row["full_share"] for row in rows if "full_share" in row]
    return f"""
Three hosts of a lab with cables of {rival_labs.RATE}; each has {rival_labs.SHARE:g} of one processor by a quota, and a
weight of {rival_labs.WEIGHT} that lets it have that whatever else the machine does. The last host has a co-tenant of
{rival_labs.TENANTS} processes that compress text. Measured, all hosts computing at once: {hosts} steps per second, so
the last has {steps[-1] / statistics.mean(steps[:-1]):.3g} of the speed of the others. Nobody sleeps. The slow host used
up its share in {min(shares, default=math.nan):.2f} to {max(shares, default=math.nan):.2f} of the periods of each race
(a race with less than {LEAST_SHARE:g} was made again). {given.lanes} race{"s" * (given.lanes > 1)} at a time, each on a
processor of its own; all programs start outside the shares and are moved into them before the first batch.

The net of `--task mnist --set model=cnn` on {lab_mnist.TRAIN_SAMPLES:,} images, {BATCH} of them per host and step, to
an accuracy of {rival_labs.TARGET:g} on {lab_mnist.HELD_OUT:,} held-out ones. `to_target_s` is from the first batch (for
paceline from the beginning of the phase, which is earlier) to the moment at which the first model that has it was
taken. Models are taken every {rival_labs.EVERY} samples, or at the first exchange after that, at the side's cost, and
evaluated outside of the shares at nobody's. At most {LIMIT_S:g} s.

paceline: `serve` on the first host, `join` on all, encrypted. `ddp`: torchrun, `gradient_as_bucket_view`,
`static_graph`. With `split` batches are {SPLIT}, as somebody would choose who knows the speeds and that they stay;
`ddp_split` weights losses accordingly. `ray_train`: TorchTrainer on a Ray cluster across the hosts, with DDP's loop.
It, `ddp_split` and `bsp` make updates of as many samples as DDP, and have its rate and momentum. `torchft`: LocalSGD
over Gloo, by torchrun, with a lighthouse on the first host. `hivemind`: its Optimizer, set up as in
[uneven_real](uneven_real.md). All have one thread per rank. {versions}.

Rates {RATES}, beyond an edge while the best lies on it, with momentum {MOMENTA[0]:g} and {MOMENTA[1]:g}, by seed
{TUNING_SEEDS[0]}, a choice being given up at {CUT:g} times the best with its momentum; those within {NEAR:g}
times the best also by seed {TUNING_SEEDS[1]}. Settings of a side were chosen first, at the first rate. Then all sides
raced on seeds {sorted({row["seed"] for row in rows if "side" in row and not row["tuning"]})}. The first rows
are the medians; the races follow, those of the tuning included. Bars hold geometric means over the seeds.
"""


if __name__ == "__main__":
    main()
