"""Collect the models of all nodes, to evaluate or save them and at the end of a phase."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.model.spec import dtype_of
from paceline.peers import messages as p
from paceline.peers.models import is_averaged
from paceline.transport.mail import from_bytes

if TYPE_CHECKING:
    from paceline.peers.server import PeerExchange


class NodeModel(NamedTuple):
    """One node's model: the tensors that are averaged, and the counters."""

    tensors: Sequence[torch.Tensor]
    counters: Sequence[torch.Tensor]


class _Round:
    """One collection of all models, and the calls that wait for it."""

    def __init__(self, last: bool, then: Callable[[], None]) -> None:
        self.last = last  # the phase's last: nobody steps after it
        self.then = [then]


class Gathering:
    """Collects models from processes, one collection at a time.

    Every node sends its model between two steps; one that leaves meanwhile is not waited for. Models of nodes whose
    scripts left the loop count in the average until the phase ends.
    """

    def __init__(self, exchange: "PeerExchange") -> None:
        self._exchange = exchange
        self._number = 0
        self.waiting: set[int] = set()  # nodes that were asked for their model
        self.asked_at = 0.0
        self._found: dict[int, NodeModel] = {}
        self._left_loop: dict[int, NodeModel] = {}  # models of nodes that left the loop
        self._queue: list[_Round] = []  # the current one, and at most one that follows it
        self._dismissed: dict[int, Callable[[], None]] = {}  # calls to make when a node asked to leave has left
        self._bytes = 0
        self.averaged = False  # whether the store has an average, and not only the first model

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def begin(self, then: Callable[[], None], *, last: bool) -> None:
        """Put the average into the store, then call `then`.

        Requests made during a collection share the next one, and nothing follows the last collection of a phase: so
        frequent requests cannot outrun the nodes' answers.
        """
        if self._queue and (len(self._queue) > 1 or self._queue[0].last):
            waiting = self._queue[-1]
            waiting.last |= last
            waiting.then.append(then)
            return
        self._queue.append(_Round(last, then))
        if len(self._queue) == 1:
            self._ask()

    def _ask(self) -> None:
        run = self._exchange.run
        self._number += 1
        self._found, self._bytes = {}, 0
        self.asked_at = run.engine.now()
        self.waiting = {node for node in run.workers.in_phase if run.workers.incarnation(node) is not None}
        for node in sorted(self.waiting):
            run.engine.send(node, p.Collect(self._number, self._queue[0].last))
        self._look()

    def take(self, node: int, snapshot: p.Snapshot) -> None:
        """Accept a node's model."""
        model = self._typed(snapshot)
        if snapshot.number == 0:
            self._left_loop[node] = model
            self._dismissed.pop(node, _nothing)()
        elif snapshot.number == self._number and node in self.waiting:
            self.waiting.discard(node)
            self._found[node] = model
            self._bytes += snapshot.nbytes
            self._look()

    def dismiss(self, node: int, then: Callable[[], None]) -> None:
        """Tell a node to leave, and call `then` when it has."""
        self._dismissed[node] = then
        self._exchange.run.engine.send(node, p.Collect(0, last=True))

    def gone(self, node: int, *, crashed: bool) -> None:
        """Stop waiting for a node; drop a crashed node's model."""
        self._dismissed.pop(node, None)
        if crashed:
            self._left_loop.pop(node, None)
            self._exchange.used.pop(node, None)
        if node in self.waiting:
            self.waiting.discard(node)
            self._look()

    def phase_over(self) -> None:
        """Drop the models and sample counts of the phase, which are in the average."""
        self._left_loop.clear()
        self._exchange.used.clear()

    def _look(self) -> None:
        if self.waiting or not self._queue:
            return
        self._average({**self._left_loop, **self._found})
        for then in self._queue.pop(0).then:
            then()
        if self._queue:
            self._ask()

    def _average(self, models: dict[int, NodeModel]) -> None:
        if not models:
            return
        models = dict(sorted(models.items()))
        self._exchange.put_average(models, self._bytes, self._exchange.run.moment())
        self.averaged = True
        if self._queue[0].last:
            self._exchange.keep(models)

    def _typed(self, snapshot: p.Snapshot) -> NodeModel:
        spec = self._exchange.store.spec
        floats = [b for b in spec.buffers if is_averaged(b[2])]
        counters = [b for b in spec.buffers if not is_averaged(b[2])]

        def typed(entries: list[tuple[str, tuple[int, ...], str]], values: list[Any]) -> list[torch.Tensor]:
            pairs = zip(entries, values, strict=True)
            return [from_bytes(torch.from_numpy(v), dtype_of(dtype), shape) for (_, shape, dtype), v in pairs]

        return NodeModel(typed([*spec.parameters, *floats], snapshot.values), typed(counters, snapshot.counters))


def _nothing() -> None:
    """Stand in for the call of a node that left unasked."""
