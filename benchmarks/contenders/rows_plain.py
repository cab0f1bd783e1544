"""NumPy itself on an array at hand: the limit of what a cache can do. And the topic model without tables."""

import os
import time
from pathlib import Path

import numpy as np

from contenders.questions import Gather, Gathered, Sample, Sampled
from contenders.row_numbers import first_values, timed
from paceline.tasks import topics


def gather(task: Gather) -> Gathered:
    values = first_values(task)
    deltas = np.ones((task.rows, task.width), dtype=np.float32)

    def add(rows: object) -> None:
        values[rows] += deltas

    return Gathered(
        {
            "get": timed(task, lambda rows: values[rows], distinct=True),
            "inc_distinct": timed(task, add, distinct=True),
            "inc_repeated": timed(task, lambda rows: np.add.at(values, rows, deltas), distinct=False),
        }
    )


def sample(task: Sample) -> Sampled:
    corpus = corpus_of(task)
    compile_sampler()
    began = time.process_time()
    counts = topics.topics_alone(corpus, task.topics, 0.1, 0.05, task.passes, 0)
    cpu_s = time.process_time() - began
    return Sampled(task.passes * len(corpus.words), cpu_s, 0.0, topics.loss_of(counts, 0.05))


def compile_sampler() -> None:
    """What happens once in every process, takes long and says nothing about tables."""
    topics.topics_alone(topics.make_corpus(4, 10, 2, 5, 0), 2, 0.1, 0.05, 1, 0)


def corpus_of(task: Sample) -> topics.Corpus:
    """The documents that both contenders sample."""
    if task.folder is not None:
        return topics.load_corpus(Path(os.fspath(task.folder)))
    return topics.make_corpus(100, 300, task.topics, 60, 0)
