"""The report of a run: one object with the same fields for every strategy and engine.

`paceline.records.metrics` folds it out of a journal; `--json` prints it; `text` and `notebook` show it to people.
What has no meaning for a run is None. The fields stand in the order in which they are printed.
"""

from pathlib import Path

import msgspec

from paceline.records.journal import spelled_out

__all__ = ["PeerPoint", "PeerReport", "Report", "Staleness", "TableReads", "TargetReport", "WorkerReport", "to_json"]


class Staleness(msgspec.Struct, frozen=True):
    """Versions between the read and the Apply of a push, over all applied pushes; None if there was none."""

    mean: float | None
    p95: int | None
    max: int | None


class TargetReport(msgspec.Struct, frozen=True):
    """The metric the run was to reach, and when it did (None if it did not)."""

    metric: str
    value: float
    reached_at_seconds: float | None


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker's share; compute, transfer, wait and lost seconds make up its time present."""

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
    """Rows read of one table, and how many clocks old each was: `ages[a]` of them were `a` clocks old."""

    rows: int
    max_age: int
    ages: list[int]


class PeerPoint(msgspec.Struct, frozen=True):
    """How the nodes of a run without a server stood when their models were measured."""

    at: float  # seconds
    mean_interval: float | None  # steps of a node per exchange, since the point before
    threshold: float | None  # mean of those nodes that have stepped since then
    consensus: float  # root mean square distance of the models to their mean


class PeerReport(msgspec.Struct, frozen=True):
    """A run without a server: what the nodes' exchanges came to."""

    mean_interval: float | None  # steps of a node per exchange that it began
    sending_s: float  # of all nodes together, from the decision to send until the last byte was out
    consensus: float | None  # root mean square distance of the models to their mean, when they were last measured
    gathered_bytes: int = 0  # of models that were collected to be measured and kept: no part of `bytes_up`
    course: list[PeerPoint] = []  # over time


class Report(msgspec.Struct, frozen=True):
    """What every run reports. `seconds` is virtual under `sim` and wall-clock elsewhere."""

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

    def __repr__(self) -> str:
        from paceline.records.text import one_line  # it loads rich

        return f"Report({one_line(self)})"

    def _repr_html_(self) -> str:
        from paceline.records.notebook import html  # it loads rich

        return html(self)


def to_json(report: Report) -> str:
    """The report as one JSON object, indented; infinities and NaN, which JSON cannot write, as strings."""
    data = spelled_out(msgspec.to_builtins(report))
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def save_report(report: Report, folder: Path | None) -> None:
    """Write it into the run's folder, if there is one."""
    if folder is not None:
        (folder / "report.json").write_text(to_json(report) + "\n")
