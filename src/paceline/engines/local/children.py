"""The processes of a run's workers and evaluator: started with a role and a link, relinked, reaped.

The server decides which of them exist, and the launcher when all of them end; this module carries it out.
"""

import itertools
import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from paceline.engines.local import addresses
from paceline.engines.local.control import Exited, Linked, Relinked, Role, Secret, Unlinked, encode
from paceline.engines.local.debugging import terminal_of_this_process
from paceline.engines.local.nursery import Nursery, import_path
from paceline.engines.local.output import Console, Transcript
from paceline.engines.local.processes import Process, RunProcess
from paceline.engines.local.workload import Workload
from paceline.server.plan import Plan
from paceline.strategies import is_peer

KNOCKING_S = 60.0  # for a process of this machine to reach a server that strangers flood
Send = Callable[[Linked | Exited, tuple[int, ...]], None]  # a message for the server, with descriptors


class ProcessPlace(msgspec.Struct, frozen=True):
    """Which worker, and which incarnation of it, or the evaluator."""

    worker: int
    incarnation: int
    evaluator: bool = False

    @property
    def name(self) -> str:
        return "evaluator" if self.evaluator else f"worker {self.worker}"


class Children:
    """All processes that run the script."""

    def __init__(
        self, plan: Plan, workload: Workload, stage: Console, send_to_server: Send, nursery: Nursery | None = None
    ) -> None:
        self._plan = plan
        self._workload = workload
        self._stage = stage
        self._send_to_server = send_to_server
        self.nursery = nursery  # None: every process is a fresh interpreter
        self.folder: Path | None = None  # the run's temporary folder
        self.secret = Secret()  # the join token, for processes of this machine that do not share the server's memory
        self._address: str | None = None  # of the server (zeromq), once it listens
        self._roleless: set[ProcessPlace] = set()  # processes that wait for that address
        self._tokens: dict[ProcessPlace, str] = {}
        self._given: dict[ProcessPlace, int] = {}  # links to servers, one after the other
        self._codes: dict[ProcessPlace, int] = {}  # exit codes of reaped processes
        self._came: set[ProcessPlace] = set()  # those whose scripts have told a server what they work on
        self.alive: dict[ProcessPlace, RunProcess] = {}

    def start(self, place: ProcessPlace) -> Process:
        """Start a process for this place."""
        process = self.make(place.name)
        self.occupy(place, process)
        return process

    def occupy(self, place: ProcessPlace, process: RunProcess) -> None:
        """Let a process take this place: it gets a link to the server and its role."""
        self.alive[place] = process
        self._tokens[place] = secrets.token_hex(16)
        if process.shares_memory:
            self._link(place, self._role(place))
            return
        self._send_to_server(self._linked(place), ())
        if self._address is None:
            self._roleless.add(place)
        else:
            self._give(place, self._role(place))

    def make(self, name: str) -> Process:
        """Start a process of the run, with a transcript of its own."""
        made = Process(name, self._stage, Transcript(self._plan.folder, name), self.nursery, self.folder)
        made.shares_memory = self._plan.config.transport == "shm" and not self._plan.remote_shards
        return made

    def listening(self, address: str) -> None:
        """Send the server's address: with their role to processes that waited for it, as a relink to all others."""
        self._address = address
        for place, process in self.alive.items():
            if not process.shares_memory:
                known = addresses.connectable(address) if process.pid else address
                self._give(place, self._role(place) if place in self._roleless else Relinked(known))
        self._roleless.clear()

    def relink(self) -> None:
        """Introduce all processes to a restarted server: link the living, and report the exits of the others."""
        self._address = None
        for place in sorted(self.alive, key=lambda place: (place.worker, place.incarnation)):
            if self.alive[place].shares_memory:
                self._link(place, Relinked(""), lives_on=True)
            else:
                self._send_to_server(self._linked(place, lives_on=True), ())
        # The last exit of each, since the dict is in that order. A worker that joins may have the evaluator's number.
        latest = {(place.worker, place.evaluator): place for place in self._codes}
        for key in sorted(latest.keys() - {(place.worker, place.evaluator) for place in self.alive}):
            self._send_to_server(self._exited(latest[key]), ())

    def came(self, place: ProcessPlace) -> None:
        """Note that the script in this place has told the server what it works on."""
        self._came.add(place)

    @property
    def some_have_come(self) -> bool:
        """Whether there is a worker whose script has told a server what it works on."""
        return not self._came.isdisjoint(self.alive)

    def reap(self, place: ProcessPlace) -> int:
        """Reap the process, killing it if it still runs, and report its exit to the server."""
        process = self.alive.pop(place)
        self._roleless.discard(place)
        code = self._codes[place] = process.reap()
        self._send_to_server(self._exited(place), ())
        return code

    def end_all(self) -> None:
        """Kill and reap all processes and forget that they were, so that the run can start over."""
        for process in self.alive.values():
            process.reap()
        self._address = None
        for known in (self.alive, self._roleless, self._tokens, self._given, self._codes, self._came):
            known.clear()

    def unlink(self) -> None:
        """Tell all processes that there will be no further server."""
        for process in self.alive.values():
            process.send(encode(Unlinked()))

    def _link(self, place: ProcessPlace, message: Role | Relinked, *, lives_on: bool = False) -> None:
        """Make a link to the server, and one to each shard of it, and send one end of each to the process and one to
        the server; none outlives its owner."""
        shards = self._plan.config.servers
        with ExitStack() as last:
            pairs = [socket.socketpair() for _ in range(1 + (shards if shards > 1 else 0))]
            for end in itertools.chain(*pairs):
                last.enter_context(end)
            theirs, servers = zip(*pairs, strict=True)
            self._send_to_server(self._linked(place, lives_on=lives_on), tuple(end.fileno() for end in servers))
            self._give(place, message, tuple(end.fileno() for end in theirs))

    def _give(self, place: ProcessPlace, link: Role | Relinked, descriptors: tuple[int, ...] = ()) -> None:
        self._given[place] = self._given.get(place, 0) + 1
        self.alive[place].send(encode(link), descriptors)

    def is_latest(self, place: ProcessPlace, links: int) -> bool:
        """Return whether the last of so many links is that to the latest server, which listens."""
        return self._address is not None and links == self._given.get(place)

    def _linked(self, place: ProcessPlace, *, lives_on: bool = False) -> Linked:
        return Linked(
            place.worker, place.incarnation, place.evaluator, self.alive[place].pid, self._tokens[place],
            loads=lives_on and place not in self._came,
        )  # fmt: skip

    def _exited(self, place: ProcessPlace) -> Exited:
        return Exited(place.worker, place.incarnation, place.evaluator, self._codes[place])

    def _terminal(self, place: ProcessPlace) -> str | None:
        """Return the terminal for the only worker's debugger; several could not share one."""
        return terminal_of_this_process() if self._plan.workers == 1 and not place.evaluator else None

    def _role(self, place: ProcessPlace) -> Role:
        config, workload = self._plan.config, self._workload
        here = self.alive[place].pid != 0  # another machine knows its own address of the server, and the token
        return Role(
            worker=place.worker,
            incarnation=place.incarnation,
            workers=self._plan.workers,
            evaluator=place.evaluator,
            seed=config.seed,
            options=config.options,
            batch_size=config.batch_size,
            epochs=config.epochs,
            data_dir=None if config.data_dir is None else os.fspath(config.data_dir),
            threads=config.threads or 1,
            script=workload.script,
            arguments=workload.arguments,
            function=workload.function,
            sys_path=import_path(),
            transport="shm" if self.alive[place].shares_memory else "zeromq",
            address=addresses.connectable(self._address or "") if here else self._address or "",
            secret=self.secret if here else Secret(),
            knocking_s=KNOCKING_S,
            folder=None if self.folder is None else os.fspath(self.folder),
            over_tcp=addresses.over_tcp,
            token=self._tokens[place],
            log_level=logging.getLogger("paceline").level,
            peer=config.strategy if is_peer(config.strategy) and not place.evaluator else None,
            terminal=self._terminal(place),
            yields=self._plan.scenario is None,  # not under emulation: a worker must wake from its sleep on time
        )
