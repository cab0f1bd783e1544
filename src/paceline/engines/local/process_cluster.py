"""Real workers as an engine's outbox: grants go out over their links, pushes come in, and the wall's clock stamps both.

The counterpart of the simulator's script workers: the same session speaks to it with the same messages, and the same
coordinator decides. A process that dies is noticed by its handle; what it had delivered by then counts.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.errors import InternalError, PeerError, ScriptError
from paceline.core.events import Cause
from paceline.core.ledger import Ledger
from paceline.engines.local.alarms import Alarms
from paceline.engines.local.evaluation_process import Evaluator
from paceline.engines.local.grants import Grants
from paceline.engines.local.members import Member, initial_values, region_of
from paceline.engines.local.peer_server import LocalPeers
from paceline.engines.local.processes import how_it_ended
from paceline.engines.local.result_handover import as_error
from paceline.engines.local.shared_weights import SharedWeights
from paceline.engines.local.table_server import LocalTables
from paceline.engines.local.timekeeping import Clock, Effort, TimedStore
from paceline.model.memory_budget import require_server
from paceline.model.store import ModelSpec, Parameters, Store
from paceline.peers.messages import NodeToServer
from paceline.server.checkpoint.files import Checkpoint
from paceline.server.coordinator import Coordinator
from paceline.server.emulation import Emulation
from paceline.server.phases import Phases, as_data
from paceline.server.run_control import Conduct
from paceline.server.workers import GrantOrder
from paceline.tables.messages import TableToServer
from paceline.transport import messages as m


class LocalCluster:
    """Carries orders, cancellations and timers out on real processes."""

    coordinator: Coordinator

    def __init__(self, conduct: Conduct, alarms: Alarms, emulation: Emulation | None, expected: set[int]) -> None:
        self.conduct = conduct
        self.alarms = alarms
        self.emulation = emulation
        self.clock = Clock()
        self.effort = Effort()
        self.phases = Phases()
        self.phases.alive |= expected  # nobody begins before all of these are there
        self.members: dict[int, Member] = {}
        awaited = conduct.config.evaluate_every is not None
        self.evaluator = Evaluator(conduct, self.version_for, lambda then: self.peers.refresh(then), awaited=awaited)
        self.asked: set[str] = set()
        self.lending = SharedWeights(conduct.remark)
        self.grants = Grants(self)
        self.tables = LocalTables(self)
        self.peers = LocalPeers(self)
        self.starting: dict[int, int] = {}  # incarnations asked of the launcher that have not yet said Hello
        self.on_first_phase: Callable[[], None] = _nothing  # the clock runs from here on
        self.on_phase: Callable[[], None] = _nothing
        self.on_phase_end: Callable[[], None] = _nothing  # nobody has been told yet
        self.on_removed: Callable[[int], None] = lambda _: None
        self._before_first_phase = True
        self._phase_ended_at = 0.0
        self.save_number: Callable[[Member], int | None] = lambda _: None
        self.on_state: Callable[[int, m.State], None] = lambda _worker, _state: None
        self.restored_states: dict[int, bytes] = {}
        self.restored: Checkpoint | None = None  # that the run goes on from
        self.unfinished_phase: int | None = None  # that it was in, and whose data is not yet taken up again

    # -- processes come and go ---------------------------------------------------------------------------------------

    def link(self, member: Member) -> None:
        """A process has a link from here on."""
        if member.evaluator:
            self.evaluator.member = member
            return
        self.members[member.worker] = member
        self.coordinator.seat(member.worker, member.incarnation)

    def exited(self, member: Member, code: int) -> None:
        """The process is no more; all that it had sent has been heard."""
        if member.evaluator:
            self.coordinator.now = self.moment()
            self.evaluator.exited(member, code)
            self.begin_phase_if_ready()
            return
        if self.members.get(member.worker) is not member or member.gone:
            return
        if member.ended and self.tables.is_parting(member.worker):
            self.tables.part(member.worker, lambda: self.exited(member, code))
            return
        if not member.ended and code > 0 and self.conduct.active:
            raise ScriptError(f"the script of worker {member.worker} exited with {code}")
        if not member.ended and code < 0 and not member.meant_to_die:
            self._mourn(member, code)
        self.remove(member, "done" if member.ended or code == 0 else "crash")

    def _mourn(self, member: Member, code: int) -> None:
        self.coordinator.now = now = self.moment()
        advice = "" if self.conduct.config.respawn else " (--respawn would bring it back)"
        what = f"the others go on{advice}" if self.conduct.active else "its script had not come to its end"
        self.conduct.remark(f"worker {member.worker} {how_it_ended(code)} at {now:.3g} s; {what}")

    def moment(self) -> float:
        """The run's time: after a phase, and after the run, it stands still until another begins."""
        return self.clock.now() if self.phases.running else self._phase_ended_at

    def stand_still(self, at: float) -> None:
        """No phase runs from here on."""
        self._phase_ended_at = at

    def remove(self, member: Member, cause: Cause) -> None:
        """The worker takes no more part."""
        member.gone, member.order, member.left = True, None, cause in ("leave", "done")
        self._has_started(member)
        self.on_removed(member.worker)
        if self.conduct.active:
            self.coordinator.leave(member.worker, cause, self.moment())
        self.phases.gone(member.worker)
        self.tables.left(member.worker)
        self.peers.left(member.worker, cause)
        self.greet_waiting()
        self._notice_empty_phase()
        self.begin_phase_if_ready()

    def _has_started(self, member: Member) -> None:
        """Or never will."""
        if self.starting.get(member.worker) == member.incarnation:
            del self.starting[member.worker]

    def no_evaluator(self) -> None:
        """Nobody measures versions any more, or ever did."""
        self.evaluator.give_up()
        self.begin_phase_if_ready()

    # -- what scripts say --------------------------------------------------------------------------------------------

    def hear(self, member: Member, message: m.ToServer) -> None:
        """Deal with one message; the most frequent kinds come first."""
        match message:
            case m.Push():
                (self.peers if self.peers.in_use else self.grants).pushed(member, message)
            case m.More():
                self.grants.more(member, message)
            case m.Note():
                self.coordinator.now = self.clock.now()
                self.coordinator.observe("report", {"name": message.name, "value": message.value}, member.worker)
            case m.Evaluated():
                self.conduct.measured(message.number, message.metrics)
            case m.State():
                self.on_state(member.worker, message)
            case m.Ready():
                self._on_ready(member, message)
            case m.Hello():
                self._on_hello(member, message)
            case m.Asked():
                self.asked.add(message.name)
            case m.Remark():
                self.coordinator.now = self.clock.now()
                self.conduct.remark(message.text)
            case _ if isinstance(message, NodeToServer):
                self.peers.hear_from(member, message)
            case _ if isinstance(message, TableToServer):
                self.peers.refuse_tables()
                self.tables.hear_from(member, message)
            case _:
                self._on_end(member, message)

    def _on_end(self, member: Member, message: m.ToServer) -> None:
        match message:
            case m.Done():
                self._out_of_loop(member)
            case m.Stop():
                self.coordinator.now = self.clock.now()
                self.conduct.stop_phase(message.reason)
            case m.Ended():
                self._on_ended(member)
            case m.Failed():
                raise as_error(message)
            case _:
                raise InternalError(f"{member.name} sent {message}, which has no meaning here")

    def _on_ended(self, member: Member) -> None:
        member.ended = True
        if member.evaluator:
            self.evaluator.awaited = False
            self.begin_phase_if_ready()
            return
        self.tables.part(member.worker, lambda: self._depart(member))

    def _depart(self, member: Member) -> None:
        """The script is at its end, and all that it wrote has arrived."""
        self.phases.gone(member.worker)
        self.greet_waiting()
        self._out_of_loop(member)
        self.begin_phase_if_ready()

    # -- the model ---------------------------------------------------------------------------------------------------

    def _on_hello(self, member: Member, hello: m.Hello) -> None:
        member.hello = hello
        if self.conduct.store_or_none is None and not any(o.hello for o in self.members.values() if o is not member):
            require_server(hello.spec, regions=len(self.phases.alive) - 1)  # all but the first are about to take theirs
        if not member.evaluator:
            self.has_come(member)
        self.greet_waiting()

    def has_come(self, member: Member) -> None:
        """A worker's script has said what it is to work on."""
        self._has_started(member)
        self.phases.alive.add(member.worker)

    def greet_waiting(self) -> None:
        """Answer those who have prepared a model; at first that waits until all have, since worker 0's is taken."""
        waiting = [o for o in self.members.values() if o.hello is not None and not o.gone]
        if self.conduct.store_or_none is None:
            here = {o.worker for o in waiting}
            if not waiting or not self.phases.alive <= here:
                return
        for member in sorted(waiting, key=lambda o: o.worker):
            self._greet(member)
        if self.conduct.store_or_none is not None and self.evaluator.greet():
            self.begin_phase_if_ready()

    def _greet(self, member: Member) -> None:
        hello = member.hello
        if hello is None:
            return
        if self.restored is not None:
            self.restored.require_spec(hello.spec)
        if self.conduct.store_or_none is None:
            values, buffers = initial_values(hello)
            self.conduct.adopt(self.timed_store(hello.spec, values, buffers, self.conduct.strategy.needs_applied))
        self.conduct.store.spec.require_same(hello.spec, member.worker)
        member.hello = None
        if hello.reads:
            self.lending.offer(member, self.conduct.store)
        state = self.restored_states.pop(member.worker, None)
        member.link.deliver(m.Welcome(self.version_for(member), state))

    def timed_store(
        self, spec: ModelSpec, values: Sequence[Tensor], buffers: Sequence[Tensor], statistics: bool
    ) -> Store:
        """A store whose effort is counted."""
        return TimedStore(spec, values, buffers, statistics, self.effort)

    def version_for(self, member: Member) -> Parameters:
        """The current version, copied into the process's memory."""
        if member.link.region is None and self.peers.in_use:
            return self.conduct.store.read()  # nodes have no memory in common with anybody
        region = region_of(member)
        version = self.conduct.store.write_to(region.flat, region.buffers)
        return Parameters(version, region.flat, region.buffers)

    # -- phases ------------------------------------------------------------------------------------------------------

    def _on_ready(self, member: Member, message: m.Ready) -> None:
        member.computing = False
        answer = "over" if not self.conduct.active else self.phases.ready(member.worker, message)
        if answer == "over":
            self._tell_over(member)
        elif answer == "join":
            self.coordinator.join(member.worker, message.batch_size, self.clock.now())
            self.tables.settle()
        else:
            self.tables.look_at_openers()
            self.begin_phase_if_ready()

    def begin_phase_if_ready(self) -> None:
        """Start the phase once everybody waits for it."""
        if not self.phases.can_begin or not self.conduct.active or self.evaluator.awaited:
            return
        ledger = self.phases.begin(self.conduct.config.seed, self.conduct.header.workers)
        if self._before_first_phase:
            self._before_first_phase = False
            if self.clock.zero is None:
                self.clock.start(self.restored.run.at if self.restored is not None else 0.0)
            self.effort.begin()
            self.on_first_phase()
        current = self.phases.current
        if current is None:
            raise InternalError("a phase began without anybody")
        members = sorted(self.phases.members)
        round_samples = current.batch_size * len(members)
        if self.unfinished_phase is not None:
            before = self._take_up_again(ledger)
            round_samples = round_samples if self.tables.in_use else before
        self.coordinator.now = self.clock.now()
        self.coordinator.observe("phase", as_data(current, math.ceil(ledger.total / round_samples)))
        self.conduct.phase_begins(ledger, current.size, round_samples)
        self.on_phase()
        self.peers.begin(members)
        for worker in members:
            self.coordinator.join(worker, current.batch_size, self.clock.now())
        self.tables.settle()

    def _take_up_again(self, ledger: Ledger) -> int:
        """Bring a phase's data to where the checkpoint left it; its nominal round."""
        restored, number = self.restored, self.unfinished_phase
        if restored is None or restored.run.ledger is None or self.phases.number != number:
            raise PeerError(
                f"the run was restored in its phase {number}, but its workers are in phase {self.phases.number}: start "
                "it again with --resume"
            )
        ledger.restore(restored.run.ledger)
        self.unfinished_phase = None
        return restored.run.round_samples

    def end_phase(self) -> None:
        """Let everybody out of the loop; what their scripts do next may be another phase."""
        self.stand_still(self.clock.now())
        self.coordinator.close(self._phase_ended_at)
        for member in self.members.values():
            member.order = None
        members = sorted(self.phases.end())
        self.peers.phase_over()
        self.on_phase_end()  # before anybody leaves: a restored server must not stand in a phase that all have left
        for worker in members:
            self._tell_over(self.members[worker])
        self.begin_phase_if_ready()

    def finish(self) -> None:
        """The run is over: scripts run to their end without further work."""
        self.stand_still(self.moment())
        leaving = self.phases.end() | set(self.phases.waiting)
        self.peers.phase_over()
        self.phases.waiting.clear()
        for worker in sorted(leaving):
            self._tell_over(self.members[worker])

    def _tell_over(self, member: Member) -> None:
        member.order = None
        if member.gone:
            return
        final = self.version_for(member) if self.conduct.store_or_none is not None else None
        run_over = not self.conduct.active
        save = self.save_number(member)
        member.link.deliver(m.Over(self.phases.number, final, self.coordinator.position, run_over, save))

    def _out_of_loop(self, member: Member) -> None:
        """The script wants no more of this phase; whatever the worker computed is not delivered."""
        self.phases.members.discard(member.worker)
        member.order = None
        if self.conduct.active:
            self.coordinator.leave(member.worker, "done", self.moment())
        self.tables.left(member.worker)
        self.peers.left(member.worker, "done")
        self._notice_empty_phase()

    def _notice_empty_phase(self) -> None:
        if self.phases.running and not self.phases.members and not self.starting and self.phases.alive:
            self.conduct.nobody_left()

    # -- what the coordinator wants ----------------------------------------------------------------------------------

    def order(self, order: GrantOrder) -> None:
        """Tell a worker to go on."""
        (self.peers if self.peers.in_use else self.tables if self.tables.in_use else self.grants).order(order)

    def cancel(self, worker: int, ticket: int) -> None:
        """The grant is void. One to work on tables is none of a worker's business."""
        if not self.tables.in_use:
            self.grants.cancel(worker, ticket)

    def timer(self, name: str, at: float | None, generation: int) -> None:
        """Wake the strategy at that time."""
        if at is not None and at < math.inf:
            self.alarms.at(at, self._ring, (name, generation))

    def _ring(self, timer: tuple[str, int]) -> None:
        if self.conduct.active:
            self.coordinator.fire(*timer, self.clock.now())
            self.tables.settle()


def _nothing() -> None:
    """Nobody need be told."""
