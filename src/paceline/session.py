"""The user's side of a run: five lines turn a plain PyTorch loop into one worker.

Not public: import `Session` and `init` from `paceline`.
"""

import contextlib
import copy
import numbers
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.errors import OptionError, UserError
from paceline.core.ledger import SAMPLINGS, Sampling, whole_epochs
from paceline.model.measuring import Evaluate
from paceline.tables.client import Client, serve_evaluations
from paceline.tables.messages import Measures
from paceline.tables.table import Table, initial_values
from paceline.tables.table_spec import make_spec
from paceline.transport.base import Closed
from paceline.transport.messages import (
    Collective,
    EvaluationsAsked,
    EvaluationsHeld,
    Note,
    Number,
    OptimizerAsked,
    OptimizerHeld,
    OptimizerLoaded,
    OptionAsked,
    Ready,
    Stop,
    ToWorker,
)
from paceline.worker import context, optimizer_hooks
from paceline.worker.collective_calls import CollectiveCalls
from paceline.worker.context import WorkerContext, convert_option
from paceline.worker.device_replica import device_of, make_replica
from paceline.worker.enclosing_loops import is_in_loop
from paceline.worker.fetching import Fetcher
from paceline.worker.handshake import Handshake, serve_versions
from paceline.worker.loops import Batches, LoopRunner, Steps, Stream, plan_loop, rounds_of
from paceline.worker.other_frameworks import require_no_launcher, require_no_process_group, unwrapped
from paceline.worker.parts import Parts
from paceline.worker.rehearsal import Rehearsal
from paceline.worker.replica import Replica, spec_of
from paceline.worker.run_optimizer import RunOptimizer
from paceline.worker.run_position import RunProgress
from paceline.worker.schedules import Schedules, check_schedule
from paceline.worker.state import WorkerState
from paceline.worker.streaming import is_stream

T = TypeVar("T")
CLOCKS = 1 << 40  # stands for the size of the data where there is none
Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def init() -> "Session":
    """Return this worker's session. Call it once, at the start of the script.

    Outside of a run the script is the only worker, and trains as usual in its own process.
    """
    given = context.current()
    require_no_process_group("paceline.init()")
    if given is None:
        from paceline import engines  # it imports this module

        context.require_no_run("paceline.init()")
        require_no_launcher(os.environ, sys.argv)
        return Session(engines.start_alone())
    if given.sessions:
        raise UserError(
            f"paceline.init() was called a second time in worker {given.worker}: a worker has one session; keep what "
            "the first call returned and hand it on"
        )
    session = Session(given)
    given.sessions.append(session)
    return session


class Session:
    """One worker's side of a run; `paceline.init()` returns it.

    A script that trains a model calls `prepare`, then loops over `batches`. One that works on tables opens them with
    `table`, then calls `clock` after each iteration. `device` is the device to train on: cuda:(worker % devices) where
    there is CUDA, else cpu.
    """

    def __init__(self, given: WorkerContext) -> None:
        kept = deque[ToWorker]()
        self.device = _device_for(given)
        self._context = given
        self._state = WorkerState()
        self._asked: set[str] = set()  # options
        self._tables: Client | None = None
        self._handles: dict[str, Table] = {}  # one per open table
        self._collectives = CollectiveCalls(given.endpoint, kept, self.device)
        self._endpoint = self._collectives.endpoint
        self._parts = Parts(alone=given.alone)
        self._schedules = Schedules(given.endpoint, self._state, alone=given.alone)
        self._loops = LoopRunner(given, self._state, self._schedules, self._collectives, kept, self._parts)

    @property
    def worker(self) -> int:
        """This worker's number, from 0. In the process that only evaluates it equals `workers`."""
        return self._context.workers if self._context.evaluator else self._context.worker

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, which prints and saves where one worker should; never the evaluator's process."""
        return self._context.worker == 0 and not self._context.evaluator

    @property
    def workers(self) -> int:
        """The number of workers that the run started with."""
        return self._context.workers

    @property
    def data_dir(self) -> Path | None:
        """The folder given by `--data-dir`; None without one."""
        return self._context.data_dir

    def option(self, name: str, default: T) -> T:
        """Return the value given by `--set name=value`, in the type of `default`; without one, `default`."""
        self._context.shared.asked.add(name)
        if name not in self._asked:
            self._asked.add(name)
            with contextlib.suppress(Closed):  # a script may ask after the run is over
                self._endpoint.send(OptionAsked(name))
        if name not in self._context.options:
            return default
        value: T = convert_option(name, self._context.options[name], default)
        return value

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Return this process's object called `key`, which the first call makes: use it to load a data set once."""
        made: T = self._context.shared.once(key, make)
        return made

    # -- training a model --------------------------------------------------------------------------------------------

    def prepare(
        self, model: Model, optimizer: Optimizer, scheduler: Any = None, evaluate: Evaluate | None = None,
        plateau: str | None = None,
    ) -> tuple[Model, Optimizer]:  # fmt: skip
        """Put the model and optimizer under the run's control and return them, the same objects.

        All workers start from worker 0's parameters. Inside a `batches` loop `optimizer.step()` pushes the gradient and
        returns with the model to go on with. Call it once for each optimizer that the script has; then all steps of a
        pass are one push, made at the next batch.

        A `scheduler` follows the run: stepped inside a loop it counts the run's rounds, between loops its calls.
        `evaluate(model)` measures versions as the run goes on: it gets a module of its own in eval mode and returns
        numbers by name, such as {"accuracy": 0.97}. It may use only what exists before this call. With it, a
        `ReduceLROnPlateau` takes a step at every evaluation, by the number called `plateau`, by default the first.
        """
        if self._loops.phase:
            raise UserError("prepare() was called after the first loop: prepare all models and optimizers before it")
        if self._tables is not None:
            raise UserError("prepare() was called after table(): a run trains a model or works on tables")
        require_no_process_group("prepare()")
        as_given = model, optimizer, scheduler
        model, optimizer, scheduler = [self._unwrapped(each) for each in (model, optimizer, scheduler)]
        if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            given = f"{type(model).__name__} and {type(optimizer).__name__}"
            raise OptionError(f"prepare(model, optimizer) takes a torch module and a torch optimizer, not {given}")
        if evaluate is not None and not callable(evaluate):
            raise OptionError(f"evaluate must be a function of the model, not {type(evaluate).__name__}")
        check_schedule(scheduler, evaluate, plateau)
        self._parts.add(model, optimizer, evaluated=evaluate is not None)
        if self._context.evaluator and evaluate is None:
            return as_given[:2]  # a later call may have something to measure
        whole, groups = self._parts.whole()
        measure = None if evaluate is None else self._parts.measured(evaluate)
        evaluator = None
        if measure is not None and self._context.evaluates:
            evaluator = (copy.deepcopy(whole).eval(), measure)
        replica = self._loops.replica = self._make_replica(whole, groups)
        for each in ((model, optimizer, scheduler), as_given):
            self._state.leave_out(*(each if scheduler is not None else each[:1]))
        follows = evaluate is not None and isinstance(scheduler, ReduceLROnPlateau)
        self._schedules.give(scheduler, optimizer, partial(self._ask_evaluations, plateau) if follows else None)
        handshake = self._loops.handshake = Handshake(self._endpoint, replica, self._state, evaluator)
        if self._context.evaluator and measure is not None:
            serve_versions(self._endpoint, handshake, replica, measure)
        handshake.greet()
        if not replica.steps_itself:
            loops = self._loops
            shown = RunOptimizer(
                optimizer, lambda: loops.parameters, self._state, lambda: loops.ask(OptimizerAsked(), OptimizerHeld),
                self._load_optimizer, self._check_load,
            )  # fmt: skip
            if optimizer.state:  # from before
                shown.hand_over()
        if replica.at_once:
            known = weakref.ref(self)  # a script that runs by itself may keep its optimizer for longer than its session
            optimizer_hooks.count_steps(optimizer, partial(_on_own_step, known), partial(_on_zero_grad, known))
        else:
            step = self._make_step(optimizer)
            optimizer_hooks.take_over(optimizer, step, self._on_zero_grad, fixed=not replica.steps_itself)
        replica.watch_backward()
        if follows:
            self._ask_evaluations(plateau, 0)  # from here on, checkpoints hold them
        return as_given[:2]

    def _unwrapped(self, thing: Any) -> Any:
        inner, remarks = unwrapped(thing)
        for remark in remarks:
            self._loops.remark(remark)
        return inner

    def _make_replica(self, model: torch.nn.Module, groups: Any) -> Replica:
        make = self._context.make_replica
        if make is not None and not self._context.alone and self._parts.several:
            raise UserError("prepare() was called twice: nodes of a run without a server train one model each")
        spec = spec_of(model, *([] if self._context.alone else self._parts.optimizers))
        spec = msgspec.structs.replace(spec, calls=len(self._parts.prepared))
        if not self._context.alone:
            device_of(list(model.parameters()))  # refuses a model that no worker can compute
        replica = make_replica(model, groups, spec, self._endpoint) if make is None else make(model, groups, spec)
        if replica.kept_as is not None:
            self._state.keep(replica.kept_as, replica)
        return replica

    def keep(self, name: str, obj: Any) -> None:
        """Save the object's `state_dict()` in every checkpoint, and load it back when the run is resumed.

        Call it before the loop. The run itself restores the model given to `prepare`, a scheduler and the learning
        rates that it sets; keeping them changes nothing.
        """
        self._state.keep(name, obj)

    def batches(
        self, dataset: Any, batch_size: int | None = None, epochs: float = 1, sampling: Sampling = "epoch",
        *, steps: int | None = None, **loader_options: Any,
    ) -> "Batches":  # fmt: skip
        """Return this worker's share of the data, sized by the strategy, as batches of at most `batch_size` samples.

        Iterating over it is one phase, which begins when every worker has come to it. Its `len()` is the number of
        rounds, the unit of schedulers. The settings `--batch-size` and `--epochs` override the arguments; inside a loop
        of the script's own, `--epochs` is the total of all its passes.

        `dataset` has `len()` and is indexed by number, or is a `DataLoader`, whose data set, batch size, collate_fn and
        loader processes are used; what the call says itself comes first, and without either a batch is one sample.
        `epochs` counts passes of all workers together. `sampling` says which samples a worker gets: "epoch", a share of
        one global shuffle per epoch; "shard", rows of its own; "replacement", uniform draws from the whole data set.
        `loader_options` are those of `torch.utils.data.DataLoader` (collate_fn, num_workers, ...), without shuffle,
        sampler, batch_sampler and drop_last.

        `dataset` may also be a stream, of which each worker reads its own: an `IterableDataset`, whose items become
        batches as in a `DataLoader`; a `DataLoader` over one; any other iterable, whose items are batches already. It
        is read for `steps` rounds, shared out by speed, or until the streams of all workers have ended. Which samples
        come, and how often, is then up to the script.
        """
        self._require_prepared("batches()")
        given, dataset = self._context, self._unwrapped(dataset)
        if is_stream(dataset):
            if sampling != "epoch":
                raise OptionError(f"a stream is read in its own order: leave out sampling={sampling!r}")
            return Stream(self._loops, *self._loops.open_stream(dataset, batch_size, steps, epochs, loader_options))
        if steps is not None:
            raise OptionError(f"steps={steps!r} is for streams: give epochs for a data set that has a length")
        dataset, batch_size, epochs, loader_options, remark = plan_loop(
            given, dataset, batch_size, epochs, loader_options
        )
        if sampling not in SAMPLINGS:
            raise OptionError(f"sampling must be one of {', '.join(SAMPLINGS)}, not {sampling!r}")
        least = self._loops.least
        if batch_size < least:
            raise OptionError(f"a model with BatchNorm needs batch_size >= {least}, not {batch_size}")
        fetcher = Fetcher(dataset, loader_options)
        if not fetcher.size:
            raise OptionError("the data set is empty: batches() needs at least 1 sample")
        if remark is not None:
            self._loops.remark(remark)

        def phase(epochs: float) -> Ready:
            if sampling == "epoch":  # here, so that `len()` and the journal agree with it
                epochs = whole_epochs(fetcher.size, epochs, least)
            return Ready(self._loops.phase, fetcher.size, batch_size, epochs, sampling, least)

        if given.epochs is None:
            return Batches(self._loops, fetcher, phase(epochs))
        in_loop = is_in_loop(sys._getframe(1))  # then each pass of it has as many epochs as the script says
        return Batches(self._loops, fetcher, phase(epochs if in_loop else given.epochs), phase(epochs))

    def steps(self, count: int) -> "Steps":
        """Return a loop without a data set: `count` rounds, that is `count` steps for each worker of the run.

        All these steps are shared out by speed, so a fast worker makes more of them. What comes is the number of the
        round, from 0. The script makes its own batches, of which each counts as one sample in reports and scenarios.
        """
        self._require_prepared("steps()")
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
            raise OptionError(f"steps(count) needs a whole number >= 1, not {count!r}")
        fetcher = Fetcher(range(int(count) * self.workers), {})
        return Steps(self._loops, fetcher, Ready(self._loops.phase, fetcher.size, 1, 1.0, "epoch", 1))

    def _require_prepared(self, what: str) -> None:
        if self._context.evaluator:
            raise Closed  # the evaluator's process has nothing to measure
        if self._loops.replica is None:
            raise UserError(f"{what} was called before prepare(model, optimizer)")

    def rounds(self, dataset: Any, batch_size: int | None = None, epochs: float = 1) -> int:
        """Return the `len()` of `batches(...)` with these arguments: how many rounds such a loop has.

        It can be called before `prepare`, for the horizon of a scheduler. `--batch-size` and `--epochs` override the
        arguments, as they do in `batches`.
        """
        plan = plan_loop(self._context, unwrapped(dataset)[0], batch_size, epochs, {})
        epochs = plan.epochs if self._context.epochs is None else self._context.epochs
        size = Fetcher(plan.dataset, {}).size
        if not size:
            raise OptionError("the data set is empty: rounds() needs at least 1 sample")
        return rounds_of(size, plan.batch_size, epochs, self.workers)

    @property
    def progress(self) -> RunProgress:
        """How far the run has come: `fraction` of the loop, and `rounds`, `epochs` and `samples` of all workers."""
        if self._tables is not None:
            raise UserError("progress is that of batches() and steps() loops: on tables use session.clocks")
        return self._schedules.position.progress

    def epochs(self, count: int) -> Iterator[int]:
        """Return the epochs of an outer loop, from 0: `for epoch in session.epochs(10)`, with `batches` loops inside.

        After `--resume`, and in a worker that joins later, it starts at the epoch where the run stands; the ones before
        are not run again. `--epochs` overrides `count`. The loop ends with the run.
        """
        self._require_prepared("epochs()")
        return self._loops.epochs(count)

    def report(self, **numbers: Any) -> None:
        """Report numbers by name; call it before `optimizer.step()`, or before `clock` on tables.

        `loss` goes with the push: the convergence guard and some strategies use it. Other names go to the journal.
        """
        for name, value in numbers.items():
            number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            if name == "loss":
                if self._loops.current is not None:
                    self._loops.current.on_loss(number)
                elif self._tables is not None:
                    self._tables.report_loss(number)
            elif not isinstance(self._loops.current, Rehearsal):
                self._endpoint.send(Note(name, number))

    # -- tables ------------------------------------------------------------------------------------------------------

    def table(
        self,
        name: str,
        rows: int,
        width: int = 1,
        *,
        dtype: Any = "float32",
        staleness: int | None = None,
        init: Any = None,
        update: str = "add",
        eager: bool = False,
        cache_rows: int | None = None,
    ) -> Table:
        """Open a table that all workers share: rows of a fixed width, read with `get` and added to with `inc`.

        `staleness` bounds the age of what is read, in clocks, where it is tighter than the strategy's bound. `init` is
        a number, an array, or a function of rows and width; the first worker's is taken. `update` is what an increment
        does at the server (`add`, `clip:limit=...`, `adagrad:rate=...`). With `eager` the server resends
        rows that this worker has read as they change. `cache_rows` bounds how many rows it caches.
        """
        if self._loops.replica is not None:
            raise UserError("table() was called after prepare(): a run trains a model or works on tables")
        spec = make_spec(name, rows, width, dtype, staleness, update, eager)
        if self._tables is None:
            ready = None if self._context.evaluator else Ready(0, CLOCKS, 1, 1, "clocks", 1)
            self._tables = Client(self._endpoint, self._context.worker, ready, self._state)
            self._context.after_script.append(self._tables.outlast_server)
        opened = self._tables.open(spec, initial_values(spec, init), cache_rows)
        return self._handles.setdefault(spec.name, Table(self._tables, opened))

    def clock(self, work: int = 1) -> bool:
        """Complete an iteration on tables and send what this worker wrote; return False once the run is over.

        `work` is what the iteration cost, in samples, tokens, ratings; a scenario's times are per unit of it.
        """
        return self._on_tables("clock()").complete_clock(work)

    @property
    def clocks(self) -> int:
        """Iterations on tables that this worker has completed. A newcomer starts at the slowest worker's number, a
        resumed run where it stopped."""
        client = self._on_tables("clocks")
        client.require_going("clocks")
        return client.clock

    def share(self, count: int) -> Any:
        """Return this worker's part of `count` rows, an array of row numbers; it changes as workers join or leave."""
        return self._on_tables("share()").share(count)

    def measure(self, evaluate: Callable[[dict[str, Any]], Mapping[str, float]]) -> None:
        """Measure the tables as the run goes on: `evaluate(tables)` gets arrays by name and returns numbers by name.

        Call it before the first `get` or `clock`. It takes none of the workers' time.
        """
        if not callable(evaluate):
            raise OptionError(f"evaluate must be a function of the tables, not {type(evaluate).__name__}")
        if self._context.evaluator:
            serve_evaluations(self._endpoint, evaluate)
        self._endpoint.send(Measures(evaluate if self._context.evaluates else None))

    def _on_tables(self, what: str) -> Client:
        if self._tables is None:
            raise UserError(f"{what} was called before session.table(...): open the tables first")
        return self._tables

    # -- all workers together ----------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Wait until all workers have made this call, and return the list of their values, in worker order.

        Call it before, between or after loops, in every worker. A value is a number, text, True, False, None, a torch
        tensor, or a list, tuple or dict (with text as keys) of them. A worker that has died is left out.
        """
        return self._together("gather", value)

    def mean(self, value: Any) -> Any:
        """Wait until all workers have made this call, and return the mean of their values.

        Call it as `gather`. A value is a number, a tensor, or a list or dict of them, of the same form in all workers.
        """
        return self._together("mean", value)[0]

    def barrier(self) -> None:
        """Wait until all workers have made this call, before, between or after loops.

        On tables: after it, all workers read what any of them wrote in clocks completed before it.
        """
        if self._tables is not None:
            self._tables.barrier()
        else:
            self._together("barrier", None)

    def _together(self, call: Collective, value: Any) -> list[Any]:
        if self._loops.current is not None:
            raise UserError(
                f"{call}() inside a batches() or steps() loop: workers make unequal numbers of passes, so one would "
                "wait for a call that another never makes; call it after the loop, or use report(name=value) in it"
            )
        if self._tables is not None and self._tables.has_begun:
            raise UserError(
                f"{call}() after the work on tables has begun: workers complete clocks at their own pace; call it "
                "before the first clock(), get(), inc() or share(), or share the value in a table"
            )
        return self._collectives.make(call, value, self._find_server)

    def _find_server(self) -> None:
        if self._loops.handshake is not None:
            self._loops.handshake.again()
        elif self._tables is not None:
            self._tables.find_server()
        else:
            self._endpoint.reconnect()

    def stop(self, reason: str) -> None:
        """End this phase for all workers, this one's loop with the current batch; the journal records the reason."""
        if self._loops.current is not None:
            self._loops.current.stop(reason)
        else:
            self._endpoint.send(Stop(reason))

    def _load_optimizer(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Number]) -> None:
        if self._context.worker == 0:
            self._endpoint.send(OptimizerLoaded(self._loops.phase, tensors, numbers))

    def _check_load(self) -> None:
        if self._loops.current is not None:
            raise UserError(
                "optimizer.load_state_dict() inside a batches() loop: other workers go on training with the state that "
                "there is; call it before the loop"
            )

    def _ask_evaluations(self, metric: str | None, start: int) -> list[float]:
        return self._loops.ask(EvaluationsAsked(start, metric), EvaluationsHeld).values

    def _make_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        """Return what takes the place of the optimizer's `step`: it pushes."""
        loops, parts, position = self._loops, self._parts, self._schedules.position

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loop = loops.current
            if loop is None:
                text = "optimizer.step() outside of a `for ... in session.batches(...)` loop has nothing to push"
                raise UserError(text)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            position.steps += 1
            if parts.several:
                loop.on_step_of(parts.places_of(optimizer, loops.parameters))
            else:
                loop.on_step()
            return loss

        return step

    def _on_zero_grad(self) -> None:
        if self._loops.current is not None:
            self._loops.current.on_zero_grad()


def _device_for(given: WorkerContext) -> torch.device:
    """Return where this worker computes."""
    if given.device is not None:
        return torch.device(given.device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", given.worker % count) if count else torch.device("cpu")


def _on_own_step(known: weakref.ref[Session]) -> None:
    session = known()
    if session is not None and session._loops.current is not None:
        session._loops.current.on_own_step()


def _on_zero_grad(known: weakref.ref[Session]) -> None:
    session = known()
    if session is not None:
        session._on_zero_grad()
