"""Learning-rate schedulers that follow the run instead of counting one worker's calls.

Where `step()` is called says what it means. Inside a loop it means rounds: the call makes as many real steps as it
takes to stand where the run does, the same on fast and slow workers. Between two loops every call is one real step:
all workers run the same script, and one that starts late or again passes through the same calls. So a scheduler stands
at its calls between loops plus the whole rounds of those phases in whose loops some worker has stepped it.

The first call inside a phase's loop is told to the server. It sends the names with every grant and at the end of a
phase, so a worker that comes later knows what to catch up with before its first push.

`ReduceLROnPlateau` follows the run's evaluations, in their order.

A `step` is replaced by changing the object's class to a subclass, not by setting an attribute: schedulers save all
their attributes as state. Copies and pickles have the original class.

Rounds and evaluations fall when a restarted server resumes from a checkpoint. Schedulers only step forward, so one is
reset to its state before its first step for the run, and repeats the steps from there.
"""

import copy
import copyreg
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from paceline.core.errors import UserError
from paceline.worker.run_position import RunPosition

Options = list[dict[str, Any]]  # of each parameter group, without its parameters
Remark = Callable[[str], None]


class SchedulerStart(NamedTuple):
    """A scheduler's state before the run stepped it."""

    made: int
    state: Any  # None: it cannot be restored
    options: Options


class RunSteps:
    """A scheduler's real steps: made one after the other, and taken back all together."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = scheduler
        self.made = 0
        self.changed: set[str] = set()  # names of options that steps changed
        self._optimizer = optimizer
        self._advance = scheduler.step
        self._load = getattr(scheduler, "load_state_dict", None)
        self._start: SchedulerStart | None = None  # set before the first step

    def make(self, *arguments: Any, **named: Any) -> Any:
        """Make one step."""
        before = _options(self._optimizer)
        if self._start is None:
            self._start = SchedulerStart(self.made, _state(self.scheduler), before)
        self.made += 1
        answer = self._advance(*arguments, **named)
        for old, new in zip(before, _options(self._optimizer), strict=False):
            self.changed.update(name for name in new if not _same(old.get(name), new[name]))
        return answer

    def load(self, state: Any) -> None:
        """Load a state that the script gives; further steps continue from there."""
        if self._load is not None:
            self._load(state)
        self._start = None

    def take_back(self) -> None:
        """Reset the scheduler and the options that it changed to before the first step, where that is possible."""
        start = self._start
        if start is None or start.state is None or self._load is None:
            return  # the script brought it to this state, or it cannot be restored
        self._load(copy.deepcopy(start.state))
        self.set_options(start.options)
        self.made = start.made

    def options(self) -> Options:
        """Return the options that steps have changed, as they are."""
        return [
            {name: value for name, value in group.items() if name in self.changed}
            for group in _options(self._optimizer)
        ]

    def set_options(self, options: Options) -> None:
        """Set those options that steps have changed."""
        for group, known in zip(self._optimizer.param_groups, options, strict=False):
            for name in self.changed & known.keys():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(known[name])
                else:
                    group[name] = known[name]


class RunScheduler:
    """Replaces the `step` of a scheduler that counts its steps."""

    def __init__(
        self, name: str | None, scheduler: Any, optimizer: torch.optim.Optimizer, position: RunPosition,
        tell: Callable[[str], None], remark: Remark,
    ) -> None:  # fmt: skip
        """`name` is the same on all workers; None: it cannot be told from another scheduler of the optimizer.

        `tell` sends the server the name of a scheduler that was stepped inside the current phase's loop.
        """
        self._name = name
        self._steps = RunSteps(scheduler, optimizer)
        self._position = position
        self._tell, self._remark = tell, remark
        self._calls = 0  # between loops
        self._followed = 0.0  # rounds of earlier phases in whose loops it was stepped
        self._phase, self._began = -1, 0.0  # the latest phase, and the run's rounds when it began
        self._stepped = False  # in the latest phase's loop, by any worker
        self._called = False  # there, by this worker
        self._last = position.steps  # optimizer steps at the last call inside a loop
        _put_in_place(scheduler, self.step, self._steps.load)

    @property
    def scheduler(self) -> Any:
        return self._steps.scheduler

    @property
    def target(self) -> int:
        """How many steps it is to have made."""
        here = self._position.in_phase if self._stepped else 0.0
        return self._calls + math.floor(self._followed + here + 1e-9)

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Stand where the run does: the script calls it."""
        position = self._position
        if position.inside and not position.granted:
            return None  # the phase was over before this worker came; its rounds are known
        if arguments or named:
            return self._steps.make(*arguments, **named)  # where to stand, in the script's own words
        if position.inside:
            if not self._stepped:
                self._say_so()
            self._stepped = self._called = True
            self._look_at_gap()
        else:
            self._calls += 1
        self.catch_up()
        return None

    def _say_so(self) -> None:
        if self._name is not None:
            self._tell(self._name)

    def _look_at_gap(self) -> None:
        steps, self._last = self._position.steps - self._last, self._position.steps
        if steps > 1:
            self._remark(
                f"{type(self.scheduler).__name__}.step() is not called after every optimizer.step(): inside a loop it "
                "follows the run's rounds, one step for each; to count epochs, call it between loops of one epoch each"
            )

    def on_standing(self, *, granted: bool) -> None:
        """Take note of a grant or of a phase's end.

        Catch up at grants as long as only others step it in this loop, so that workers that come late or resume push
        with the run's learning rate; after the server resumed from a checkpoint; and at the phase's end, so that the
        script goes on between loops with the same rate everywhere.
        """
        position = self._position
        if self._phase != position.phase:
            self._begin(position)
        if self._name in position.standing.stepped:
            self._stepped = True
        went_back = self.target < self._steps.made
        if went_back and self._called:
            self._say_so()  # the checkpoint may be older than the first call
        if went_back or not self._called or not granted:
            self.catch_up()

    def _begin(self, position: RunPosition) -> None:
        """Begin a phase; a script that has skipped epochs learns from the server what it has missed."""
        began, name = position.standing.began, self._name or ""
        if self._stepped:
            self._followed += max(0.0, began - self._began)
        self._followed = max(self._followed, position.standing.followed.get(name, 0.0))
        self._calls = max(self._calls, position.standing.between.get(name, 0))
        self._phase, self._began = position.phase, began
        self._stepped = self._called = False

    @property
    def calls(self) -> dict[str, int]:
        """Steps between loops so far, by name."""
        return {self._name: self._calls} if self._name is not None and self._calls else {}

    def catch_up(self) -> None:
        """Make the steps that are missing, or repeat them from the start if there were too many."""
        target, steps = self.target, self._steps
        if target < steps.made:
            steps.take_back()
        while steps.made < target and not self._at_its_end():
            steps.make()

    def _at_its_end(self) -> bool:
        """Return whether one more step would be an error: others may do more rounds than the script planned for."""
        return isinstance(self.scheduler, OneCycleLR) and self.scheduler.last_epoch >= self.scheduler.total_steps


class RunPlateau:
    """Replaces the `step` of a `ReduceLROnPlateau`.

    With an `evaluate`, the run's evaluations are its metrics. Without one, the script's calls between loops are; inside
    a loop there is no metric that all workers have.
    """

    def __init__(
        self, scheduler: ReduceLROnPlateau, optimizer: torch.optim.Optimizer, position: RunPosition,
        fetch: Callable[[int], Sequence[float]] | None, remark: Remark,
    ) -> None:  # fmt: skip
        """`fetch` returns the run's evaluations from this number on; None: it does not follow them."""
        self._steps = RunSteps(scheduler, optimizer)
        self._position = position
        self._fetch = fetch
        self._remark = remark
        _put_in_place(scheduler, self.step, self._steps.load)

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Make a step with the script's metric, or say why not."""
        position = self._position
        if self._fetch is not None:
            self._remark(
                "ReduceLROnPlateau follows the run's evaluations, since prepare() was given evaluate; its own step() "
                "does nothing"
            )
            return None
        if position.inside and not position.granted:
            return None
        if position.inside:
            raise UserError(
                "ReduceLROnPlateau.step(metric) inside a loop: every worker would have a metric of its own. Call it "
                "between loops, or give prepare() an evaluate, whose numbers it then follows"
            )
        return self._steps.make(*arguments, **named)

    def on_standing(self, *, granted: bool) -> None:
        """Take in the evaluations that were made since the last grant."""
        if not granted or self._fetch is None:
            return
        known, steps = self._position.standing.evaluations, self._steps
        if known < steps.made:
            steps.take_back()
        if known > steps.made:
            # The answer may hold later ones, of which other workers learn with their next grants.
            for value in self._fetch(steps.made)[: known - steps.made]:
                steps.make(value)

    # What a checkpoint holds of one that the script steps itself: a resumed script has no metrics of finished phases.

    def state_dict(self) -> dict[str, Any]:
        return {
            "scheduler": self._steps.scheduler.state_dict(), "changed": sorted(self._steps.changed),
            "options": self._steps.options(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps.load(state["scheduler"])
        self._steps.changed |= set(state["changed"])
        self._steps.set_options(state["options"])


def _put_in_place(scheduler: Any, follow: Callable[..., Any], load: Callable[[Any], None]) -> None:
    """Make the scheduler's `step` and `load_state_dict` call these."""
    kind: Any = type(scheduler)

    def step(_: Any, *arguments: Any, **named: Any) -> Any:
        return follow(*arguments, **named)

    def load_state_dict(_: Any, state_dict: Any) -> None:
        load(state_dict)

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
    scheduler.step = follow


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
