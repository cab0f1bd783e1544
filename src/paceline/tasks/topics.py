"""A topic model (latent Dirichlet allocation) by collapsed Gibbs sampling on tables, as in the SSP publication.

The tables hold how often each word is in each topic (`words`), how many tokens each topic has (`topics`), and which
topic each token is in (`assignments`, many tokens to a row). A worker samples the tokens of its share of the documents,
some documents in each clock. `assignments` has staleness 0, but is read only when documents go to another worker, which
then finds them exactly as the last one left them, so that counts and assignments agree.

Without a data folder the model itself generates the documents; with one they are those of `ap.dat.gz` in lda-c's
format. Evaluates `loss`: minus the log likelihood of the words given their topics, per token. `topics_alone` is the
same in one process without tables.
"""

import gzip
import math
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import paceline
from paceline.core.errors import DataError
from paceline.tasks.inputs import require_file, within

Counts = npt.NDArray[np.int32]
Whole = npt.NDArray[np.int64]
TOKENS = 64  # per row of `assignments`


class Corpus(NamedTuple):
    """Tokens by document: document d has the words from starts[d] to starts[d + 1]."""

    words: Whole
    starts: Whole
    vocabulary: int

    @property
    def documents(self) -> int:
        return len(self.starts) - 1


def make_corpus(documents: int, vocabulary: int, topics: int, length: int, seed: int) -> Corpus:
    """Draw documents from a random model with that many topics; the same for equal arguments."""
    chance = np.random.default_rng(seed)
    of_topic = chance.dirichlet(np.full(vocabulary, 0.05), topics)
    mixtures = chance.dirichlet(np.full(topics, 0.2), documents)
    words = [chance.choice(vocabulary, length, p=mixture @ of_topic) for mixture in mixtures]
    return Corpus(np.concatenate(words), np.arange(documents + 1) * length, vocabulary)


def load_corpus(folder: Path) -> Corpus:
    """Read lda-c's lines: the number of distinct words, then word:count for each."""
    path = require_file(folder, "ap.dat.gz", "ap.dat")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    words: list[Whole] = []
    try:
        with opener(path, "rt") as file:
            for line in file:
                pairs = [entry.partition(":") for entry in line.split()[1:]]
                words.append(np.repeat([int(word) for word, _, _ in pairs], [int(count) for _, _, count in pairs]))
        every = np.concatenate(words).astype(np.int64)
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is cut short or damaged ({error}); fetch it again") from error
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is not in lda-c's format (count word:count ...): {error}") from error
    return Corpus(every, np.concatenate(([0], np.cumsum([len(part) for part in words]))), int(every.max()) + 1)


def _sample(
    words: Whole, documents: Whole, assigned: Counts, in_document: Counts, in_topic: Counts, totals: Whole,
    chances: npt.NDArray[np.float64], alpha: float, beta: float, vocabulary: int,
) -> None:  # fmt: skip
    """Draw every token's topic given all others. Stale counts may be below zero and are then taken as zero."""
    topics = len(totals)
    sums = np.empty(topics)
    for token in range(len(words)):
        word, document, topic = words[token], documents[token], assigned[token]
        in_document[document, topic] -= 1
        in_topic[word, topic] -= 1
        totals[topic] -= 1
        total = 0.0
        for k in range(topics):
            like_word = (max(in_topic[word, k], 0) + beta) / (max(totals[k], 0) + vocabulary * beta)
            total += (in_document[document, k] + alpha) * like_word
            sums[k] = total
        wanted, topic = chances[token] * total, 0
        while sums[topic] < wanted and topic < topics - 1:
            topic += 1
        assigned[token] = topic
        in_document[document, topic] += 1
        in_topic[word, topic] += 1
        totals[topic] += 1


@cache
def sampler() -> Callable[..., None]:
    """Return the compiled inner loop."""
    try:
        import numba
    except ImportError as error:
        raise DataError("task topics compiles its inner loop with numba: pip install 'paceline[tasks]'") from error
    compiled: Any = numba.njit(_sample)
    return compiled  # type: ignore[no-any-return]


def count_words(words: Whole, assigned: Counts, rows: int, topics: int) -> Counts:
    """Count how often each word, or document, is in each topic."""
    cells = np.bincount(words * topics + assigned, minlength=rows * topics)
    return cells.reshape(rows, topics).astype(np.int32)


def first_assignment(corpus: Corpus, topics: int, seed: int) -> Counts:
    """Return a random topic for every token."""
    return np.random.default_rng(seed).integers(0, topics, len(corpus.words)).astype(np.int32)


def loss_of(in_topic: Counts, beta: float) -> float:
    """Return minus the log likelihood of the words given their topics, per token."""
    counts = torch.from_numpy(np.maximum(in_topic, 0)).double()
    vocabulary, topics = counts.shape
    totals = counts.sum(dim=0)
    likelihood = float(torch.lgamma(counts + beta).sum() - torch.lgamma(totals + vocabulary * beta).sum())
    likelihood += topics * (math.lgamma(vocabulary * beta) - vocabulary * math.lgamma(beta))
    return -likelihood / float(totals.sum())


def topics_alone(corpus: Corpus, topics: int, alpha: float, beta: float, passes: int, seed: int) -> Counts:
    """Sample in one process without tables; return how often each word is in each topic."""
    chance, sample = np.random.default_rng(seed), sampler()
    assigned = first_assignment(corpus, topics, seed)
    documents = np.repeat(np.arange(corpus.documents), np.diff(corpus.starts))
    in_document = count_words(documents, assigned, corpus.documents, topics)
    in_topic = count_words(corpus.words, assigned, corpus.vocabulary, topics)
    totals = in_topic.sum(axis=0, dtype=np.int64)
    for _ in range(passes):
        chances = chance.random(len(corpus.words))
        sample(
            corpus.words, documents, assigned, in_document, in_topic, totals, chances, alpha, beta, corpus.vocabulary
        )
    return in_topic


def in_rows(numbers: Counts, first: int) -> tuple[slice, Counts]:
    """Lay out numbers for the tokens from `first` on as rows of `assignments`, zero for all other tokens."""
    begin, end = first // TOKENS, -(-(first + len(numbers)) // TOKENS)
    rows = np.zeros((end - begin) * TOKENS, dtype=np.int32)
    rows[first - begin * TOKENS :][: len(numbers)] = numbers
    return slice(begin, end), rows.reshape(-1, TOKENS)


class Part(NamedTuple):
    """Some documents of a worker's share: their tokens, with each word as its place among the distinct words."""

    first: int  # token
    distinct: Whole
    places: Whole
    documents: Whole
    size: int  # documents

    @classmethod
    def of(cls, corpus: Corpus, documents: Whole) -> "Part":
        begin, end = int(corpus.starts[documents[0]]), int(corpus.starts[documents[-1] + 1])
        distinct, places = np.unique(corpus.words[begin:end], return_inverse=True)
        lengths = np.diff(corpus.starts[documents[0] : documents[-1] + 2])
        return cls(begin, distinct, places, np.repeat(np.arange(len(documents)), lengths), len(documents))


def train() -> None:
    """Entry point of `paceline run --task topics`."""
    session = paceline.init()
    topics = within("topics", session.option("topics", 10), low=1)
    alpha = within("alpha", session.option("alpha", 0.1), low=1e-6)
    beta = within("beta", session.option("beta", 0.05), low=1e-6)
    parts = within("parts", session.option("parts", 4), low=1)  # clocks per pass over a worker's documents
    clocks = within("clocks", session.option("clocks", 80), low=1)
    documents = within("documents", session.option("documents", 200), low=1)
    vocabulary = within("vocabulary", session.option("vocabulary", 500), low=2)
    data_seed = within("data_seed", session.option("data_seed", 0), low=0)

    def load() -> Corpus:
        if session.data_dir is not None:
            return load_corpus(session.data_dir)
        return make_corpus(documents, vocabulary, topics, 100, data_seed)

    corpus = session.once(f"topics-{session.data_dir}-{documents}-{vocabulary}-{topics}-{data_seed}", load)
    sample, size = sampler(), corpus.vocabulary
    start = first_assignment(corpus, topics, data_seed)
    in_topic = session.table(
        "words", size, topics, dtype="int32", init=lambda *_: count_words(corpus.words, start, size, topics)
    )
    totals = session.table(
        "topics", 1, topics, dtype="int64", init=lambda *_: np.bincount(start, minlength=topics)[None]
    )
    assignments = session.table(
        "assignments",
        -(-len(start) // TOKENS),
        TOKENS,
        dtype="int32",
        staleness=0,
        init=lambda *_: in_rows(start, 0)[1],
    )
    session.measure(lambda tables: {"loss": loss_of(tables["words"], beta)})

    mine, pieces = np.empty(0, dtype=np.int64), list[Part]()
    clock: int | None = None  # the last one, with the assignments at hand; None: read them again
    while session.clocks < clocks:
        share = session.share(corpus.documents)
        # A server restored from a checkpoint has set back the clock, and the assignments with it.
        if not np.array_equal(share, mine) or clock is None or session.clocks != clock + 1:
            mine, pieces = share, [Part.of(corpus, p) for p in np.array_split(share, parts) if len(p)]
            first, last = (int(corpus.starts[share[0]]), int(corpus.starts[share[-1] + 1])) if len(share) else (0, 0)
            begin, end = first // TOKENS, -(-last // TOKENS)
            assigned = assignments.get(slice(begin, end)).ravel()[first - begin * TOKENS :] if len(share) else start[:0]
            owned = [assigned[p.first - first :][: len(p.places)] for p in pieces]
            inside = [count_words(p.documents, own, p.size, topics) for p, own in zip(pieces, owned, strict=True)]
            # Reused memory: allocating new pages costs more than the work done in them.
            scrap = np.empty((max((len(p.distinct) for p in pieces), default=0), topics), dtype=np.int32)
        work, clock = 1, session.clocks
        if pieces:
            number = session.clocks % len(pieces)
            part, own = pieces[number], owned[number]
            before, sums_before, counts = own.copy(), totals.get(0), in_topic.get(part.distinct)
            if session.clocks != clock:
                clock = None
                continue
            after, sums = scrap[: len(counts)], sums_before.copy()
            after[:] = counts
            chances = np.random.default_rng(np.random.randint(1 << 62)).random(len(own))
            sample(part.places, part.documents, own, inside[number], after, sums, chances, alpha, beta, size)
            after -= counts
            in_topic.inc(part.distinct, after)
            totals.inc(0, sums - sums_before)
            assignments.inc(*in_rows(own - before, part.first))
            work = max(1, len(own))
        if not session.clock(work=work):
            break
