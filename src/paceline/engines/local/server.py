"""The server process: one run on real processes, driven by messages of workers and launcher and by alarms.

One thread, one loop: it waits, then handles all that is due. If the launcher's end of the control channel closes,
nobody else is left to clean up: the server then kills every worker's process group and itself.
"""

import gc
import heapq
import itertools
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import safetensors.torch
import torch
import zmq
from torch import Tensor

from paceline import engines
from paceline.core.errors import InternalError, OptionError, PacelineError
from paceline.core.updates import Merged, PushRef
from paceline.engines.local import control as m
from paceline.engines.local import scratch
from paceline.engines.local.kept_result import keep
from paceline.engines.local.processes import end_own_group
from paceline.engines.local.result_handover import as_failure, as_overdue, behind_descriptor, trained_state
from paceline.engines.local.server_links import Member, ServerLinks
from paceline.engines.local.shared_weights import SharedWeights
from paceline.gradients.server import GradientExchange
from paceline.model import own_optimizer
from paceline.model.memory_budget import require_server
from paceline.model.regions import Region
from paceline.model.spec import ModelSpec
from paceline.model.store import Parameters, Store
from paceline.peers.server import PeerExchange
from paceline.records.journal import Line, Observation, Tee, Writer, read
from paceline.records.journal_tail import JournalTail
from paceline.records.logs import LEVELS
from paceline.records.metrics import Metrics, to_json
from paceline.server.checkpoint.schedule import Resumption
from paceline.server.emulation import Timing
from paceline.server.engine import EVALUATOR, Call, Control
from paceline.server.progress import Progress
from paceline.server.run import ServerRun
from paceline.server.waits import Waits
from paceline.shards.commands import CountEffort, ShardEffort
from paceline.shards.messages import BETWEEN
from paceline.shards.remote_links import CommandLink, ShardPort
from paceline.shards.sharded_store import ShardedStore, ShardLinks
from paceline.shards.sharded_tables import ShardedTableExchange
from paceline.strategies import build_central, is_peer
from paceline.tables.messages import Clocked
from paceline.tables.server import TableExchange
from paceline.transport.base import Lost
from paceline.transport.messages import Cancelled, Hello, Work
from paceline.transport.shm import Channel

logger = logging.getLogger("paceline")
PARCEL = 256  # lines; a few milliseconds of decisions at the server's top speed
LATE_S = 0.2  # the longest that a line waits for others, while lines keep coming

HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
LONG_BYTES = 1 << 20  # of a model; below, a system call per step costs too much
LAST_WORDS_S = 5.0  # for a busy launcher to read the last message, and for those of a worker of another machine
LEAVING_S = 0.01  # between looks for the latter
IDLE_S = 0.2  # between checks of what no message announces: lines to relay, a failure of the journal
logger = logging.getLogger("paceline")
SIGNALS = {"pause": signal.SIGSTOP, "resume": signal.SIGCONT, "kill": signal.SIGKILL}


class Relay:
    """Sends journal lines to the launcher, which has the user's log and listeners.

    The log shows few lines and gets them at once. A listener gets all lines, in parcels, because one message per
    decision would cost the server more than the decision itself. Its owner calls `flush` when idle and before the run's
    end is announced.
    """

    def __init__(self, send: Callable[[m.JournalLines], None], *, everything: bool) -> None:
        self._send = send
        self._everything = everything
        self._waiting: list[Line] = []
        self._since = 0.0  # when the first of them was written

    def write(self, line: Line) -> None:
        shown = isinstance(line, Observation) and line.what in LEVELS
        if not (shown or self._everything):
            return
        now = time.monotonic()
        if not self._waiting:
            self._since = now
        self._waiting.append(line)
        if shown or len(self._waiting) >= PARCEL or now - self._since > LATE_S:
            self.flush()

    def flush(self) -> None:
        """Send the waiting lines."""
        if self._waiting:
            self._send(m.JournalLines(msgspec.msgpack.encode(self._waiting)))
            self._waiting.clear()


class Clock:
    """The run's clock: seconds since its first phase began."""

    def __init__(self) -> None:
        self.zero: float | None = None  # on the machine's monotonic clock

    def start(self, at: float = 0.0) -> None:
        """Start the clock at `at` seconds into the run."""
        self.zero = time.monotonic() - at

    def now(self) -> float:
        return 0.0 if self.zero is None else time.monotonic() - self.zero


class Effort:
    """Processor seconds that the server spent applying pushes and copying versions.

    Reading them is a system call, which for a small model takes as long as the step itself; there wall-clock time,
    which needs none, is counted instead.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start counting at zero: setup is not part of the run."""
        self.apply_s = 0.0
        self.copy_s = 0.0
        self.since = time.process_time()

    def clock_for(self, nbytes: int) -> Callable[[], float]:
        """Return the clock to time one step or copy of so many bytes with."""
        return time.process_time if nbytes >= LONG_BYTES else time.perf_counter


class TimedStore(Store):
    """A store that measures the time of its steps and copies."""

    def __init__(
        self, spec: ModelSpec, values: Sequence[Tensor], buffers: Sequence[Tensor], statistics: bool, effort: Effort
    ) -> None:
        super().__init__(spec, values, buffers, statistics)
        self._effort = effort
        self._clock = effort.clock_for(self.nbytes)

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        began = self._clock()
        merged = super().apply(pushes, weights, stock=stock)
        self._effort.apply_s += self._clock() - began
        return merged

    def write_to(self, flat: Sequence[Tensor], buffers: Sequence[Tensor]) -> int:
        began = self._clock()
        version = super().write_to(flat, buffers)
        self._effort.copy_s += self._clock() - began
        return version


class Alarms:
    """A heap of scheduled calls. None can be removed; one that is outdated when it runs must do nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, Any, bool]] = []
        self.moving = 0  # scheduled calls with `moves`
        self._count = itertools.count()

    def at(self, moment: float, call: Call, argument: Any = None, *, moves: bool = True) -> None:
        """Schedule a call; calls at one moment keep their order.

        `moves`: a run in which nothing else happens may go on because of this call.
        """
        self.moving += moves
        heapq.heappush(self._heap, (moment, next(self._count), call, argument, moves))

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the next call; None if there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def ring(self, now: float) -> None:
        """Make all calls that are due, except those scheduled meanwhile."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap))
        for _, _, call, argument, moves in due:
            self.moving -= moves
            call(argument)


def main(channel: Channel) -> None:
    """Serve one run; return when the launcher has its result."""
    frame = channel.receive()
    setup = m.for_server(frame.data) if frame is not None else None
    if not isinstance(setup, m.Setup):
        raise InternalError(f"the first message of a server must be its setup, not {setup!r}")
    torch.set_num_threads(setup.plan.config.threads or 1)
    torch.set_grad_enabled(False)  # once, instead of for every step
    own_optimizer.take(setup.plan.optimizers)
    if setup.listen:
        own_optimizer.import_only((setup.plan.config.own_optimizers or "").split(","))
    try:
        server = Server(channel, setup, scratch.claim(Path(setup.folder)))
    except PacelineError as error:  # a journal that cannot be written, a checkpoint that cannot be read
        channel.send(m.encode(m.Finished("error", b"", as_failure(error))))
        channel.finish(LAST_WORDS_S)
        return
    gc.collect()
    gc.freeze()  # these objects live as long as the process: scanning them at each collection would delay workers
    server.serve()


def _tail_in(folder: Path) -> JournalTail | None:
    """Return the journal's last lines in the run's temporary folder; None if there is no room for them."""
    try:
        return JournalTail(folder / "journal-tail")
    except OSError as error:
        logger.debug("a restart would not know the journal's last lines: %s", error)
        return None


class LocalEngine:
    """The engine of a run on processes of this machine, which the launcher starts and signals."""

    run: ServerRun

    def __init__(self, channel: Channel, setup: m.Setup, folder: Path, on_idle: Callable[[], None]) -> None:
        """`folder` is this process's own."""
        self.name: str = setup.plan.config.engine
        self.capabilities = engines.capabilities(self.name)
        self._channel = channel
        self._setup = setup
        self._on_idle = on_idle
        self._clock = Clock()
        self._alarms = Alarms()
        self._effort = Effort()
        exact = setup.plan.scenario is not None
        self._orphaned: Callable[[], NoReturn] = end_own_group  # ends all processes, when the launcher is gone
        self.shards = self._link_shards(setup.plan.config.servers)
        self._links = ServerLinks(
            channel, self._clock.now, folder, self._on_control, self._check_memory, exact=exact,
            shards=self.shards,
        )  # fmt: skip
        self._orphaned = self._links.orphaned
        self._leaving: list[tuple[m.Exited, float]] = []  # exits whose last messages may come until then
        self._members: dict[int, Member] = {}  # the latest process of each worker, and the evaluator's
        self._weights = SharedWeights(self._remark)
        self._checked_memory = setup.append  # after a restart the workers already have their memory

    def _link_shards(self, count: int) -> ShardLinks | None:
        """Return the links to the shards, which the launcher announces first of all; None if there are none."""
        links: list[CommandLink] = []
        port = self._shard_port() if count > 1 and self._setup.shards_listen else None
        while count > 1 and len(links) < count:
            frame = self._channel.receive()
            message = m.for_server(frame.data) if frame is not None else None
            if frame is None or not isinstance(message, m.ShardLinked):
                raise InternalError(f"the launcher sent {message!r} before all {count} shards")
            if port is not None and message.token:
                links.append(port.expect(message.token))
            else:
                links.append(Channel(socket.socket(fileno=frame.descriptors[0])))
        return ShardLinks(links, self._on_lost_shard) if links else None

    def _shard_port(self) -> ShardPort:
        """Return where shards of other machines connect to, once the launcher knows it."""
        place = self._setup.shards_listen
        try:
            port = ShardPort(place, self._setup.secret.security, self._require_launcher)
        except zmq.ZMQError as error:
            raise OptionError(f"--listen: cannot listen at {place}, for shards: {error.strerror}") from error
        self._channel.send(m.encode(m.ShardsExpected(port.address)))
        return port

    def _require_launcher(self) -> None:
        """Raise `Lost` if the launcher is gone: while a shard is waited for, nobody reads what it sends."""
        poller = select.poll()
        poller.register(self._channel, HUNG_UP)
        if poller.poll(0):
            raise Lost

    def _on_lost_shard(self, shard: int) -> NoReturn:
        """Wait for the end: the launcher knows how the shard died, or has it ended if only its link did, and starts a
        successor from a checkpoint."""
        logger.debug("shard %d is gone", shard)
        try:
            self._channel.send(m.encode(m.ShardLost(shard)))
            while True:
                self._channel.receive()
        except Lost:
            self._orphaned()

    def carry(self, run: ServerRun) -> None:
        """Set the run that messages go to."""
        self.run = self._links.run = run

    # -- time --------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.now()

    def start_clock(self, at: float) -> None:
        if self._clock.zero is None:
            self._clock.start(at)
        self._effort.begin()
        if self.shards is not None:
            self.shards.ask(CountEffort(begin=True), ShardEffort)
        if self._clock.zero is not None:
            self.send_to_launcher(m.Began(self._clock.zero))

    def call_at(self, at: float, call: Call, argument: Any = None, *, keeps_alive: bool = True) -> None:
        self._alarms.at(at, call, argument, moves=keeps_alive)

    def wake(self) -> None:
        """Do nothing: the loop attends to the run after every wait."""

    def drive(self, run: ServerRun) -> None:
        """Drive the run until it is finished."""
        setup = self._setup
        self.send_to_launcher(m.Serving())
        if setup.listen or setup.plan.config.transport == "zeromq":
            at = self._links.listen(setup.listen, setup.secret.security, over_tcp=setup.over_tcp)
            shards = [] if self.shards is None else self.shards.addresses
            self.send_to_launcher(m.Listening(BETWEEN.join([at, *shards])))
        self._on_control()  # messages read together with the setup are already buffered, so no wait would report them
        while not run.finished:
            self._wait()
            run.attend(self.now())

    def _wait(self) -> None:
        """Wait once, and handle messages and alarms."""
        run, limit = self.run, self._setup.plan.config.max_seconds
        left, patience = self._alarms.seconds_left(self.now()), IDLE_S
        if left is not None:
            patience = min(patience, left)
        if limit is not None and run.active and run.phases.running:
            patience = min(patience, max(0.0, limit - self.now()))
        something = self._links.wait(min(patience, LEAVING_S) if self._leaving else patience)
        if self._leaving:
            self._look_at_leaving()
        self._alarms.ring(self.now())
        if not something:
            self._on_idle()
            if self.shards is not None:
                self.shards.look()
            if not self._alarms.moving:
                run.on_quiet(self.now())

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, worker: int, incarnation: int) -> None:
        self.send_to_launcher(m.StartWorker(worker, incarnation))

    def control(self, worker: int, what: Control) -> None:
        member = self._members.get(worker)
        if member is None or member.hung_up:
            return
        if what == "hang_up":
            self._links.hang_up(member)
        elif worker != EVALUATOR:
            self.send_to_launcher(m.Signal(worker, SIGNALS[what]))

    def crash_server(self, for_s: float | None) -> None:
        del for_s  # a successor is started at once, and takes the time that it takes
        self.run.checkpoints.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def _on_control(self) -> None:
        try:
            while (frame := self._channel.collect()) is not None:
                self._on_launcher_message(m.for_server(frame.data), frame.descriptors)
        except Lost:
            self._orphaned()

    def _on_launcher_message(self, message: m.ToServer, descriptors: list[int]) -> None:
        match message:
            case m.Linked():
                self._on_linked(message, descriptors)
            case m.Exited():
                self._leaving.append((message, time.monotonic() + LAST_WORDS_S))
                self._look_at_leaving()
            case m.Interrupt():
                self.run.interrupt(self.now())
            case m.Newcomer():
                reason = self.run.invite(self._setup.plan.config.most_workers)
                if reason is not None:
                    self.send_to_launcher(m.NoPlace(reason))
            case m.Leaves():
                self.run.departures.send_away(message.worker, message.incarnation)
            case m.NeverStarted():
                self.run.on_never_started(message.worker, message.incarnation)
            case m.Debugged():
                self.run.departures.liveness.debugging(message.worker, message.waits)
            case _:
                raise InternalError(f"the launcher sent {message} to a server that runs")

    def _look_at_leaving(self) -> None:
        """Take leave of processes that have exited, once their last messages have come."""
        leaving, self._leaving = self._leaving, []
        for message, until in leaving:
            if time.monotonic() < until and self._links.may_still_speak(message):
                self._leaving.append((message, until))
                continue
            worker = EVALUATOR if message.evaluator else message.worker
            known = self._links.unlink(message) is not None
            ended = self.run.on_exit if known else self.run.on_unknown_exit
            ended(worker, message.incarnation, message.code, self.now())

    def _on_linked(self, message: m.Linked, descriptors: list[int]) -> None:
        worker = EVALUATOR if message.evaluator else message.worker
        before = self._members.get(worker)
        if before is not None and not before.hung_up:  # the exit of the predecessor may be reported after this
            self._links.drain(before)
        self._members[worker] = self._links.link(message, descriptors)
        if not message.evaluator:
            self.run.on_start(worker, message.incarnation, loads=message.loads)

    def send_to_launcher(self, message: m.ToLauncher, descriptors: tuple[int, ...] = ()) -> None:
        """Send the launcher a message, with descriptors."""
        try:
            self._channel.send(m.encode(message), descriptors)
        except Lost:
            self._orphaned()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _check_memory(self, hello: Hello) -> None:
        if not self._checked_memory:
            self._checked_memory = True  # the first worker has its region; all others are about to allocate theirs
            require_server(hello.spec, regions=len(self.run.workers.alive) - 1)

    def send(self, worker: int, message: Any) -> None:
        member = self._members.get(worker)
        if member is not None and not member.hung_up:
            member.link.deliver(message)

    def dispatch(self, worker: int, message: Any, timing: Timing | None) -> None:
        if timing is not None:
            if isinstance(message, Clocked):
                message = Clocked(max(0.0, timing.end - self.now()))
            else:
                # Counted from the decision, so that the server's copy of the version is part of the modelled time.
                delay = {"delay_s": timing.begin - self.now()} if isinstance(message, Work) else {}
                message = msgspec.structs.replace(message, compute_s=timing.compute_s, **delay)
        self.send(worker, message)

    def recall(self, worker: int, ticket: int) -> None:
        self.send(worker, Cancelled(ticket))

    def _remark(self, text: str) -> None:
        self.run.remark(text, self.run.moment())

    # -- the model ---------------------------------------------------------------------------------------------------

    def make_store(
        self, hello: Hello, values: list[torch.Tensor], buffers: list[torch.Tensor], *, statistics: bool
    ) -> Store:  # fmt: skip
        self._weights.close()  # of a store that this one takes the place of
        self._weights = SharedWeights(self._remark)
        if self.shards is not None:
            return ShardedStore(hello.spec, values, buffers, statistics, self.shards)
        return TimedStore(hello.spec, values, buffers, statistics, self._effort)

    def region(self, worker: int) -> Region | None:
        return self._members[worker].link.region

    def token(self, worker: int) -> str:
        """Return by what shards know the worker's process."""
        return self._members[worker].token

    def publish(self, worker: int, store: Store, *, waits: bool, reads: bool = False) -> Parameters:
        member = self._members[worker]
        if reads:
            self._weights.offer(member, store)
        if waits and self._weights.borrowers and (lent := self._weights.version_for(member)) is not None:
            return lent
        region = member.link.region
        if region is None:
            return store.read()  # nodes share no memory with the server
        if member.link.sends_region:
            return store.hand_out(region.flat, region.buffers)
        version = store.write_to(region.flat, region.buffers)
        return Parameters(version, region.flat, region.buffers)

    def measure(self, call: Callable[[], dict[str, float]]) -> dict[str, float]:
        return call()

    def effort(self) -> dict[str, float]:
        total = time.process_time() - self._effort.since
        found = {"cpu_s": total, "apply_s": self._effort.apply_s, "copy_s": self._effort.copy_s}
        if self.shards is not None:
            for each in self.shards.ask(CountEffort(), ShardEffort):
                found = {name: seconds + getattr(each, name) for name, seconds in found.items()}
        return found

    def close(self) -> None:
        """Close the shared weights and all links."""
        self._weights.close()
        self._links.close()
        if self.shards is not None:
            self.shards.close()


class Server:
    """One run's server: journal, engine, run and result."""

    def __init__(self, channel: Channel, setup: m.Setup, folder: Path) -> None:
        self._channel = channel
        self._setup = setup
        plan, config = setup.plan, setup.plan.config
        self._metrics = Metrics()
        self._struck_until = 0.0  # the last scenario event in the journal of an earlier server, in seconds
        self._writer: Writer | None = None
        if plan.journal is not None:
            self._writer = Writer(plan.journal, append=setup.append, tail=_tail_in(Path(setup.folder)))
            if setup.append:
                for line in read(plan.journal):
                    self._metrics.write(line)
                    if isinstance(line, Observation) and line.what == "scenario":
                        self._struck_until = max(self._struck_until, line.data["at"])
        self._resumption = Resumption(Path(setup.restore)) if setup.restore is not None else None
        peer = is_peer(config.strategy)
        # The checkpoint's, because the run may have switched to bsp.
        spelt = config.strategy if self._resumption is None or peer else self._resumption.run.strategy
        self._engine = LocalEngine(channel, setup, folder, self._on_idle)
        self._relay = Relay(self._engine.send_to_launcher, everything=setup.relay)
        relay = self._relay
        # The journal comes last: if it cannot be written, the report still knows what happened.
        sink = Tee(self._metrics, relay if setup.relay else None, self._writer, observations=relay)
        tables = TableExchange if self._engine.shards is None else ShardedTableExchange
        exchanges = [PeerExchange if peer else GradientExchange, tables]
        self._run = ServerRun(
            self._engine, plan, build_central(spelt, config.seed), sink, exchanges,
            progress=self._show if setup.progress else None, flush=self._flush_journal,
        )  # fmt: skip
        self._engine.carry(self._run)
        self._waits = Waits(self._run, lambda text: self._engine.send_to_launcher(m.Noticed(text)))

    def serve(self) -> None:
        """Run to the end, and send the launcher the result."""
        failure: m.Failure | None = None
        try:
            try:
                self._begin()
                self._engine.drive(self._run)
                failure = as_overdue(self._run.departures.liveness.overdue)
            except Exception as error:  # noqa: BLE001 - the launcher shows whatever ended the run
                failure = as_failure(error)
                self._run.fail(error)
            self._hand_over(failure)
        finally:
            self._run.checkpoints.close()
            self._engine.close()

    def _begin(self) -> None:
        run, setup, resumption = self._run, self._setup, self._resumption
        if resumption is None:
            run.begin()
            return
        lost = self._metrics.beyond(resumption.run.restored)  # what an earlier server did after the checkpoint
        # Between two phases the journal's time stands still, so an event there counts by its own second.
        seen_until = max(self._metrics.seconds, self._struck_until) if setup.append else resumption.run.at
        died_at = time.monotonic() - setup.began if setup.append and setup.began is not None else None
        run.begin(resumption, died_at, seen_until, lost)

    def _hand_over(self, failure: m.Failure | None) -> None:
        """Save the result in the run's folder, and send report and model to the launcher."""
        run, plan = self._run, self._setup.plan
        left = run.result()
        state = trained_state(left)
        data = safetensors.torch.save(state) if state is not None else None
        model: str | None = None
        try:
            if data is not None and plan.folder is not None:
                name = "model" if left.tables is None else "tables"
                kept = keep(data, left.nodes, plan.folder, name)
                model = None if kept.path is None else os.fspath(kept.path)
                if kept.complaint is not None:
                    self._warn(kept.complaint)
                if kept.path is None:
                    failure = failure or m.Failure("storage", kept.complaint or "the trained model is lost")
            if self._writer is not None:
                self._writer.close()
        except PacelineError as error:  # a full disk costs neither the report nor the model
            failure = failure or as_failure(error)
        self._relay.flush()
        journal, folder = (None if path is None else os.fspath(path) for path in (plan.journal, plan.folder))
        report = to_json(self._metrics.report(journal, folder, model)).encode()
        cause = "error" if failure is not None else run.cause or "done"
        finished = m.Finished(cause, report, failure, list(state or ()), left.tables is not None)
        with behind_descriptor(data) as descriptors:
            self._engine.send_to_launcher(finished, descriptors)
            self._channel.finish(LAST_WORDS_S)

    def _warn(self, complaint: str) -> None:
        """Warn in the report and the log; the journal already has its last line."""
        Tee(self._metrics, self._relay).write(Observation(self._run.moment(), "warning", {"text": complaint}))

    def _on_idle(self) -> None:
        self._relay.flush()
        self._waits.look(time.monotonic())

    def _flush_journal(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _show(self, progress: Progress) -> None:
        self._engine.send_to_launcher(m.Progressed(progress))
