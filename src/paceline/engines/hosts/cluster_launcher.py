"""The launcher of a run whose machines nobody joins by hand: a cluster's scheduler is asked for them.

What it is asked for is an actor: a process somewhere that runs the agent of `paceline join` for one worker or shard,
and ends with that one's process. The scheduler starts none again by itself: workers come back if the server says so,
and a shard that has died is replaced as long as the run goes on. Actors are asked for when there are fewer than are
wanted, and no sooner than the one has ended whose room the next may need.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from paceline.core.settings import is_elastic
from paceline.engines.hosts.join_listener import JoinedHost, JoinedProcess
from paceline.engines.hosts.serving import HostLauncher, name_of
from paceline.engines.local import control
from paceline.engines.local.children import ProcessPlace
from paceline.engines.local.result_handover import Outcome
from paceline.engines.local.workload import Workload
from paceline.records.journal import Sink
from paceline.records.logs import Log
from paceline.server.plan import Plan, how_it_ended
from paceline.server.progress import Progress
from paceline.transport.join_token import JoinToken

LOOK_S = 0.5  # between two looks at what has become of actors
VAIN = 3  # actors of a kind that come to nothing before the run gives up, or as many as it begins with

Left = tuple[int, str]  # how an actor left: the exit code of `paceline join`, and the error that it would have shown
logger = logging.getLogger("paceline")


class Actors(Protocol):
    """The actors that run workers, or those that hold shards, living or asked for."""

    def __len__(self) -> int: ...

    def ask(self) -> None:
        """Ask for one more."""

    def ended(self) -> Iterator[tuple[int, Left | str]]:
        """Yield those that have ended since the last look: number, and how it left or what the scheduler says of it."""

    def part(self) -> None:
        """Let those that run end by themselves, so that each removes its files; forget those that never began."""


class ClusterLauncher(HostLauncher):
    """One run's processes: server, evaluator and perhaps shards here, workers and the other shards in actors."""

    def __init__(
        self, plan: Plan, workload: Workload, token: JoinToken, interrupts: int, actors: Callable[[str, bool], Actors],
        sink: Sink | None, progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        """`interrupts` has a byte for each; `actors` makes those that join at an address, as shards or as workers."""
        super().__init__(plan, workload, name_of(workload), token, Log(), sink, progress)
        self._interrupted, self._look_at = interrupts, 0.0
        self._workers, self._holders = (actors(self._listener.address, shards) for shards in (False, True))
        self._wanted = self._most = plan.config.most_workers or plan.workers  # that there should be, and may be
        self._joined: set[tuple[bool, int | None]] = set()  # those that are in the run: whether a shard's, and number
        self._missed: set[int] = set()  # workers that the server wants back, and for which there was no machine
        self._coming = 0  # actors that were asked for because of them, and run no worker yet
        self._vain = {"worker": 0, "shard": 0}  # actors that have ended since the last joined, and first processes

    def _interrupts(self) -> contextlib.AbstractContextManager[int]:
        return contextlib.nullcontext(self._interrupted)

    def _address_for_tensors(self, _shard: int) -> str:
        return f"tcp://{self._address}"

    def run(self) -> Outcome:
        try:
            self._look()
            return super().run()
        finally:
            self._workers.part()
            self._holders.part()

    def _kill_the_late(self) -> None:
        super()._kill_the_late()
        self._look()

    def _look(self) -> None:
        """See which actors have ended, and ask for as many as are wanted."""
        now = time.monotonic()
        if now < self._look_at or self._finished is not None or self._failure is not None:
            return
        self._look_at = now + LOOK_S
        for number, how in self._workers.ended():
            self._on_worker_actor_end(number, how)
        for number, how in self._holders.ended():
            self._on_shard_actor_end(number, how)
        while self._failure is None and len(self._workers) < min(self._wanted, self._most):
            self._workers.ask()
        while self._failure is None and len(self._holders) < self._plan.remote_shards:
            self._holders.ask()

    def _on_worker_actor_end(self, number: int, how: Left | str) -> None:
        """Decide whether another is asked for. Before training begins always, since the run waits for it."""
        joined, text = (False, number) in self._joined, how if isinstance(how, str) else how[1]
        self._joined.discard((False, number))
        if text and not isinstance(how, str) and not joined and self._began is None:
            self._fail(control.Failure("user", text))
        elif not joined and isinstance(how, str):
            logger.warning("actor %d has ended before it could join: %s", number, text)
            self._count_vain("worker", text)
        elif isinstance(how, str) and is_elastic(self._plan.config) and not self._plan.config.respawn:
            logger.warning("actor %d is gone, and another one is asked for: %s", number, text)
        elif self._began is not None:
            self._wanted -= 1  # it has ended by itself, or the server decides whether to start it again
            if text:
                logger.warning("actor %d has left the run: %s", number, text)

    def _on_shard_actor_end(self, number: int, how: Left | str) -> None:
        """Another one is asked for, since the run cannot do without; give up if none joins."""
        joined, text = (True, number) in self._joined, how if isinstance(how, str) else how[1]
        self._joined.discard((True, number))
        if text and not isinstance(how, str) and not joined and self._began is None:
            self._fail(control.Failure("user", text))
        elif not joined:
            logger.warning("actor %d, for a shard, has ended before it could join: %s", number, text)
            self._count_vain("shard", text)
        elif text:
            logger.warning("actor %d, of a shard, is gone, and another one is asked for: %s", number, text)

    def _count_vain(self, what: str, why: str) -> None:
        """Give up if it goes on like this."""
        self._vain[what] += 1
        at_first = self._plan.workers if what == "worker" else self._plan.remote_shards
        if self._vain[what] < max(VAIN, at_first):
            return
        if self._began is None or what == "shard":
            text = f"no {what} gets as far as to {'train' if what == 'worker' else 'hold its part'}: {why}"
            self._fail(self._script_failure or control.Failure("peer", text))
        else:
            self._wanted, self._vain[what], self._coming = len(self._workers), 0, 0
            self._missed.clear()

    def _start(self, place: ProcessPlace) -> None:
        """Want an actor for each worker that is missed; a restarted server asks for all of them again.

        A number that no worker had is for a machine that waited, which has got another one meanwhile.
        """
        super()._start(place)
        if place in self._children.alive:
            self._missed.discard(place.worker)
            self._coming = max(0, self._coming - 1)  # whomever it was asked for
        elif self._began is not None and place.incarnation > 0:
            self._missed.add(place.worker)
            lacking = max(0, len(self._missed) - self._coming)
            self._wanted += lacking  # once the actor of the last process has ended: its room is needed
            self._coming += lacking

    def _on_no_place(self, reason: str) -> None:
        super()._on_no_place(reason)
        self._wanted += 1  # the server has not noticed yet that the one is gone whom this one was to replace

    def _waits_for_others(self) -> bool:
        return self._wanted > 0

    def on_host(self, host: JoinedHost) -> None:
        self._joined.add((host.shard, host.rank))
        if self._began is not None:
            self._vain["shard" if host.shard else "worker"] = 0
        super().on_host(host)

    def on_end(self, process: JoinedProcess) -> None:
        """As on hosts; but the actor ends with its process, whatever becomes of the worker or shard."""
        super().on_end(process)
        if process.host.identity in self._listener.hosts:
            self._listener.dismiss(process.host, *self._why_dismissed(process))
        if self._began is None and process.code and not process.host.shard:
            self._count_vain("worker", f"its process {how_it_ended(process.code)}")
