"""A child process of the launcher: the server, a worker or the evaluator, whichever it is told to be.

Its name and the number of its control socket come on the command line, everything else over that socket. The socket's
end means that the launcher died: then this process ends at once, with all that it started. Ctrl-C is the launcher's
business alone.
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
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from paceline.core.errors import InternalError, ScriptError, UserError
from paceline.core.scenario.jitter import worker_key
from paceline.engines.local import scratch
from paceline.engines.local.control import Failure, Finished, Relinked, Role, Unlinked, encode, for_child
from paceline.engines.local.processes import end_own_group
from paceline.engines.local.workload import unpacked
from paceline.peers import messages as _node_messages  # noqa: F401 - registers what a node may receive
from paceline.strategies import Peer, build_peer
from paceline.tables import messages as _table_messages  # noqa: F401 - likewise, about tables
from paceline.transport.base import Closed, Lost
from paceline.transport.frames import Channel, Frame
from paceline.transport.mail import Mail
from paceline.transport.messages import Ended, Failed
from paceline.transport.shm import ShmEndpoint
from paceline.worker import context
from paceline.worker.context import Shared, WorkerContext
from paceline.worker.scripts import script_traceback

if TYPE_CHECKING:
    from paceline.transport.zeromq import ZeromqEndpoint


EVALUATIONS = -1  # the random streams of evaluations are nobody's, as in the simulator
KEPT = 64 << 20  # bytes of freed memory
LARGEST = 32 << 20  # of a block that is kept; the most that glibc takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # by torch, as not to be compiled
OTHERWISE_WRAPPED = "LBFGS"
NEXT_PROCESS = 1_000_003  # a worker that comes back draws other numbers, the simulator's


def main() -> NoReturn:
    """Be what the command line says, and exit."""
    name, descriptor = sys.argv[1:]
    sys.argv[1:] = []
    leave_compiler_out()
    begin(name, int(descriptor))


def begin(name: str, descriptor: int) -> NoReturn:
    """Be the process of this name, in an interpreter that is like a fresh one, and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        code = serve(channel) if name == "server" else work(channel)
    except Lost:
        end_own_group()
    sys.exit(code)


def serve(channel: Channel) -> int:
    """The server."""
    from paceline.engines.local import server  # workers need nothing of it

    try:
        server.main(channel)
    except Exception as error:  # noqa: BLE001 - an error of ours, and not a death after which a restart would help
        text = f"the server failed: {type(error).__name__}: {error}"
        channel.send(encode(Finished("error", b"", Failure("internal", text, traceback.format_exc()))))
        channel.finish(LAST_WORDS_S)
        return 1
    return 0


def work(channel: Channel) -> int:
    """A worker or the evaluator."""
    frame = channel.receive()
    role = for_child(frame.data) if frame is not None else None
    if frame is None or not isinstance(role, Role):
        raise InternalError(f"the first message of a worker must be its role, not {role!r}")
    links = WorkerLinks(channel)
    endpoint = links.endpoint(role, frame.descriptors)
    _settle_in(role)
    mail = _mailbox(role)
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
        post=None if mail is None else (_machine_of(role), role.incarnation, mail),
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


def _machine_of(role: Role) -> Callable[[], Peer]:
    return lambda: build_peer(role.peer or "", role.seed, role.worker)


def _mailbox(role: Role) -> Mail | None:
    """Where other nodes reach this one, in a run without a server."""
    if role.peer is None:
        return None
    if role.transport == "shm":
        from paceline.transport.mail_shm import ShmMail  # whoever has a server needs neither

        return ShmMail(scratch.own_folder())
    from paceline.transport.mail_zeromq import ZeromqMail

    return ZeromqMail()


def _settle_in(role: Role) -> None:
    """What a process has one of: threads, random generators, a folder for sockets, logging."""
    scratch.claim()
    torch.set_num_threads(role.threads)
    if role.yields and hasattr(os, "SCHED_BATCH"):
        # A worker that is woken does not push the server, for which all others may be waiting, off its core.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    seed = worker_key(role.seed + role.incarnation * NEXT_PROCESS, EVALUATIONS if role.evaluator else role.worker) >> 1
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if role.log_level:
        logging.getLogger("paceline").setLevel(role.log_level)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("paceline: %(levelname)s: %(message)s"))
        logging.getLogger("paceline").addHandler(handler)


def _run(role: Role, given: WorkerContext) -> Failure | None:
    """Run the script; what went wrong, if something did."""
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
    except BaseException as error:  # noqa: BLE001 - whatever ended the script is the server's to report
        return _blame(role, given, error)
    _say(given, Ended())
    return None


def _blame(role: Role, given: WorkerContext, error: BaseException) -> Failure:
    failure = _failure_of(role, given, error)
    return Failure(failure.blame, _sendable(failure.text), _sendable(failure.traceback))


def _sendable(text: str) -> str:
    """Names of files may hold bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _failure_of(role: Role, given: WorkerContext, error: BaseException) -> Failure:
    if isinstance(error, UserError):
        return Failure("user", str(error), script_traceback(error))
    if isinstance(error, ScriptError):
        return Failure("script", str(error), script_traceback(error.__cause__ or error))
    if isinstance(error, Lost):
        return Failure("peer", f"{_who(role)} lost its server and could not go on", script_traceback(error))
    batch = given.shared.batches.get(role.worker, 0)
    text = f"the script raised {type(error).__name__} in {_who(role)}, batch {batch}: {error}"
    return Failure("script", text, script_traceback(error))


def _who(role: Role) -> str:
    return "the evaluator" if role.evaluator else f"worker {role.worker}"


def _say(given: WorkerContext, message: Ended | Failed) -> None:
    with contextlib.suppress(Closed, Lost):
        given.endpoint.send(message)


def keep_freed_memory() -> bool:
    """Have freed memory stay with this process; whether it could be arranged. A setting of the user's own stands.

    Arrays of the same size come and go with every push, step and clock. glibc hands large blocks back to the kernel as
    soon as they are freed, and the next array of that size pays for every page anew, which costs more than what is done
    with it. Up to `KEPT` bytes are kept instead.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, LARGEST))


def leave_compiler_out() -> None:
    """Start without torch's compiler.

    Torch marks some methods of its optimizers as not to be compiled, and the mark imports the whole compiler when an
    optimizer is made or saved: 2.3 s of processor time in each of a run's processes, beside 2.0 s for torch itself.
    Without the mark the methods are the same; a script that compiles its model imports the compiler then. Inside a
    compiled function, where the mark would matter, nobody adds parameter groups or zeroes gradients of an optimizer
    that a parameter server steps.

    A node of a run without a server makes its steps itself, and there the wrapper of every optimizer's `step` does the
    same. It turns gradients off, which stays, and tells the compiler to break its graph, which matters to a compiled
    `step()` alone.
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
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return step(self, *given, **named)

    return plain


LAST_WORDS_S = 5.0

Fresh = tuple[str, list[int]] | None  # where the server is, or the link to it; None: there will be none


class WorkerLinks:
    """A worker's control socket, and the link to the server that it may bring anew.

    A thread of its own hears the launcher from the moment the role is known: a script computes for as long as it likes,
    and the launcher's death must be noticed meanwhile.
    """

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._fresh: SimpleQueue[Fresh] = SimpleQueue()
        threading.Thread(target=self._watch, name="paceline-control", daemon=True).start()

    def endpoint(self, role: Role, descriptors: list[int]) -> "ShmEndpoint | ZeromqEndpoint":
        """The link to the server."""
        if role.transport == "shm":
            return ShmEndpoint(_channel(descriptors), lambda: _channel(self._await()[1]))
        from paceline.transport.zeromq import ZeromqEndpoint  # workers that share memory do without its thread

        return ZeromqEndpoint(role.address, role.token, lambda: (self._await()[0], role.token))

    def report(self, failure: Failure) -> None:
        """Tell the launcher, in case there is no server any more that would."""
        self._control.send(encode(failure))
        self._control.finish(LAST_WORDS_S)

    def _await(self) -> tuple[str, list[int]]:
        """The latest word about a server; servers that came and went meanwhile are passed over."""
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
            end_own_group()  # whoever cannot hear the launcher must not go on without it

    def _handle(self, frame: Frame) -> None:
        match for_child(frame.data):
            case Relinked(address):
                self._fresh.put((address, frame.descriptors))
            case Unlinked():
                self._fresh.put(None)


def _channel(descriptors: list[int]) -> Channel:
    if not descriptors:
        raise InternalError("a link was announced and its descriptor did not come with it")
    return Channel(socket.socket(fileno=descriptors[0]))
