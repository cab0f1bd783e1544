"""The law of snapshots: a strategy that is stopped, written down and restored decides as one that never stopped."""

from collections.abc import Callable, Iterable

import msgspec

from paceline.records.journal import Decision, Line, spelled_out
from paceline.strategies import Strategy


def first_difference(lines: Iterable[Line], fresh: Callable[[], Strategy], every: int, after: int = 0) -> str | None:
    """Feed the events again, replacing the strategy by a restored one every so many decisions from `after` on.

    `fresh` makes the one that takes over; the snapshot travels through JSON, as a checkpoint does.
    """
    strategy, first = fresh(), True
    for count, line in enumerate(line for line in lines if isinstance(line, Decision)):
        if count >= after and (count - after) % every == 0 and not first:
            written = msgspec.json.encode(spelled_out(strategy.snapshot()))
            strategy = fresh().restore(msgspec.json.decode(written))
        first = False
        actions = strategy.handle(line.event)
        if actions != line.actions:
            return f"decision {count + 1} on {line.event}: {actions} instead of {line.actions}"
    return None
