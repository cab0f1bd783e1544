"""A worker's state for checkpoints, beside the model: its random generators and the objects that it keeps.

A worker's state is captured at the start of a grant, before any data is fetched or random number drawn for it, or at
the end of a phase. A resumed script runs from its beginning and passes through the finished phases without data; its
state is restored when it reaches that moment. Kept objects are also restored as soon as they are known, since the
script may use them before that. A stream with a state of its own is kept as long as its loop runs.
"""

import copy
import random
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from paceline.core.errors import OptionError
from paceline.worker.state_codec import pack, unpack


@runtime_checkable
class Keepable(Protocol):
    """Any object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class WorkerState:
    """The state of one worker's script."""

    def __init__(self) -> None:
        self._kept: dict[str, Keepable] = {}
        self._left_out: list[Any] = []  # restored by the run itself: loading them twice would make them wrong
        self._data: bytes | None = None  # from the checkpoint
        self.busy = False  # it is captured or restored
        self.stream: Keepable | None = None  # that the loop under way reads
        self.pending: tuple[int, bool] | None = None  # phase, and whether at its end: when to restore

    def keep(self, name: str, thing: Any) -> None:
        """Include an object in every checkpoint; restore it at once if the resumed one has it."""
        if not isinstance(name, str) or not name:
            raise OptionError(f"keep(name, obj) takes a name that is not empty, not {name!r}")
        if name in self._kept:
            raise OptionError(f"keep() was given two objects called {name!r}: give each a name of its own")
        if not isinstance(thing, Keepable):
            raise OptionError(
                f"keep({name!r}, ...) needs an object with state_dict() and load_state_dict(), which "
                f"{type(thing).__name__} has not"
            )
        self._kept[name] = thing
        if self._data is not None:
            self._restore({name: thing}, unpack(self._data)["kept"])

    def leave_out(self, *things: Any) -> None:
        """Exclude objects that the run restores by itself, even if the script keeps them."""
        self._left_out += things

    def welcome(self, data: bytes | None) -> None:
        """Take over the worker's state from the server's checkpoint, if there is one."""
        if data is None:
            return
        state = unpack(data)
        self._data = data
        self.pending = (state["phase"], state["over"])
        self._restore(self._kept, state["kept"])

    def capture(self, phase: int, *, over: bool) -> bytes:
        """Return the current state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.busy = True
        try:
            return pack(
                {
                    "phase": phase,
                    "over": over,
                    "torch": torch.get_rng_state(),
                    "numpy": np.random.get_state(legacy=False),
                    "python": random.getstate(),
                    "cuda": cuda,
                    "kept": {name: thing.state_dict() for name, thing in self._kept.items() if self._is_own(thing)},
                    "stream": None if self.stream is None else self.stream.state_dict(),
                }
            )
        finally:
            self.busy = False

    def reach(self, phase: int, *, over: bool) -> bool:
        """Restore the captured state if the script has reached its moment; return whether it has."""
        if self.pending is None or self._data is None or (phase, over) < self.pending:
            return False
        same_phase, self.pending = phase == self.pending[0], None
        state = unpack(self._data)  # again: an object may have changed the state it was given before
        self._set_generators(state)
        self._restore(self._kept, state["kept"])
        if same_phase and self.stream is not None and state.get("stream") is not None:
            self._restore({"stream": self.stream}, state)
        return True

    def freeze(self) -> dict[str, Any]:
        """Return the current state for `thaw`, in this process."""
        kept = {name: thing.state_dict() for name, thing in self._kept.items() if self._is_own(thing)}
        return {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "kept": copy.deepcopy(kept),
        }

    def thaw(self, state: dict[str, Any]) -> None:
        """Go back to a state of `freeze`."""
        self._set_generators(state)
        self._restore(self._kept, state["kept"])

    def _set_generators(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])

    def _restore(self, things: dict[str, Keepable], states: dict[str, Any]) -> None:
        self.busy = True
        try:
            for name, thing in things.items():
                if name in states and self._is_own(thing):
                    thing.load_state_dict(states[name])
        finally:
            self.busy = False

    def keeps(self, thing: Any) -> bool:
        """Return whether the script keeps this object itself."""
        return any(thing is other for other in self._kept.values())

    def _is_own(self, thing: Keepable) -> bool:
        """Return whether the run does not restore the object by itself."""
        return not any(thing is other for other in self._left_out)
