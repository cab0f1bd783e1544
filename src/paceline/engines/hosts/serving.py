"""`paceline serve`: a run's server and evaluator on this machine, and workers that join from wherever they are.

It is the launcher of one machine, and listens for others. The server still decides who is a worker; the launcher finds
a machine for each: at first for as many as the run waits for, later for newcomers and workers that are to come back.
If some of its shards are on other machines, a server is started when there is a machine for each of them.
"""

import contextlib
import hashlib
import logging
import os
import platform
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline._version import __version__
from paceline.core.errors import OptionError, UserError
from paceline.core.settings import EVERY_ADDRESS
from paceline.engines.hosts import tokens
from paceline.engines.hosts.join_listener import JoinedHost, JoinedProcess, JoinListener, Requirements
from paceline.engines.hosts.remote_shards import RemoteShards
from paceline.engines.hosts.strategy_source import digest_of_file, strategy_source
from paceline.engines.local import control
from paceline.engines.local.children import ProcessPlace
from paceline.engines.local.launcher import Launcher, finished_run
from paceline.engines.local.result_handover import Outcome, interrupted_without_server
from paceline.engines.local.workload import Workload, packed
from paceline.model import descriptors
from paceline.records.journal import Sink
from paceline.records.logs import Log, notice
from paceline.server.exchange import Launched
from paceline.server.plan import Plan, how_it_ended
from paceline.server.progress import Progress
from paceline.transport.codec import FORMAT as WIRE_FORMAT
from paceline.transport.join_token import JoinToken
from paceline.transport.refusals import RefusalLog
from paceline.transport.security import Security
from paceline.worker import context

logger = logging.getLogger("paceline")

MOST_SPARE = 64  # machines that stand by for lost ones of shards
RELINK_S = 10.0  # for a worker that has lost its link to the server: a restarted server gives it another within that


class HostLauncher(Launcher):
    """One run's processes: server and evaluator here, workers and perhaps shards elsewhere."""

    def __init__(
        self, plan: Plan, workload: Workload, name: str, token: JoinToken, log: Sink, sink: Sink | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:  # fmt: skip
        """`name` says what workers run, for machines that join to compare."""
        super().__init__(plan, workload, log, sink, progress)
        self._address = plan.config.listen or ""
        required = Requirements(
            WIRE_FORMAT, name, versions_here(), strategy_source(plan.config.strategy), plan.remote_shards > 0
        )
        encrypts = not plan.config.trusted_network
        self._secret = self._children.secret = control.Secret(token.reveal(), encrypts)
        descriptors.raise_limit()  # as the listener does: a nursery does not serve a process whose limits have changed
        self._take_nursery()  # it imports torch while machines join
        try:
            self._listener = JoinListener(self._address, Security(token, encrypted=encrypts), required, self)
        except BaseException:
            self._leave_nothing()
            raise
        self._remote = RemoteShards(plan, self._listener)
        self._pending: Callable[[], None] | None = None  # starts a server whose shards have no machines yet
        self._places: dict[JoinedProcess, ProcessPlace] = {}
        self._vacant: list[ProcessPlace] = []  # places that wait for a machine
        self._announced: list[JoinedHost] = []  # machines that the server was asked to find a number for
        self._joins = RefusalLog("notices of machines that join", notice)

    def run(self) -> Outcome:
        failed = True
        try:
            self._loop.watch_descriptor(self._listener.fileno(), self._listener.pump)
            outcome = super().run()
            failed = outcome.failure is not None
            return outcome
        finally:
            self._listener.close("the run has failed" if failed else "the run is over", failed=failed)

    def _on_exit(self, place: ProcessPlace) -> None:
        super()._on_exit(place)
        left = [each for each in self._children.alive if not each.evaluator]
        goes_on = self._began is not None and self._finished is None and self._failure is None
        if goes_on and not left and self._waits_for_others():
            notice("no worker is left: waiting for some to join; Ctrl-C ends the run with its report")

    def _waits_for_others(self) -> bool:
        """Whether somebody may join a run that has lost all workers."""
        return True

    # -- shards of other machines ------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        waits = self._pending is not None and self._finished is None and self._failure is None
        return waits or super()._goes_on()

    def _begin(self, restore: Path | None, *, append: bool, then: Callable[[], None]) -> None:
        self._end_shards()  # of an earlier server: their machines are needed
        self._pending = partial(super()._begin, restore, append=append, then=then)
        self._begin_if_possible()

    def _begin_if_possible(self) -> None:
        """Start the server that is due, unless machines for its shards are missing; workers wait meanwhile."""
        pending, missing = self._pending, self._remote.missing
        if pending is None:
            return
        if missing:
            self._spare_linkless()
            self._joins.warn(f"waiting for {missing} more shard{'s' * (missing > 1)} to join")
            return
        self._pending = None
        pending()

    def _start_shards(self) -> None:
        super()._start_shards()
        for process in self._remote.start():
            self._shards.append(process)
            self._send_to_server(self._remote.announced(process))
            self._joins.warn(f"{process.host.hostname} holds {process.name}")

    def _address_for_shards(self) -> str:
        """Return the port that the first shard of another machine would have here."""
        remote = self._plan.remote_shards
        return self._address_for_tensors(self._plan.config.servers - remote + 1) if remote else ""

    def _on_shards_expected(self, address: str) -> None:
        self._remote.send_roles(address)

    def _on_shard_lost(self, shard: int) -> None:
        """End a shard that only its link was lost of: its machine then reports its end."""
        process = self._remote.process_of(shard)
        if process is not None and process in self._shards:
            process.signal(signal.SIGKILL)

    def _interrupt_server(self) -> None:
        if self._pending is None:
            for process in self._processes():
                if process.pid == 0:  # of another machine; one that somebody has stopped would hold up the end
                    process.signal(signal.SIGCONT)
            super()._interrupt_server()
            return
        self._pending, missing = None, self._remote.missing
        how = f"{missing} shard{'s were' if missing > 1 else ' was'} missing"
        self._finished = interrupted_without_server(self._plan, how)
        self._children.unlink()
        self._end_all()

    # -- places and machines -----------------------------------------------------------------------------------------

    def _listening(self, shard: int = 0) -> dict[str, Any]:
        if self._children.folder is not None and not self._listener.is_open_locally:
            self._loop.watch_descriptor(self._listener.open_locally(self._children.folder), self._listener.accept)
        return {"listen": self._address_for_tensors(shard), "secret": self._secret}

    def _address_for_tensors(self, shard: int) -> str:
        host, _, port = self._address.rpartition(":")
        return f"tcp://{host}:{int(port) + 1 + shard}"

    def _start_children(self) -> None:
        self._vacant.clear()  # of a server that died before anything was trained
        announced, self._announced = self._announced, []
        if self._plan.config.evaluate_every is not None:
            super()._start(ProcessPlace(self._plan.workers, 0, evaluator=True))
        for worker in range(self._plan.workers):
            self._start(ProcessPlace(worker, 0))
        for host in announced:
            if host.process is None:
                self.on_host(host)

    def _start(self, place: ProcessPlace) -> None:
        """Give the place to a machine; before training the run waits for one, later it does without."""
        host = self._next_announced() or self._listener.idle(place.worker)
        if host is not None:
            process = self._listener.start(host, place.worker)
            process.shares_memory = process.shares_memory and not self._plan.remote_shards  # it could not with these
            self._places[process] = place
            self._children.occupy(place, process)
            shared = "shares memory with the server" if process.shares_memory else "over the network"
            self._joins.warn(f"{host.hostname} runs worker {place.worker} ({shared})")
        elif self._began is None:
            self._vacant.append(place)
        else:
            self._send_to_server(control.NeverStarted(place.worker, place.incarnation))

    def _next_announced(self) -> JoinedHost | None:
        """Return the next machine that waits for a number; one may be gone, or have asked again as another."""
        while self._announced:
            host = self._announced.pop(0)
            if host.process is None and self._listener.hosts.get(host.identity) is host:
                return host
        return None

    def on_host(self, host: JoinedHost) -> None:
        if self._finished is not None:
            self._listener.dismiss(host, "the run is over")
        elif host.shard:
            held = sum(process.pid == 0 for process in self._shards)
            spare = len(self._listener.free(shard=True)) + held - self._plan.remote_shards
            if spare > MOST_SPARE:
                self._listener.dismiss(host, f"{MOST_SPARE} machines stand by for shards already", True)
                return
            if self._pending is None:
                self._joins.warn(f"{host.hostname} stands by, in case that a shard's machine is lost")
            self._begin_if_possible()
        elif self._vacant:
            by_rank = [place for place in self._vacant if place.worker == host.rank]
            place = by_rank[0] if by_rank else min(self._vacant, key=lambda each: each.worker)
            self._vacant.remove(place)
            self._start_with(host, place)
        else:
            self._announced.append(host)
            self._send_to_server(control.Newcomer())

    def _start_with(self, host: JoinedHost, place: ProcessPlace) -> None:
        self._announced.insert(0, host)
        self._start(place)
        missing = len(self._vacant)
        if missing:
            self._joins.warn(f"waiting for {missing} more worker{'s' * (missing > 1)} to join")

    def _on_no_place(self, reason: str) -> None:
        host = self._next_announced()
        if host is not None:
            self._listener.dismiss(host, reason, True)

    # -- what machines say -------------------------------------------------------------------------------------------

    def on_word(self, process: JoinedProcess, data: bytes) -> None:
        place = self._places.get(process)
        if place is not None and self._children.alive.get(place) is process:
            self._on_child_word(place, data)

    def on_end(self, process: JoinedProcess) -> None:
        if process in self._shards:
            self._on_shard_exit(process)
            return
        place = self._places.pop(process, None)
        if place is None or self._children.alive.get(place) is not process:
            return
        self._on_exit(place)
        host = process.host
        comes_back = self._plan.config.respawn and process.code != 0 and self._finished is None
        if self._listener.hosts.get(host.identity) is host and not comes_back:
            self._listener.dismiss(host, *self._why_dismissed(process))

    def on_idle_gone(self, host: JoinedHost) -> None:
        if host.shard:
            self._begin_if_possible()  # it may have counted as there: one more is missing

    def _why_dismissed(self, process: JoinedProcess) -> tuple[str, bool]:
        """Return the reason for a machine whose process has ended, and whether that is a failure."""
        finished, why = self._finished, self._why()
        if why is not None and (finished is not None or self._failure is not None):
            return f"the run has failed: {why.text}", True
        if finished is not None and finished.cause == "interrupted":
            return "the run was interrupted", False
        if process.code == 0 and process.host.shard:
            return "the run is over" if finished is not None else "its shard has lost the server", False
        if process.code == 0:
            return "its script has ended", False
        return f"its process {how_it_ended(process.code or 0)}", True

    def on_leaving(self, process: JoinedProcess) -> None:
        place = self._places.get(process)
        if place is not None:
            self._send_to_server(control.Leaves(place.worker, place.incarnation))
        elif process in self._shards:
            self._joins.warn(f"{process.host.hostname} leaves with {process.name}, as its user asks")
            self._listener.dismiss(process.host, "as its user asks")
            self._on_shard_exit(process)

    def _on_link_lost(self, place: ProcessPlace, links: int) -> None:
        """End a joined process that has lost its link, unless a restarted server has given it another, or soon will.

        It may also have been a link that such a server gave it: nothing else would end its wait. The evaluator is a
        process of this machine: only the server's death cuts its link, as for all of one machine.
        """
        process = self._children.alive.get(place)
        latest = self._pending is None and self._children.is_latest(place, links)
        if process is not None and not place.evaluator and latest:
            self._kill_at[process] = time.monotonic() + RELINK_S

    def _on_relinked(self) -> None:
        for _ in self._announced:  # the server that was asked is gone
            self._send_to_server(control.Newcomer())
        self._spare_linkless()

    def _spare_linkless(self) -> None:
        """Let processes live that were to be ended for having lost their link."""
        for process in self._children.alive.values():
            if process.pid == 0:
                self._kill_at.pop(process, None)

    # -- time --------------------------------------------------------------------------------------------------------

    def _seconds_left(self) -> float | None:
        before, beat = super()._seconds_left(), self._listener.seconds_left()
        return beat if before is None else min(before, beat)

    def _kill_the_late(self) -> None:
        super()._kill_the_late()
        self._listener.tick()


def versions_here() -> dict[str, str]:
    """Return the versions that results may depend on."""
    return {"paceline": __version__, "torch": str(torch.__version__), "Python": platform.python_version()}


def name_of(workload: Workload, task: str | None = None) -> str:
    """Return what both sides compare: a script's name and digest, the name of a task, or a function's digest."""
    if task is not None:
        return f"the task {task}"
    if workload.script is None:
        return f"a function ({hashlib.sha256(workload.function or b'').hexdigest()[:16]})"
    return digest_of_file(Path(workload.script))


def launch(
    train: Callable[[], None], plan: Plan, sink: Sink | None, progress: Callable[[Progress], None] | None
) -> Launched:
    """Serve a run for workers that join, save the report in the run's folder, and return the result."""
    if context.current() is not None:
        raise UserError("launch() was called inside a worker of another run: leave the call out")
    workload = packed(train)
    room, _, task = getattr(train, "__module__", "").rpartition(".")
    if workload.script is None and room != "paceline.tasks":
        raise OptionError("workers of other machines need a script or a task that they have, too, not a function")
    name = name_of(workload, task if room == "paceline.tasks" else None)
    with tokens.of_a_run(plan.config.token_file, plan.folder) as token:
        launcher = HostLauncher(plan, workload, name, token, Log(), sink, progress)
        say_how_to_join(plan, name)
        with contextlib.closing(launcher.run()) as outcome:
            return finished_run(outcome, plan)


def command_to_join(address: str, name: str, *, trusted: bool) -> str:
    """Return the command that joins a run of this script or task; options come before the address."""
    task = name.removeprefix("the task ")
    options = ["--trusted-network"] * trusted + (["--task", task] if task != name else [])
    return " ".join(["paceline join", *options, address, *([] if task != name else [name.partition(" (")[0]])])


def say_how_to_join(plan: Plan, name: str) -> None:
    """Show the command for other machines."""
    listen = plan.config.listen or ""
    host, _, port = listen.rpartition(":")
    if host in EVERY_ADDRESS:
        listen = f"{os.uname().nodename}:{port}"
    if plan.config.trusted_network:
        logger.warning("--trusted-network: nothing is encrypted, whoever can read the network can change the model")
    trusted, shards = plan.config.trusted_network, plan.remote_shards
    notice(f"to join, on any machine: {command_to_join(listen, name, trusted=trusted)}")
    if shards:
        options = ["--trusted-network"] * trusted + ["--shard", listen]
        notice(f"to hold a shard, on {shards} of them: paceline join {' '.join(options)}")
    notice(f"waiting for {plan.workers} worker{'s' * (plan.workers > 1)}")
