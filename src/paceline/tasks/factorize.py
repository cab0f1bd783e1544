"""Matrix factorization by stochastic gradient descent on two tables, as in the SSP publication (Ho et al., NIPS 2013).

The product of a row of `users` and a row of `items` predicts a user's rating of an item. A worker has the ratings of
its share of the users; each clock takes some of them at random. Without a data folder the ratings are made from random
factors plus noise; with one they are Jester's (`jester-data-1.zip`). Evaluates `loss`, the mean squared error over the
training ratings plus the regularization, and `rmse` on held-out ratings.
"""

import csv
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import paceline
from paceline.core.errors import DataError
from paceline.tasks.inputs import require_file, within

Matrix = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
JESTER = "jester-data-1.zip"
NOT_RATED = 99.0
HELD_OUT = 20  # one rating in this many


class Ratings(NamedTuple):
    """Ratings sorted by user, so that a range of users is a range of ratings."""

    user: Whole
    item: Whole
    value: Matrix
    users: int
    items: int

    def of_users(self, first: int, last: int) -> tuple[int, int]:
        """Return where the ratings of these users begin and end."""
        begin, end = np.searchsorted(self.user, [first, last + 1])
        return int(begin), int(end)


def make_ratings(users: int, items: int, rank: int, per_user: int, seed: int) -> Ratings:
    """Make ratings from random factors of that rank plus noise; the same for equal arguments."""
    chance = np.random.default_rng(seed)
    left, right = chance.normal(size=(users, rank)), chance.normal(size=(items, rank))
    user = np.repeat(np.arange(users), per_user)
    item = chance.integers(0, items, len(user))
    value = (left[user] * right[item]).sum(axis=1) / rank**0.5 + 0.1 * chance.normal(size=len(user))
    return Ratings(user, item, value.astype(np.float32), users, items)


def load_jester(folder: Path) -> Ratings:
    """Read ratings from -10 to 10 and subtract their mean."""
    path = require_file(folder, JESTER)
    try:
        with zipfile.ZipFile(path) as archive, archive.open("jester-data-1.csv") as file:
            rows = csv.reader(io.TextIOWrapper(file, "ascii"))
            table = np.array([row[1:] for row in rows], dtype=np.float32)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} does not hold Jester's ratings (rows of 101 numbers): {error}") from error
    user, item = np.nonzero(table != NOT_RATED)
    value = table[user, item]
    return Ratings(user, item, value - value.mean(), *table.shape)


def split(ratings: Ratings) -> tuple[Ratings, Ratings]:
    """Split into ratings to train on and held-out ratings."""
    held = np.random.default_rng(0).random(len(ratings.user)) < 1 / HELD_OUT
    parts = (Ratings(ratings.user[m], ratings.item[m], ratings.value[m], *ratings[3:]) for m in (~held, held))
    return next(parts), next(parts)


def gradient(left: Matrix, right: Matrix, value: Matrix, reg: float) -> tuple[Matrix, Matrix]:
    """Return the gradient by both factors of each rating's half squared error and its share of regularization."""
    error = (left * right).sum(axis=1) - value
    return error[:, None] * right + reg * left, error[:, None] * left + reg * right


def objective(left: Matrix, right: Matrix, ratings: Ratings, reg: float) -> float:
    """Return the mean over the ratings of the squared error plus the regularization."""
    a, b = left[ratings.user], right[ratings.item]
    error = (a * b).sum(axis=1) - ratings.value
    return float(np.mean(error**2 + reg * ((a**2).sum(axis=1) + (b**2).sum(axis=1))))


def rmse(left: Matrix, right: Matrix, ratings: Ratings) -> float:
    """Return the root of the mean squared error."""
    error = (left[ratings.user] * right[ratings.item]).sum(axis=1) - ratings.value
    return float(np.sqrt(np.mean(error**2)))


def first_factors(rows: int, rank: int, seed: int) -> Matrix:
    """Return small random factors to start from."""
    chance = np.random.default_rng(seed)
    return (chance.normal(size=(rows, rank)) / rank).astype(np.float32)


def train() -> None:
    """Entry point of `paceline run --task factorize`."""
    session = paceline.init()
    rank = within("rank", session.option("rank", 8), low=1)
    users = within("users", session.option("users", 1000), low=1)
    items = within("items", session.option("items", 200), low=1)
    per_user = within("per_user", session.option("per_user", 40), low=1)
    lr = session.option("lr", 0.05)
    reg = within("reg", session.option("reg", 0.01), low=0.0)
    batch = within("batch", session.option("batch", 200), low=1)  # ratings per clock
    clocks = within("clocks", session.option("clocks", 300), low=1)
    data_seed = within("data_seed", session.option("data_seed", 0), low=0)

    def load() -> tuple[Ratings, Ratings]:
        if session.data_dir is not None:
            return split(load_jester(session.data_dir))
        return split(make_ratings(users, items, rank, per_user, data_seed))

    key = f"factorize-{session.data_dir}-{users}-{items}-{rank}-{per_user}-{data_seed}"
    ratings, held_out = session.once(key, load)
    left = session.table("users", ratings.users, rank, init=first_factors(ratings.users, rank, data_seed))
    right = session.table("items", ratings.items, rank, init=first_factors(ratings.items, rank, data_seed + 1))

    def evaluate(tables: dict[str, Matrix]) -> dict[str, float]:
        loss = objective(tables["users"], tables["items"], ratings, reg)
        return {"loss": loss, "rmse": rmse(tables["users"], tables["items"], held_out)}

    session.measure(evaluate)
    while session.clocks < clocks:
        mine = session.share(ratings.users)
        begin, end = ratings.of_users(int(mine[0]), int(mine[-1])) if len(mine) else (0, 0)
        chosen = np.random.randint(begin, end, batch) if end > begin else np.empty(0, dtype=np.int64)
        user, item = ratings.user[chosen], ratings.item[chosen]
        by_user, by_item = gradient(left.get(user), right.get(item), ratings.value[chosen], reg)
        left.inc(user, np.float32(-lr) * by_user)
        right.inc(item, np.float32(-lr) * by_item)
        if not session.clock(work=max(1, len(chosen))):
            break
