"""The worker's side of collective calls: `mean`, `gather` and `barrier`, which all workers make in the same order."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.errors import OptionError
from paceline.transport.base import Endpoint, Lost
from paceline.transport.messages import Collective, CollectiveAnswer, CollectiveCall, CollectiveKept, ToWorker
from paceline.transport.value_codec import PackedValue, pack_value, placed_like, unpack_value


class CollectiveCalls:
    """The collective calls of one worker's script, counted from 0."""

    def __init__(self, endpoint: Endpoint, kept: deque[ToWorker], device: torch.device) -> None:
        """`kept` gets messages for the batch loop that come meanwhile; `device`: for tensors that others alone have."""
        self.endpoint = AnnouncingEndpoint(endpoint, self._announce)
        self._endpoint = endpoint
        self._kept = kept
        self._device = device
        self.made = 0
        self._last: CollectiveAnswer | None = None

    def make(self, call: Collective, value: Any, find_server: Callable[[], None]) -> list[Any]:
        """Wait until all workers have made this call, and return the values of the answer."""
        packed = pack_value(value, f"{call}()")
        if call == "mean":
            require_numbers(value, "value")
        answer = self._ask(CollectiveCall(self.made, call, *packed), find_server)
        self.made, self._last = self.made + 1, answer
        found = [PackedValue(*pair) for pair in zip(answer.values, answer.tensors, strict=True)]
        return [placed_like(unpack_value(each), value, self._device) for each in found]

    def _announce(self) -> None:
        """Give a restarted server the last answer: another worker may still be waiting for it."""
        if self._last is not None:
            last = self._last
            self._endpoint.send(CollectiveKept(last.number, last.call, last.values, last.tensors))

    def _ask(self, message: CollectiveCall, find_server: Callable[[], None]) -> CollectiveAnswer:
        while True:
            try:
                self._endpoint.send(message)
                while True:
                    answer = self._endpoint.receive()
                    if isinstance(answer, CollectiveAnswer) and answer.number == message.number:
                        return answer
                    self._kept.append(answer)
            except Lost:
                self._kept.clear()  # they are of the server that is gone
                find_server()


class AnnouncingEndpoint:
    """A worker's end that tells a restarted server first which collective calls are answered."""

    def __init__(self, endpoint: Endpoint, announce: Callable[[], None]) -> None:
        self.send, self.receive = endpoint.send, endpoint.receive  # attributes, since every push goes through them
        self.poll, self.adopt = endpoint.poll, endpoint.adopt
        self._reconnect, self._announce = endpoint.reconnect, announce

    def reconnect(self) -> None:
        self._reconnect()
        self._announce()


def require_numbers(value: Any, place: str) -> None:
    """Refuse what has no mean: anything but numbers, tensors, and lists and dicts of them."""
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            require_numbers(item, f"{place}[{number}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            require_numbers(item, f"{place}[{key!r}]")
    elif value is None or isinstance(value, str):
        raise OptionError(
            f"mean(): {place} is {'None' if value is None else 'text'}, which has no mean; give numbers, tensors, and "
            "lists and dicts of them, or use gather()"
        )
