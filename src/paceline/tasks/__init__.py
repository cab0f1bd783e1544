"""Built-in workloads, each a short script on the public API: `paceline run --task digits`.

The names of this module are public, and so are data, model and score of the digits (`tasks.digits`, `tasks.scoring`).

A task's module is imported when it is asked for, so listing the tasks loads neither torch nor scikit-learn.
"""

import importlib
from collections.abc import Callable

from paceline.core.errors import OptionError
from paceline.core.values import nearest, shown
from paceline.tasks.tuned import learning_rate, learning_rates

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


def names() -> list[str]:
    """Every task, sorted."""
    return sorted(_SUMMARIES)


def describe(name: str) -> str:
    """What the task trains, in one line."""
    _require_known(name)
    return _SUMMARIES[name]


def get(name: str) -> Callable[[], None]:
    """The task's training function, for `paceline.launch` and `--task`."""
    _require_known(name)
    train: Callable[[], None] = importlib.import_module(f"paceline.tasks.{name}").train
    return train


def _require_known(name: str) -> None:
    if name not in _SUMMARIES:
        raise OptionError(f"there is no task {shown(name)}; {nearest(name, names())}")
