"""Journal lines on their way from the server to the launcher, which has the user's log and listeners.

The log shows few lines and gets them at once. A listener gets all lines, in parcels, because one message per decision
would cost the server more than the decision itself.
"""

import time
from collections.abc import Callable

import msgspec

from paceline.engines.local.control import JournalLines
from paceline.records.journal import Line, Observation
from paceline.records.logs import LEVELS

PARCEL = 256  # lines; a few milliseconds of decisions at the server's top speed
LATE_S = 0.2  # the longest that a line waits for others, while lines keep coming

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Line])


class Relay:
    """The server's end: a sink for journal lines. Its owner calls `flush` when idle and before the run's end is
    announced."""

    def __init__(self, send: Callable[[JournalLines], None], *, everything: bool) -> None:
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
            self._send(JournalLines(_encoder.encode(self._waiting)))
            self._waiting.clear()


def unpacked(message: JournalLines) -> list[Line]:
    """Decode a parcel, at the launcher's end."""
    return _decoder.decode(message.data)
