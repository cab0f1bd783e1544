"""A learning-rate scheduler that follows the run's rounds instead of counting one worker's calls.

Its `step` is replaced by changing the object's class to a subclass, not by setting an attribute: schedulers save all
their attributes as state. Copies and pickles have the original class.

The rounds done fall when a restarted server resumes from a checkpoint. Schedulers only step forward, so this one is
reset to its state before its first step for the run, and repeats the steps from there.
"""

import copy
import copyreg
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.core.errors import OptionError

Options = list[dict[str, Any]]  # of each parameter group, without its parameters


class SchedulerStart(NamedTuple):
    """A scheduler's state before the run stepped it."""

    made: int
    state: Any  # None: it cannot be restored
    options: Options


class RunScheduler:
    """Replaces a scheduler's `step` by as many real steps as it takes to catch up with the run."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, rounds_done: Callable[[], float]) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise OptionError(
                "ReduceLROnPlateau decides by a metric, not by the run's rounds; choose a scheduler that counts "
                "steps, or call it without handing it to prepare()"
            )
        if not callable(getattr(scheduler, "step", None)):
            raise OptionError(f"scheduler must have a step(), and {type(scheduler).__name__} has none")
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._advance = scheduler.step
        self._load = getattr(scheduler, "load_state_dict", None)
        self._made = max(0, getattr(scheduler, "last_epoch", 0))
        self._rounds_done = rounds_done
        self._start: SchedulerStart | None = None  # set before the first step
        self._changed: set[str] = set()  # names of options that steps changed
        self._granted = False
        _put_in_place(self, scheduler)

    def step(self) -> None:
        """Catch up with the run."""
        self.move_to(self._rounds_done())

    def load(self, state: Any) -> None:
        """Load a state that the script gives; the run continues from there."""
        if self._load is not None:
            self._load(state)
        self._start = None

    def on_work(self, rounds_done: float) -> None:
        """Catch up at the first grant, so that workers that join late or resume push with the run's learning rate, and
        after the server resumed from a checkpoint."""
        if not self._granted or _whole(rounds_done) < self._made:
            self._granted = True
            self.move_to(rounds_done)

    def move_to(self, rounds_done: float) -> None:
        """Bring the scheduler to its state after `rounds_done` rounds."""
        target = _whole(rounds_done)
        if target < self._made:
            self._go_back()
        while self._made < target:
            before = _options(self._optimizer)
            if self._start is None:
                self._start = SchedulerStart(self._made, _state(self._scheduler), before)
            self._made += 1
            self._advance()
            for old, new in zip(before, _options(self._optimizer), strict=False):
                self._changed.update(name for name in new if not _same(old.get(name), new[name]))

    def _go_back(self) -> None:
        start = self._start
        if start is None or start.state is None or self._load is None:
            return  # the script brought it to this state, or it cannot be restored
        self._load(copy.deepcopy(start.state))
        for group, known in zip(self._optimizer.param_groups, start.options, strict=False):
            for name in self._changed & known.keys():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(known[name])
                else:
                    group[name] = known[name]
        self._made = start.made


def _put_in_place(follower: RunScheduler, scheduler: Any) -> None:
    """Make the scheduler's `step` and `load_state_dict` call the follower."""
    kind: Any = type(scheduler)

    def step(_: Any, *__: Any, **___: Any) -> None:
        follower.step()

    def load_state_dict(_: Any, state_dict: Any) -> None:
        follower.load(state_dict)

    def reduced(self: Any, protocol: Any) -> Any:
        make, arguments, *rest = kind.__reduce_ex__(self, protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined] # pickle insists on the object's own class
            make = kind.__new__
        make, *arguments = [kind if part is type(self) else part for part in (make, *arguments)]
        return (make, tuple(arguments), *rest)

    members: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members |= {"__doc__": kind.__doc__, "step": step, "__reduce_ex__": reduced}
    if hasattr(kind, "load_state_dict"):
        members["load_state_dict"] = load_state_dict
    if "step" not in getattr(scheduler, "__dict__", {}):
        try:
            scheduler.__class__ = type(kind.__name__, (kind,), members)
            return
        except TypeError:  # its class is not written in Python
            pass
    scheduler.step = lambda *_, **__: follower.step()


def _whole(rounds_done: float) -> int:
    return math.floor(rounds_done + 1e-9)


def _options(optimizer: torch.optim.Optimizer) -> Options:
    """Copy the groups' current options, tensors too: schedulers change those in place."""
    return [
        {name: value.clone() if isinstance(value, torch.Tensor) else value
         for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]  # fmt: skip


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _state(scheduler: Any) -> Any:
    """Return a copy of the scheduler's state; None if that fails."""
    try:
        return copy.deepcopy(scheduler.state_dict())
    except Exception:  # noqa: BLE001 - a user's scheduler may hold anything; only going back is lost
        return None
