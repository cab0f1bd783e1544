"""Who this script is: what an engine tells the session that runs in one of its workers."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import OptionError, UserError
from paceline.core.values import read
from paceline.transport.base import Endpoint


class Shared:
    """One per process: objects that all of its workers use, and which options they have asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.asked: set[str] = set()
        self.batches: dict[int, int] = {}  # handed to each worker's script
        self._lock = threading.RLock()

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The object of that name, made by whoever asks first."""
        with self._lock:
            if key not in self.objects:
                self.objects[key] = make()
            return self.objects[key]


class WorkerContext(msgspec.Struct, frozen=True):
    """What a worker is given."""

    worker: int
    workers: int
    endpoint: Endpoint
    shared: Shared
    options: dict[str, str] = {}
    batch_size: int | None = None
    epochs: float | None = None
    data_dir: Path | None = None
    evaluates: bool = False  # this worker's module is copied for evaluation
    evaluator: bool = False  # this process trains nothing: it stops at prepare() and measures versions
    device: str | None = None  # where to compute; None: on the CUDA device of this worker's number, if there are any
    peer: Any = None  # the machine of this node, in a run without a server,
    post: Any = None  # or, in a process of its own, what makes it, the node's incarnation, and its mailbox
    sessions: list[Any] = []  # the one session of this worker, once it was asked for


_current = threading.local()
_running = threading.Lock()  # held while an engine runs virtual workers in this process


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Virtual workers share what a process has one of, so one run at a time has them."""
    inside = current() is not None
    if not inside:
        require_no_run("launch()")
        _running.acquire()
    try:
        yield
    finally:
        if not inside:
            _running.release()


def require_no_run(what: str) -> None:
    """Refuse what would mix with a run that goes on in another thread."""
    if _running.locked():
        raise UserError(
            f"{what} in a thread of its own while a run is going on in this process: call it where the run's script or "
            "launch() runs, or wait for its end"
        )


def bind(context: WorkerContext | None) -> None:
    """Make this thread's scripts run as that worker."""
    _current.context = context


def current() -> WorkerContext | None:
    """The worker this thread runs as, if an engine runs it."""
    return getattr(_current, "context", None)


def convert_option(name: str, text: str, default: Any) -> Any:
    """What `--set name=text` means for a script whose default is of a certain type."""
    kind = type(default)
    if default is None or kind is str:
        return text
    if kind not in (bool, int, float):
        raise OptionError(f"--set {name}={text}: the script's default is a {kind.__name__}, which has no text form")
    return read(text, kind, f"--set {name}")
