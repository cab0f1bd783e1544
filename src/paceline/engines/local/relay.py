"""The journal's lines on their way from the server to the launcher, where listeners and the user's log are.

A log shows few lines and wants them at once; a listener wants all, and gets them in parcels, because a message for each
decision would cost the server more than the decision.
"""

import time
from collections.abc import Callable

import msgspec

from paceline.engines.local.control import JournalLines
from paceline.records.journal import Line, Observation
from paceline.records.logs import LEVELS

PARCEL = 256  # lines; a few milliseconds of decisions at the server's top speed
LATE_S = 0.2  # that a line waits for others at most, while there are any

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Line])


class Relay:
    """The server's end: a sink for the journal's lines. Whoever has it calls `flush` before anything that ends a run,
    and whenever there is nothing else to do."""

    def __init__(self, send: Callable[[JournalLines], None], *, everything: bool) -> None:
        self._send = send
        self._everything = everything
        self._waiting: list[Line] = []
        self._since = 0.0  # the first of them

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
        """Send what waits."""
        if self._waiting:
            self._send(JournalLines(_encoder.encode(self._waiting)))
            self._waiting.clear()


def unpacked(message: JournalLines) -> list[Line]:
    """The launcher's end: the lines of a parcel."""
    return _decoder.decode(message.data)
