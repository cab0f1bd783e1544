"""What a scenario lets happen to real workers: they are stopped, killed, sent away and started for real.

Slow-downs and cut links are in the emulated times already; a pause is too, and its worker is stopped besides, so that
nothing of it moves meanwhile.
"""

import signal
from collections.abc import Callable
from functools import partial
from typing import Protocol

from paceline.core.scenario.file import ScenarioEvent
from paceline.engines.local.alarms import Alarms
from paceline.engines.local.members import Member
from paceline.engines.local.process_cluster import LocalCluster
from paceline.server.emulation import Emulation


class Hands(Protocol):
    """What only the launcher can do to processes."""

    def start(self, worker: int) -> None:
        """Start a process for this worker, as its next incarnation."""

    def signal(self, worker: int, number: int) -> None:
        """Send it a signal."""

    def hang_up(self, member: Member) -> None:
        """Tell it that nothing more will come."""

    def crash_server(self) -> None:
        """Die, as a scenario's `server_crash` asks."""


class ScenarioFaults:
    """The scenario's events, each at its second of the run."""

    def __init__(self, cluster: LocalCluster, emulation: Emulation, alarms: Alarms, hands: Hands) -> None:
        self._cluster = cluster
        self._emulation = emulation
        self._alarms = alarms
        self._hands = hands

    def schedule(self, seen_until: float | None) -> None:
        """Let those happen that lie ahead, and at once those that fell into a server's absence.

        Of what a restored run has seen only newcomers' speeds matter.
        """
        for event in self._emulation.scenario.events:
            if seen_until is None or event.at > seen_until:
                self._alarms.at(event.at, self._befall, event)
            elif event.kind == "join":
                self._add_workers(event)
            elif event.kind == "pause" and event.until > seen_until:
                self._alarms.at(event.until, self._go_on, event)

    def _befall(self, event: ScenarioEvent) -> None:
        cluster = self._cluster
        if not cluster.conduct.active:
            return
        cluster.coordinator.now = cluster.clock.now()
        for worker in event.workers or (None,):
            cluster.coordinator.observe("scenario", event.as_data(), worker)
        carry_out: dict[str, Callable[[ScenarioEvent], None]] = {
            "pause": self._pause, "crash": self._crash, "leave": self._leave, "rejoin": self._start, "join": self._join,
            "server_crash": lambda _: self._hands.crash_server(),
        }  # fmt: skip
        if event.kind in carry_out:
            carry_out[event.kind](event)

    def _pause(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            self._hands.signal(worker, signal.SIGSTOP)
        self._alarms.at(event.until, self._go_on, event)

    def _go_on(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            self._hands.signal(worker, signal.SIGCONT)

    def _crash(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            member = self._cluster.members.get(worker)
            if member is not None and not member.gone:
                member.meant_to_die = True
                self._hands.signal(worker, signal.SIGKILL)

    def _leave(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            member = self._cluster.members.get(worker)
            if member is not None and not member.gone:
                go = partial(self._send_away, member)
                if not self._cluster.peers.ask_to_leave(member, go):
                    go()

    def _send_away(self, member: Member) -> None:
        if not member.gone:
            self._cluster.remove(member, "leave")
            self._hands.hang_up(member)

    def _start(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            self._hands.start(worker)

    def _join(self, event: ScenarioEvent) -> None:
        self._add_workers(event)
        self._start(event)

    def _add_workers(self, event: ScenarioEvent) -> None:
        for worker in event.workers:
            self._emulation.times.add_worker(worker, event.speed)
