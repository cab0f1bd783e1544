"""The plan that `launch` makes of its arguments, and how the end of a run or process is described."""

import signal
from pathlib import Path
from typing import Literal

import msgspec

from paceline.core.errors import InternalError, PacelineError, ScriptError, UserError
from paceline.core.scenario.file import Scenario
from paceline.core.settings import RunConfig
from paceline.records.journal import Header
from paceline.transport.messages import Failed

Cause = Literal["done", "target", "limit", "stopped", "interrupted", "error", "divergence"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is about to begin."""

    config: RunConfig  # with its workers and threads settled
    scenario: Scenario | None  # None: nothing is emulated
    header: Header  # the journal's first line
    folder: Path | None  # the run's own
    journal: Path | None
    restore: Path | None = None  # the checkpoint to continue from
    remote_shards: int = 0  # of the servers, those on other machines: the last ones
    optimizers: bytes = b""  # classes that launch() was given, for a server in a process of its own

    @property
    def workers(self) -> int:
        """How many the run starts with."""
        return self.header.workers


def how_it_ended(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def as_error(message: Failed) -> Exception:
    """Return the error that ends the run, for a script that failed on a worker."""
    kinds: dict[str, type[PacelineError]] = {
        "storage": UserError,
        "user": UserError,
        "script": ScriptError,
        "internal": InternalError,
    }
    error = kinds[message.blame](message.text)
    error.add_note(message.traceback)
    return error
