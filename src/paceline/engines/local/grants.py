"""Grants of work on a model: they go out with a version in the worker's memory and come back as pushes."""

from typing import TYPE_CHECKING

from paceline.engines.local.members import Member
from paceline.server.workers import GrantOrder, PushArrival
from paceline.transport import messages as m

if TYPE_CHECKING:
    from paceline.engines.local.process_cluster import LocalCluster


class Grants:
    """Which worker computes what, from the order to the push."""

    def __init__(self, cluster: "LocalCluster") -> None:
        self._cluster = cluster

    def order(self, order: GrantOrder) -> None:
        """Put the version into the worker's memory and tell it to compute."""
        cluster = self._cluster
        member = cluster.members[order.worker]
        parameters = (cluster.lending.version_for(member) or cluster.version_for(member)) if order.fresh else None
        member.order, member.computing = order, True
        member.bytes_down = self._cluster.coordinator.model_bytes if order.fresh else 0
        delay_s, compute_s, sent_at = 0.0, None, None
        if self._cluster.emulation is not None:
            member.attempt = self._cluster.emulation.attempt(order.worker)
            delay_s, compute_s = self._cluster.emulation.order(
                order.worker, member.attempt, order.allotment.samples, member.bytes_down, order.at
            )
            sent_at = self._cluster.clock.on_host(order.at)
        slot, save = member.free_slot(self._cluster.coordinator.held), self._cluster.save_number(member)
        member.link.deliver(m.Work(
            order.ticket, order.allotment, parameters, order.position, slot, delay_s, compute_s, save, sent_at,
            self._cluster.phases.number,
        ))  # fmt: skip

    def cancel(self, worker: int, ticket: int) -> None:
        """The grant is void; a push that already set out crosses the cancellation and is refused on arrival."""
        member = self._cluster.members[worker]
        member.order = None
        if not member.gone:
            member.link.deliver(m.Cancelled(ticket))

    def pushed(self, member: Member, message: m.Push) -> None:
        """A worker has computed what it was granted."""
        now = self._cluster.clock.now()
        member.pushed, member.computing = True, False
        arrival = PushArrival(
            member.worker, member.incarnation, message.ticket, message.samples, message.compute_s, 0.0,
            bytes_up=self._cluster.coordinator.model_bytes, bytes_down=member.bytes_down,
            gradient=message.gradient, kept=message.kept, nominal=message.nominal,
        )  # fmt: skip
        if self._cluster.emulation is None or member.order is None or member.order.ticket != message.ticket:
            self._arrived(arrival)  # one that crossed a cancellation takes no part in the emulated traffic
            return
        self._cluster.emulation.computed(message.overrun_s)
        attempt, size = member.attempt, arrival.bytes_up
        for moment in self._cluster.emulation.arrivals(member.worker, attempt, size, now, message.compute_s):
            if moment <= now:
                self._arrived(arrival)
            else:
                self._cluster.alarms.at(moment, self._arrived, arrival)

    def _arrived(self, arrival: PushArrival) -> None:
        """The push is there; one whose process died on the way is not, nor is one that comes after the end."""
        member = self._cluster.members[arrival.worker]
        if member.incarnation != arrival.incarnation or member.gone or not self._cluster.conduct.active:
            return
        now, order = self._cluster.clock.now(), member.order
        if order is not None and order.ticket == arrival.ticket:
            member.order = None
            arrival.transfer_s = max(0.0, now - order.at - arrival.compute_s)
        self._cluster.coordinator.arrive(now, arrival)

    def more(self, member: Member, message: m.More) -> None:
        """A worker wants further samples on its grant."""
        if member.order is None or member.order.ticket != message.ticket:
            return  # it crosses a cancellation or the phase's end, which is the answer
        current = self._cluster.phases.current
        work = current.batch_size if current is not None else 1
        extra = self._cluster.coordinator.more(member.worker, member.incarnation, message.ticket, work)
        seconds = None
        if extra is not None and self._cluster.emulation is not None:
            seconds = self._cluster.emulation.more(member.worker, extra.samples, self._cluster.clock.now())
        member.link.deliver(m.Extra(extra, seconds))
