"""Random runs in virtual time in which much goes wrong, for bench_chaos.py: clusters, strategies, jobs, faults.

A seed fixes everything. Seeds go round all strategies, under every exchange: gradients, tables, nodes without a server,
and light workers, which only cost time. In every run workers crash, leave, join and come back, pause, slow down and are
cut off, messages arrive twice or out of order, and in most the server crashes up to three times.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from attacks import foreign_checker, foreign_runs

Draw = random.Random
CENTRAL = (
    "bsp", "asp", "ssp", "dssp", "adaptive_sync", "dasp", "fastest_k", "k_async", "adaptive_k", "adaptive_k_load",
    "balanced",
)  # fmt: skip
CASES = [
    *(("gradients", name) for name in CENTRAL),
    *(("tables", name) for name in foreign_runs.TABLE_STRATEGIES),
    *(("nodes", name) for name in foreign_runs.PEER_STRATEGIES),
    *(("light", name) for name in CENTRAL),
]
FAULTS = ("crash", "leave", "rejoin", "join", "pause", "slow", "partition", "duplicate", "reorder", "server_crash")
SERVER_CRASHES = (0, 1, 1, 2, 3)  # one of these is drawn
EARLY = "before its first checkpoint is complete"
LATER = 1.6  # a server that crashed too early crashes later by this factor
SAMPLES_PER_LIGHT_RUN = 400
LONGEST_S = 3600.0  # of virtual time: the longest of these runs takes some minutes


class Chaos(NamedTuple):
    """One random run."""

    seed: int
    kind: str  # what is exchanged
    strategy: str
    scenario: str
    workers: int
    lasting: frozenset[int]  # workers that neither crash nor leave
    train: Callable[[], None] | None
    rows: int | None  # of which each is used once, where the model can tell
    clocks: int | None  # of each worker, on tables
    checkpoint_every: str
    run_seed: int


class Outcome(NamedTuple):
    """What became of a run."""

    chaos: Chaos
    journal: Path
    error: str | None  # that `launch` raised
    told: list[str]  # what the result says against it, beside the journal


def chaos(seed: int) -> Chaos:
    """Draw the run of this seed."""
    draw = Draw(seed)
    kind, name = CASES[seed % len(CASES)]
    workers = draw.randint(2, 6)
    of_job = {"nodes": "peers", "light": "gradients"}.get(kind, kind)
    strategy = foreign_runs.strategy(_Only(draw, name), of_job, workers)
    rows, batch, epochs = draw.randint(30, 120), draw.randint(1, 5), draw.choice([1, 1, 2])
    clocks = draw.randint(6, 20)
    per_sample = draw.choice([0.001, 0.01])
    samples = {"tables": 2 * clocks * workers, "light": SAMPLES_PER_LIGHT_RUN}.get(kind, rows * epochs)
    around_s = 1.5 * samples * per_sample / workers
    scenario, lasting = _scenario(draw, workers, per_sample, around_s)
    train: Callable[[], None] | None = None
    if kind == "tables":
        staleness, eager, barrier = draw.choice([None, 0, 2]), draw.random() < 0.3, draw.random() < 0.3
        train = foreign_runs.tables(clocks, staleness, eager=eager, barrier=barrier)
    elif kind != "light":
        train = foreign_runs.gradients(rows, batch, epochs, "epoch")
    return Chaos(
        seed, kind, strategy, scenario, workers, lasting, train,
        rows if kind == "gradients" and epochs == 1 else None, clocks if kind == "tables" else None,
        f"{draw.randint(1, 8)}v", draw.randrange(100),
    )  # fmt: skip


class _Only(random.Random):
    """Draws as another does, but chooses this strategy where strategies are chosen from."""

    def __init__(self, draw: Draw, name: str) -> None:
        super().__init__(draw.random())
        self._name = name

    def choice(self, seq: Any) -> Any:
        return self._name if self._name in seq else super().choice(seq)


def _scenario(draw: Draw, workers: int, per_sample: float, around_s: float) -> tuple[str, frozenset[int]]:
    """A cluster as TOML whose events fall into the seconds that a run takes, and the workers that stay."""
    jitter = draw.choice(["none", "lognormal:0.3", "exponential", "shifted_exponential:0.5,1.0"])
    parts = [
        f"seed = {draw.randrange(1000)}",
        f'[compute]\nseconds_per_sample = {per_sample}\njitter = "{jitter}"',
        f"[network]\nlatency_ms = {draw.choice([0, 1, 20])}\n{draw.choice(['', 'bandwidth_mbps = 1'])}",
    ]
    parts += [f"[[workers]]\nspeed = {draw.choice([1.0, 1.0, 0.5, 0.2])}" for _ in range(workers)]
    kinds = ["duplicate", "reorder", *(draw.choice(FAULTS[:-1]) for _ in range(draw.randint(3, 12)))]
    kinds += ["server_crash"] * draw.choice(SERVER_CRASHES)
    moments = sorted(round(draw.random() * around_s, 5) for _ in kinds)
    draw.shuffle(kinds)
    stays, joined = draw.randrange(workers), workers
    gone, hit = set[int](), set[int]()
    if draw.random() < 0.2:  # even the one that stays goes, but not for ever
        at, back = sorted(round(draw.random() * around_s, 5) for _ in range(2))
        parts += [f'[[events]]\nkind = "{what}"\nworker = {stays}\nat = {when}'
                  for what, when in (("crash", at), ("rejoin", back + 0.001))]  # fmt: skip
        hit.add(stays)
    for kind, at in zip(kinds, moments, strict=True):
        lines = [f'kind = "{kind}"', f"at = {at}"]
        there = [worker for worker in range(joined) if worker not in gone]
        may_go = [worker for worker in there if worker != stays]
        lasts = round((0.02 + draw.random()) * around_s / 3, 5)
        if kind in ("duplicate", "reorder"):
            lines += [f"share = {draw.choice([0.3, 1.0])}", f"for = {round(3 * lasts, 5)}"]
        elif kind == "server_crash":
            lines += draw.choice([[], [f"for = {lasts}"]])
        elif kind == "join" and joined < 9:
            joined += 1
        elif kind == "rejoin" and gone:
            lines.append(f"worker = {(back := draw.choice(sorted(gone)))}")
            gone.discard(back)
        elif kind in ("crash", "leave") and may_go:
            lines.append(f"worker = {(away := draw.choice(may_go))}")
            gone.add(away)
            hit.add(away)
        elif kind in ("pause", "slow", "partition"):
            lines += [f"worker = {draw.choice(there)}", f"for = {lasts}"]
            lines += [f"factor = {draw.choice([0.5, 4.0, 20.0])}"] if kind == "slow" else []
        else:
            continue
        parts.append("\n".join(["[[events]]", *lines]))
    return "\n\n".join(parts) + "\n", frozenset(range(workers)) - hit


def make(drawn: Chaos, folder: Path) -> Outcome:
    """Make the run. A server that crashes before there is a checkpoint crashes later: that would be another run."""
    while True:
        outcome = _make(drawn, folder)
        if outcome.error is None or EARLY not in outcome.error:
            return outcome
        drawn = drawn._replace(scenario=_later(drawn.scenario))


def _later(scenario: str) -> str:
    """The same events, with the server's crashes later."""
    lines, crash = [], False
    for line in scenario.splitlines():
        if line.startswith("kind = "):
            crash = "server_crash" in line
        late = crash and line.startswith("at = ")
        lines.append(f"at = {round(float(line[5:]) * LATER + 0.01, 5)}" if late else line)
    return "\n".join(lines) + "\n"


def _make(drawn: Chaos, folder: Path) -> Outcome:
    place, journal = folder / f"{drawn.seed}.toml", folder / f"{drawn.seed}.jsonl"
    place.write_text(drawn.scenario)
    told = list[str]()
    try:
        light = drawn.kind == "light"
        told = _simulate(drawn, place, journal) if light else _launch(drawn, place, journal, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is judged
        return Outcome(drawn, journal, f"{type(error).__name__}: {error}", told)
    return Outcome(drawn, journal, None, told)


def _simulate(drawn: Chaos, place: Path, journal: Path) -> list[str]:
    from paceline import scenario, strategies
    from paceline.engines.sim.light import simulate
    from paceline.records.journal import Writer

    writer = Writer(journal)
    try:
        done = simulate(
            strategies.build(drawn.strategy, drawn.run_seed), scenario.load(str(place)), work=3,
            samples=SAMPLES_PER_LIGHT_RUN, max_seconds=LONGEST_S, model_bytes=500, sink=writer, seed=drawn.run_seed,
            checkpoint_every=int(drawn.checkpoint_every[:-1]),
        )  # fmt: skip
    finally:
        writer.close()
    few = done.used + done.lost < SAMPLES_PER_LIGHT_RUN
    return [f"{done.used} used and {done.lost} lost of {SAMPLES_PER_LIGHT_RUN} samples"] if few else []


def _launch(drawn: Chaos, place: Path, journal: Path, folder: Path) -> list[str]:
    import paceline

    assert drawn.train is not None
    run = paceline.launch(
        drawn.train, engine="sim", scenario=place, strategy=drawn.strategy, seed=drawn.run_seed, evaluate_every="off",
        max_seconds=LONGEST_S, journal=journal, checkpoint_every=drawn.checkpoint_every, runs_dir=folder / "runs",
    )  # fmt: skip
    told = []
    if drawn.rows is not None and run.model_state is not None:
        unused = int((run.model_state["weight"] == 0).sum())
        if unused:  # as many are used as there are: none twice if none is left out
            told.append(f"{unused} of {drawn.rows} samples moved no weight")
    if drawn.clocks is not None and run.tables is not None:
        counts = {worker: int(run.tables["t"][worker, 0]) for worker in drawn.lasting}
        wrong = {worker: count for worker, count in counts.items() if count != drawn.clocks}
        if wrong:
            told.append(f"workers that stayed counted {wrong} in the table instead of {drawn.clocks}")
    return told


def faults_of(outcome: Outcome) -> list[str]:
    """All that is wrong with a run: by its journal first."""
    found = (
        foreign_checker.faults(foreign_checker.read(outcome.journal), whole=True) if outcome.journal.exists() else []
    )
    return [*found, *([] if outcome.error is None else [outcome.error]), *outcome.told]
