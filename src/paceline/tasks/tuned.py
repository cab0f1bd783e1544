"""Learning rates tuned per strategy, read from `learning_rates.toml` beside this file."""

import functools
import tomllib
from importlib import resources

from paceline.core.errors import OptionError


@functools.cache
def learning_rates(task: str) -> dict[str, float]:
    """By strategy as it was tuned, options included; empty for a task that was not."""
    text = (resources.files("paceline.tasks") / "learning_rates.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text).get(task, {}))


def learning_rate(task: str, strategy: str) -> float:
    """The tuned rate of a strategy, given as `name` or `name:option=value`; its name alone decides."""
    name = strategy.partition(":")[0].strip()
    for spec, rate in learning_rates(task).items():
        if spec.partition(":")[0] == name:
            return rate
    tuned = ", ".join(spec.partition(":")[0] for spec in learning_rates(task)) or "none"
    raise OptionError(
        f"no learning rate was tuned for {name!r} on task {task!r} (tuned: {tuned}); "
        "give --set lr=VALUE, or tune one: python benchmarks/tune_learning_rates.py"
    )
