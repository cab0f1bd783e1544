"""A worker's model in a run without a server: it is the node's own, and a push is a step that was made here."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import OptionError
from paceline.peers.node import Node
from paceline.replica import Replica
from paceline.store import Gradient, ModelSpec, Parameters, flat_norm
from paceline.strategies.peers.base import Peer
from paceline.transport.base import Closed
from paceline.transport.messages import Over
from paceline.transport.peer_messages import Averages, Border, Model, Pulled, Step


class NodeReplica(Replica):
    """Steps with the script's own optimizer and lets the node decide what is exchanged."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: ModelSpec,
        machine: Peer,
        number: int,
        endpoint: Any,  # it carries nodes' messages, too
    ) -> None:
        super().__init__(model, optimizer, spec)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptionError("LBFGS asks for the loss several times in a step, which batches() cannot give it")
        self._endpoint = endpoint
        self._border: Border | None = None
        self._step = type(optimizer).step
        self._samples_stepped = 0
        self.node = self._make_node(machine, number)

    def _make_node(self, machine: Peer, number: int) -> Node:
        return Node(machine, number, self.tensors, self._endpoint.send, self._ask)

    def tensors(self) -> Sequence[torch.Tensor]:
        """What is exchanged: parameters, and buffers that can be averaged."""
        return [*self._values, *(b for b in self.buffers if b.is_floating_point())]

    def counters(self) -> Sequence[torch.Tensor]:
        """Buffers that are not."""
        return [b for b in self.buffers if not b.is_floating_point()]

    def introduce(self) -> None:
        """Say where the model lies."""
        self._endpoint.send(Model(self.tensors, self.counters))

    def load(self, version: Parameters) -> None:
        super().load(version)
        self._read = None  # the script's parameters are its own: nothing overwrites its edits

    def meet(self, work: object) -> float:
        self._border = work.border if isinstance(work, Step) else None
        return 0.0

    def take(self, loss: float | None) -> Gradient | None:
        """Make the step; what is pushed is that it was made."""
        flat, missing, samples = self._flat, self._missing, self._samples
        self.forget()
        self._samples_stepped = 0
        pushed = None
        if flat is not None:
            norm = flat_norm(flat)
            pushed = Gradient([], frozenset(), (), [], loss, norm=norm)
            if math.isfinite(norm):  # another is refused, as every engine refuses it: the model stays as it is
                self._make_step(flat, missing)
                self._samples_stepped = samples
        return pushed

    def cross(self, compute_s: float, loss: float | None) -> None:  # noqa: ARG002 - the border knows
        border, self._border = self._border, None
        if border is not None:
            self.node.border(border, self._samples_stepped, loss)

    def leave(self) -> None:
        """What had arrived for a step that is not made is dealt with all the same."""
        self._samples_stepped = 0
        self.cross(0.0, None)

    def _make_step(self, flat: list[torch.Tensor], missing: frozenset[int]) -> None:
        views = self.layout.views(flat)
        before = [parameter.grad for parameter in self.parameters]
        for place, parameter in enumerate(self.parameters):
            parameter.grad = None if place in missing else views[place]
        self._step(self.optimizer)
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient

    def _ask(self, message: object) -> object:
        self._endpoint.send(message)
        while True:
            answer = self._endpoint.receive()
            if isinstance(answer, Pulled | Averages):
                return answer
            if isinstance(answer, Over):
                self.interrupted = answer
                return None
            if answer is None:
                raise Closed
