"""What the user's script holds: five lines turn a plain PyTorch loop into one worker of a run."""

import copy
import math
import numbers
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from paceline import context
from paceline.context import WorkerContext, convert_option
from paceline.errors import OptionError, UserError
from paceline.fetching import Fetcher
from paceline.ledger import SAMPLINGS, Sampling
from paceline.passes import OVER, Passes
from paceline.replica import Replica, has_batch_statistics
from paceline.transport.base import Closed
from paceline.transport.messages import Hello, Note, Over, Ready, Remark, Stop, Welcome

T = TypeVar("T")
Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
EMPTY_PHASES = 1000  # loops without data that a script may make after the run is over
Evaluate = Callable[[torch.nn.Module], Mapping[str, float]]


def init() -> "Session":
    """The session of this worker; outside of a run, one worker in its own process."""
    given = context.current()
    if given is None:
        from paceline.engines import alone  # the engines import this module

        context.require_no_run("paceline.init()")
        return Session(alone.start())
    if given.sessions:
        return given.sessions[0]  # type: ignore[no-any-return]
    session = Session(given)
    given.sessions.append(session)
    return session


class Session:
    """One worker's place in a run."""

    def __init__(self, given: WorkerContext) -> None:
        self._context = given
        self._endpoint = given.endpoint
        self._replica: Replica | None = None
        self._passes: Passes | None = None
        self._phase = 0
        self._position = 0.0
        self._run_over = False
        self._empty_phases = 0
        self.device = torch.device("cpu")

    @property
    def worker(self) -> int:
        """This worker's number, from 0."""
        return self._context.worker

    @property
    def workers(self) -> int:
        """How many workers the run started with."""
        return self._context.workers

    @property
    def data_dir(self) -> Path | None:
        """What `--data-dir` gave."""
        return self._context.data_dir

    def option(self, name: str, default: T) -> T:
        """What `--set name=value` gave, in the default's type; else the default."""
        self._context.shared.asked.add(name)
        if name not in self._context.options:
            return default
        value: T = convert_option(name, self._context.options[name], default)
        return value

    def once(self, key: str, make: Callable[[], T]) -> T:
        """One object per process, made by whoever asks first: data sets, mostly."""
        made: T = self._context.shared.once(key, make)
        return made

    def prepare(
        self,
        model: Model,
        optimizer: Optimizer,
        scheduler: Any = None,
        evaluate: Evaluate | None = None,
    ) -> tuple[Model, Optimizer]:
        """Put model and optimizer under the run's control; the same objects come back.

        `evaluate(model)` gets a module of its own in eval mode and returns numbers by name. A given scheduler's
        `step()` follows the run's position instead of counting this worker's calls.
        """
        if self._replica is not None:
            raise UserError("prepare() was called twice; one session trains one model")
        if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            given = f"{type(model).__name__} and {type(optimizer).__name__}"
            raise OptionError(f"prepare(model, optimizer) takes a torch module and a torch optimizer, not {given}")
        if evaluate is not None and not callable(evaluate):
            raise OptionError(f"evaluate must be a function of the model, not {type(evaluate).__name__}")
        replica = self._replica = Replica(model, optimizer)
        values, buffers = replica.values()
        evaluator = None
        if evaluate is not None and self._context.evaluates:
            evaluator = (copy.deepcopy(model).eval(), evaluate)
        self._endpoint.send(Hello(replica.spec, values, buffers, evaluator))
        answer = self._endpoint.receive()
        if isinstance(answer, Welcome):
            replica.load(answer.parameters)
        if optimizer.state:
            text = "the optimizer's state from before prepare() is not carried over: it starts afresh"
            self._endpoint.send(Remark(text))
        self._hook_model(model, optimizer)
        if scheduler is not None:
            self._hook_scheduler(scheduler)
        return model, optimizer

    def batches(
        self,
        dataset: Any,
        batch_size: int = 1,
        epochs: float = 1,
        sampling: Sampling = "epoch",
        **loader_options: Any,
    ) -> "Batches":
        """This worker's share of the data, sized by the strategy, as batches of at most `batch_size` samples.

        `loader_options` are those of `torch.utils.data.DataLoader` (collate_fn, num_workers, ...).
        """
        if self._replica is None:
            raise UserError("batches() was called before prepare(model, optimizer)")
        given = self._context
        batch_size = given.batch_size if given.batch_size is not None else batch_size
        if isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool):
            batch_size = int(batch_size)
        epochs = given.epochs if given.epochs is not None else epochs
        if type(batch_size) is not int or batch_size < 1:
            raise OptionError(f"batch_size must be a whole number >= 1, not {batch_size!r}")
        if not (isinstance(epochs, int | float) and epochs > 0 and math.isfinite(epochs)):
            raise OptionError(f"epochs must be > 0 and finite, not {epochs!r}")
        if sampling not in SAMPLINGS:
            raise OptionError(f"sampling must be one of {', '.join(SAMPLINGS)}, not {sampling!r}")
        least = 2 if has_batch_statistics(self._replica.model) else 1
        if batch_size < least:
            raise OptionError(f"a model with BatchNorm needs batch_size >= {least}, not {batch_size}")
        fetcher = Fetcher(dataset, loader_options)
        if not fetcher.size:
            raise OptionError("the data set is empty: batches() needs at least 1 sample")
        ready = Ready(self._phase, fetcher.size, batch_size, epochs, sampling, least)
        return Batches(self, fetcher, ready)

    def report(self, **numbers: Any) -> None:
        """Before `step()`: `loss` goes with the push, every other name is recorded as a number of your own."""
        for name, value in numbers.items():
            number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            if name == "loss":
                if self._passes is not None:
                    self._passes.on_loss(number)
            else:
                self._endpoint.send(Note(name, number))

    def stop(self, reason: str) -> None:
        """End this phase for all workers."""
        self._endpoint.send(Stop(reason))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run_phase(self, fetcher: Fetcher, ready: Ready) -> Iterator[Any]:
        if self._passes is not None:
            raise UserError("a batches() loop is already running in this session; finish it first")
        if self._run_over or self._replica is None:
            self._empty_phases += 1
            if self._empty_phases > EMPTY_PHASES:
                raise Closed  # a script that loops until it has seen enough data would loop for ever
            return
        ready = msgspec.structs.replace(ready, phase=self._phase)
        self._phase += 1
        passes = self._passes = Passes(self._endpoint, self._replica, fetcher, ready)
        try:
            passes.begin()
            batches = self._context.shared.batches
            while (batch := passes.next_batch()) is not OVER:
                batches[self.worker] = batches.get(self.worker, 0) + 1
                yield batch
        finally:
            self._position = passes.position
            self._passes = None
            if isinstance(passes.over, Over):
                self._run_over = passes.over.run_over
            passes.abandon()

    def _hook_model(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # Torch keeps hooks out of the garbage collector's sight: one that held the session would hold it for ever.
        known = weakref.ref(self)

        seen: dict[int, int] = {}  # the gradient each parameter had after its last backward

        def on_backward(parameter: torch.Tensor) -> None:
            session = known()
            if session is None or session._passes is None:
                return
            place, gradient = id(parameter), id(parameter.grad)
            session._passes.on_backward(fresh=seen.get(place) != gradient)
            seen[place] = gradient

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(on_backward)
        # The module is left as it is, so that it can be copied and pickled; its own zero_grad shows in the gradients.
        optimizer.zero_grad = self._noticing(optimizer.zero_grad)  # type: ignore[method-assign]
        session = self

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return session._on_step(closure)

        # Schedulers look for this mark to tell their own wrapper from a step that was replaced behind their back.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def _noticing(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        def noticed(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            if self._passes is not None:
                self._passes.on_zero_grad()

        return noticed

    def _on_step(self, closure: Callable[[], Any] | None) -> Any:
        if self._passes is None:
            raise UserError("optimizer.step() outside of a `for ... in session.batches(...)` loop has nothing to push")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._passes.on_step()
        return loss

    def _hook_scheduler(self, scheduler: Any) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise OptionError(
                "ReduceLROnPlateau decides by a metric, not by the run's position; choose a scheduler that counts "
                "steps, or call it without handing it to prepare()"
            )
        if not callable(getattr(scheduler, "step", None)):
            raise OptionError(f"scheduler must have a step(), and {type(scheduler).__name__} has none")
        advance = scheduler.step
        made = max(0, getattr(scheduler, "last_epoch", 0))

        def step(*_: Any, **__: Any) -> None:
            nonlocal made
            position = self._passes.position if self._passes is not None else self._position
            while made < math.floor(position + 1e-9):
                made += 1
                advance()

        scheduler.step = step


class Batches:
    """A phase as an iterable; its length is the number of nominal rounds."""

    def __init__(self, session: Session, fetcher: Fetcher, ready: Ready) -> None:
        self._session = session
        self._fetcher = fetcher
        self._ready = ready

    def __len__(self) -> int:
        total = max(1, round(self._ready.epochs * self._ready.size))
        return math.ceil(total / (self._ready.batch_size * self._session.workers))

    def __iter__(self) -> Iterator[Any]:
        return self._session._run_phase(self._fetcher, self._ready)
