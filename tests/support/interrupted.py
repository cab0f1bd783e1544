"""A run without processes that can be broken off after any event and gone on with from a checkpoint.

The coordinator, the store and the ledger are the real ones; workers compute the gradient of a linear model when it is
their turn, in an order drawn by chance, on the version they were granted.
"""

import random
from collections.abc import Callable
from pathlib import Path

import torch

from paceline import strategies
from paceline.core.ledger import make_ledger
from paceline.core.updates import PushRef
from paceline.model.mass_optimizer import describe
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Store, spec_of_contents, store_of
from paceline.records.journal import Header, Lines, Sink
from paceline.server.checkpoint.files import Checkpoint, Checkpointer
from paceline.server.checkpoint.run_snapshot import restore, snapshot
from paceline.server.coordinator import Coordinator
from paceline.server.workers import GrantOrder

WORKERS = 4
BATCH = 4
SEED = 5
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def linear_store(optimizer: str, statistics: bool = False) -> Store:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(3, 5, generator=generator), torch.randn(3, generator=generator)]
    parameters = [torch.nn.Parameter(value) for value in values]
    spec = ModelSpec(
        tuple((name, tuple(v.shape), str(v.dtype)) for name, v in zip(("weight", "bias"), values, strict=True)),
        (("seen", (), "torch.int64"), ("mean", (3,), "torch.float32")),
        describe(OPTIMIZERS[optimizer](parameters), {id(p): i for i, p in enumerate(parameters)}),
        (("weight", 0), ("bias", 1), ("seen", 2), ("mean", 3)),
    )
    return Store(spec, values, [torch.tensor(0), torch.zeros(3)], statistics)


class InterruptedRun:
    """One start of a run; `restored` makes the next one."""

    def __init__(
        self, strategy: str, optimizer: str, sampling: str, epochs: float = 2, size: int = 53, sink: Sink | None = None,
        checkpoint: Checkpoint | None = None, chance: int = 0, at: float | None = None,
    ) -> None:  # fmt: skip
        self.sampling, self.epochs, self.size = sampling, epochs, size
        self.sink = Lines() if sink is None else sink
        self.chance = random.Random(chance)
        generator = torch.Generator().manual_seed(2)
        self.data = torch.randn(size, 5, generator=generator)
        self.wanted = torch.randn(size, 3, generator=generator)
        self.orders: dict[int, tuple[GrantOrder, list[torch.Tensor] | None]] = {}
        self.read: dict[int, list[torch.Tensor]] = {}
        self.on_version: list[Callable[[int, float], None]] = []
        self.timers: dict[str, tuple[float, int]] = {}
        taken = checkpoint.run if checkpoint is not None else None
        made = strategies.build(taken.strategy if taken else strategy, SEED)
        if checkpoint is None:
            self.store = linear_store(optimizer, made.needs_applied)
        else:
            contents = checkpoint.contents()
            assert spec_of_contents(contents) == linear_store(optimizer).spec
            self.store = store_of(contents, checkpoint.run.version, made.needs_applied)
        self.coordinator = Coordinator(made, self, self.sink, self.store, carrier=self, on_version=self.on_version)
        self.at = at if at is not None else taken.at if taken else 0.0
        self.sink.write(
            Header(
                engine="local",
                strategy=strategies.canonical(made),
                seed=SEED,
                workers=WORKERS,
                snapshot=taken.strategy_state if taken else None,
                restored=taken.restored if taken else None,
            )
        )
        ledger = make_ledger(sampling, size, epochs, SEED, WORKERS)
        if taken is not None:
            restore(self.coordinator, taken, self.at)
            ledger.restore(taken.ledger)
        self.coordinator.open(ledger, taken.round_samples if taken else WORKERS * BATCH)
        for worker in range(WORKERS):
            self.coordinator.workers.admit(worker, 0)
        for worker in range(WORKERS):
            self.coordinator.join(worker, BATCH, self.at)

    # -- what the coordinator decides --------------------------------------------------------------------------------

    def grant(self, order: GrantOrder) -> None:
        if order.fresh:
            self.read[order.worker] = [view.clone() for view in self.store.layout.views(self.store.read().flat)]
        self.orders[order.worker] = order, self.read[order.worker]

    def cancel(self, worker: int, ticket: int) -> None:
        del self.orders[worker]

    def set_timer(self, name: str, at: float | None, generation: int) -> None:
        self.timers.pop(name, None)
        if at is not None:
            self.timers[name] = at, generation

    def on_work_used_up(self) -> None:
        """`over` is asked after every event."""

    def on_divergence(self, text: str) -> None:
        """The journal has it."""

    def on_nonfinite(self, worker: int) -> None:
        raise AssertionError("these gradients are finite")

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.coordinator.phase_over

    def step(self) -> None:
        """One event."""
        self.at += self.chance.uniform(0.1, 1.0)
        due = [(at, name, number) for name, (at, number) in self.timers.items() if at <= self.at or not self.orders]
        if due:
            _, name, number = min(due)
            del self.timers[name]
            self.coordinator.fire(name, number, self.at)
            return
        worker = self.chance.choice(sorted(self.orders))
        order, read = self.orders.pop(worker)
        rows = torch.from_numpy(order.allotment.indices.copy())
        gradient = self._gradient(rows, read)
        norm = self.store.hold(order.ticket, gradient)
        arrival = PushRef(
            worker, 0, order.ticket, order.allotment.samples, self.at - order.at, 0.0, norm=norm, loss=gradient.loss
        )  # fmt: skip
        self.coordinator.arrive(self.at, arrival)

    def _gradient(self, rows: torch.Tensor, read: list[torch.Tensor]) -> Gradient:
        weight, bias = (value.clone().requires_grad_() for value in read)
        loss = ((self.data[rows] @ weight.T + bias - self.wanted[rows]) ** 2).mean()
        loss.backward()
        flat = self.store.layout.pack([weight.grad, bias.grad])
        change = [torch.tensor(int(rows.max()) + 1), self.data[rows, :3].mean(0) * 0.1]
        return Gradient(flat, frozenset(), list(self.store.spec.optimizer.groups), change, float(loss.detach()))

    def steps(self, events: int) -> "InterruptedRun":
        """So many events, or as many as there are."""
        for _ in range(events):
            if not self.over:
                self.step()
        return self

    def finish(self) -> "InterruptedRun":
        while not self.over:
            self.step()
        self.at += 0.1
        self.coordinator.close(self.at)
        self.coordinator.observe_end(self.at, "done")
        return self

    def save(self, folder: Path, keep: int = 3) -> Path:
        """A checkpoint as of this moment."""
        writer = Checkpointer(folder, keep)
        run = snapshot(self.coordinator, self.at)
        writer.begin(run, self.store.contents(), {"phase": 0}, range(WORKERS))
        for worker in range(WORKERS):
            last = writer.state(run.version, worker, f"state of {worker}".encode())
            assert last == (worker == WORKERS - 1)
        return writer.complete()

    def state(self) -> list[torch.Tensor]:
        """Everything the model and its optimizer consist of."""
        taken = self.store.snapshot()
        optimizer = [value for _, value in sorted(taken.optimizer_tensors.items())]
        return [*taken.parameters.values(), *taken.buffers.values(), *optimizer]
