"""Runs that the convergence guard has to judge: 200 healthy ones, and 20 whose divergence was planted.

Healthy are the tasks at their committed rates, the examples, and scripts with losses that are hard to judge: batches of
one sample, losses that fall to zero, noisy and negative ones, warm restarts and curricula. Planted are rates of up to
100 times of what a script bears, and what staleness makes of a rate that was tuned for bsp. The benchmark
(bench_guard.py) runs all of them, the tests a sample.
"""

import contextlib
import functools
import io
import itertools
import logging
import math
import runpy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import paceline
from contenders import guard_scripts
from learning_trials import KINDS, cluster
from paceline import scenario, tasks
from paceline.core.actions import Apply, Discard
from paceline.core.events import Pushed
from paceline.records.journal import Decision, Header, Line, Observation
from paceline.scenario import Scenario

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = Path(__file__).parents[2] / "shared" / "data"
AVERAGED, PATIENCE = 10, 50  # rounds
FOLDERS = {"mnist": DATA / "mnist", "shakespeare": DATA / "tinyshakespeare"}


class Trial(msgspec.Struct, frozen=True):
    """One run; `script` is `task:NAME`, `example:FILE` or the name of a function of guard_scripts."""

    script: str
    strategy: str = "bsp"
    cluster: str = "uneven8"
    seed: int = 0
    options: dict[str, Any] = {}
    engine: str = "sim"
    settings: dict[str, Any] = {}
    planted: str = ""  # what was done to make it diverge; empty: it is healthy

    @property
    def name(self) -> str:
        """What tells it from all others."""
        told = " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                        for name, value in self.options.items())  # fmt: skip
        where = self.engine if self.engine == "alone" else f"{self.strategy} on {self.cluster}"
        where += " (processes)" * (self.engine == "local")
        return f"{self.script} {told}".strip() + f", {where}, seed {self.seed}"


class Course(msgspec.Struct, frozen=True):
    """What a run did: the losses of its versions with the rounds each stands for, and what the guard said, when."""

    losses: list[float]
    rounds: list[float]
    named_at: float | None  # in rounds
    refused_at: float | None  # when the first gradient that was not finite came
    text: str
    seconds: float  # of the processor


# -- running ----------------------------------------------------------------------------------------------------------


class Recorder:
    """A sink that keeps the losses of all versions, and the round at which the guard first spoke."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rounds: list[float] = []
        self.named_at: float | None = None
        self.refused_at: float | None = None
        self.text = ""
        self._workers, self._batch_size = 1, 1
        self._held: dict[int, tuple[float | None, int]] = {}

    def write(self, line: Line) -> None:
        if isinstance(line, Decision):
            self._decided(line)
        elif isinstance(line, Header):
            self._workers = line.workers
        elif isinstance(line, Observation) and line.what == "phase":
            self._batch_size = line.data["batch_size"]
        elif isinstance(line, Observation) and line.what == "warning":
            self.warned(line.data["text"])

    def warned(self, text: str) -> None:
        """Note what the guard says first."""
        if self.named_at is None and text.startswith("diverging"):
            self.named_at, self.text = math.fsum(self.rounds), text
            if "not finite" in text:
                self.refused_at = self.named_at

    def _decided(self, line: Decision) -> None:
        if isinstance(line.event, Pushed):
            self._held[line.event.push] = (line.event.loss, line.event.samples)
        for action in line.actions:
            if isinstance(action, Apply):
                found = [self._held.pop(push) for push in action.pushes]
                self._applied([(loss, samples) for loss, samples in found if loss is not None and samples])
            elif isinstance(action, Discard):
                self._held.pop(action.push, None)

    def _applied(self, known: Sequence[tuple[float, int]]) -> None:
        total = sum(samples for _, samples in known)
        if total:
            self.losses.append(sum(loss * samples for loss, samples in known) / total)
            self.rounds.append(total / (self._workers * self._batch_size))


def run(trial: Trial) -> Course:
    """Make one run; called in a process of the pool."""
    began, recorder = time.process_time(), Recorder()
    torch.set_num_threads(1)
    if trial.engine == "alone":
        _run_alone(trial, recorder)
    else:
        settings = {"evaluate_every": "off", **trial.settings, "seed": trial.seed}
        paceline.launch(
            script(trial.script), engine=trial.engine, scenario=machines(trial.cluster), sink=recorder,
            strategy=trial.strategy.replace("examples", str(EXAMPLES)),
            options=trial.options, data_dir=folder(trial.script), **settings,
        )  # fmt: skip
    spent = round(time.process_time() - began, 2)
    return Course(recorder.losses, recorder.rounds, recorder.named_at, recorder.refused_at, recorder.text, spent)


def _run_alone(trial: Trial, recorder: Recorder) -> None:
    """Run a script by itself in this process, which tells its warnings to a logger."""
    handler = logging.Handler()
    handler.emit = lambda record: recorder.warned(record.getMessage())  # type: ignore[method-assign]
    log, report = logging.getLogger("paceline"), paceline.Session.report

    def noting(session: paceline.Session, **numbers: Any) -> None:
        recorder.losses.append(float(torch.as_tensor(numbers["loss"]).detach()))
        recorder.rounds.append(1.0)
        report(session, **numbers)

    log.addHandler(handler)
    paceline.Session.report = noting  # type: ignore[method-assign]
    try:
        torch.manual_seed(trial.seed)
        script(trial.script)()
    finally:
        paceline.Session.report = report  # type: ignore[method-assign]
        log.removeHandler(handler)


def script(name: str) -> Callable[[], None]:
    """The function that every worker of a trial runs."""
    kind, _, rest = name.partition(":")
    if kind == "task":
        return tasks.get(rest)
    if kind == "example":
        return functools.partial(_run_example, rest)
    return getattr(guard_scripts, name)  # type: ignore[no-any-return]


def _run_example(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        found = runpy.run_path(str(EXAMPLES / name))
    if "train" in found:  # it is left to its caller when to run
        found["train"]()


def folder(name: str) -> Path | None:
    """The data folder of a task that needs one."""
    return FOLDERS.get(name.removeprefix("task:"))


def machines(name: str) -> Scenario:
    """A cluster by name: one worker, those that rates were tuned on, a file of the examples, or a built-in scenario."""
    if name == "one":
        base = scenario.load("even4")
        return msgspec.structs.replace(base, workers=base.workers[:1], name=name)
    if name.startswith("same"):
        base = scenario.load("uneven8")
        return msgspec.structs.replace(base, workers=base.workers[:1] * int(name[4:]), name=name)
    if name in KINDS:
        return cluster("digits", name)
    if name.endswith("4") and name[:-1] in KINDS:
        return cluster("linreg", name[:-1])
    if name.endswith(".toml"):
        return scenario.load(EXAMPLES / name)
    return scenario.load(name)


# -- healthy runs -----------------------------------------------------------------------------------------------------


def healthy() -> list[Trial]:
    """All runs that must not be called diverging."""
    return [*_tasks(), *_examples(), *_hard_losses(), *_alone_and_processes()]


def _tasks() -> Iterator[Trial]:
    """Tasks at their committed rates: every strategy, with and without momentum, on several clusters."""
    for kind in KINDS:
        for spec, lr in tasks.learning_rates("digits").items():
            yield Trial("task:digits", spec, kind, 3, {"lr": lr, "epochs": 15.0})
        for spec, lr in tasks.learning_rates("digits_without_momentum").items():
            yield Trial("task:digits", spec, kind, 4, {"lr": lr, "momentum": 0.0, "epochs": 15.0})
        for spec, lr in tasks.learning_rates("linreg").items():
            yield Trial("task:linreg", spec, f"{kind}4", 5, {"lr": lr, "epochs": 250.0})
    for place, spec in itertools.product(("interference8", "mixed_gpus12"), ("bsp", "asp", "dasp", "balanced")):
        lr = tasks.learning_rates("digits_without_momentum")[spec]
        yield Trial("task:digits", spec, place, 6, {"lr": lr, "momentum": 0.0, "epochs": 12.0})
    for spec, place in itertools.product(("bsp", "asp", "ssp"), ("one", "uneven8")):
        small = {"batch_size": 1, "lr": 0.02, "momentum": 0.0, "epochs": 0.3 if place == "one" else 2.0}
        yield Trial("task:digits", spec, place, 7, small)
    for name, spec in itertools.product(("factorize", "lasso", "logreg"), ("bsp", "ssp:staleness=3")):
        yield Trial(f"task:{name}", spec, "even4", 8, {"clocks": 30})
    for spec in ("bsp", "asp"):
        yield Trial("task:mnist", spec, "even4", 9, {"samples": 4000, "epochs": 3.0})
        yield Trial("task:shakespeare", spec, "even4", 9, {"samples": 2400, "width": 32, "context": 32, "epochs": 3.0})


def _examples() -> Iterator[Trial]:
    """The examples as they are."""
    for spec in ("bsp", "asp", "ssp", "dasp", "balanced", "fastest_k:k=3"):
        yield Trial("example:train.py", spec, "even4", 1, settings={"epochs": 6})
    for spec in ("bsp", "dasp", "balanced"):
        yield Trial("example:demo.py", spec, "uneven4.toml", 2, {"lr": tasks.learning_rate("digits", spec)})
    yield Trial("example:factors.py", "ssp:staleness=3", "uneven8", 3)
    yield Trial("task:digits", "examples/my_strategy.py:Damped", "even4", 4, {"lr": 0.1, "momentum": 0.0})


CENTRAL = ("bsp", "asp", "dasp", "balanced")


def _hard_losses() -> Iterator[Trial]:
    """Losses that are hard to judge, under few strategies each."""
    for number, (name, options) in enumerate(HARD):
        for spec in CENTRAL[number % 2 :: 2]:
            yield Trial(name, spec, "uneven8", 20 + number, options)
        yield Trial(name, "bsp", "one", 40 + number, options)
    for number, (spec, (name, options)) in enumerate(zip(PEERS, HARD[::4], strict=False)):
        yield Trial(name, spec, "even4", 60 + number, options)


HARD: list[tuple[str, dict[str, Any]]] = [
    ("classify", {"batch": 1, "lr": 0.01}),
    ("classify", {"batch": 1, "flipped": 0.3, "lr": 0.01, "rounds": 400}),
    ("classify", {"batch": 4, "dropout": 0.5, "smoothing": 0.1, "lr": 0.05}),
    ("classify", {"optimizer": "adam", "lr": 0.01}),
    ("classify", {"optimizer": "adamw", "lr": 0.003, "layers": 3}),
    ("classify", {"optimizer": "rmsprop", "lr": 0.003}),
    ("classify", {"optimizer": "adagrad", "lr": 0.05}),
    ("separable", {}),
    ("separable", {"optimizer": "sgd", "lr": 0.1, "batch": 1}),
    ("restarts", {}),
    ("restarts", {"period": 110, "lr": 0.3}),
    ("more_classes", {}),
    ("more_classes", {"optimizer": "adam", "lr": 0.01}),
    ("harder_inputs", {}),
    ("harder_inputs", {"noise": 0.55}),
    ("finetune", {"lr": 0.01}),
    ("characters", {}),
    ("noise_only", {}),
    ("noise_only", {"batch": 4}),
    ("exact_fit", {}),
    ("exact_fit", {"optimizer": "adam", "lr": 0.02}),
    ("heavy_tails", {}),
    ("likelihood", {}),
    ("likelihood", {"batch": 4, "lr": 0.001}),
    ("elbo", {}),
    ("elbo", {"annealed": True}),
    ("critic", {}),
    ("rewards", {}),
    ("rewards", {"batch": 1}),
]
PEERS = ("gossip", "adaptive_gossip", "elastic", "adaptive_elastic", "local_sgd")


def _alone_and_processes() -> Iterator[Trial]:
    """Scripts by themselves, and on real processes."""
    for name in ("example:train.py", "task:digits", "noise_only", "likelihood", "restarts", "more_classes"):
        yield Trial(name, engine="alone", cluster="one")
    yield Trial("example:train.py", "asp", "even4", engine="local", settings={"epochs": 2})


# -- planted divergences ----------------------------------------------------------------------------------------------


def planted() -> list[Trial]:
    """All runs that must be named."""
    return [
        Trial("task:digits", "bsp", "equal", 1, {"lr": 40.0, "epochs": 15.0}, planted="100 times the rate"),
        Trial("task:digits", "balanced", "uneven8", 2, {"lr": 8.0, "epochs": 15.0}, planted="20 times the rate"),
        Trial("task:digits", "dasp", "uneven8", 3, {"lr": 20.0, "epochs": 15.0}, planted="100 times the rate"),
        Trial("task:digits", "k_async:k=4", "uneven8", 4, {"lr": 10.0, "epochs": 15.0}, planted="100 times the rate"),
        Trial("task:digits", "asp", "same32", 5, {"lr": 0.8, "epochs": 50.0}, planted="staleness of 32 workers"),
        Trial("task:digits", "asp:whole_steps=true", "same24", 6, {"lr": 0.4, "epochs": 50.0},
              planted="staleness of 24 workers, 8 times the rate"),
        Trial("task:linreg", "bsp", "equal4", 7, {"lr": 0.001, "epochs": 200.0}, planted="twice the rate"),
        Trial("task:linreg", "asp", "uneven4", 8, {"lr": 0.001, "epochs": 200.0}, planted="twice the rate"),
        Trial("task:linreg", "bsp", "equal4", 9, {"lr": 0.00067, "epochs": 200.0}, planted="just above the limit"),
        Trial("curvature", "ssp:staleness=8", "uneven8", 10, {"lr": 4.0, "rounds": 200}, planted="5 times the rate"),
        Trial("curvature", "bsp", "even4", 11, {"lr": 40.0, "clip": 0.5, "rounds": 200},
              planted="50 times the rate, clipped: oscillates"),
        Trial("classify", "bsp", "even4", 12, {"optimizer": "adam", "lr": 1.0}, planted="100 times the rate"),
        Trial("classify", "asp", "uneven8", 13, {"optimizer": "adam", "lr": 0.001, "growth": 1.03, "rounds": 350},
              planted="a rate that grows by 3 % a round"),
        Trial("classify", "local_sgd", "even4", 14, {"lr": 10.0}, planted="100 times the rate"),
        Trial("restarts", "bsp", "even4", 15, {"lr": 10.0}, planted="50 times the rate"),
        Trial("finetune", "bsp", "even4", 16, {"lr": 0.6}, planted="60 times the rate"),
        Trial("characters", "bsp", "even4", 17, {"lr": 1.0}, planted="100 times the rate"),
        Trial("likelihood", "bsp", "even4", 18, {"growth": 1.02, "clip": 1.0, "rounds": 450},
              planted="a rate that grows by 2 % a round"),
        Trial("root", "bsp", "even4", 19, planted="not a number after a while"),
        Trial("hasty", engine="alone", cluster="one", planted="100 times the rate"),
    ]  # fmt: skip


# -- judging ----------------------------------------------------------------------------------------------------------


def by_round(course: Course) -> list[float]:
    """The mean loss of each round."""
    found, loss, rounds = list[float](), 0.0, 0.0
    for value, part in zip(course.losses, course.rounds, strict=True):
        loss, rounds = loss + value * part, rounds + part
        if rounds > 1 - 1e-9:
            found.append(loss / rounds)
            loss = rounds = 0.0
    return found


def plain_at(course: Course) -> float | None:
    """Return the round at which a run is plainly diverging; None if it never is.

    That is the first round at which the mean of the last ten rounds is either twice the first loss (and above it by
    half of what had been gained), or twice the best such mean with three quarters of what had been gained lost again
    (not for losses below zero), and from which it does not recover for fifty rounds: half way to the best, and a tenth
    below the first. A loss that is not a number is plain at once.
    """
    losses = by_round(course)
    broken = next((number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if course.refused_at is not None:
        broken = min(course.refused_at, broken or math.inf)
    finite = losses[: math.floor(broken)] if broken is not None else losses
    means = [statistics.fmean(finite[max(0, number - AVERAGED) : number]) for number in range(1, len(finite) + 1)]
    first = best = finite[0] if finite else 0.0
    for number, mean in enumerate(means, 1):
        best = min(best, mean) if number >= AVERAGED else best
        gained = first - best
        exploded = mean > first + max(abs(first), gained / 2)
        if exploded or (best >= 0 and mean > max(2 * best, best + 0.75 * gained)):
            recovered = min(first - gained / 2, first - abs(first) / 10)
            if all(later > recovered for later in means[number : number + PATIENCE]):
                return float(number)
    return broken


def named_by_earlier_rule(course: Course) -> float | None:
    """The round at which the rule before this one spoke: above four times its best for fifty rounds."""
    first, opening, mean, known, bad, at, best = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.inf
    for loss, rounds in zip(course.losses, course.rounds, strict=True):
        at += rounds
        if not math.isfinite(loss):
            return at
        if opening < 1:
            first, opening = first + loss * rounds, opening + rounds
            best = first / opening
            continue
        share = 1 - math.exp(-rounds / AVERAGED)
        mean, known = mean + share * (loss - mean), known + share * (1 - known)
        best = min(best, mean / known) if known >= 0.5 else best
        limit = 4 * best if best > 0 else best + 4
        harmless = mean / known <= limit or abs(mean / known) <= 0.01 * abs(first / opening)
        bad = 0.0 if harmless else bad + rounds
        if bad >= PATIENCE:
            return at
    return course.refused_at
