"""Public logs of parameter-server training under BSP and ASP, with and without stragglers (Sync-Switch, ICDCS 2021).

Each log is a table of wall-clock seconds and the step at which the training loss was written. A step is an update of
the model: under ASP one push, under BSP one round of all workers. `SOURCE.txt` beside the archive says where it is
from.
"""

import csv
import io
import itertools
import lzma
import statistics
import tarfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

ARCHIVE = Path(__file__).parents[3] / "shared" / "data" / "trace_syncswitch_ps" / "syncswitch_logs.tar.xz"
IQR_OF_NORMAL = 1.349  # interquartile range of a normal distribution, in standard deviations


class Log(msgspec.Struct, frozen=True):
    """The moments at which some steps were done, in order."""

    seconds: list[float]
    steps: list[float]

    @property
    def rate(self) -> float:
        """Updates per second over the whole log, pauses for evaluations and checkpoints included."""
        return (self.steps[-1] - self.steps[0]) / (self.seconds[-1] - self.seconds[0])

    def after(self, step: float) -> "Log":
        """The part from that step on."""
        first = next(i for i, each in enumerate(self.steps) if each >= step)
        return Log(self.seconds[first:], self.steps[first:])


def read(archive: Path, names: Sequence[str]) -> dict[str, Log]:
    """The logs of these folders of the archive."""
    found = {}
    with lzma.open(archive) as stream, tarfile.open(fileobj=stream) as tar:
        for member in tar:
            folder, _, file = member.name.removeprefix("./").rpartition("/")
            if folder in names and file == "loss.csv":
                content = tar.extractfile(member)
                assert content is not None
                found[folder] = parse(content.read().decode())
    if missing := [name for name in names if name not in found]:
        raise SystemExit(f"{archive} has no loss.csv of {', '.join(missing)}")
    return {name: found[name] for name in names}


def parse(text: str) -> Log:
    """A table with the columns `Wall time` and `Step`; lines that lack one of them, as some end with, are left out."""
    rows = []
    for row in csv.DictReader(io.StringIO(text)):
        if row["Wall time"] and row["Step"]:
            rows.append((float(row["Wall time"]), float(row["Step"])))
    rows.sort()
    return Log([second for second, _ in rows], [step for _, step in rows])


def jitter_of(logs: Sequence[Log]) -> float:
    """The standard deviation of a push's time over its mean, from asynchronous logs.

    Pushes of workers that do not wait for each other are renewals: the count of N pushes varies by the deviation over
    the root of N. The spread between quartiles is taken, so that pauses for evaluations do not count.
    """
    found = []
    for log in logs:
        pairs = itertools.pairwise(zip(log.seconds, log.steps, strict=True))
        parts = [(b[0] - a[0], b[1] - a[1]) for a, b in pairs if b[0] > a[0] and b[1] > a[1]]
        per_push = [seconds / pushes for seconds, pushes in parts]
        low, middle, high = statistics.quantiles(per_push, n=4)
        pushes = statistics.median(count for _, count in parts)
        found.append((high - low) / IQR_OF_NORMAL / middle * pushes**0.5)
    return statistics.median(found)
