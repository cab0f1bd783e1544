"""What `launch` makes of its arguments: all that an engine needs to know of a run before it begins."""

from pathlib import Path

import msgspec

from paceline.core.scenario.file import Scenario
from paceline.core.settings import RunConfig
from paceline.records.journal import Header


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is about to begin."""

    config: RunConfig  # with its workers and threads settled
    scenario: Scenario | None  # None: nothing is emulated
    header: Header  # the journal's first line
    folder: Path | None  # the run's own
    journal: Path | None
    restore: Path | None = None  # the checkpoint to go on from

    @property
    def workers(self) -> int:
        """How many the run starts with."""
        return self.header.workers
