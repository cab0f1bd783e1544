"""Built-in workloads, each a short script on the public API: `paceline run --task digits`.

The names of this module are public, and so are `tasks.digits` and `tasks.classification`: data, model and score of the
digits.

A task's module is imported on first use, so listing the tasks loads neither torch nor scikit-learn.
"""

import functools
import importlib
import tomllib
from collections.abc import Callable
from importlib import resources

from paceline.core.errors import OptionError
from paceline.core.values import nearest, shown

__all__ = ["describe", "get", "learning_rate", "learning_rates", "names"]

_SUMMARIES = {
    "cifar": "CIFAR-10 with a small convolutional net and momentum, from a folder of JPEG coefficients (--data-dir)",
    "digits": "8x8 handwritten digits with a small MLP; bundled with scikit-learn, needs no data folder",
    "factorize": "matrix factorization on tables; made ratings, or Jester's (--data-dir)",
    "lasso": "Lasso by coordinate descent on tables; a made problem, or a9a (--data-dir)",
    "linreg": "linear regression of the fastest-k publication on made data; needs no data folder",
    "logreg": "sparse logistic regression on a table; made examples, or a9a (--data-dir)",
    "mnist": "MNIST with an MLP or a small CNN, from idx files (--data-dir)",
    "shakespeare": "a small character transformer with AdamW, from input.txt (--data-dir)",
    "topics": "a topic model by Gibbs sampling on tables; made documents, or the AP corpus (--data-dir)",
}


@functools.cache
def learning_rates(task: str) -> dict[str, float]:
    """Return the tuned rate of each strategy, options included; empty for a task that was not tuned."""
    text = (resources.files("paceline.tasks") / "learning_rates.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text).get(task, {}))


def learning_rate(task: str, strategy: str) -> float:
    """Return the tuned rate of a strategy, given as `name` or `name:option=value`; only the name matters."""
    name = strategy.partition(":")[0].strip()
    for spec, rate in learning_rates(task).items():
        if spec.partition(":")[0] == name:
            return rate
    tuned = ", ".join(spec.partition(":")[0] for spec in learning_rates(task)) or "none"
    raise OptionError(
        f"no learning rate was tuned for {name!r} on task {task!r} (tuned: {tuned}); "
        "give --set lr=VALUE, or tune one: python benchmarks/tune_learning_rates.py"
    )


def names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_SUMMARIES)


def describe(name: str) -> str:
    """Return what the task trains, in one line."""
    _require_known(name)
    return _SUMMARIES[name]


def get(name: str) -> Callable[[], None]:
    """Return the task's training function, for `paceline.launch` and `--task`."""
    _require_known(name)
    train: Callable[[], None] = importlib.import_module(f"paceline.tasks.{name}").train
    return train


def _require_known(name: str) -> None:
    if name not in _SUMMARIES:
        raise OptionError(f"there is no task {shown(name)}; {nearest(name, names())}")
