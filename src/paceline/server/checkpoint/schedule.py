"""When checkpoints are taken, and how a run goes on from one.

A checkpoint is taken between two decisions. The workers' own states (random generators, kept objects) are asked for
with the first grant that each of them gets after the version that made the checkpoint due, so that under bsp they are
exactly those of that version. The first one is taken when training begins and one more at the end of every phase: a
restored server never stands in a phase that all its workers have left behind.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.core.errors import CheckpointError, PeerError
from paceline.core.ledger import Ledger
from paceline.records.journal import Header
from paceline.server.checkpoint import files
from paceline.server.checkpoint.run_snapshot import RunSnapshot, restore, snapshot
from paceline.transport.messages import SavedState

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


class Checkpoints:
    """The checkpoints of one run; without --checkpoint-every there are none."""

    def __init__(self, run: "ServerRun", flush: Callable[[], None]) -> None:
        config, folder = run.plan.config, run.plan.folder
        self._run = run
        self.flush = flush  # the journal
        self.every = config.checkpoint_every
        self._writer: files.Checkpointer | None = None
        if self.every is not None and folder is not None:
            self._writer = files.Checkpointer(folder / files.FOLDER, config.checkpoint_keep)
        self.due = False
        self._number = 0  # names what was asked of the workers
        self._began = 0.0
        self._next_version = 0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint lacks something."""
        return self._writer is not None and self._writer.number is not None

    def count_from(self, version: int) -> None:
        """The run begins, or goes on, at this version."""
        if self.every is not None:
            self._next_version = version + round(self.every.amount)

    @property
    def by_versions(self) -> bool:
        """Whether they fall due by the number of versions."""
        return self._writer is not None and self.every is not None and self.every.unit == "v"

    def on_version(self, version: int, at: float) -> None:
        """A version was made."""
        del at
        if version >= self._next_version:
            self.ask()

    # -- taking one --------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """From here on every grant asks its worker for its state; the rest follows between two decisions."""
        if self._writer is None or self.every is None:
            return
        self.finish()
        self._number += 1
        self.count_from(self._run.coordinator.version)
        self._run.exchange.refresh(self._become_due)  # where models are elsewhere, the store is to hold their average

    def _become_due(self) -> None:
        self.due = True

    def take(self) -> None:
        """Write what the server has; the workers' states follow."""
        self.due = False
        run, writer = self._run, self._writer
        contents = run.exchange.contents()
        if writer is None or contents is None:
            return
        self._began = time.monotonic()
        workers, phases, config = run.workers, run.phases, run.plan.config
        inside = workers.in_phase if phases.running else workers.records.keys()
        present = [worker for worker in inside if not workers.records[worker].script.gone]
        engine = {
            "phase": phases.number, "running": phases.running, "run_state": run.snapshot(),
            "attempts": run.emulation.attempts if run.emulation is not None else {},
            "seed": config.seed, "workers": run.plan.header.workers,
            "sampling": phases.current.sampling if phases.current is not None else None,
            **run.exchange.extra(),
        }  # fmt: skip
        writer.begin(snapshot(run.coordinator, run.moment()), contents, engine, present)
        if not present:
            self.finish()

    def number_for(self, worker: int) -> int | None:
        """What a grant to this worker asks for, once."""
        if self._writer is None:
            return None
        script = self._run.workers.records[worker].script
        wanted = self.due or (self.busy and worker in self._writer.waiting)
        if not wanted or script.asked_for_state == self._number:
            return None
        script.asked_for_state = self._number
        return self._number

    def on_state(self, worker: int, state: SavedState) -> None:
        """A worker's own state."""
        writer = self._writer
        if writer is None or state.number != self._number or writer.number is None:
            return
        if writer.state(writer.number, worker, state.data):
            self.finish()

    def on_removed(self, worker: int) -> None:
        """The worker will send nothing."""
        if self._writer is not None and self._writer.gone(worker):
            self.finish()

    def on_phase_end(self) -> None:
        """Whole before the workers leave the phase; then once more, to be completed by their states."""
        if self._writer is not None:
            self.take()
            self.finish()
            self.ask()
            self.take()

    def finish(self) -> None:
        """Let the checkpoint under way appear; a worker that never gave its state will start with fresh numbers."""
        if self._writer is None or self._writer.number is None:
            return
        version, lacking = self._writer.number, sorted(self._writer.waiting)
        folder = self._writer.complete()
        data = {"version": version, "folder": folder.name, "seconds": time.monotonic() - self._began}
        if lacking:
            data["without_state_of"] = lacking
        self._run.coordinator.observe(self._run.moment(), "checkpoint", data)
        self.flush()  # or a killed server's journal could end before the checkpoint that its successor goes on from

    def close(self) -> None:
        """Give up what is under way."""
        if self._writer is not None:
            self._writer.abandon()


class Resumption:
    """A run that goes on from a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.found = files.read(path)
        self.engine = self.found.head.engine
        self.unfinished_phase: int | None = None  # whose data is not yet taken up again
        self.seen_until: float | None = None  # what the scenario did before that time has happened

    @property
    def run(self) -> RunSnapshot:
        return self.found.run

    def header(self, given: Header) -> Header:
        """What the journal begins with, or goes on with."""
        restored = self.run.restored
        strategy = given.strategy if self.engine.get("peer") else self.run.strategy
        return msgspec.structs.replace(given, strategy=strategy, snapshot=self.run.strategy_state, restored=restored)

    def carry_out(self, run: "ServerRun", at: float) -> None:
        """Bring model, decisions and data to where they were."""
        engine, taken = self.engine, self.run
        states = {worker: state for worker in self.found.workers if (state := self.found.state(worker)) is not None}
        try:
            run.restore_exchange(self.found.contents(), taken.version, states, engine)
        except CheckpointError as error:
            raise CheckpointError(f"{self.found.path}: {error}") from error
        restore(run.coordinator, taken, at)
        run.restore(engine["run_state"] if "run_state" in engine else engine["conduct"])  # the older name
        running = bool(engine["running"])
        run.phases.number = int(engine["phase"]) - (1 if running else 0)
        if running:
            self.unfinished_phase = int(engine["phase"])
        if run.emulation is not None:
            run.emulation.resume({int(worker): count for worker, count in engine["attempts"].items()})

    def take_up(self, phase: int, ledger: Ledger) -> int | None:
        """Bring a phase's data to where the checkpoint left it; its nominal round, None if there is nothing to do."""
        if self.unfinished_phase is None:
            return None
        if self.run.ledger is None or phase != self.unfinished_phase:
            raise PeerError(
                f"the run was restored in its phase {self.unfinished_phase}, but its workers are in phase {phase}: "
                "start it again with --resume"
            )
        ledger.restore(self.run.ledger)
        self.unfinished_phase = None
        return self.run.round_samples
