"""What a scenario does to the workers of a run: pauses, crashes, leaves, rejoins, joins, and a crash of its server.

Slow-downs and cut links are part of the emulated times. So are pauses, but a worker's process is also stopped, so that
nothing in it moves meanwhile.
"""

from functools import partial
from typing import TYPE_CHECKING

from paceline.core.scenario.faults import ScenarioEvent
from paceline.server.emulation import Emulation
from paceline.server.workers import WorkerRecord

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


class ScenarioFaults:
    """The scenario's events, each at its second of the run."""

    def __init__(self, run: "ServerRun", emulation: Emulation) -> None:
        self._run = run
        self._emulation = emulation
        self._ahead: list[ScenarioEvent] | None = (
            None  # events that are still to happen; None before they are scheduled
        )

    def schedule(self, seen_until: float | None) -> None:
        """Schedule the events ahead; those that fell into a server's absence are due at once.

        Of the events before `seen_until`, a restored run needs only newcomers' speeds and pauses that still last.
        Do nothing the second time.
        """
        if self._ahead is not None:
            return
        call_at = self._run.engine.call_at
        self._ahead = self._unseen(seen_until)
        for event in self._emulation.scenario.events:
            if seen_until is None or event.at > seen_until:
                call_at(event.at, self._strike, event)
            elif event.kind == "join":
                self._add_workers(event)
            elif event.kind == "pause" and event.until > seen_until:
                call_at(event.until, self._resume, event)

    def _unseen(self, seen_until: float | None) -> list[ScenarioEvent]:
        return [event for event in self._emulation.scenario.events if seen_until is None or event.at > seen_until]

    def brings_somebody_back(self) -> bool:
        """Return whether a worker is still to join or rejoin, be it an event that a server's absence has delayed."""
        ahead = self._ahead
        if ahead is None:
            restored = self._run.resumption
            ahead = self._unseen(None if restored is None else restored.seen_until)
        return any(event.kind in ("rejoin", "join") for event in ahead)

    def _strike(self, event: ScenarioEvent) -> None:
        run = self._run
        if self._ahead is not None:
            self._ahead.remove(event)
        if not run.active:
            return
        at = run.moment()
        for worker in event.workers or (None,):
            run.coordinator.observe(at, "scenario", event.as_data(), worker)
        match event.kind:
            case "pause":
                for worker in event.workers:
                    run.engine.control(worker, "pause")
                if event.for_s is not None:
                    run.engine.call_at(event.until, self._resume, event)
            case "crash":
                for record in self._there(event):
                    record.script.meant_to_die = True
                    run.engine.control(record.worker, "kill")
            case "leave":
                for record in self._there(event):
                    run.exchange.ask_to_leave(record, partial(self._send_away, record))
            case "join":
                self._add_workers(event)
                self._start(event)
            case "rejoin":
                self._start(event)
            case "server_crash":
                run.engine.crash_server(event.for_s)
            case _:
                pass  # part of the emulated times

    def _there(self, event: ScenarioEvent) -> list[WorkerRecord]:
        records = [self._run.workers.records.get(worker) for worker in event.workers]
        return [record for record in records if record is not None and not record.script.gone]

    def _resume(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            self._run.engine.control(worker, "resume")

    def _send_away(self, record: WorkerRecord) -> None:
        if not record.script.gone:
            self._run.departures.remove(record, "leave", self._run.moment())
            self._run.engine.control(record.worker, "hang_up")

    def _start(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            self._run.start(worker)

    def _add_workers(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            self._emulation.times.add_worker(worker, event.speed)
