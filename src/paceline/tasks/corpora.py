"""Documents as the words that they are made of."""

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.tasks.folders import require_file

Whole = npt.NDArray[np.int64]


class Corpus(NamedTuple):
    """Tokens by document: document d has the words from starts[d] to starts[d + 1]."""

    words: Whole
    starts: Whole
    vocabulary: int

    @property
    def documents(self) -> int:
        return len(self.starts) - 1


def make_corpus(documents: int, vocabulary: int, topics: int, length: int, seed: int) -> Corpus:
    """Documents of a random model of so many topics; the same for equal arguments."""
    chance = np.random.default_rng(seed)
    of_topic = chance.dirichlet(np.full(vocabulary, 0.05), topics)
    mixtures = chance.dirichlet(np.full(topics, 0.2), documents)
    words = [chance.choice(vocabulary, length, p=mixture @ of_topic) for mixture in mixtures]
    return Corpus(np.concatenate(words), np.arange(documents + 1) * length, vocabulary)


def load_corpus(folder: Path) -> Corpus:
    """Lines of lda-c: how many distinct words, then word:count for each."""
    path = require_file(folder, "ap.dat.gz", "ap.dat")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    words: list[Whole] = []
    try:
        with opener(path, "rt") as file:
            for line in file:
                pairs = [entry.partition(":") for entry in line.split()[1:]]
                words.append(np.repeat([int(word) for word, _, _ in pairs], [int(count) for _, _, count in pairs]))
        every = np.concatenate(words).astype(np.int64)
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is not in lda-c's format (count word:count ...): {error}") from error
    return Corpus(every, np.concatenate(([0], np.cumsum([len(part) for part in words]))), int(every.max()) + 1)
