"""Letters on their way out of a node: when each has left, and when the next step may begin.

Where a scenario is emulated, a node's outgoing link is serial and takes the scenario's time; a letter says when it is
there. Otherwise the mailbox knows.
"""

import math
import time
from collections.abc import Sequence

import msgspec
import torch

from paceline.transport.mail import Departed, Letter, Mail

TICK_S = 0.0005


class Outbox:
    """One node's outgoing link."""

    def __init__(self, mail: Mail) -> None:
        self._mail = mail
        self.latencies: dict[int, float] = {}
        self._latency_s = 0.0
        self._seconds_per_byte = 0.0
        self._free_at = 0.0
        self._leaving: list[tuple[float, Departed]] = []  # when each is out

    def over(self, latency_s: float, seconds_per_byte: float) -> None:
        """The link is of that kind from here on; all zero: it is as it is."""
        self._latency_s, self._seconds_per_byte = latency_s, seconds_per_byte

    def send(self, peer: int, letter: Letter, values: Sequence[torch.Tensor]) -> bool:
        """Post a letter; False if it cannot be taken at the moment."""
        now, nbytes = time.perf_counter(), sum(value.nbytes for value in values)
        out_at = max(now, self._free_at) + nbytes * self._seconds_per_byte
        latency_s = (self._latency_s + self.latencies.get(peer, 0.0)) / 2
        emulated = bool(latency_s or self._seconds_per_byte)
        letter = msgspec.structs.replace(letter, at=out_at + latency_s if emulated else 0.0)
        if not self._mail.post(peer, letter, values):
            return False
        if letter.kind == "model":
            if self._seconds_per_byte:
                self._free_at = out_at
                self._leaving.append((out_at, Departed(peer, nbytes, out_at - now)))
            elif not self._mail.tracks:
                self._leaving.append((now, Departed(peer, nbytes, time.perf_counter() - now)))
        return True

    def departed(self) -> list[Departed]:
        """Those that have left since this was last asked."""
        now = time.perf_counter()
        known = self._mail.departed()
        if not self._seconds_per_byte and self._mail.tracks:
            return known
        out = [departed for at, departed in self._leaving if at <= now]
        self._leaving = [(at, departed) for at, departed in self._leaving if at > now]
        return out

    def _on_their_way(self) -> int:
        now = time.perf_counter()
        if self._seconds_per_byte:
            return sum(at > now for at, _ in self._leaving)
        return self._mail.on_their_way

    def wait_for_room(self, *, overlaps: bool) -> None:
        """Until at most one letter is on its way out, or none where sending does not overlap computing."""
        self._wait(1 if overlaps else 0, math.inf)

    def wait_for_all(self, seconds: float) -> None:
        """Until everything has left, at most so long."""
        self._wait(0, seconds)

    def _wait(self, most: int, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while self._on_their_way() > most and time.perf_counter() < until:
            time.sleep(TICK_S)
