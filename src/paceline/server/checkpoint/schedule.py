"""When checkpoints are taken, and how a run continues from one.

A checkpoint is taken between two decisions. The first grant that each worker gets after the version that made the
checkpoint due also asks for the worker's own state (random generators, kept objects), so that under bsp the states are
exactly those of that version. One checkpoint is taken when training begins and one at the end of every phase, before
workers leave it: a restored server never resumes a phase that all its workers have left. An interrupted run takes a
last one at its next version, whether or not checkpoints were asked for.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
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


MOST_VAIN = 2  # checkpoints in a row that may be begun again


class Checkpoints:
    """The checkpoints of one run; without --checkpoint-every there is at most one, of a run that was interrupted."""

    def __init__(self, run: "ServerRun", flush: Callable[[], None]) -> None:
        config, folder = run.plan.config, run.plan.folder
        self._run = run
        self.flush = flush  # the journal
        self.every = config.checkpoint_every
        self._writer: files.Checkpointer | None = None
        if self.every is not None and folder is not None:
            self._writer = files.Checkpointer(folder / files.FOLDER, config.checkpoint_keep)
        self.possible = self._writer is not None  # grants have to ask for workers' states
        self._then: Callable[[], None] | None = None  # what follows the last checkpoint, once it is wanted
        self._last: int | None = None  # the number of that one, once workers are asked for their states
        self.due = False
        self._number = 0  # of the latest request for workers' states
        self._written_any = False  # by this server
        self._vain = 0  # checkpoints in a row that were begun again
        self._began = 0.0
        self._next_version = 0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is waiting for workers' states."""
        return self._writer is not None and self._writer.number is not None

    def count_from(self, version: int) -> None:
        """Make the next checkpoint due the set number of versions after this one."""
        if self.every is not None:
            self._next_version = version + round(self.every.amount)

    # -- the last one ------------------------------------------------------------------------------------------------

    def take_last(self, then: Callable[[], None]) -> bool:
        """Take a checkpoint at the next version, then call `then`; return False if the run cannot have one.

        At a version, since only there the workers' own states are those of what the server saves.
        """
        run, folder = self._run, self._run.plan.folder
        if folder is None or not run.engine.capabilities.own_processes or self._then is not None:
            return False
        if run.exchange.contents() is None or not run.phases.running:
            return False
        if self._writer is None:
            self._writer = files.Checkpointer(folder / files.FOLDER, run.plan.config.checkpoint_keep)
            self.possible = True
        self._then = then
        run.on_version.append(self._ask_last)
        return True

    def _ask_last(self, version: int, at: float) -> None:
        del version, at
        if self._last is None and self._then is not None:
            self._last = self._number + 1
            self.ask()

    def give_up_last(self) -> None:
        """Take the last checkpoint as far as it has come: workers that did not answer lose their own states."""
        if self._then is None:
            return
        if self._last is None:
            self._last = self._number + 1
            self.ask()
        if self.due:
            self.take()
        if self.busy:
            self.finish()
        else:  # nodes that did not send their models
            self._end_last()

    def _end_last(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Let a checkpoint that cannot be written cost the run, but not the report of one that was interrupted."""
        try:
            yield
        except CheckpointError as error:
            if self._last is None:
                raise
            self._run.remark(str(error), self._run.moment())
            self._end_last()

    @property
    def by_versions(self) -> bool:
        """Whether checkpoints are due by the number of versions."""
        return self._writer is not None and self.every is not None and self.every.unit == "v"

    def on_version(self, version: int, at: float) -> None:
        """Ask for a checkpoint if this version makes one due."""
        del at
        if version >= self._next_version:
            self.ask()

    # -- taking one --------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Start a checkpoint: every grant asks for its worker's state, and `take` follows between two decisions."""
        if self._writer is None or (self._last is not None and self._last <= self._number):
            return
        if self.busy and self._run.exchange.needs_states and self._last is None:
            return  # the one under way comes first; the next version asks again
        self.finish()
        self._number += 1
        self.count_from(self._run.coordinator.version)
        self._run.exchange.refresh(self._become_due)  # where nodes hold the models, the store gets their average

    def begin_again(self, *, vain: bool = True) -> None:
        """Give up the checkpoint under way and begin another: states that have come are not of one moment with others.

        After two of them complete the third as it is, or a script that seldom sends its state would never have one. Not
        if none could be sent meanwhile, where the checkpoint is not begun in `vain`: its time is yet to come.
        """
        if self._writer is None or not self.busy:
            return
        if vain and self._vain == MOST_VAIN:
            self.finish(anyway=True)
            return
        self._vain += vain
        self._writer.abandon()
        if self._last == self._number:
            self._last += 1
        self._number += 1
        self.due = True

    def _become_due(self) -> None:
        self.due = True
        self._run.engine.wake()

    def take(self) -> None:
        """Write the server's part of the checkpoint; the workers' states follow."""
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
        done = {worker: state for worker, state in workers.done.items() if phases.running}
        with self._written():
            writer.begin(snapshot(run.coordinator, run.moment()), contents, engine, [*present, *done])
            run.exchange.checkpoint_begins()
            complete = not present
            for worker, state in done.items():  # they get no grant that could ask for it
                complete = writer.state(run.coordinator.version, worker, state)
            if complete:
                self.finish()

    def number_for(self, worker: int) -> int | None:
        """Return the number under which a grant asks for this worker's state; None if it need not ask."""
        if self._writer is None:
            return None
        script = self._run.workers.records[worker].script
        wanted = self.due or (self.busy and worker in self._writer.waiting)
        if not wanted or script.asked_for_state == self._number:
            return None
        script.asked_for_state = self._number
        return self._number

    def on_state(self, worker: int, state: SavedState) -> None:
        """Add a worker's state to the checkpoint under way."""
        writer = self._writer
        if writer is None or state.number != self._number or writer.number is None:
            return
        self._run.exchange.state_came(worker)
        with self._written():
            if writer.state(writer.number, worker, state.data):
                self.finish()

    def on_done(self, worker: int, state: bytes) -> None:
        """Add the state of a worker that gets no further grant to the checkpoint under way."""
        writer = self._writer
        if writer is None or writer.number is None:
            return
        with self._written():
            if writer.state(writer.number, worker, state):
                self.finish()

    def on_removed(self, worker: int) -> None:
        """Stop waiting for the state of a worker that is gone."""
        if self._writer is not None and self._writer.gone(worker):
            self.finish()

    def on_phase_end(self) -> None:
        """Write a whole checkpoint before workers leave the phase, then start one that their states complete."""
        if self._writer is not None:
            self.take()
            self.finish(anyway=True)
            self.ask()
            self.take()

    def finish(self, *, anyway: bool = False) -> None:
        """Complete the checkpoint under way; workers whose states are missing will start with fresh random numbers.

        Where that would matter, keep the one before instead, unless this one is wanted `anyway`.
        """
        if self._writer is None or self._writer.number is None:
            return
        version, lacking = self._writer.number, sorted(self._writer.waiting)
        wanted = anyway or not self._written_any or self._last == self._number
        if lacking and self._run.exchange.needs_states and not wanted:
            self._writer.abandon()
            return
        with self._written():
            self._complete(version, self._writer, lacking)

    def _complete(self, version: int, writer: files.Checkpointer, lacking: list[int]) -> None:
        late = self._run.exchange.late_contents()
        if late is not None:
            writer.add(late)
        self.flush()  # else a killed server's journal could end before the checkpoint that its successor uses
        folder = writer.complete()
        self._written_any, self._vain = True, 0
        # Virtual time stands still meanwhile, and the journal of such a run says nothing of the machine.
        seconds = 0.0 if self._run.engine.capabilities.virtual_time else time.monotonic() - self._began
        data = {"version": version, "folder": folder.name, "seconds": seconds}
        if lacking:
            data["without_state_of"] = lacking
        self._run.coordinator.observe(self._run.moment(), "checkpoint", data)
        self._run.exchange.checkpoint_written()
        if self._last == self._number:
            self._end_last()

    def close(self) -> None:
        """Give up the checkpoint under way."""
        if self._writer is not None:
            self._writer.abandon()


class Resumption:
    """The checkpoint that a run continues from, and what of it is not yet restored."""

    def __init__(self, path: Path) -> None:
        self.found = files.read(path)
        self.engine = self.found.head.engine
        self.unfinished_phase: int | None = None  # the phase whose ledger is not yet restored
        self.workers_live = False  # only the server was restarted
        self.seen_until: float | None = None  # scenario events up to that time have happened

    @property
    def run(self) -> RunSnapshot:
        return self.found.run

    def header(self, given: Header) -> Header:
        """Return the header with which the journal begins or continues."""
        restored = self.run.restored
        strategy = given.strategy if self.engine.get("peer") else self.run.strategy
        return msgspec.structs.replace(given, strategy=strategy, snapshot=self.run.strategy_state, restored=restored)

    def carry_out(self, run: "ServerRun", at: float) -> None:
        """Restore the exchange, the coordinator and the run."""
        engine, taken = self.engine, self.run
        states = {worker: state for worker in self.found.workers if (state := self.found.state(worker)) is not None}
        try:
            run.restore_exchange(self.found.contents(), taken.version, states, engine)
        except CheckpointError as error:
            raise CheckpointError(f"{self.found.path}: {error}") from error
        restore(run.coordinator, taken, at)
        run.restore(engine["run_state"] if "run_state" in engine else engine["conduct"])  # the key in older checkpoints
        running = bool(engine["running"])
        run.phases.number = int(engine["phase"]) - (1 if running else 0)
        if running:
            self.unfinished_phase = int(engine["phase"])
        if run.emulation is not None:
            run.emulation.resume({int(worker): count for worker, count in engine["attempts"].items()})

    def take_up(self, phase: int, ledger: Ledger) -> int | None:
        """Restore a phase's ledger and return its nominal round; None if there is nothing to restore."""
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
