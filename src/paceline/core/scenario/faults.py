"""The events of a scenario: interference, faults, and workers that join and leave, each at its second.

They are checked in order of time: a worker that crashes must be present, one that rejoins must be gone, and newcomers
get the next free ids, so that a later event can name them.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from paceline.core.scenario.toml_fields import Fields
from paceline.core.values import nearest, shown

Kind = Literal[
    "slow", "slow_link", "pause", "crash", "rejoin", "join", "leave", "partition", "server_crash", "duplicate",
    "reorder",
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
MAX_WORKERS = 10_000_000
MAX_NEWCOMERS = 100_000  # of all joins together: unlike the first workers, each is kept by its number

_TARGETS = ("worker", "workers")


class _Shape(NamedTuple):
    needs: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()
    targets: Literal["required", "optional", "none"] = "required"


SHAPES: dict[str, _Shape] = {
    "slow": _Shape(needs=("for", "factor")),
    "slow_link": _Shape(needs=("for", "factor"), targets="optional"),
    "pause": _Shape(needs=("for",)),
    "crash": _Shape(),
    "rejoin": _Shape(),
    "leave": _Shape(),
    "join": _Shape(may_have=("count", "speed"), targets="none"),
    "partition": _Shape(needs=("for",)),
    "server_crash": _Shape(may_have=("for",), targets="none"),
    "duplicate": _Shape(needs=("share",), may_have=("for",), targets="optional"),
    "reorder": _Shape(needs=("share",), may_have=("for",), targets="optional"),
}


class ScenarioEvent(msgspec.Struct, frozen=True):
    """One event; `workers` holds the ids of all affected workers, for a join those of the newcomers."""

    kind: Kind
    at: float
    worker: int | None = None  # set if the file names a single one
    workers: tuple[int, ...] = ()
    for_s: float | None = None  # the key `for`
    factor: float | None = None
    share: float | None = None
    count: int = 1
    speed: float = 1.0

    @property
    def until(self) -> float:
        """The end of the event; infinite if it has no `for`."""
        return math.inf if self.for_s is None else self.at + self.for_s

    def as_data(self) -> dict[str, Any]:
        """Return the event as the keys of a scenario file."""
        data: dict[str, Any] = {"kind": self.kind, "at": self.at}
        if self.worker is not None:
            data["worker"] = self.worker
        elif self.workers and self.kind != "join":
            data["workers"] = list(self.workers)
        shape = SHAPES[self.kind]
        for key in shape.needs + shape.may_have:
            value = getattr(self, "for_s" if key == "for" else key)
            if value is not None:
                data[key] = value
        return data


def read_events(top: Fields, workers: int, speeds: Mapping[str, float]) -> tuple[ScenarioEvent, ...]:
    """Read the `[[events]]` of a file in order of time; `speeds` holds the speeds from recorded tables."""
    found = [_read_event(top, number, entry, speeds) for number, entry in enumerate(top.tables("events"), 1)]
    story = _Story(workers)
    # Events of the same second happen in the order of the file.
    return tuple(story.check(event, fields) for event, fields in sorted(found, key=lambda pair: pair[0].at))


def read_speed(fields: Fields, speeds: Mapping[str, float]) -> float:
    """Read the `speed` key of a table; `speeds` holds the speeds from recorded tables."""
    given = fields.data.get("speed")
    if isinstance(given, str):
        return speeds[given]
    fix = "1.0 takes seconds_per_sample for a sample, 0.5 takes twice as long"
    return fields.number("speed", fix, above=0, default=1.0)


def _read_event(top: Fields, number: int, entry: Any, speeds: Mapping[str, float]) -> tuple[ScenarioEvent, Fields]:
    where = f"[[events]] {number}"
    known = entry if isinstance(entry, dict) else ()
    kind: Any = Fields(entry, top.source, where, known).text("kind", f"choose from {', '.join(KINDS)}")
    if kind not in SHAPES:
        fix = nearest(kind, KINDS)
        raise Fields({}, top.source, where, ()).refusal(f"kind must be a known event, not {shown(kind)}", fix)
    shape = SHAPES[kind]
    targets = () if shape.targets == "none" else _TARGETS
    fields = Fields(entry, top.source, f"{where} ({kind})", ("kind", "at", *shape.needs, *shape.may_have, *targets))
    worker, workers = _read_targets(fields, shape)

    def number_of(key: str, fix: str, **bounds: float) -> float | None:
        return fields.number(key, fix, **bounds) if fields.has(key) or key in shape.needs else None

    event = ScenarioEvent(
        kind=kind,
        at=fields.number("at", "give the second of the run at which it happens", at_least=0),
        worker=worker,
        workers=workers,
        for_s=number_of("for", "give the seconds it lasts", above=0),
        factor=number_of(
            "factor", f"4.0 makes a {'message' if kind == 'slow_link' else 'sample'} take 4 times as long", above=0
        ),
        share=number_of("share", "give the share of messages it strikes", at_least=0, at_most=1),
        count=fields.whole("count", "give the number of newcomers", at_least=1, at_most=MAX_WORKERS, default=1),
        speed=read_speed(fields, speeds),
    )
    return event, fields


def _read_targets(fields: Fields, shape: _Shape) -> tuple[int | None, tuple[int, ...]]:
    """Return the worker, if a single one is named, and all named workers."""
    if fields.has("worker") and fields.has("workers"):
        raise fields.refusal("has both worker and workers", "keep one of them")
    if fields.has("worker"):
        worker = fields.whole("worker", "give the id of a worker", at_least=0, at_most=MAX_WORKERS)
        return worker, (worker,)
    if not fields.has("workers"):
        if shape.targets == "required":
            raise fields.refusal("needs worker", "name the worker it befalls, or several as workers = [0, 1]")
        return None, ()
    fix = "list ids of workers, such as workers = [0, 1]"
    ids = fields.data["workers"]
    if not isinstance(ids, list):
        raise fields.refusal(f"workers must be a list of ids, not {shown(ids)}", fix)
    workers = tuple(fields.whole_value("workers", each, fix, at_least=0, at_most=MAX_WORKERS) for each in ids)
    if not workers or len(set(workers)) < len(workers):
        raise fields.refusal(f"workers must be distinct ids, at least one, not {shown(ids)}", fix)
    return None, workers


class _Story:
    """Tracks which workers are present, to check events in order of time."""

    def __init__(self, workers: int) -> None:
        self.known = workers
        self.newcomers = 0
        self.gone: dict[int, tuple[str, float]] = {}  # how and when

    def check(self, event: ScenarioEvent, fields: Fields) -> ScenarioEvent:
        """Check an event against all before it; assign newcomers their ids."""
        if event.kind == "join":
            self.newcomers += event.count
            if self.newcomers > MAX_NEWCOMERS:
                fix = f"at most {MAX_NEWCOMERS} may join, in all events together"
                raise fields.refusal(f"count makes {self.newcomers} newcomers", fix)
            newcomers = tuple(range(self.known, self.known + event.count))
            self.known += event.count
            return msgspec.structs.replace(event, workers=newcomers)
        for worker in event.workers:
            if worker >= self.known:
                raise fields.refusal(
                    f"names worker {worker}, but at {event.at:g} s ids end at {self.known - 1}", "ids start at 0"
                )
            self._come_or_go(event, worker, fields)
        return event

    def _come_or_go(self, event: ScenarioEvent, worker: int, fields: Fields) -> None:
        gone = self.gone.get(worker)
        if event.kind in ("crash", "leave"):
            if gone is not None:
                how, when = gone
                fix = "let it rejoin before, or remove this event"
                raise fields.refusal(f"worker {worker} is gone at {event.at:g} s ({how} at {when:g} s)", fix)
            self.gone[worker] = (event.kind, event.at)
        elif event.kind == "rejoin":
            if gone is None:
                fix = "let it crash or leave before, or remove this event"
                raise fields.refusal(f"worker {worker} has not gone by {event.at:g} s", fix)
            del self.gone[worker]
