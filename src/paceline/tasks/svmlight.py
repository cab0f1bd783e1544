"""Sparse examples in LIBSVM's format, and sums over them."""

import gzip
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError

Numbers = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


class Examples(NamedTuple):
    """Rows of a sparse matrix with a label each: row i has the entries from starts[i] to starts[i + 1]."""

    starts: Whole
    feature: Whole
    value: Numbers
    label: Numbers  # -1 or 1, or any number to predict
    features: int

    @property
    def rows(self) -> int:
        return len(self.label)

    def chosen(self, rows: Whole) -> "Examples":
        """Return these rows."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        entries = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], lengths)
        return Examples(starts, self.feature[entries], self.value[entries], self.label[rows], self.features)

    @property
    def row(self) -> Whole:
        """The row of each entry."""
        return np.repeat(np.arange(self.rows), np.diff(self.starts))

    def times(self, weights: Numbers) -> Numbers:
        """Return each row's product with `weights`, one number per entry."""
        return np.asarray(np.bincount(self.row, weights=self.value * weights, minlength=self.rows), dtype=np.float64)

    def dense(self) -> Numbers:
        """Return the dense matrix."""
        matrix = np.zeros((self.rows, self.features))
        np.add.at(matrix, (self.row, self.feature), self.value)
        return matrix


def load(path: Path, features: int | None = None) -> Examples:
    """Read a file, plain or compressed; the file numbers features from 1."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    labels, starts, feature, value = [], [0], [], []
    try:
        with opener(path, "rt") as file:
            for line_number, line in enumerate(file, 1):
                label, *entries = line.split()
                labels.append(float(label))
                for entry in entries:
                    number, _, amount = entry.partition(":")
                    if int(number) < 1:
                        raise DataError(
                            f"{path}, line {line_number}: feature numbers must be >= 1, not {int(number)}; number "
                            "features from 1"
                        )
                    feature.append(int(number) - 1)
                    value.append(float(amount))
                starts.append(len(feature))
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is cut short or damaged ({error}); fetch it again") from error
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is not in LIBSVM's format (label feature:value ...): {error}") from error
    most = max(feature, default=-1) + 1
    if features is not None and most > features:
        raise DataError(f"{path} has {most} features, {features} were expected")
    return Examples(np.array(starts), np.array(feature), np.array(value), np.array(labels), features or most)


def make(count: int, features: int, per_row: int, seed: int) -> Examples:
    """Make random sparse rows; a random weight per feature decides the labels, of which a tenth is flipped."""
    chance = np.random.default_rng(seed)
    feature = np.sort(chance.random((count, features)).argpartition(per_row - 1, axis=1)[:, :per_row], axis=1).ravel()
    weights = chance.normal(size=features)
    value = np.ones(len(feature))
    starts = np.arange(count + 1) * per_row
    score = weights[feature].reshape(count, per_row).sum(axis=1)
    label = np.where((score > np.median(score)) ^ (chance.random(count) < 0.1), 1.0, -1.0)
    return Examples(starts, feature, value, label, features)
