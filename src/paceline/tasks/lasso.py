"""Lasso by coordinate descent on two tables: each worker has a share of the features, all share the residual.

A worker cycles through its features. Each clock reads the residual, minimizes
`|residual|^2 / (2 n) + lam |weights|_1` along the next features one after the other, and adds the changes. Staleness
costs what others have changed in the residual meanwhile. Without a data folder the problem is made as in the SSP
publication, smaller: independent normal features, of which a few matter. With one it is a9a (`a9a.gz`), its columns
scaled to unit length times sqrt(n). Evaluates `loss`, that objective, and `nonzeros`.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import paceline
from paceline.tasks import svmlight
from paceline.tasks.inputs import require_file, within

Numbers = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


class Problem(NamedTuple):
    """Columns of length sqrt(n), each contiguous in memory, and the target that they predict."""

    columns: Numbers  # features x samples
    target: Numbers

    @property
    def features(self) -> int:
        return len(self.columns)

    @property
    def samples(self) -> int:
        return len(self.target)


def scaled(matrix: Numbers, target: Numbers) -> Problem:
    """Scale every column to length sqrt(n) and leave out empty ones."""
    lengths = np.sqrt((matrix**2).sum(axis=0))
    kept = lengths > 0
    columns = np.ascontiguousarray((matrix[:, kept] / lengths[kept]).T) * len(target) ** 0.5
    return Problem(columns, target)


def make(samples: int, features: int, seed: int) -> Problem:
    """Make independent normal features; one in fifty has a weight, and the noise is a tenth of the signal."""
    chance = np.random.default_rng(seed)
    matrix = chance.normal(size=(samples, features))
    weights = np.where(chance.random(features) < 0.02, chance.normal(size=features), 0.0)
    weights[0] = 1.0
    clean = matrix @ weights
    return scaled(matrix, clean + 0.1 * clean.std() * chance.normal(size=samples))


def load(folder: Path) -> Problem:
    """Read a9a, with its labels as the numbers to predict."""
    examples = svmlight.load(require_file(folder, "a9a.gz", "a9a"))
    return scaled(examples.dense(), examples.label)


def descend(problem: Problem, residual: Numbers, weights: Numbers, features: Whole, lam: float) -> Numbers:
    """Minimize along these features one after the other; update `residual` and return the changes of the weights."""
    changes = np.zeros(len(features))
    for place, feature in enumerate(features):
        column = problem.columns[feature]
        pull = weights[place] + column @ residual / problem.samples
        wanted = np.sign(pull) * max(abs(pull) - lam, 0.0)
        change = wanted - weights[place]
        if change:
            residual -= change * column
            changes[place] = change
    return changes


def objective(problem: Problem, weights: Numbers, lam: float) -> float:
    """Return the objective that is minimized."""
    residual = problem.target - weights @ problem.columns
    return float(residual @ residual / (2 * problem.samples) + lam * np.abs(weights).sum())


def train() -> None:
    """Entry point of `paceline run --task lasso`."""
    session = paceline.init()
    samples = within("samples", session.option("samples", 500), low=2)
    features = within("features", session.option("features", 1000), low=1)
    lam = within("lam", session.option("lam", 0.05), low=0.0)
    block = within("block", session.option("block", 20), low=1)  # features per clock
    clocks = within("clocks", session.option("clocks", 200), low=1)
    data_seed = within("data_seed", session.option("data_seed", 0), low=0)

    folder = session.data_dir
    key = f"lasso-{folder}-{samples}-{features}-{data_seed}"
    problem = session.once(key, lambda: load(folder) if folder else make(samples, features, data_seed))
    weights = session.table("weights", problem.features, 1, dtype="float64")
    residual = session.table("residual", problem.samples, 1, dtype="float64", init=problem.target[:, None])
    session.measure(
        lambda tables: {
            "loss": objective(problem, tables["weights"][:, 0], lam),
            "nonzeros": float(np.count_nonzero(tables["weights"])),
        }
    )
    while session.clocks < clocks:
        mine = session.share(problem.features)
        chosen = np.unique(mine[(session.clocks * block + np.arange(min(block, len(mine)))) % max(1, len(mine))])
        before = residual.get()[:, 0]
        after = before.copy()
        weights.inc(chosen, descend(problem, after, weights.get(chosen)[:, 0], chosen, lam)[:, None])
        residual.inc(None, (after - before)[:, None])
        if not session.clock(work=max(1, len(chosen))):
            break
