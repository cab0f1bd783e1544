"""Who was waited for, and why: a pure fold over a journal.

A wait ends with a Grant; the worker waited for is the one whose event led to that Grant. The cause is the scenario's
pause, slow-down, slow link (a `transfer`) or partition of that worker that overlapped its push; otherwise it is
whichever of the push's compute and transfer time exceeds that worker's own median more, in seconds, or the longer of
the two if neither exceeds it. The median is over its last 31 pushes; compute time is compared per sample, so that more
work does not look like a slow-down.

A grant may be held back after its decision: by the server while it saves a checkpoint, or in a run without a server by
a node that waits for others to average with. A push says how long its worker waited in all; what goes beyond the wait
until the decision has the cause `server` or `peers`, and no culprit.

Where a run resumes from a checkpoint, waits end with the last line before the restored header, and every worker is
absent until it joins again, as in metrics.py.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

import msgspec

from paceline.core.actions import Apply, Cancel, Discard, Grant
from paceline.core.events import Applied, Event, Joined, Left, Pushed
from paceline.records.journal import Decision, Line, Observation, PeerDecision

EPISODES = {
    "partition": "partition",
    "pause": "pause",
    "slow": "slow",
    "slow_link": "transfer",
}  # of a scenario: causes
NOISE = 1e-6  # share of a push's time: rounding, not an excess
ROUNDING = 1e-9  # seconds: of times that an engine adds up
WINDOW = 31  # pushes: enough for a steady median, short enough to follow a change of speed


class Waited(msgspec.Struct, frozen=True):
    """`waiter` spent these seconds waiting for `culprit` (None: no worker's event ended the wait)."""

    waiter: int
    culprit: int | None
    cause: str  # compute | transfer | partition | pause | slow | joined | left | timer | server | peers | end
    seconds: float


class Culprit(msgspec.Struct, frozen=True):
    """How long all others together waited for one worker, by cause."""

    worker: int | None
    seconds: float
    causes: dict[str, float]


def _recent() -> deque[float]:
    """Make a container for the latest `WINDOW` values."""
    return deque(maxlen=WINDOW)


class WaitAttribution:
    """A journal sink that adds up waiting times by the worker waited for."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int | None, str], float] = {}
        self._present: set[int] = set()
        self._free_at: dict[int, float] = {}  # present workers without a grant, and since when
        self._granted: dict[int, tuple[float, float]] = {}  # running grants: when decided, and the wait until then
        self._closed: dict[int, float] = {}  # grants ended by a Cancel or Left: seconds since their decision
        self._peers = False  # a run without a server
        self._held: dict[int, int] = {}  # samples of pushes neither applied nor discarded yet
        self._compute: dict[int, deque[float]] = {}  # seconds per sample
        self._transfer: dict[int, deque[float]] = {}  # seconds per push
        self._episodes: dict[int, list[tuple[float, float, str]]] = {}  # (from, until, cause), by worker
        self._cause: tuple[Event, int] | None = None  # the latest event except Applied, and its samples
        self._at = 0.0  # of the last line
        self._resuming = False  # Left events of the checkpoint's workers are still coming in

    def write(self, line: Line) -> None:
        """Process one line of the journal."""
        if isinstance(line, Decision):
            self._at = line.event.at
            self._resuming = self._resuming and isinstance(line.event, Left)
            if not self._resuming:
                self._decided(line)
        elif isinstance(line, Observation):
            self._at = line.at
            self._observed(line)
        elif isinstance(line, PeerDecision):
            self._peers = True
        elif line.restored is not None:
            self._went_back()

    def waited_for(self) -> list[Waited]:
        """Return the seconds of every (waiter, culprit, cause), the longest first."""
        rows = [Waited(*key, seconds) for key, seconds in self._seconds.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def culprits(self) -> list[Culprit]:
        """Return the workers that others waited for, the most costly first."""
        causes: dict[int | None, dict[str, float]] = {}
        for (_, culprit, cause), seconds in self._seconds.items():
            of = causes.setdefault(culprit, {})
            of[cause] = of.get(cause, 0.0) + seconds
        rows = [Culprit(worker, sum(of.values()), of) for worker, of in causes.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def _went_back(self) -> None:
        """Forget workers and pushes of the server that died: both come again, and ids of pushes repeat."""
        self._end_waits(self._at)
        self._remember()
        self._cause = None
        self._granted.clear()
        self._closed.clear()
        self._present.clear()
        self._held.clear()
        self._resuming = True

    def _decided(self, line: Decision) -> None:
        event, at = line.event, line.event.at
        if not isinstance(event, Applied):  # an Applied follows from the event that led to the Apply
            self._remember()
            self._cause = event, self._take_in(event)
        blamed: tuple[int | None, str] | None = None
        for action in line.actions:
            if isinstance(action, Grant):
                since = self._free_at.pop(action.worker, at)
                self._granted[action.worker] = at, at - since
                if since < at:
                    blamed = blamed or self._blamed()
                    self._charge(action.worker, *blamed, at - since)
            elif isinstance(action, Apply):
                for push in action.pushes:
                    self._held.pop(push, None)
            elif isinstance(action, Discard):
                self._held.pop(action.push, None)
            elif isinstance(action, Cancel):
                self._free_at.setdefault(action.worker, at)
                self._close(action.worker, at)

    def _take_in(self, event: Event) -> int:
        """Update which workers are free; return the samples of the piece, if the event is a push."""
        if isinstance(event, Pushed):
            samples = event.samples - self._held.get(event.push, 0)
            self._held[event.push] = event.samples
            self._free_at[event.worker] = event.at
            _, waited = self._granted.pop(event.worker, (0.0, event.wait_s))
            self._hold(event.worker, event.wait_s - waited)
            return samples
        if isinstance(event, Joined) and event.worker not in self._present:
            self._present.add(event.worker)
            self._free_at[event.worker] = event.at
            self._hold(event.worker, self._closed.pop(event.worker, 0.0))
        elif isinstance(event, Left):
            self._present.discard(event.worker)
            since = self._free_at.pop(event.worker, event.at)
            if since < event.at:
                self._charge(event.worker, None, "end", event.at - since)
            self._close(event.worker, event.at)
        return 0

    def _close(self, worker: int, at: float) -> None:
        """End a grant without a push: how much of it was computing, an observation says."""
        if worker in self._granted:
            self._closed[worker] = at - self._granted.pop(worker)[0]

    def _hold(self, worker: int, seconds: float) -> None:
        """Charge waiting between the decision of a grant and its beginning."""
        if seconds > ROUNDING:
            self._charge(worker, None, "peers" if self._peers else "server", seconds)

    def _blamed(self) -> tuple[int | None, str]:
        event, samples = self._cause or (None, 0)
        if isinstance(event, Pushed):
            return event.worker, self._why(event, samples)
        if isinstance(event, Joined):
            return event.worker, "joined"
        if isinstance(event, Left):
            return event.worker, "left"
        return None, "timer"

    def _why(self, event: Pushed, samples: int) -> str:
        began = event.at - event.compute_s - event.transfer_s
        for start, end, cause in reversed(self._episodes.get(event.worker, ())):
            if start < event.at and end > began:
                return cause
        if event.worker in self._compute:
            by_compute = event.compute_s - median(self._compute[event.worker]) * samples
            by_transfer = event.transfer_s - median(self._transfer[event.worker])
            if max(by_compute, by_transfer) > NOISE * (event.compute_s + event.transfer_s):
                return "compute" if by_compute >= by_transfer else "transfer"
        return "compute" if event.compute_s >= event.transfer_s else "transfer"

    def _remember(self) -> None:
        """Add the last push to its worker's medians, once no further wait can be blamed on it."""
        event, samples = self._cause or (None, 0)
        if isinstance(event, Pushed) and samples > 0:
            self._compute.setdefault(event.worker, _recent()).append(event.compute_s / samples)
            self._transfer.setdefault(event.worker, _recent()).append(event.transfer_s)

    def _charge(self, waiter: int, culprit: int | None, cause: str, seconds: float) -> None:
        key = (waiter, culprit, cause)
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def _observed(self, line: Observation) -> None:
        worker, data = line.worker, line.data
        if line.what == "scenario" and data["kind"] in EPISODES:
            episode = line.at, line.at + data.get("for", float("inf")), EPISODES[data["kind"]]
            for struck in [worker] if worker is not None else data.get("workers", ()):
                self._episodes.setdefault(struck, []).append(episode)
        elif line.what == "cancelled" and worker is not None:
            if worker not in self._closed:
                self._close(worker, line.at)
            self._hold(worker, self._closed.pop(worker, 0.0) - data["seconds"])
            if worker in self._present and data["cause"] != "cancel":
                self._free_at.setdefault(worker, line.at)
        elif line.what == "end":
            self._end_waits(line.at)

    def _end_waits(self, at: float) -> None:
        for worker, seconds in sorted(self._closed.items()):
            self._hold(worker, seconds)
        self._closed.clear()
        for waiter, since in sorted(self._free_at.items()):
            if since < at:
                self._charge(waiter, None, "end", at - since)
        self._free_at.clear()


def fold(lines: Iterable[Line]) -> WaitAttribution:
    """Attribute the waits of a whole journal."""
    waits = WaitAttribution()
    for line in lines:
        waits.write(line)
    return waits
