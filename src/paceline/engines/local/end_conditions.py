"""Runs that cannot go on: nobody is left to train, or nobody is ever given work again."""

from paceline.core.errors import InternalError, PeerError, ScenarioError
from paceline.engines.local.process_cluster import LocalCluster
from paceline.server.emulation import Emulation


def notice_the_end(cluster: LocalCluster, emulation: Emulation | None) -> None:
    """Nobody may be left whose script runs: the run is done then, or it has lost all its workers."""
    conduct, phases = cluster.conduct, cluster.phases
    if not conduct.active or phases.alive or cluster.starting or _rejoin_ahead(cluster, emulation):
        return
    left_at, members = cluster.coordinator.now, list(cluster.members.values())
    unfinished = phases.running or cluster.unfinished_phase is not None
    over = phases.running and all(m.ended for m in members)
    no_data = cluster.tables.in_use or not unfinished  # scripts on tables know themselves when they have done enough
    if over or (no_data and any(m.at_its_end for m in members)):
        conduct.cause = "done"
    elif cluster.unfinished_phase is not None:
        raise PeerError("the server was restored and every worker has ended meanwhile: start it again with --resume")
    elif emulation is not None:
        raise ScenarioError(
            f"every worker has left at {left_at:.6g} s and data remains: let one rejoin in the scenario's events"
        )
    else:
        raise PeerError(f"every worker's process has died by {left_at:.6g} s: --respawn would bring them back")


def _rejoin_ahead(cluster: LocalCluster, emulation: Emulation | None) -> bool:
    events = emulation.scenario.events if emulation is not None else ()
    now = cluster.clock.now()
    return any(event.kind in ("rejoin", "join") and event.at >= now for event in events)


def require_movement(cluster: LocalCluster) -> None:
    """Nothing can become due by itself: somebody must be at work."""
    coordinator = cluster.coordinator
    seats = coordinator.seats.values()
    present = [seat.worker for seat in seats if seat.present]
    stuck = cluster.phases.running and present and not any(seat.ticket for seat in seats)
    if stuck and not cluster.starting:
        raise InternalError(
            f"{coordinator.strategy.name} lets workers {present} wait for ever at {cluster.clock.now():.6g} s"
        )


def say_what_overran(cluster: LocalCluster, emulation: Emulation | None) -> None:
    """Whether the machine was fast enough for the scenario."""
    if emulation is None:
        return
    data = {"overruns": emulation.overruns, "computations": emulation.computations}
    cluster.coordinator.observe("overruns", data)
    complaint = emulation.complaint()
    if complaint is not None:
        cluster.conduct.remark(complaint)
