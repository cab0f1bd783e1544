"""A child process of the launcher: the server, a worker or the evaluator.

Its name and the number of its control socket come on the command line, everything else over that socket. When the
socket closes the launcher has died: the child then ends at once, with all that it started. It ignores Ctrl-C, which the
launcher handles.
"""

import contextlib
import ctypes
import functools
import logging
import os
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from paceline.core.errors import InternalError, PeerError, ScriptError, UserError
from paceline.core.scenario.jitter import worker_key
from paceline.engines.local import addresses, scratch
from paceline.engines.local.control import (
    SHARD,
    Debugging,
    Failure,
    Finished,
    LinkLost,
    Relinked,
    Role,
    Unlinked,
    Warned,
    encode,
    for_child,
)
from paceline.engines.local.debugging import BreakpointHook
from paceline.engines.local.prctl import show_as
from paceline.engines.local.processes import end_own_group
from paceline.engines.local.workload import unpacked
from paceline.model.spec import ModelSpec
from paceline.peers import messages as _node_messages  # noqa: F401 - registers what a node may receive
from paceline.shards import messages as _shard_messages  # noqa: F401 - likewise, from shards
from paceline.strategies import Peer, build_peer
from paceline.tables import messages as _table_messages  # noqa: F401 - likewise, about tables
from paceline.transport.base import Closed, Endpoint, Lost
from paceline.transport.mail import Mail
from paceline.transport.messages import Ended, Failed
from paceline.transport.shm import Channel, Frame, ShmEndpoint
from paceline.worker import context
from paceline.worker.context import MakeReplica, Shared, WorkerContext
from paceline.worker.other_frameworks import advice_for
from paceline.worker.scripts import raised_in_loop, script_traceback

if TYPE_CHECKING:
    from paceline.transport.zeromq import ZeromqEndpoint

EVALUATIONS = -1  # stands in for a worker's number in the evaluator's random seed, as in the simulator
KEPT = 64 << 20  # bytes of freed memory that stay with the process
LARGEST = 32 << 20  # bytes of a block that is kept; the most that glibc accepts
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # by torch, as not to be compiled
OTHERWISE_WRAPPED = "LBFGS"
NEXT_PROCESS = 1_000_003  # added to the seed per incarnation, so that each draws other random numbers, as in sim
LAST_WORDS_S = 5.0


def main() -> NoReturn:
    """Be the process that the command line names, and exit."""
    name, descriptor = sys.argv[1:]
    sys.argv[1:] = []
    leave_compiler_out()
    begin(name, int(descriptor))


def begin(name: str, descriptor: int) -> NoReturn:
    """Be the process of this name, in a fresh interpreter or a nursery's child, and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_as(name)
    keep_freed_memory()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        code = serve(channel) if name == "server" else hold(channel) if name.startswith(SHARD) else work(channel)
    except Lost:
        end_own_group()
    sys.exit(code)


def serve(channel: Channel) -> int:
    """Be the server; return the exit code."""
    from paceline.engines.local import server  # workers do not need it

    try:
        server.main(channel)
    except Exception as error:  # noqa: BLE001 - a bug of ours, which a restart would not cure
        text = f"the server failed: {type(error).__name__}: {error}"
        channel.send(encode(Finished("error", b"", Failure("internal", text, traceback.format_exc()))))
        channel.finish(LAST_WORDS_S)
        return 1
    return 0


def hold(channel: Channel) -> int:
    """Be a shard; return the exit code."""
    from paceline.engines.local import shard_process  # workers do not need it

    shard_process.main(channel)
    return 0


def work(channel: Channel) -> int:
    """Be a worker or the evaluator; return the exit code."""
    frame = channel.receive()
    role = for_child(frame.data) if frame is not None else None
    if frame is None or not isinstance(role, Role):
        raise InternalError(f"the first message of a worker must be its role, not {role!r}")
    links = WorkerLinks(channel)
    endpoint = links.endpoint(role, frame.descriptors)
    folder = None if role.folder is None else scratch.claim(Path(role.folder))
    _settle_in(role, links)
    mail = _mailbox(role, folder)
    given = WorkerContext(
        worker=role.worker,
        workers=role.workers,
        endpoint=endpoint,
        shared=Shared(),
        options=role.options,
        batch_size=role.batch_size,
        epochs=role.epochs,
        data_dir=Path(role.data_dir) if role.data_dir is not None else None,
        evaluator=role.evaluator,
        make_replica=None if mail is None else _node_maker(role, endpoint, mail),
    )
    failure = _run(role, given)
    if failure is not None:
        links.report(failure)
        if failure.blame != "peer":
            _say(given, Failed(failure.blame, failure.text, failure.traceback))
    if mail is not None:
        mail.close()
    endpoint.close()
    return 0 if failure is None else 1


def _node_maker(role: Role, endpoint: Endpoint, mail: Mail) -> MakeReplica:
    from paceline.peers.process import ProcessReplica  # a run with a server needs none

    def machine() -> Peer:
        return build_peer(role.peer or "", role.seed, role.worker)

    def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: ModelSpec) -> ProcessReplica:
        return ProcessReplica(model, optimizer, spec, machine, (role.worker, role.incarnation), endpoint, mail)

    return make


def _mailbox(role: Role, folder: Path | None) -> Mail | None:
    """Return the mailbox for messages of other nodes, in a run without a server."""
    if role.peer is None or folder is None:
        return None
    if role.transport == "shm" and not role.mail_host:
        from paceline.transport.mail_shm import ShmMail  # a run with a server needs neither

        return ShmMail(folder)
    from paceline.transport.mail_zeromq import ZeromqMail

    remote = f"tcp://{role.mail_host}:*" if role.mail_host else None
    place = remote or addresses.of_socket(folder, "mail", over_tcp=role.over_tcp)
    return ZeromqMail(place, role.secret.security)


def _settle_in(role: Role, links: "WorkerLinks") -> None:
    """Set up what is per process: threads, random generators, warnings, logging, debugging."""
    torch.set_num_threads(role.threads)
    os.environ.update(torchrun_variables(role.worker, role.workers))
    if role.yields and hasattr(os, "SCHED_BATCH"):
        # A worker that wakes up must not preempt the server, for which all others may be waiting.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    seed = worker_key(role.seed + role.incarnation * NEXT_PROCESS, EVALUATIONS if role.evaluator else role.worker) >> 1
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if role.log_level:
        logging.getLogger("paceline").setLevel(role.log_level)
        handler = _Relayed(links.warn)
        handler.setFormatter(logging.Formatter("paceline: %(levelname)s: %(message)s"))
        logging.getLogger("paceline").addHandler(handler)
    _relay_warnings(links.warn)
    why = f"{role.workers} workers share one terminal" if role.workers > 1 else "this process has no terminal"
    sys.breakpointhook = BreakpointHook(role.terminal, why, role.script or "train.py", links.warn, links.debugs)


class _Relayed(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints records, but hands warnings to the launcher, which shows the same one of all workers once."""

    def __init__(self, warn: Callable[[str], bool]) -> None:
        super().__init__()
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or not self._warn(self.format(record)):
            super().emit(record)


def _relay_warnings(warn: Callable[[str], bool]) -> None:
    """Hand Python's warnings to the launcher instead of printing them."""
    shown_before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
        if file is not None or not warn(text):
            shown_before(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def torchrun_variables(worker: int, workers: int) -> dict[str, str]:
    """Return what scripts written for torchrun read. They take LOCAL_RANK for a device's number, so it is 0 where this
    process sees exactly one."""
    local = 0 if torch.cuda.device_count() == 1 else worker
    return {"RANK": str(worker), "LOCAL_RANK": str(local), "WORLD_SIZE": str(workers)}


def _run(role: Role, given: WorkerContext) -> Failure | None:
    """Run the script; return its failure, if any."""
    try:
        train = unpacked(role)
        with context.running():
            context.bind(given)
            train()
    except Closed:
        return None
    except SystemExit as error:
        if error.code not in (None, 0):
            return Failure("script", f"the script of {_who(role)} exited with {error.code}")
        left = any(session._loops.left_early for session in given.sessions)
        _say(given, Ended(in_loop=left and raised_in_loop(error)))
    except BaseException as error:  # noqa: BLE001 - the server reports whatever ended the script
        return _blame(role, given, error)
    else:
        _say(given, Ended())
    with contextlib.suppress(Closed):
        for call in given.after_script:
            call()
    return None


def _blame(role: Role, given: WorkerContext, error: BaseException) -> Failure:
    failure = _failure_of(role, given, error)
    return Failure(failure.blame, _sendable(failure.text), _sendable(failure.traceback))


def _sendable(text: str) -> str:
    """Escape what UTF-8 cannot encode, such as undecodable bytes of file names."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _failure_of(role: Role, given: WorkerContext, error: BaseException) -> Failure:
    if isinstance(error, UserError):
        return Failure("user", str(error), script_traceback(error))
    if isinstance(error, ScriptError):
        return Failure("script", str(error), script_traceback(error.__cause__ or error))
    if isinstance(error, PeerError):
        return Failure("peer", str(error), script_traceback(error))
    if isinstance(error, Lost):
        return Failure("peer", f"{_who(role)} lost its server and could not go on", script_traceback(error))
    batch = given.shared.batches.get(role.worker, 0)
    text = f"the script raised {type(error).__name__} in {_who(role)}, batch {batch}: {error}{advice_for(error)}"
    return Failure("script", text, script_traceback(error))


def _who(role: Role) -> str:
    return "the evaluator" if role.evaluator else f"worker {role.worker}"


def _say(given: WorkerContext, message: Ended | Failed) -> None:
    with contextlib.suppress(Closed, Lost):
        given.endpoint.send(message)


def keep_freed_memory() -> bool:
    """Make glibc keep up to `KEPT` bytes of freed memory; return whether it does. The user's own settings win.

    Arrays of the same size come and go with every push, step and clock. By default glibc returns large blocks to the
    kernel as soon as they are freed, and the next array of that size faults in every page again, which costs more than
    the work on it.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, LARGEST))


def leave_compiler_out() -> None:
    """Keep optimizers from importing torch's compiler.

    Torch wraps some optimizer methods to exclude them from compilation, and the wrapper imports the whole compiler when
    an optimizer is made or saved: 2.3 s of processor time in each of a run's processes, beside 2.0 s for torch itself.
    The methods do the same without it; a script that compiles its model imports the compiler then. The wrapper matters
    only inside a compiled function, and there nobody adds parameter groups to, or zeroes gradients of, an optimizer
    that a parameter server steps.

    A node of a run without a server steps itself, and the wrapper of each optimizer's `step` imports the compiler, too.
    Its replacement still turns gradients off, but does not break the graph of a compiled `step()`.
    """
    for name in MARKED:
        method = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, getattr(method, "__wrapped__", method))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind.__name__ != OTHERWISE_WRAPPED:
            inner = getattr(vars(kind).get("step"), "__wrapped__", None)
            if inner is not None:
                kind.step = _without_gradients(inner)  # type: ignore[method-assign]


def _without_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def plain(self: torch.optim.Optimizer, *given: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable"))):
            return step(self, *given, **named)

    return plain


Fresh = tuple[str, list[int]] | None  # the server's address or a link to it; None: there will be no server


class WorkerLinks:
    """A worker's control socket, and the links to restarted servers that arrive over it.

    A thread reads it: a script may compute for any time, and the launcher's death must be noticed meanwhile.
    """

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._fresh: SimpleQueue[Fresh] = SimpleQueue()
        self._given = 1  # links, that of the role included
        self._owner = os.getpid()
        self._sending = threading.Lock()  # any thread may warn
        threading.Thread(target=self._watch, name="paceline-control", daemon=True).start()

    def endpoint(self, role: Role, descriptors: list[int]) -> "ShmEndpoint | ZeromqEndpoint":
        """Return the worker's end of the link to the server."""
        if role.transport == "shm":
            if len(descriptors) == 1:
                return ShmEndpoint(_channels(descriptors)[0], lambda: _channels(self._await()[1])[0])
            from paceline.shards.table_endpoint import TableEndpoint

            return TableEndpoint(_channels(descriptors), lambda: _channels(self._await()[1]))
        # Not for workers that share memory: it starts a thread.
        from paceline.shards.messages import BETWEEN
        from paceline.shards.sharded_endpoint import ShardedEndpoint
        from paceline.transport.zeromq import ZeromqEndpoint

        kind = ShardedEndpoint if BETWEEN in role.address else ZeromqEndpoint
        return kind(
            role.address, role.token, lambda: (self._await()[0], role.token), role.secret.security, role.knocking_s
        )

    def report(self, failure: Failure) -> None:
        """Send the launcher a failure, in case there is no server left to report it."""
        with self._sending:
            self._control.send(encode(failure))
            self._control.finish(LAST_WORDS_S)

    def warn(self, text: str) -> bool:
        """Send the launcher a warning; return False if this process cannot: a fork has no socket of its own."""
        return self._tell(Warned(_sendable(text)))

    def debugs(self, waits: bool, on_terminal: bool = True) -> None:
        """Tell the launcher whether a debugger waits for a command."""
        self._tell(Debugging(waits, on_terminal))

    def _tell(self, message: Warned | Debugging | LinkLost) -> bool:
        if os.getpid() != self._owner:
            return False
        try:
            with self._sending:
                self._control.send(encode(message))
                self._control.finish(LAST_WORDS_S)
        except Lost:
            return False
        return True

    def _await(self) -> tuple[str, list[int]]:
        """Wait for a restarted server and return its address or link; skip servers that have died meanwhile."""
        given = self._given  # read before the look: what comes meanwhile is one more
        if self._fresh.empty():
            self._tell(LinkLost(given))
        fresh = self._fresh.get()
        while not self._fresh.empty():
            for descriptor in fresh[1] if fresh is not None else ():
                os.close(descriptor)
            fresh = self._fresh.get()
        if fresh is None:
            self._fresh.put(None)
            raise Closed
        return fresh

    def _watch(self) -> None:
        try:
            while (frame := self._control.receive()) is not None:
                self._handle(frame)
        finally:
            end_own_group()  # a process must not go on without the launcher

    def _handle(self, frame: Frame) -> None:
        match for_child(frame.data):
            case Relinked(address):
                self._fresh.put((address, frame.descriptors))
                self._given += 1
            case Unlinked():
                self._fresh.put(None)


def _channels(descriptors: list[int]) -> list[Channel]:
    if not descriptors:
        raise InternalError("a link was announced and its descriptor did not come with it")
    return [Channel(socket.socket(fileno=descriptor)) for descriptor in descriptors]
