"""The records of a run and what is computed from them: journal, metrics, report, replay, waits.

The names of this module are public; its submodules are not.
"""

from paceline.records.journal import (
    Decision,
    Header,
    Line,
    Lines,
    Observation,
    PeerDecision,
    Restored,
    Sink,
    Tee,
    Writer,
)
from paceline.records.journal import read as read_journal
from paceline.records.metrics import Metrics
from paceline.records.metrics import fold as fold_metrics
from paceline.records.replay import Difference, Replay
from paceline.records.replay import replay as replay_journal
from paceline.records.report import (
    BatchReport,
    PeerPoint,
    PeerReport,
    Report,
    ReportedNumber,
    Staleness,
    TableReads,
    TargetReport,
    WorkerReport,
    to_json,
)
from paceline.records.wait_attribution import Culprit, WaitAttribution, Waited
from paceline.records.wait_attribution import fold as attribute_waits

__all__ = [
    "BatchReport",
    "Culprit",
    "Decision",
    "Difference",
    "Header",
    "Line",
    "Lines",
    "Metrics",
    "Observation",
    "PeerDecision",
    "PeerPoint",
    "PeerReport",
    "Replay",
    "Report",
    "ReportedNumber",
    "Restored",
    "Sink",
    "Staleness",
    "TableReads",
    "TargetReport",
    "Tee",
    "WaitAttribution",
    "Waited",
    "WorkerReport",
    "Writer",
    "attribute_waits",
    "fold_metrics",
    "read_journal",
    "replay_journal",
    "to_json",
]
