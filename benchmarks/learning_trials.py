"""What it means that a strategy learns: tasks, clusters, targets and limits of the trials.

The tuner and the tests run the same trials, so a learning rate is tested on what it was tuned for. Both clusters of a
task have the same number of workers, hence the same samples per round, and a learning rate means the same on both.
Both tasks need no files.
"""

import functools
from typing import Literal

import msgspec

import paceline
from paceline import scenario
from paceline.scenario import Scenario
from paceline.strategies import describe, machine_class
from paceline.tasks import digits, get, linreg

Kind = Literal["equal", "uneven"]
KINDS: tuple[Kind, ...] = ("equal", "uneven")
FIRST_ERROR_SHARE = 1e-4  # what linreg has to reach, of its error at version 0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One task's conditions; a run that misses the target ends with its epochs."""

    goal: str  # the target, in words
    samples: int  # of an epoch
    speeds: dict[Kind, tuple[float, ...]]
    options: dict[str, str]  # of the strategies whose defaults do not suit a run as short as this
    momenta: tuple[float | None, ...]  # that are tried, the task's own first; None: the task has no momentum
    epochs: int
    evaluate_every: str


TRIALS = {
    "digits": Trial(
        goal="held-out accuracy 0.93",
        samples=digits.TRAIN_SAMPLES,
        speeds={"equal": (1.0,) * 8, "uneven": (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25)},
        options={
            "fastest_k": "k=6",
            "k_async": "k=4",
            "adaptive_k": "start=2,step=2,burn_in=50",
            "adaptive_k_load": "burn_in=50,window=25",
        },
        momenta=(0.9, 0.0),
        epochs=40,  # three times what the slowest tuned run takes: who is not there by then does not get there
        evaluate_every="0.1e",
    ),
    "linreg": Trial(
        goal="1e-4 of the first error",
        samples=2000,
        speeds={"equal": (1.0,) * 4, "uneven": (1.0, 1.0, 0.5, 0.25)},
        options={
            "fastest_k": "k=3",
            "k_async": "k=2",
            "adaptive_k": "burn_in=50",
            "adaptive_k_load": "burn_in=50,window=25",
        },
        momenta=(None,),
        epochs=600,  # one is a round of all workers; a tuned run takes up to 300
        evaluate_every="1e",
    ),
}


def strategy_spec(task: str, name: str) -> str:
    """The strategy as it is tried on the task, `name` or `name:option=value,...`."""
    options = TRIALS[task].options.get(name)
    return f"{name}:{options}" if options else name


class Variant(msgspec.Struct, frozen=True):
    """A strategy as it is tried: with its options, and with or without momentum."""

    spec: str
    momentum: float | None


def variants(task: str, name: str) -> list[Variant]:
    """All that are tuned of a strategy; every strategy is tried with and without momentum.

    Those that can make a whole step of each push are tried in this form too. Without momentum the two forms are the
    same arithmetic: the weighted gradient is added.
    """
    plain = strategy_spec(task, name)
    found = []
    for momentum in TRIALS[task].momenta:
        found.append(Variant(plain, momentum))
        if momentum and any(option.name == "whole_steps" for option in describe(machine_class(name)).options):
            found.append(Variant(f"{plain}{',' if ':' in plain else ':'}whole_steps=true", momentum))
    return found


def cluster(task: str, kind: Kind) -> Scenario:
    """Machines, network and jitter of the built-in `uneven8` with the trial's speeds; digits on `uneven` is uneven8."""
    base = scenario.load("uneven8")
    worker = base.workers[0]
    workers = tuple(msgspec.structs.replace(worker, speed=speed) for speed in TRIALS[task].speeds[kind])
    return msgspec.structs.replace(base, workers=workers, name=f"{kind}{len(workers)}")


@functools.cache
def target(task: str) -> str:
    """Held-out accuracy 0.93, or an error of 1e-4 of its first value."""
    if task == "digits":
        return "accuracy>=0.93"
    x, y = linreg.make_data(samples=TRIALS[task].samples, features=100, noise=1.0, seed=0).tensors
    first = float(linreg.half_mean_square(x @ linreg.best_weights(x, y)))  # all weights are 0 at the start
    return f"error<={FIRST_ERROR_SHARE * first!r}"


def attempt(
    task: str, kind: Kind, spec: str, lr: float, seed: int, epochs: int | None = None, momentum: float | None = None
) -> paceline.Run:
    """One run, in virtual time; it learned if it ended with `target`. `momentum` None: the task's own."""
    trial = TRIALS[task]
    options = {"lr": lr} if momentum is None else {"lr": lr, "momentum": momentum}
    return paceline.launch(
        get(task),
        engine="sim",
        scenario=cluster(task, kind),
        strategy=spec,
        target=target(task),
        options=options,
        evaluate_every=trial.evaluate_every,
        seed=seed,
        epochs=epochs or trial.epochs,
    )
