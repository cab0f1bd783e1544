"""What an engine tells the session of each worker: which worker it is, its link and its settings."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.core.errors import OptionError, UserError
from paceline.core.values import read
from paceline.model.spec import ModelSpec
from paceline.transport.base import Endpoint
from paceline.worker.other_frameworks import process_groups_refused
from paceline.worker.replica import Replica


class Shared:
    """State of one process: objects that all of its workers use, and which options they asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.asked: set[str] = set()
        self.batches: dict[int, int] = {}  # given to each worker's script so far
        self._lock = threading.RLock()

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the object of that name; the first caller makes it."""
        with self._lock:
            if key not in self.objects:
                self.objects[key] = make()
            return self.objects[key]


MakeReplica = Callable[[torch.nn.Module, Any, ModelSpec], Replica]


class WorkerContext(msgspec.Struct, frozen=True):
    """The identity, link and settings of one worker."""

    worker: int
    workers: int
    endpoint: Endpoint
    shared: Shared
    options: dict[str, str] = {}
    batch_size: int | None = None
    epochs: float | None = None
    data_dir: Path | None = None
    evaluates: bool = False  # this worker's module is copied for evaluation
    evaluator: bool = False  # this process does not train: it stops at prepare() and measures versions
    device: str | None = None  # where to compute; None: the CUDA device of this worker's number, if there are any
    make_replica: MakeReplica | None = None  # for a worker that steps itself: alone, or a node
    alone: bool = False  # the script runs by itself
    sessions: list[Any] = []  # this worker's one session, once it exists
    after_script: list[Callable[[], None]] = []  # what its process does once the script has ended


_current = threading.local()
_running = threading.Lock()  # held while an engine runs virtual workers in this process


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Hold the process for one run: virtual workers share its global state."""
    inside = current() is not None
    if not inside:
        require_no_run("launch()")
        _running.acquire()
    try:
        with process_groups_refused(_current_worker):
            yield
    finally:
        if not inside:
            _running.release()


def require_no_run(what: str) -> None:
    """Raise `UserError` if another thread of this process is in a run."""
    if _running.locked():
        raise UserError(
            f"{what} was called in a thread of its own during a run in this process: call it in the thread of the "
            "run's script or launch(), or wait for the run to end"
        )


def bind(context: WorkerContext | None) -> None:
    """Make this thread run scripts as that worker."""
    _current.context = context


def current() -> WorkerContext | None:
    """Return the worker that this thread runs as; None outside an engine."""
    return getattr(_current, "context", None)


def _current_worker() -> int | None:
    given = current()
    return None if given is None else given.worker


def convert_option(name: str, text: str, default: Any) -> Any:
    """Convert the text of `--set name=text` to the type of the script's default."""
    kind = type(default)
    if default is None or kind is str:
        return text
    if kind not in (bool, int, float):
        raise OptionError(f"--set {name}={text}: the default is a {kind.__name__}, not a str, bool, int or float")
    return read(text, kind, f"--set {name}")
