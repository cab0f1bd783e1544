"""The base of every strategy: options, plain-data state, and one mutator, `handle`.

There are two kinds. A `Strategy` is central: one machine decides for all workers of a server. A `Peer` (peers/base.py)
decides for one node of a run without a server, and every node has its own.

Rule one: a strategy sees nothing but its events. Time is `event.at`, randomness is the injected `random.Random`,
gradients are numbers on the event. Rule two: all that it remembers lives in `self.state`, a struct of plain data, so
that `snapshot` and `restore` need no code in a strategy and a resumed run decides as an uninterrupted one would.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar, Literal, Self

import msgspec

from paceline.core.actions import Action
from paceline.core.errors import OptionError
from paceline.core.events import Event

Kind = Literal["central", "peer"]

DEFAULTS = 2  # of options, counted; a journal says which it was written under, and `former` has those before


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a strategy; each field is `Annotated` with a `Meta` that has its bounds and a description."""


class State(msgspec.Struct):
    """What a strategy remembers: plain data only."""


class Machine(ABC):
    """What strategies of both kinds have in common: description, options, randomness, and a state that can be saved."""

    kind: ClassVar[Kind]
    name: ClassVar[str]  # the name of the class unless given
    rule: ClassVar[str]  # one sentence; the docstring's first line unless given
    citation: ClassVar[str] = "unpublished"
    former: ClassVar[Mapping[str, str]] = {}  # defaults before DEFAULTS was 2, by option, for those that have changed
    Options: ClassVar[type[Options]] = Options
    State: ClassVar[type[State]] = State

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        own = vars(cls)
        cls.name = own.get("name", cls.__name__)
        cls.rule = own.get("rule", (cls.__doc__ or "").strip().partition("\n")[0])

    def __init__(self, options: Any = None, rng: random.Random | None = None, **given: Any) -> None:
        """An engine passes options and `rng`; `launch(strategy=Mine(staleness=2))` passes options by name."""
        self.options: Any = self.Options(**given) if options is None else options
        self.rng = rng or random.Random(0)
        self.state: Any = self.State()
        self.set_up()

    def set_up(self) -> None:  # noqa: B027 - most have nothing to derive
        """Derive from `self.options` what does not change during a run; called once, by the constructor."""

    def snapshot(self) -> dict[str, Any]:
        """Return all that `restore` needs, as plain data."""
        state = msgspec.to_builtins(self.state, str_keys=True)
        return {"state": state, "random": msgspec.to_builtins(self.rng.getstate())}

    def restore(self, data: dict[str, Any]) -> Self:
        """Return to the state of a snapshot."""
        # Lax, because JSON carries numbers that it has no notation for as strings such as "inf".
        self.state = msgspec.convert(data["state"], type(self.state), str_keys=True, strict=False)
        version, internal, gauss = data["random"]
        self.rng.setstate((version, tuple(internal), gauss))
        return self


class Strategy(Machine):
    """A pure state machine that decides who computes what, and when updates are merged."""

    kind = "central"

    needs_applied: bool = False  # feed Applied with the inner product and norm of applied gradients
    needs_norms: bool = False  # put the gradient's norm on each Pushed
    needs_losses: bool = False  # the script must report a loss
    may_leave_out: bool = False  # a slow worker's pushes may never be used: the run warns of such workers

    keeps_models: bool = False  # some grants are `cached`: the worker goes on from the model that it has

    # For workers on tables, where a clock may begin without a message to the server:
    serves_tables: ClassVar[bool] = False
    free_lead: float = 0.0  # clocks by which a worker may lead the slowest without ever being made to wait
    waits_for_fast: ClassVar[bool] = False  # the slowest may have to wait for a push of a worker that leads it
    max_lead: float = inf  # clocks by which a computing worker leads the slowest at most, whatever happens

    @abstractmethod
    def handle(self, event: Event) -> list[Action]:
        """Update the state with an event and return what to do."""

    def check(self, workers: int) -> None:
        """Refuse options that a run starting with this many workers cannot meet; by default accept all."""


def require_k_within(k: int, workers: int, name: str) -> None:
    """Refuse a `k` that exceeds the workers that the run starts with."""
    if k > workers:
        raise OptionError(f"{name}: k must be <= the number of workers ({workers}), not {k}; lower k or add workers")
