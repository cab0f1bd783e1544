"""Sparse logistic regression on a table of weights: a clock reads only the weights of its examples' features.

A worker has its share of the examples and takes some at random in each clock. Without a data folder the examples are
made; with one they are a9a's (`a9a.gz`, and `a9a.t.gz` to test on). Evaluates `loss` (with the regularization) on the
training examples and `accuracy` on held-out ones.
"""

from pathlib import Path

import numpy as np

import paceline
from paceline.tasks import svmlight
from paceline.tasks.inputs import require_file, within
from paceline.tasks.svmlight import Examples, Numbers, Whole

HELD_OUT = 5  # one made example in this many


def load(folder: Path) -> tuple[Examples, Examples]:
    """Read the examples to train on and those to test on."""
    train = svmlight.load(require_file(folder, "a9a.gz", "a9a"))
    return train, svmlight.load(require_file(folder, "a9a.t.gz", "a9a.t"), train.features)


def make(count: int, features: int, seed: int) -> tuple[Examples, Examples]:
    """Make examples; return those to train on and those held out."""
    whole = svmlight.make(count, features, min(10, features), seed)
    numbers = np.arange(count)
    return whole.chosen(numbers[numbers % HELD_OUT != 0]), whole.chosen(numbers[numbers % HELD_OUT == 0])


def slopes(part: Examples, weights: Numbers) -> Numbers:
    """Return the logistic loss's derivative by each example's score; `weights` has one number per entry."""
    return np.asarray(-part.label / (1 + np.exp(np.clip(part.label * part.times(weights), -50, 50))))


def gradient(part: Examples, known: Whole, weights: Numbers, reg: float) -> Numbers:
    """Return the mean gradient for the examples' features (`known`, sorted) at those features' weights."""
    place = np.searchsorted(known, part.feature)
    by_entry = part.value * slopes(part, weights[place])[part.row]
    return np.bincount(place, weights=by_entry, minlength=len(known)) / part.rows + reg * weights


def score(examples: Examples, weights: Numbers, reg: float) -> tuple[float, float]:
    """Return the mean loss with the regularization, and the share of right labels."""
    margin = examples.label * examples.times(weights[examples.feature])
    loss = float(np.mean(np.logaddexp(0, -margin))) + 0.5 * reg * float(weights @ weights)
    return loss, float(np.mean(margin > 0))


def train() -> None:
    """Entry point of `paceline run --task logreg`."""
    session = paceline.init()
    examples = within("examples", session.option("examples", 4000), low=HELD_OUT)
    features = within("features", session.option("features", 200), low=1)
    lr = session.option("lr", 0.1)  # applied to each worker's mean gradient
    reg = within("reg", session.option("reg", 1e-4), low=0.0)
    batch = within("batch", session.option("batch", 100), low=1)  # examples per clock
    clocks = within("clocks", session.option("clocks", 200), low=1)
    data_seed = within("data_seed", session.option("data_seed", 0), low=0)

    folder = session.data_dir
    key = f"logreg-{folder}-{examples}-{features}-{data_seed}"
    data, held_out = session.once(key, lambda: load(folder) if folder else make(examples, features, data_seed))
    table = session.table("weights", data.features, 1, dtype="float64")

    def evaluate(tables: dict[str, Numbers]) -> dict[str, float]:
        weights = tables["weights"][:, 0]
        return {"loss": score(data, weights, reg)[0], "accuracy": score(held_out, weights, reg)[1]}

    session.measure(evaluate)
    while session.clocks < clocks:
        mine = session.share(data.rows)
        part = data.chosen(np.random.choice(mine, batch) if len(mine) else mine)
        if part.rows:
            known = np.unique(part.feature)
            table.inc(known, -lr * gradient(part, known, table.get(known)[:, 0], reg)[:, None])
        if not session.clock(work=max(1, part.rows)):
            break
