"""The laws of peer machines, read off what one node's machine was told and what it answered.

The checker knows the words of events and actions and the options, and counts everything else itself.

* form: actions stand in their order, and each gives its reason;
* presence: nothing goes to oneself, to a leaver or to somebody unheard of, and nothing but weight leaves a leaver;
* mixing: what arrives is mixed in, once, with a weight in (0, 1); a node without any weight takes it as it is;
* weight: half of it goes with a Send, all of it with a leaver's, and what arrives is added;
* pace: exchanges begin when period or trigger say so, always in the warm-up, and after max_interval steps.
"""

import math
from typing import Any

from paceline import strategies
from paceline.core.actions import Track
from paceline.core.peer_actions import Ask, Average, Exchange, Mix, PeerAction, Send
from paceline.core.peer_events import Asked, PeerEvent, PeerJoined, PeerLeft, Received, Started, Stepped

ORDER = (Mix, Send, Ask, Exchange, Average, Track)
LEAST_WEIGHT = 2.0**-30


class Checker:
    """A fold over the decisions of one node."""

    def __init__(self, spec: str) -> None:
        cls, self.options = strategies.parse(spec)
        self.name = cls.name
        self.form = getattr(self.options, "form", None)
        self.violations: list[str] = []
        self.node = -1
        self.present: set[int] = set()
        self.weight = 1.0
        self.gone = False
        self.steps = 0
        self.sizes: tuple[int, ...] = ()
        self.last: list[int] = []

    def blame(self, law: str, text: str) -> None:
        """A law is broken."""
        self.violations.append(f"{law}: {text}")

    def write(self, event: PeerEvent, actions: list[PeerAction]) -> None:
        """Take one decision into account."""
        self._happen(event)
        self._check_form(actions)
        if isinstance(event, Stepped):
            self._check_pace(event, actions)
        elif any(isinstance(action, Ask | Exchange | Average) for action in actions):
            self.blame("pace", f"an exchange begins with {event}")
        self._check_mixing(event, actions)
        for action in actions:
            if isinstance(action, Send | Ask):
                self._check_partner(event, action)
            if isinstance(action, Send | Ask | Exchange):
                self._exchanged(getattr(action, "tensors", None))

    def _happen(self, event: PeerEvent) -> None:
        match event:
            case Started():
                self.node, self.sizes, self.last = event.node, event.sizes, [0] * len(event.sizes)
            case PeerJoined():
                self.present.add(event.peer)
            case PeerLeft():
                self.present.discard(event.peer)
                self.gone |= event.peer == self.node
            case Stepped():
                self.steps += 1

    def _check_form(self, actions: list[PeerAction]) -> None:
        places = [ORDER.index(type(action)) for action in actions]
        if places != sorted(places):
            self.blame("form", f"out of order: {actions}")
        for action in actions:
            if not action.reason.strip():
                self.blame("form", f"no reason for {action}")

    def _check_partner(self, event: PeerEvent, action: Send | Ask) -> None:
        if action.peer == self.node:
            self.blame("presence", f"to itself: {action}")
        elif action.peer not in self.present:
            self.blame("presence", f"n{action.peer} is not here: {action}")
        if isinstance(action, Ask):
            return
        if isinstance(event, Asked) and action.peer != event.peer:
            self.blame("presence", f"n{event.peer} asked, n{action.peer} is answered")
        if self.form != "weighted":
            if action.weight != 1 or self.gone:
                self.blame("weight", f"{action} of a node that keeps no weights")
            return
        due = self.weight if self.gone else self.weight / 2
        if action.weight != due:
            self.blame("weight", f"{action.weight} of {self.weight} goes with {action}")
        self.weight -= due

    def _check_mixing(self, event: PeerEvent, actions: list[PeerAction]) -> None:
        mixes = [action for action in actions if isinstance(action, Mix)]
        if not isinstance(event, Received):
            if mixes:
                self.blame("mixing", f"nothing was received with {event}: {mixes}")
            return
        weighted = self.form == "weighted"
        wanted = weighted or (event.peer != self.node and not self.gone)
        if [mix.message for mix in mixes] != [event.message] * wanted:
            self.blame("mixing", f"{event} is answered with {mixes}")
            return
        if not wanted:
            return
        share = event.weight / (self.weight + event.weight) if weighted else 0.5
        if abs(mixes[0].weight - share) > 1e-12:
            self.blame("mixing", f"{mixes[0]} where {share} is due")
        if not (0 < mixes[0].weight < 1 or (self.gone and mixes[0].weight == 1)):
            self.blame("mixing", f"a weight outside of (0, 1): {mixes[0]}")
        self.weight += event.weight if weighted else 0
        if getattr(self.options, "mixed", "exchanged") == "exchanged":
            self._exchanged(event.tensors)

    def _exchanged(self, tensors: tuple[int, ...] | None) -> None:
        for tensor in range(len(self.sizes)) if tensors is None else tensors:
            self.last[tensor] = self.steps

    # -- when ---------------------------------------------------------------------------------------------------------

    def _check_pace(self, event: Stepped, actions: list[PeerAction]) -> None:
        begun = [action for action in actions if isinstance(action, Send | Ask | Exchange | Average)]
        wanted = self._wanted(event)
        if len(begun) > 1 or any(type(action) is not wanted for action in begun):
            self.blame("pace", f"{event} is answered with {begun}")
        due = self._due(event) if wanted is not None else []
        sent: list[int] = []
        if begun:
            tensors = getattr(begun[0], "tensors", None)
            sent = self._nonempty if tensors is None else list(tensors)
        if getattr(self.options, "budget", None) is None or self.steps <= self.options.warmup:
            if sent != due:
                self.blame("pace", f"{sent} exchanged at step {self.steps}, due: {due}")
        elif wanted is not None and (missing := set(self._late) - set(sent)):
            self.blame("pace", f"{missing} not exchanged for {self.options.max_interval} steps")
        if begun and isinstance(begun[0], Exchange) and not 0 < begun[0].alpha < 1:
            self.blame("mixing", f"alpha outside of (0, 1): {begun[0]}")

    @property
    def _nonempty(self) -> list[int]:
        return [tensor for tensor, size in enumerate(self.sizes) if size]

    @property
    def _late(self) -> list[int]:
        return [t for t in self._nonempty if self.steps - self.last[t] >= self.options.max_interval]

    def _wanted(self, event: Stepped) -> Any:
        """What an exchange that begins at this step looks like; None if there can be none."""
        if self.gone:
            return None
        if self.name == "local_sgd":
            return Average
        if "elastic" in self.name:
            return Exchange if self.options.alpha != 0 else None
        if not self.present or self.weight < LEAST_WEIGHT:
            return None
        return Ask if self.form == "pull" else Send

    def _due(self, event: Stepped) -> list[int]:
        """The tensors that must be exchanged at this step, where no budget has moved the threshold."""
        options, everything = self.options, self._nonempty
        if "adaptive" not in self.name and getattr(options, "scope", "model") == "tensor":
            return [t for t in everything if self._at_period(event.step, t)]
        if "adaptive" not in self.name:
            return [] if event.step % options.period else everything
        if self.steps <= options.warmup:
            return everything
        if options.scope == "model":
            due = event.change**2 * (self.steps - self.last[0]) ** options.steps_power >= options.threshold**2
            return everything if due or self._late else []
        power = 2.0 if options.share_power is None else options.share_power
        return [
            t
            for t in everything
            if t in self._late
            or event.changes[t] ** 2 * (self.steps - self.last[t]) ** options.steps_power
            >= options.threshold**2 * (self.sizes[t] / sum(self.sizes)) ** power
        ]

    def _at_period(self, step: int, tensor: int) -> bool:
        """Whether a multiple of the tensor's own period has come since the step before; the scale is searched for."""
        shares = [size / sum(self.sizes) for size in self.sizes]
        low, high, power = 0.0, 1e6, self.options.share_power / 2
        for _ in range(200):
            scale = (low + high) / 2
            traffic = sum(share / max(1.0, scale * share**power) for share in shares)
            low, high = (scale, high) if traffic > 1 / self.options.period else (low, scale)
        period = max(1.0, high * shares[tensor] ** power)
        return math.floor(step / period + 1e-9) > math.floor((step - 1) / period + 1e-9)
