"""A worker's model in a run without a server: the node owns it, and a push reports a step that the node made."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.errors import OptionError
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters
from paceline.peers.messages import Averages, Border, Lent, Model, NotFinite, Pulled, Step
from paceline.peers.node import Node
from paceline.strategies.peers.base import Peer
from paceline.transport.base import Closed, Lost
from paceline.transport.messages import Cancelled, Over
from paceline.worker.replica import Replica


class NodeReplica(Replica):
    """Steps with the script's own optimizer and lets the node decide what is exchanged."""

    steps_itself = True

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: ModelSpec,
        make_machine: Callable[[], Peer],
        number: int,
        endpoint: Any,  # carries nodes' messages, too
    ) -> None:
        super().__init__(model, optimizer, spec)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptionError("LBFGS asks for the loss several times in a step, which batches() cannot give it")
        self._endpoint = endpoint
        self._make_machine = make_machine
        self._border: Border | None = None
        self._step = type(optimizer).step
        self._samples_stepped = 0
        self._refused = False  # the last step's gradient was not finite
        self._gradients: list[torch.Tensor | None] | None = None  # of the pieces so far
        self.node = self._make_node(make_machine(), number)

    def _make_node(self, machine: Peer, number: int) -> Node:
        return Node(machine, number, self.tensors, self._endpoint.send, self._ask, mend=self._mend)

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return what is exchanged: parameters, and buffers that can be averaged."""
        return [*self._values, *(b for b in self.buffers if b.is_floating_point())]

    def counters(self) -> Sequence[torch.Tensor]:
        """Return the buffers that are not exchanged."""
        return [b for b in self.buffers if not b.is_floating_point()]

    def introduce(self) -> None:
        """Send references to the model, and a fresh machine: a restarted server knows nothing of the old one."""
        self.node = self._make_node(self._make_machine(), self.node.number)
        self._endpoint.send(Model(self.tensors, self.counters, self.node.machine))

    def load(self, version: Parameters) -> None:
        super().load(version)
        self._read = None  # nothing overwrites the script's edits of its parameters, so none are looked for

    def on_grant(self, work: object) -> float:
        self._border = work.border if isinstance(work, Step) else None
        return 0.0

    def add(self, samples: int, *, last: bool) -> None:
        """Add a piece's gradients to the mean; those of a step's only piece are used without a copy."""
        pieces = [None if p.grad is None else self._dense(place) for place, p in enumerate(self.parameters)]
        known, before = self._gradients, self._samples
        self._samples = before + samples
        if known is None:
            self._gradients = pieces if last else [None if piece is None else piece.clone() for piece in pieces]
            return
        for place, piece in enumerate(pieces):
            summed = known[place]
            if piece is not None and summed is None:
                known[place] = piece * (samples / self._samples)
            elif summed is not None:
                summed.mul_(before / self._samples)
                if piece is not None:
                    summed.add_(piece, alpha=samples / self._samples)

    def forget(self) -> None:
        super().forget()
        self._gradients = None

    def take(self, loss: float | None) -> Gradient | None:
        """Make the step; the push reports it, without a gradient."""
        gradients, samples = self._gradients, self._samples
        self.forget()
        self._samples_stepped = 0
        if gradients is None:
            return None
        norm = _norm([gradient for gradient in gradients if gradient is not None])
        self._refused = not math.isfinite(norm)
        if not self._refused:  # else the coordinator refuses the push, and the model must stay as it is
            self._make_step(gradients)
            self._samples_stepped = samples
        return Gradient([], frozenset(), (), [], loss, norm=norm)

    def on_computed(self, compute_s: float, loss: float | None) -> None:  # noqa: ARG002 - the border knows
        border, self._border = self._border, None
        if border is not None:
            if self._refused:
                self.node.recover(border.step)
            self.node.border(border, self._samples_stepped, loss)

    def leave(self) -> None:
        self.drop_step()

    def drop_step(self) -> None:
        self._samples_stepped = 0
        NodeReplica.on_computed(self, 0.0, None)  # not a subclass's: only virtual nodes get a border with a grant

    def _make_step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        before = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self._step(self.optimizer)
        for parameter, gradient in zip(self.parameters, before, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _mend(self, step: int) -> bool:
        """Take another node's model instead of one that is not finite; return whether there is one."""
        answer = self._ask(NotFinite(step))
        if not isinstance(answer, Lent) or not answer.values:
            return False
        self._adopt(answer.values)
        return True

    def _adopt(self, values: Sequence[torch.Tensor]) -> None:
        """Go on from another node's model; what the optimizer knows is of the old one."""
        with torch.no_grad():
            for home, value in zip(self.tensors(), values, strict=True):
                home.copy_(value)
        self.optimizer.state.clear()

    def _ask(self, message: object) -> object:
        self._endpoint.send(message)
        while True:
            try:
                answer = self._endpoint.receive()
            except Lost as lost:
                self.interrupted = lost
                return None
            if isinstance(answer, Pulled | Averages | Lent):
                return answer
            if isinstance(answer, Over | Cancelled):
                self.interrupted = answer
                return None
            if answer is None:
                raise Closed


def _norm(gradients: list[torch.Tensor]) -> float:
    if not gradients:
        return 0.0
    with torch.no_grad():
        return float(torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).norm())
