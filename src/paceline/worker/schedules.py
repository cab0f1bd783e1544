"""All schedulers of one worker's optimizer: the one given to `prepare`, and those built on the optimizer beside it.

Scripts rarely hand their schedulers on, so at the start of each loop the session looks for schedulers of
`torch.optim.lr_scheduler` that act on the prepared optimizer. That is early enough: between loops a scheduler counts
the script's calls anyhow.
"""

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.core.errors import OptionError
from paceline.transport.base import Closed, Endpoint
from paceline.transport.messages import Remark, SchedulerStepped
from paceline.worker.run_position import RunPosition
from paceline.worker.run_scheduler import RunPlateau, RunScheduler
from paceline.worker.state import WorkerState

PLATEAU = "paceline.plateau"  # its name in a worker's checkpoint


class Schedules:
    """What follows the run in one worker.

    A script that runs by itself is the whole run: its schedulers count its calls, as without paceline.
    """

    def __init__(self, endpoint: Endpoint, state: WorkerState, *, alone: bool = False) -> None:
        self.alone = alone
        self.position = RunPosition()
        self._endpoint = endpoint
        self._state = state
        self._optimizers: list[torch.optim.Optimizer] = []
        self._given: list[Any] = []
        self.followers: list[RunScheduler | RunPlateau] = []
        self._kinds: Counter[str] = Counter()  # how many of each were found
        self._references: dict[int, int] = {}  # to each optimizer, when schedulers were last looked for
        self._remarked: set[str] = set()

    def give(
        self, scheduler: Any, optimizer: torch.optim.Optimizer, fetch: Callable[[int], Sequence[float]] | None
    ) -> None:
        """Put the scheduler of `prepare` under the run's control; `fetch` returns the run's evaluations, if any."""
        self._optimizers.append(optimizer)
        if scheduler is None:
            return
        self._state.leave_out(optimizer, scheduler)
        self._given.append(scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            if self.alone and fetch is None:
                return
            plateau = RunPlateau(scheduler, optimizer, self.position, fetch, self._remark)
            if fetch is None:
                self._state.keep(f"{PLATEAU} {len(self._optimizers)}", plateau)
            self.followers.append(plateau)
        elif not self.alone:
            self._follow([scheduler], optimizer)

    def enter(self, phase: int) -> None:
        """Note that the script begins a loop; take charge of schedulers that it has built since the last one."""
        self.position.enter(phase)
        if not self.alone:
            for place, optimizer in enumerate(self._optimizers):
                self._look_for(place, optimizer)

    def _look_for(self, place: int, optimizer: torch.optim.Optimizer) -> None:
        """Take charge of schedulers that act on this optimizer."""
        if not any("initial_lr" in group for group in optimizer.param_groups):
            return  # every scheduler of torch that counts steps notes the initial rate
        if sys.getrefcount(optimizer) == self._references.get(place):
            return  # a scheduler that was built since would be one more; looking takes some 30 ms
        found = [thing for thing in schedulers_on(optimizer) if not any(thing is known for known in self._given)]
        self._given += found
        self._state.leave_out(optimizer, *found)
        self._follow(found, optimizer)
        self._references[place] = sys.getrefcount(optimizer)

    def _follow(self, schedulers: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
        """Follow the run with schedulers that were found together: their order may differ between workers."""
        kinds = [type(scheduler).__name__ for scheduler in schedulers]
        for kind, scheduler in zip(kinds, schedulers, strict=True):
            before = self._kinds[kind]
            name = None if kinds.count(kind) > 1 else f"{kind} {before + 1}" if before else kind
            self.followers.append(RunScheduler(name, scheduler, optimizer, self.position, self._tell, self._remark))
        self._kinds.update(kinds)

    @property
    def between(self) -> dict[str, int]:
        """Steps that schedulers have made between loops, by their names."""
        known = [follower.calls for follower in self.followers if isinstance(follower, RunScheduler)]
        return {name: count for calls in known for name, count in calls.items()}

    def _tell(self, name: str) -> None:
        self._endpoint.send(SchedulerStepped(self.position.phase, name))

    def _remark(self, text: str) -> None:
        if text not in self._remarked:
            self._remarked.add(text)
            with contextlib.suppress(Closed):  # after the run is over nothing follows it
                self._endpoint.send(Remark(text))


def check_schedule(scheduler: Any, evaluate: Any, plateau: str | None) -> None:
    """Raise `OptionError` for arguments of `prepare` that do not fit together."""
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise OptionError(f"scheduler must have a step(), and {type(scheduler).__name__} has none")
    if plateau is None:
        return
    if not isinstance(plateau, str):
        raise OptionError(f"plateau must be the name of a number that evaluate() returns, not {plateau!r}")
    if not isinstance(scheduler, ReduceLROnPlateau) or evaluate is None:
        raise OptionError(f"plateau={plateau!r} needs a ReduceLROnPlateau as scheduler, and an evaluate")


def schedulers_on(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """Return the schedulers that count steps and act on this optimizer, without those inside another one."""
    kinds = _kinds(LRScheduler)
    known: list[Any] = [thing for thing in gc.get_objects() if type(thing) in kinds]
    found = [thing for thing in known if vars(thing).get("optimizer") is optimizer]
    parts = {id(part) for thing in found for part in vars(thing).get("_schedulers", ())}
    return [thing for thing in found if id(thing) not in parts and not isinstance(thing, ReduceLROnPlateau)]


def _kinds(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_kinds, kind.__subclasses__()))
