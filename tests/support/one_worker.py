"""One worker without an engine: a server inside its own calls, or a conversation written down beforehand.

`trained` runs a script against the real coordinator and store, with tensors by reference or in a region, and again as
plain PyTorch on the batches it was given; so every test that uses it compares with what torch itself does.
"""

import contextlib
from collections import deque

import msgspec
import numpy as np
import torch
from clusters import network

import paceline
from paceline.core.ledger import Allotment
from paceline.core.settings import RunConfig
from paceline.engines.alone import Alone, AloneLink
from paceline.model.regions import SLOTS, Region, RegionLayout
from paceline.model.store import Parameters, Store
from paceline.transport.base import Closed, Lost
from paceline.transport.messages import Hello, OptimizerAsked, OptimizerHeld, Push, Welcome, Work
from paceline.worker import context
from paceline.worker.context import Shared, WorkerContext
from paceline.worker.device_replica import DeviceStage

KINDS = ["memory", "slots", "hooked", "alternating", "staged", "staged late"]  # see `server`


def region_of(spec):
    layout = RegionLayout(spec)
    return Region(layout, bytearray(layout.nbytes))


class ServedEngine(Alone):
    """The engine of the only worker of a server: its weights are the store's."""

    def make_store(self, hello, values, buffers, *, statistics):
        return Store(hello.spec, values, buffers, statistics)

    def publish(self, worker, store, *, waits, reads=False):
        return store.read()


class RegionEngine(ServedEngine):
    """Writes versions into the worker's region and names a slot for each push."""

    def __init__(self, alternate):
        self.worker_region = None
        self.slot = 0
        self._alternate = alternate
        super().__init__(RunConfig())

    def region(self, worker):
        return self.worker_region

    def publish(self, worker, store, *, waits, reads=False):
        region = self.worker_region
        return Parameters(store.write_to(region.flat, region.buffers), region.flat, region.buffers)

    def dispatch(self, worker, message, timing):
        if isinstance(message, Work):
            if self._alternate:
                message = msgspec.structs.replace(message, slot=message.ticket % SLOTS)
            self.slot = message.slot
        super().dispatch(worker, message, timing)


class ReferenceLink(AloneLink):
    """The worker's end, whose tensors go by reference."""

    def __init__(self, engine=None):
        self.engine = engine or ServedEngine(RunConfig())
        super().__init__(self.engine)

    @property
    def store(self):
        return self.engine.run.exchange.store


class RegionLink(ReferenceLink):
    """The worker's end, which has a region and notes what was pushed there."""

    def __init__(self, alternate=False):
        super().__init__(RegionEngine(alternate))
        self.pushes = []

    def adopt(self, spec):
        self.engine.worker_region = region_of(spec)
        return self.engine.worker_region

    def send(self, message):
        if isinstance(message, Push) and message.gradient is not None:
            self.pushes.append(message.gradient)
            assert message.gradient.slot == self.engine.slot
            assert message.gradient.flat is self.engine.worker_region.slots[self.engine.slot].flat
        super().send(message)


class StandInCopies:
    """Copies to a device that is this machine: at once, or as late as is allowed."""

    def __init__(self, late=False):
        self.downloads = []  # elements of each
        self._late = late
        self._waiting = []

    def lock(self, tensors):
        """Nothing here needs it."""

    def unlock(self, tensors):
        """Nor this."""

    def upload(self, home, value):
        home.copy_(value)

    def finish_uploads(self):
        """They are."""

    def download(self, home, value):
        self.downloads.append(value.numel())
        self._waiting.append((home, value))
        if not self._late:
            self.finish_downloads()

    def finish_downloads(self):
        for home, value in self._waiting:
            home.copy_(value)
        self._waiting.clear()


def server(kind, monkeypatch):
    """`memory`: by reference; `slots`: in a region; `hooked`: there, every gradient by hook; `alternating` slots;
    `staged`: as on a device with memory of its own, where every gradient is sent early."""
    if kind == "memory":
        return ReferenceLink()
    if kind != "slots":
        monkeypatch.setattr("paceline.worker.shared_replica.HOOKED", 1)
    if kind.startswith("staged"):
        monkeypatch.setattr("paceline.worker.device_replica.EARLY", 1)
        copies = StandInCopies(late=kind.endswith("late"))
        monkeypatch.setattr(
            "paceline.worker.device_replica.stage_on", lambda device, region: DeviceStage(region, device, copies)
        )
    return RegionLink(alternate=kind in ("alternating", "staged"))


@contextlib.contextmanager
def worker(endpoint, **given):
    """A session of this worker."""
    known = {"worker": 0, "workers": 1, "endpoint": endpoint, "shared": Shared(), "sessions": []}
    context.bind(WorkerContext(**{**known, **given}))
    try:
        yield paceline.init()
    finally:
        context.bind(None)


def trained(script, endpoint=None):
    """What `script(prepare, batches)` makes of its model under paceline, and as plain PyTorch on the same batches.

    Without an endpoint the script runs by itself.
    """
    loops = []  # the batches of each
    with worker(endpoint) if endpoint is not None else contextlib.nullcontext(paceline.init()) as session:

        def batches(*args, **options):
            loops.append([])
            for batch in session.batches(*args, **options):
                loops[-1].append(batch)
                yield batch

        model = script(session.prepare, batches)
    again = iter(loops)
    plain = script(lambda model, optimizer: (model, optimizer), lambda *_, **__: iter(next(again)))
    return dict(model.state_dict()), dict(plain.state_dict())


def assert_same(trained_state, plain_state, **tolerance):
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-12}
    assert set(trained_state) == set(plain_state)
    for name, value in plain_state.items():
        torch.testing.assert_close(
            trained_state[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


class Conversation:
    """An endpoint whose server's part is written down.

    `answers` are handed out in order, each when the worker asks for one; a function of this endpoint makes its answer
    then, and `Lost` is raised. `late` ones (time, message) come by themselves, when the clock gets there. The clock
    goes only when the worker sleeps or a test sets it.
    """

    def __init__(self, *answers, region=False, welcomes=(), late=()):
        self.answers = deque(answers)
        self.welcomes = deque(welcomes)  # fields of each Welcome, or Lost
        self.late = deque(late)
        self.sent = []
        self.reconnects = 0
        self.now = 100.0
        self.region = None
        self._with_region = region

    def adopt(self, spec):
        if self._with_region:
            self.region = region_of(spec)
        return self.region

    def send(self, message):
        self.sent.append(message)
        if isinstance(message, Hello):
            self.hello = message
            fields = self.welcomes.popleft() if self.welcomes else {}
            self.answers.appendleft(Lost if fields is Lost else Welcome(self.version(0), **fields))
        elif isinstance(message, OptimizerAsked):
            self.answers.appendleft(OptimizerHeld({}, {}))

    def version(self, number, value=None):
        """A version as it travels; `value`: every parameter of it is that."""
        region = self.region
        if region is None:
            region = region_of(self.hello.spec)
            given = [*self.hello.values, *self.hello.buffers]
            for home, tensor in zip([*region.parameters, *region.buffers], given, strict=True):
                home.copy_(tensor)
        if value is not None:
            for part in region.flat:
                part.fill_(value)
        return Parameters(number, region.flat, region.buffers)

    def receive(self):
        self._arrive()
        if not self.answers:
            raise Closed
        answer = self.answers.popleft()
        if answer is Lost:
            raise Lost
        return answer(self) if callable(answer) else answer

    def poll(self, seconds=0.0):
        if self._arrive():
            return True
        until = self.now + seconds
        if self.late and self.late[0][0] <= until:
            self.now = self.late[0][0]
            return self._arrive()
        self.now = until
        return False

    def _arrive(self):
        if self.late and self.late[0][0] <= self.now:
            self.answers.appendleft(self.late.popleft()[1])
            return True
        return False

    def reconnect(self):
        self.reconnects += 1

    def sent_of(self, *kinds):
        return [message for message in self.sent if isinstance(message, kinds)]


def work(ticket, samples, rounds_done=0.0, start=0, parameters=None, **fields):
    """A grant of rows `start`, `start + 1`, ..."""
    return Work(ticket, rows(samples, start), parameters, rounds_done, **fields)


def rows(samples, start=0):
    return Allotment(0, samples, np.arange(start, start + samples))


def sgd(model, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, **{"lr": 0.005, "momentum": 0.9, "weight_decay": 0.01, **options})


class Odd(torch.nn.Module):
    """Tied, frozen, sometimes and never used parameters."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6).double()
        self.second = torch.nn.Linear(6, 6).double()
        self.second.weight = self.first.weight
        self.sometimes = torch.nn.Linear(6, 6).double()
        self.last = torch.nn.Linear(6, 1).double()
        self.unused = torch.nn.Linear(3, 3).double()
        self.first.bias.requires_grad_(False)
        self.detour = False

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(self.sometimes(x) if self.detour else x)


class Buffered(torch.nn.Module):
    """Batch statistics, a mask of infinities, a buffer that forward replaces, and one that nobody touches."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6).double()
        self.body = network()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("still", torch.arange(3))
        self.register_buffer("grows", torch.tensor([float("-inf"), 0.0]))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1.0
            self.grows[1] += 1.0
        return self.body(self.norm(x)) + self.mask[0]
