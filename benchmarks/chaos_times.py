"""What a run went through, read from its journal and from the moments of the kills, for bench_lab_chaos.py.

A journal counts seconds from the run's first phase. Workers report the machine's monotonic clock before a push, and the
server writes that down when it comes: the difference, where it is greatest, is when the phase began, less the time of
the fastest message. A server that was started again goes on with that clock, set anew, so each header starts another
part; one in which no worker reported anything has the clock of the part before.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

Line = dict[str, Any]
CLOCK = "monotonic"  # the number under which workers report theirs
SLACK_S = 0.05  # by which a moment of the journal may be early
NO_LOSS = {"versions": 0, "samples": 0, "pushes": 0}


What = Literal["server", "shard", "worker", "machine"]


class Kill(msgspec.Struct, frozen=True):
    """One kill -9, or that of all processes of a machine at once."""

    at: float  # by the monotonic clock
    what: What
    workers: tuple[int, ...] = ()  # that died
    during_cut: bool = False  # a host was cut off


class Moment(msgspec.Struct, frozen=True):
    """One event of the run."""

    at: float  # by the monotonic clock
    kind: str  # joined, left, pushed, applied, restored
    worker: int = -1
    cause: str = ""


class WorkerDeath(msgspec.Struct, frozen=True):
    """What followed the death of a worker, or of a machine's. Seconds since the kill; None: it did not happen."""

    kill: Kill
    noticed_s: float | None  # the server went on without all of them
    version_s: float | None  # the next version
    all_others_s: float | None  # every other worker has pushed
    others: int = 1  # that there were


class ServerDeath(msgspec.Struct, frozen=True):
    """What followed the death of the server or of a shard. Seconds since the kill; None: it did not happen."""

    kill: Kill
    version_s: float | None  # the first version of a successor, also of one that had to be replaced meanwhile
    workers: int = 1  # that were training; without any, a version has to wait for scripts that load


def moments(lines: Sequence[Line]) -> list[Moment]:
    """The events of a journal, in its order, on the machine's clock."""
    found: list[Moment] = []
    zero: float | None = None
    for part in parts(lines):
        zero = zero_of(part, zero)
        begun = part[0].get("restored") is None
        for line in part:
            if line["type"] != "decision":
                continue
            event = line["event"]
            at = zero + event["at"]
            if not begun and event["kind"] == "left":
                continue  # of the workers in the checkpoint: they have gone nowhere
            if not begun:
                begun = True
                found.append(Moment(at, "restored"))
            if event["kind"] in ("joined", "left", "pushed"):
                found.append(Moment(at, event["kind"], event["worker"], event.get("cause", "")))
            if any(action["kind"] == "apply" for action in line["actions"]):
                found.append(Moment(at, "applied"))
    return found


def parts(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The journal from each header to the next."""
    begins = [number for number, line in enumerate(lines) if line["type"] == "header"]
    for begin, end in itertools.pairwise([*begins, len(lines)]):
        yield list(lines[begin:end])


def zero_of(part: Sequence[Line], before: float | None = None) -> float:
    """When a part's clock was zero; `before`: that of the part before, for one in which no worker reported."""
    reports = [line for line in part if line["type"] == "observation" and line["what"] == "report"]
    told: list[float] = [line["data"]["value"] - line["at"] for line in reports if line["data"]["name"] == CLOCK]
    if told:
        return max(told)
    if before is None:
        raise ValueError(f"no worker reported {CLOCK!r}: the journal's times cannot be told")
    return before


def worker_deaths(kills: Sequence[Kill], found: Sequence[Moment]) -> list[WorkerDeath]:
    """What followed each kill of workers."""
    deaths = []
    for kill in kills:
        if kill.workers:
            after = [moment for moment in found if moment.at >= kill.at - SLACK_S]
            present = _present(found, kill.at - SLACK_S)
            deaths.append(_after_worker(kill, after, present & {*kill.workers}, present - {*kill.workers}))
    return deaths


def _present(found: Sequence[Moment], at: float) -> set[int]:
    """The workers that the server counted on at this time."""
    there: set[int] = set()
    for moment in found:
        if moment.at > at:
            break
        if moment.kind == "joined":
            there.add(moment.worker)
        elif moment.kind == "left" and moment.cause != "idle":
            there.discard(moment.worker)
        elif moment.kind == "restored":
            there.clear()
    return there


def _after_worker(kill: Kill, after: Sequence[Moment], dead: set[int], others: set[int]) -> WorkerDeath:
    """`dead` had joined when they were killed; nobody waits for one that had not."""
    leaves = [_first(after, lambda moment, one=one: moment.kind == "left" and moment.worker == one) for one in dead]
    left = None if None in leaves else max((number for number in leaves if number is not None), default=None)
    restored = _first(after, lambda moment: moment.kind == "restored")
    begin = left if dead else 0
    if begin is None or (restored is not None and restored < begin):
        begin = restored if restored is not None else 0
    late = after[begin:]
    applied = _first(late, lambda moment: moment.kind == "applied")
    waiting, last = set(others), None
    for moment in late:
        if not waiting:
            break
        if moment.kind in ("pushed", "left") and moment.worker in waiting:
            waiting.discard(moment.worker)
            last = moment.at
    return WorkerDeath(
        kill,
        None if left is None else max(0.0, after[left].at - kill.at),
        None if applied is None else max(0.0, late[applied].at - kill.at),
        None if waiting or last is None else max(0.0, last - kill.at),
        len(others),
    )


def _first(found: Sequence[Moment], fits: Callable[[Moment], bool]) -> int | None:
    return next((number for number, moment in enumerate(found) if fits(moment)), None)


def server_deaths(kills: Sequence[Kill], found: Sequence[Moment]) -> list[ServerDeath]:
    """What followed each kill of the server or of a shard."""
    deaths = []
    for kill in kills:
        if kill.what in ("server", "shard"):
            late = [moment for moment in found if moment.at >= kill.at]
            again = _first(late, lambda moment: moment.kind == "restored")
            after = [] if again is None else late[again:]
            applied = _first(after, lambda moment: moment.kind == "applied")
            lasted = None if applied is None else after[applied].at - kill.at
            deaths.append(ServerDeath(kill, lasted, len(_present(found, kill.at))))
    return deaths


def rollbacks(lines: Sequence[Line]) -> list[dict[str, int]]:
    """What each restart of the server rolled back, as it said itself: versions, samples and pushes."""
    told = []
    for part in parts(lines):
        if part[0].get("restored") is not None:
            said = [line["data"] for line in part if line.get("what") == "rolled_back"]
            told.append(dict(said[0]) if said else NO_LOSS)
    return told


def departures_without_a_kill(kills: Sequence[Kill], found: Sequence[Moment]) -> list[Moment]:
    """Departures of workers whose process nobody killed: each kill explains one, the next of that worker."""
    unexplained = []
    open_kills = sorted((kill.at, worker) for kill in kills for worker in kill.workers)
    for moment in found:
        if moment.kind != "left" or moment.cause in ("idle", "done"):
            continue
        why = next((k for k in open_kills if k[1] == moment.worker and k[0] <= moment.at + SLACK_S), None)
        if why is None:
            unexplained.append(moment)
        else:
            open_kills.remove(why)
    return unexplained


def longest_silence(found: Sequence[Moment], begin: float, end: float) -> float:
    """The longest time without a version between two moments."""
    at = [begin, *(moment.at for moment in found if moment.kind == "applied" and begin < moment.at < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(at))
