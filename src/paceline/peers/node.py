"""One node: feeds events to its machine and carries out the actions, at the borders of its steps.

Tensors are the model's parameters and its floating-point buffers. Between two steps the node sends copies, made at the
moment of the decision, and mixes in what it received.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from paceline.core import peer_events as events
from paceline.core.errors import InternalError
from paceline.core.peer_actions import Ask, Average, Exchange, Mix, PeerAction, Send
from paceline.peers import messages
from paceline.peers.models import is_finite, mix_in
from paceline.peers.packing import off_wire, on_wire
from paceline.strategies.peers.base import Peer

Tensors = Sequence[torch.Tensor]


class Node:
    """A machine and the tensors it decides about. `send` sends a message to the engine, `ask` waits for the answer."""

    def __init__(
        self, machine: Peer, number: int, tensors: Callable[[], Tensors], send: Callable[[Any], None],
        ask: Callable[[Any], Any], *, copies: bool = True, mend: Callable[[int], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        """`copies`: copy tensors before sending; not needed where `send` copies them at once.

        `mend` replaces a model that is not finite after that step by another node's, and returns whether it could.
        """
        self.machine = machine
        self.number = number
        self._tensors = tensors
        self._send = send
        self._ask = ask
        self._copies = copies
        self._replace = mend
        self._step = 0
        self._is_sound: bool | None = None  # whether all tensors are finite after this step; None: not known
        self._last: list[torch.Tensor] | None = None  # each tensor right after its last exchange
        self._received: dict[int, messages.Arrived] = {}
        self._at = 0.0

    def border(self, border: messages.Border, samples: int, loss: float | None) -> None:
        """Let the machine decide after a step, or one that the script skipped (`samples` 0), and handle arrivals."""
        self._at, self._step, self._is_sound = border.at, border.step, None
        if border.others is not None:
            self._start(border.others)
        known = [arrived for arrived in border.arrived if not _is_mail(arrived)]
        for arrived in known:
            self._decide(arrived.event)
        if samples:
            change, changes = self.changes()
            took = (border.compute_s, border.wait_s)
            self._decide(events.Stepped(border.at, border.step, change, changes, samples, *took, loss))
        for arrived in border.arrived:
            if _is_mail(arrived):
                self._take_in(arrived)

    def leave(self, at: float, cause: events.PeerCause) -> None:
        """Tell the machine that this node leaves, so that it can pass on what the others must not lose."""
        self._at = at
        self._decide(events.PeerLeft(at, self.number, cause))

    def _start(self, others: tuple[int, ...]) -> None:
        tensors = self._tensors()
        if self.machine.needs_change or self.machine.needs_changes:
            self._last = [tensor.detach().clone() for tensor in tensors]
        self._decide(events.Started(self._at, self.number, tuple(tensor.nbytes for tensor in tensors)))
        for peer in others:
            self._decide(events.PeerJoined(self._at, peer))

    def _take_in(self, arrived: messages.Arrived) -> None:
        event = arrived.event
        if isinstance(event, events.Received):
            self._received[event.message] = arrived
        self._decide(event)
        if isinstance(event, events.Received):
            self._received.pop(event.message, None)

    def _decide(self, event: events.PeerEvent) -> None:
        event = msgspec.structs.replace(event, at=self._at)
        actions = self.machine.handle(event)
        self._send(messages.Decided(event, actions))
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: PeerAction) -> None:
        tensors = self._tensors()
        if isinstance(action, Send | Exchange | Average) and not self._finite(self._places(action_tensors(action))):
            return  # what others must not get
        match action:
            case Send():
                values = self.on_wire([tensors[place] for place in self._places(action.tensors)], copy=self._copies)
                self._send(messages.Outgoing(action.peer, action.weight, action.tensors, values))
                self._remember(action.tensors)
            case Ask():
                self._send(messages.Wanted(action.peer))
                self._remember(None)
            case Mix():
                self._mix(action, tensors)
            case Exchange():
                chosen = [tensors[place] for place in self._places(action.tensors)]
                answer = self._ask(
                    messages.CentreExchange(action.alpha, action.tensors, self.on_wire(chosen, copy=self._copies))
                )
                if isinstance(answer, messages.Pulled):
                    with torch.no_grad():
                        for tensor, pull in zip(chosen, answer.values, strict=True):
                            tensor.sub_(pull.to(tensor.device, tensor.dtype))
                    self._remember(action.tensors)
            case Average():
                values = [tensor.detach().clone() for tensor in tensors] if self._copies else list(tensors)
                answer = self._ask(messages.Averaging(action.round, values))
                if isinstance(answer, messages.Averages):
                    with torch.no_grad():
                        for tensor, mean in zip(tensors, answer.values, strict=True):
                            tensor.copy_(mean)
                    self._remember(None)
                    self._decide(events.Averaged(self._at, action.round, answer.members))
            case _:
                pass  # Track is for the journal alone

    def _finite(self, places: Sequence[int]) -> bool:
        """Return whether these tensors are finite; if they are not, take another node's model first."""
        tensors = self._tensors()
        if self._is_sound or is_finite([tensors[place] for place in places]):
            return True
        if not self._replace(self._step):
            return False
        self._is_sound = True
        self._remember(None)
        return True

    def recover(self, step: int) -> None:
        """Take another node's model if this one is not finite, as a gradient that is not suggests."""
        self._step, self._is_sound = step, None
        self._finite(self._places(None))

    def is_sound(self) -> bool:
        """Return whether the model is finite."""
        return is_finite(self._tensors())

    def _mix(self, action: Mix, tensors: Tensors) -> None:
        arrived = self._received.get(action.message)
        if arrived is None or not isinstance(arrived.event, events.Received) or arrived.values is None:
            raise InternalError(f"{self.machine.name} mixes message {action.message}, which is not here")
        places = self._places(arrived.event.tensors)
        values = off_wire(arrived.values, self.machine.wire, [tensors[place] for place in places])
        if self.machine.wire != "float32" and not is_finite(values):
            return  # its sender has checked it, but rounding may have made it infinite
        mix_in(tensors, arrived.event.tensors, values, action.weight)
        if self.machine.resets_on_mix:
            self._remember(arrived.event.tensors)

    def _places(self, named: tuple[int, ...] | None) -> Sequence[int]:
        return range(len(self._tensors())) if named is None else named

    def on_wire(self, tensors: Tensors, *, copy: bool) -> list[torch.Tensor]:
        """Convert tensors to what is sent of them."""
        return [on_wire(tensor, self.machine.wire, copy=copy) for tensor in tensors]

    # -- how far the model has moved ---------------------------------------------------------------------------------

    def _remember(self, named: tuple[int, ...] | None) -> None:
        if self._last is not None:
            tensors = self._tensors()
            places = self._places(named)
            with torch.no_grad():
                torch._foreach_copy_([self._last[p] for p in places], [tensors[p] for p in places])

    def changes(self) -> tuple[float | None, tuple[float, ...] | None]:
        """Return the relative change since each tensor's last exchange: of the whole model, and of each tensor."""
        if self._last is None:
            return None, None
        with torch.no_grad():
            moved = torch._foreach_norm(torch._foreach_sub(list(self._tensors()), self._last))
            sizes = torch._foreach_norm(self._last)
        by_tensor = [(float(m), float(s)) for m, s in zip(moved, sizes, strict=True)]
        self._is_sound = all(math.isfinite(m) for m, _ in by_tensor) or None
        whole = _relative(math.hypot(*(m for m, _ in by_tensor)), math.hypot(*(s for _, s in by_tensor)))
        each = tuple(_relative(m, s) for m, s in by_tensor) if self.machine.needs_changes else None
        return whole if self.machine.needs_change else None, each


def action_tensors(action: Send | Exchange | Average) -> tuple[int, ...] | None:
    """Return the tensors that an action shares; None: all."""
    return None if isinstance(action, Average) else action.tensors


def _is_mail(arrived: messages.Arrived) -> bool:
    """Whether the machine gets this after `Stepped`: models and questions; membership and departures come before."""
    return isinstance(arrived.event, events.Asked | events.Received)


def _relative(moved: float, size: float) -> float:
    if size:
        return moved / size
    return math.inf if moved else 0.0
