"""`paceline.compare(...)`: a comparison of a function, from Python, with one run after the other in this process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline import engines
from paceline.comparison.outcome import Comparison, Trial
from paceline.comparison.trials import carried_out, option_sets, summary
from paceline.core.errors import OptionError
from paceline.core.scenario.file import Scenario
from paceline.core.settings import EngineName, Every, Target, Unset, unset
from paceline.launching import launch
from paceline.records.wait_attribution import WaitAttribution


class Calls:
    """Makes each run by a call of `launch`."""

    at_once = 1

    def __init__(self, train: Callable[[], None], options: Mapping[str, str | float], settings: dict[str, Any]) -> None:
        self._train, self._options, self._settings = train, options, settings

    def run(self, trial: Trial) -> Trial:
        """Make this run."""
        waits = WaitAttribution()
        options = {**self._options, **trial.options}
        settings = {**self._settings, "strategy": trial.strategy, "seed": trial.seed, "options": options}
        run = launch(self._train, sink=waits, **settings)
        return msgspec.structs.replace(trial, report=run.summary, waited_for=waits.culprits())

    def stop(self) -> None:
        """Do nothing: an exception has ended the only run that there is at a time."""


def compare(
    train: Callable[[], None],
    strategies: Sequence[str],
    *,
    seeds: int = 3,
    tune: Mapping[str, Sequence[str | float]] | None = None,
    engine: EngineName | None = None,
    scenario: Scenario | str | Path | None = unset.scenario,
    workers: int | None = unset.workers,
    seed: int = 0,
    batch_size: int | None = unset.batch_size,
    epochs: float | None = unset.epochs,
    max_versions: int | None = unset.max_versions,
    max_seconds: float | None = unset.max_seconds,
    target: Target | str | None = unset.target,
    evaluate_every: Every | str | None = unset.evaluate_every,
    options: Mapping[str, str | float] | None = None,
    data_dir: Path | str | None = unset.data_dir,
    threads: int | None = unset.threads,
    runs_dir: Path | str | None = unset.runs_dir,
) -> Comparison:
    """Train `train` under each of these strategies with `seeds` seeds, and return them side by side.

    With `tune={"lr": [0.05, 0.1], ...}`, values for `session.option`, each strategy first tries every combination with
    `seed`, and is judged with its best one and the seeds after it. The other settings are those of `launch`; without an
    engine it is the simulator.
    """
    arguments = locals()  # the parameters and nothing else, since this is the first line
    own = ("train", "strategies", "seeds", "tune", "seed", "options")
    settings = {name: value for name, value in arguments.items() if name not in own and not isinstance(value, Unset)}
    tuned = {name: [str(value) for value in values] for name, values in (tune or {}).items()}
    if seeds < 1:
        raise OptionError(f"seeds: must be >= 1, not {seeds}")
    if not all(tuned.values()):
        raise OptionError(f"tune: {next(name for name, values in tuned.items() if not values)} has no values")
    if not strategies or (len(strategies) < 2 and len(option_sets(tuned)) < 2):
        raise OptionError(f"strategies: {list(strategies)!r} are fewer than two; give two to compare, or one and tune")
    settings["engine"] = engine or engines.simulator()
    calls = Calls(train, options or {}, settings)
    return summary(carried_out(list(dict.fromkeys(strategies)), tuned, seed, seeds, calls, lambda *_: None))
