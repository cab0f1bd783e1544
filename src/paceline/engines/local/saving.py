"""When checkpoints are taken, and how a server goes on from one.

A checkpoint is taken between two decisions. The workers' own states (random generators, kept objects) are asked for
with the first grant that each of them gets after the version that made the checkpoint due, so that under bsp they are
exactly those of that version. The first one is taken when training begins and one more at the end of every phase: a
restored server never stands in a phase that all its workers have left behind.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from paceline.engines.local.control import Setup
from paceline.engines.local.members import Member
from paceline.engines.local.process_cluster import LocalCluster
from paceline.records.journal import Header
from paceline.records.metrics import Metrics
from paceline.server.checkpoint import files as checkpoint
from paceline.server.checkpoint.run_snapshot import RunSnapshot, restore, snapshot
from paceline.transport.messages import State


class Saving:
    """The checkpoints of one run."""

    def __init__(self, cluster: LocalCluster, setup: Setup, flush: Callable[[], None]) -> None:
        self._cluster = cluster
        self._flush = flush  # the journal
        self._every = setup.config.checkpoint_every
        self._writer: checkpoint.Checkpointer | None = None
        if self._every is not None and setup.folder is not None:
            folder = Path(setup.folder) / checkpoint.FOLDER
            self._writer = checkpoint.Checkpointer(folder, setup.config.checkpoint_keep)
        self.due = False
        self._number = 0  # names what was asked of the workers
        self._began = 0.0
        self._next_version = 0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint lacks something."""
        return self._writer is not None and self._writer.number is not None

    def attach(self) -> None:
        """Be told by the cluster and its coordinator."""
        cluster = self._cluster
        if self._writer is None or self._every is None:
            return
        cluster.save_number = self._number_for
        cluster.on_state = self._on_state
        cluster.on_phase = self._ask
        cluster.on_phase_end = self._on_phase_end
        cluster.on_removed = self._on_removed
        if self._every.unit == "v":
            self._next_version = cluster.coordinator.version + round(self._every.amount)
            told = cluster.coordinator.on_version

            def on_version(version: int, held: list[Any]) -> None:
                if told is not None:
                    told(version, held)
                if version >= self._next_version:
                    self._ask()

            cluster.coordinator.on_version = on_version

    def schedule(self, repeat: Callable[[float, Callable[[], None]], None]) -> None:
        """Put checkpoints by seconds on the clock."""
        if self._writer is not None and self._every is not None and self._every.unit == "s":
            repeat(self._every.amount, self._ask)

    # -- taking one --------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """From here on every grant asks its worker for its state; the rest follows between two decisions."""
        if self._writer is None or self._every is None:
            return
        self.finish()
        self._number += 1
        self._next_version = self._cluster.coordinator.version + round(self._every.amount)
        self._cluster.peers.refresh(self._become_due)  # where models are elsewhere, the store is to hold their average

    def _become_due(self) -> None:
        self.due = True

    def take(self) -> None:
        """Write what the server has; the workers' states follow."""
        self.due = False
        cluster, writer = self._cluster, self._writer
        contents = cluster.conduct.store_or_none or cluster.conduct.tables
        if writer is None or contents is None:
            return
        cluster.coordinator.now = cluster.clock.now()
        self._began = time.monotonic()
        phases = cluster.phases
        workers = phases.members if phases.running else set(cluster.members)
        present = [worker for worker in workers if not cluster.members[worker].gone]
        engine = {
            "phase": phases.number, "running": phases.running, "conduct": cluster.conduct.snapshot(),
            "attempts": dict(cluster.emulation.attempts) if cluster.emulation is not None else {},
            "seed": cluster.conduct.config.seed, "workers": cluster.conduct.header.workers,
            "peer": cluster.conduct.peer, "node_samples": dict(cluster.peers.gathering.used),
            "sampling": phases.current.sampling if phases.current is not None else None,
        }  # fmt: skip
        writer.begin(snapshot(cluster.coordinator), contents, engine, present)
        if not present:
            self.finish()

    def _number_for(self, member: Member) -> int | None:
        """What a grant to this worker asks for, once."""
        wanted = self.due or (self.busy and self._writer is not None and member.worker in self._writer.waiting)
        if not wanted or member.asked_for_state == self._number:
            return None
        member.asked_for_state = self._number
        return self._number

    def _on_state(self, worker: int, state: State) -> None:
        writer = self._writer
        if writer is None or state.number != self._number or writer.number is None:
            return
        if writer.state(writer.number, worker, state.data):
            self.finish()

    def _on_removed(self, worker: int) -> None:
        if self._writer is not None and self._writer.gone(worker):
            self.finish()

    def _on_phase_end(self) -> None:
        """Whole before the workers leave the phase; then once more, to be completed by their states."""
        self.take()
        self.finish()
        self._ask()
        self.take()

    def conclude(self) -> None:
        """The run is over: what fell due with its last version is taken, and completed as far as it goes."""
        if self.due:
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
        self._cluster.coordinator.now = self._cluster.clock.now()
        self._cluster.coordinator.observe("checkpoint", data)
        self._flush()  # or a killed server's journal could end before the checkpoint that its successor goes on from

    def close(self) -> None:
        """Give up what is under way."""
        if self._writer is not None:
            self._writer.abandon()


class Resumption:
    """A run that goes on from a checkpoint."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.found = checkpoint.read(Path(setup.restore or ""))
        self.engine = self.found.head.engine

    @property
    def run(self) -> RunSnapshot:
        return self.found.run

    def header(self, given: Header) -> Header:
        """What the journal begins with, or goes on with."""
        restored = self.run.restored
        strategy = given.strategy if self.engine.get("peer") else self.run.strategy
        return msgspec.structs.replace(given, strategy=strategy, snapshot=self.run.strategy_state, restored=restored)

    def rolled_back(self, so_far: Metrics) -> dict[str, int]:
        """What a server before this one did after the checkpoint."""
        return so_far.beyond(self.run.restored)

    def carry_out(self, cluster: LocalCluster, at: float | None) -> None:
        """Bring model, decisions and data to where they were; `at` is the clock's time where it went on meanwhile."""
        conduct, engine, run = cluster.conduct, self.engine, self.run
        moment = run.at if at is None else at
        cluster.restored = self.found
        cluster.stand_still(moment)
        if at is not None:
            cluster.clock.start(at)  # it went on while there was no server
        states = {worker: state for worker in self.found.workers if (state := self.found.state(worker)) is not None}
        if self.found.head.spec is None:
            cluster.tables.restore(self.found, states)
        else:
            conduct.adopt(self.found.store(conduct.strategy.needs_applied, cluster.timed_store))
            cluster.restored_states = states
        node_samples = engine.get("node_samples", {})
        cluster.peers.gathering.used = {int(node): count for node, count in node_samples.items()}
        cluster.peers.gathering.averaged = True
        restore(cluster.coordinator, run, moment)
        conduct.restore(engine["conduct"])
        running = bool(engine["running"])
        cluster.phases.number = int(engine["phase"]) - (1 if running else 0)
        if running:
            cluster.unfinished_phase = int(engine["phase"])
        if cluster.emulation is not None:
            cluster.emulation.resume({int(worker): count for worker, count in engine["attempts"].items()})
