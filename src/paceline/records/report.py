"""The report of a run: one object with the same fields for every strategy and engine.

`paceline.records.metrics` computes it from a journal; `--json` prints it; `text` and `notebook` render it for people.
Fields without meaning for a run are None. They come in the order in which they are printed.
"""

import contextlib
import logging
from pathlib import Path

import msgspec

from paceline.records.journal import spelled_out
from paceline.records.private_files import write_text

logger = logging.getLogger("paceline")

__all__ = [
    "BatchReport", "FaultReport", "PeerPoint", "PeerReport", "Report", "ReportedNumber", "Staleness", "TableReads",
    "TargetReport", "WorkerReport", "to_json",
]  # fmt: skip


class Staleness(msgspec.Struct, frozen=True):
    """Versions between the read and the Apply of a push, over all applied pushes; None without any."""

    mean: float | None
    p95: int | None
    max: int | None


class BatchReport(msgspec.Struct, frozen=True):
    """The size of batches and updates, and what the script's learning rate was multiplied by.

    Samples and pushes are those of most updates, which a short last round does not change; where no size is that
    frequent they are means.
    """

    batch_size: int  # of one worker, as the last loop had it
    update_samples: float
    update_pushes: float
    update_mass: float | None  # the mean: the share of a whole optimizer step that an update stands for
    global_batch: int | None = None
    scale_lr: str = "none"
    rate_factor: float = 1.0


class ReportedNumber(msgspec.Struct, frozen=True):
    """A number that scripts gave to `session.report`, over all workers."""

    last: float
    mean: float
    count: int


class TargetReport(msgspec.Struct, frozen=True):
    """The target of the run and when it was reached (None: not reached)."""

    metric: str
    value: float
    reached_at_seconds: float | None


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker's numbers; compute, transfer, wait and lost seconds add up to its time present."""

    worker: int
    clock: int
    samples: int
    compute_s: float
    transfer_s: float
    wait_s: float
    lost_s: float
    score: float | None
    state: str | None


class TableReads(msgspec.Struct, frozen=True):
    """Rows read of one table and their ages: `ages[a]` of them were `a` clocks old."""

    rows: int
    max_age: int
    ages: list[int]


class PeerPoint(msgspec.Struct, frozen=True):
    """State of the nodes of a run without a server when their models were measured."""

    at: float  # seconds
    mean_interval: float | None  # steps of a node per exchange, since the previous point
    threshold: float | None  # mean over the nodes that have stepped since then
    consensus: float  # root mean square distance of the models to their mean


class NodesNumber(msgspec.Struct, frozen=True):
    """One number that evaluate() returned of the nodes' own final models."""

    mean: float
    min: float
    max: float


class PeerReport(msgspec.Struct, frozen=True):
    """Totals of the nodes' exchanges in a run without a server."""

    mean_interval: float | None  # steps of a node per exchange that it began
    sending_s: float  # of all nodes together, from the decision to send until the last byte was out
    consensus: float | None  # root mean square distance of the models to their mean, when they were last measured
    gathered_bytes: int = 0  # of models collected to be measured and kept; not part of `bytes_up`
    course: list[PeerPoint] = []  # over time
    nodes: dict[str, NodesNumber] = {}  # of the nodes' own final models, by name; `metrics` are of their average


class FaultReport(msgspec.Struct, frozen=True):
    """What went wrong with workers, and how the run went on."""

    timeouts: int = 0  # how often a worker was taken out because it was silent
    killers: list[int] = []  # samples that were left out because they killed each process that computed them alone
    set_aside: list[int] = []  # workers that were sent away because what they delivered was never finite
    not_finite: int = 0  # how often a node's model was not finite, and it went on from another's


class Report(msgspec.Struct, frozen=True):
    """The report of any run. `seconds` is virtual under `sim` and wall-clock elsewhere."""

    strategy: str
    engine: str
    workers: int
    seed: int
    seconds: float
    versions: int
    pushes: int
    samples_used: int
    samples_discarded: int
    samples_per_second: float | None
    wait_fraction: float | None
    staleness: Staleness
    bytes_up: int
    bytes_down: int
    exchanges: int | None
    loss: float | None
    accuracy: float | None
    metrics: dict[str, float]
    target: TargetReport | None
    per_worker: list[WorkerReport]
    warnings: list[str]
    journal: str | None
    table_reads: dict[str, TableReads] | None = None  # by table
    peers: PeerReport | None = None
    batch: BatchReport | None = None
    reported: dict[str, ReportedNumber] = {}  # by name
    folder: str | None = None
    model: str | None = None  # the file with the trained model, or the tables
    faults: FaultReport = FaultReport()
    streams: bool = False  # workers read streams of their own: which samples were used is up to the script

    def __repr__(self) -> str:
        from paceline.records.text import one_line  # it loads rich

        return f"Report({one_line(self)})"

    def _repr_html_(self) -> str:
        from paceline.records.notebook import html  # it loads rich

        return html(self)


def to_json(report: Report) -> str:
    """Return the report as one indented JSON object; infinities and NaN, which JSON does not have, as strings."""
    data = spelled_out(msgspec.to_builtins(report))
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def save_report(report: Report, folder: Path | None) -> None:
    """Write the report into the run's folder, if there is one; a full disk costs the file, not the report."""
    if folder is None:
        return
    unfinished = folder / ".report.json"
    try:
        write_text(unfinished, to_json(report) + "\n")
        unfinished.replace(folder / "report.json")
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        logger.warning("cannot write %s: %s", folder / "report.json", error.strerror)
