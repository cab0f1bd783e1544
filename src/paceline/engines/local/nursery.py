"""The nursery: one interpreter that imports torch once and then forks the processes of a run.

Why its forks are safe, and its children equal to fresh interpreters:

1. It is an interpreter of its own, not a fork of the caller, so it has none of the caller's threads, locks, devices and
   random state.
2. It has one thread whenever it forks, and makes no CUDA call and no parallel operation. It keeps OpenBLAS from
   starting threads when numpy is imported, and each child sets the number that its environment asks for.
3. Each start hands over the caller's environment, import path and current folder. The nursery does not serve a caller
   whose interpreter flags, limits, umask, cores or credentials have changed since (`_inherited`). Unlike fresh
   interpreters the children share a hash seed, unless PYTHONHASHSEED sets it anyway.
4. It forks twice and the process in between exits, so the kernel reparents the child to the launcher, which is a
   subreaper for that moment. The launcher waits for its children itself, so it sees their exit codes, and the death of
   the nursery does not affect a child.
5. It ends when its socket closes or the launcher dies, even if it was stopped. If it is killed its children live on,
   and later processes are fresh interpreters, as they are where there is no subreaper (macOS) and where importing
   torch starts threads.

This module imports neither torch nor numpy before `main` does: the command line starts a nursery before it loads them.
"""

import atexit
import contextlib
import ctypes
import gc
import itertools
import logging
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

import msgspec

from paceline.engines.local.prctl import resume_when_parent_dies, subreaper

INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")})  # noqa: PTH118
START_S = 60.0  # for a fork on a busy machine; a nursery that takes longer hangs
RESUME_S = 0.5  # after which one that has not forked yet is resumed, in case somebody has stopped it

_BEGIN = "import sys; sys.path[:] = {path!r}; from paceline.engines.local.nursery import main; main({home}, {launcher})"
_READY = b"ready"
_LONGEST = 4096  # bytes of a message from a nursery
_DESCRIPTORS = 5  # of a request: its `Birth`, current folder, control socket, standard output and error
_PID = struct.Struct("<i")
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_BLAS_WISHES = (_BLAS_THREADS, "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # in the order in which OpenBLAS reads them
_BLAS_SETTERS = tuple(f"{package}openblas_set_num_threads{size}" for package in ("scipy_", "") for size in ("64_", ""))
_INHERITED = (b"Uid", b"Gid", b"Groups", b"Umask", b"SigBlk", b"SigIgn", b"CapEff", b"Cpus_allowed", b"Mems_allowed")

logger = logging.getLogger("paceline")


def command(code: str) -> list[str]:
    """Return the command line of an interpreter with this one's flags.

    -P keeps the current folder out of its import path, and -u shows a script's output as it is printed.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    passed = {value.partition("=")[0] for flag, value in itertools.pairwise(flags) if flag == "-X"}
    for name, value in sys._xoptions.items():
        if name not in passed:
            flags += ["-X", name if value is True else f"{name}={value}"]
    return [sys.executable, *flags, "-u", "-P", "-c", code]


def environment() -> dict[str, str]:
    """Return a child's environment; Python programs that its script starts are unbuffered, too."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def import_path() -> list[str]:
    """Return this process's import path for a child, without entries that are not text."""
    return [folder for folder in sys.path if isinstance(folder, str)]


# -- the launcher's end ------------------------------------------------------------------------------------------------


class Birth(msgspec.Struct, frozen=True, array_like=True):
    """What a child needs before its control socket is read. Bytes, since file names need not be text."""

    name: str
    environment: list[tuple[bytes, bytes]]
    path: list[bytes]


class Born(NamedTuple):
    """A process from the nursery, and the launcher's end of its control socket."""

    pid: int
    control: socket.socket


class Nursery:
    """The launcher's end of a nursery. One run at a time uses it."""

    def __init__(self, ignoring: Collection[str] = ()) -> None:
        """Begin to start it; a change of the environment variables in `ignoring` does not make it useless."""
        self._ignoring = frozenset(ignoring)
        self._inherited = _inherited(ignoring)
        self._owner = os.getpid()
        self.starting = True  # neither ready nor known to be unusable
        self.usable = True
        self.complaint: str | None = None  # why it is not usable
        self._home, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _BEGIN.format(path=import_path(), home=theirs.fileno(), launcher=os.getpid())
        try:
            self._process = subprocess.Popen(
                command(code),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a fresh interpreter will fail in the same way, visibly
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**environment(), _BLAS_THREADS: "1"},
            )
        except BaseException:
            self._home.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable once `listen` would not wait."""
        return self._home.fileno()

    @property
    def alive(self) -> bool:
        """Whether it runs, belongs to this process and has not failed."""
        return self.usable and self._owner == os.getpid() and self._process.poll() is None

    @property
    def serves(self) -> bool:
        """Whether its children would inherit what this process's own children would."""
        return self.alive and self._inherited == _inherited(self._ignoring)

    def listen(self) -> None:
        """Read whether it is ready."""
        try:
            said = self._home.recv(_LONGEST)
        except OSError:
            said = b""
        self.starting = False
        if said != _READY:
            self._give_up(said.decode(errors="replace") or "it does not answer")

    def start(self, name: str, stdout: int, stderr: int) -> Born | None:
        """Start a process; return None if it has to be a fresh interpreter."""
        if self.starting:
            self.listen()
        if not self.alive:
            self._give_up("it has ended")
        if not self.serves:
            return None
        with subreaper:
            return self._start(name, stdout, stderr)

    def _start(self, name: str, stdout: int, stderr: int) -> Born | None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as ours_too:
            ours_too.callback(ours.close)
            with theirs:
                if not self._ask(name, theirs.fileno(), stdout, stderr):
                    return None
            data = self._answer(ours)
            if len(data) == _PID.size:
                ours_too.pop_all()
                return Born(_PID.unpack(data)[0], ours)
            self._home.setblocking(False)
            self.listen()  # it may have sent the reason
            return None

    def _answer(self, control: socket.socket) -> bytes:
        """Wait for a child's pid; nothing comes from a nursery that has ended or hangs."""
        control.settimeout(RESUME_S)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                with contextlib.suppress(ConnectionError):
                    return control.recv(_PID.size)  # written at once, and so few bytes come at once
                return b""
            self.resume()
        return b""

    def resume(self) -> None:
        """Let a nursery go on that somebody has stopped."""
        if self._owner == os.getpid() and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)

    def _ask(self, name: str, *given: int) -> bool:
        named = [(os.fsencode(key), os.fsencode(value)) for key, value in environment().items()]
        birth = Birth(name, named, [os.fsencode(folder) for folder in import_path()])
        with contextlib.ExitStack() as opened:
            try:
                body = os.memfd_create("paceline-birth")  # it may exceed the largest packet of the socket
                opened.callback(os.close, body)
                os.write(body, msgspec.msgpack.encode(birth))
                folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
                opened.callback(os.close, folder)
                socket.send_fds(self._home, [b"!"], [body, folder, *given])
            except OSError as error:
                self._give_up(f"it cannot be asked: {error.strerror}")
                return False
        return True

    def _give_up(self, why: str) -> None:
        if self.usable:
            self.usable, self.complaint = False, why
            logger.warning("processes start as fresh interpreters, which takes longer: no nursery (%s)", why)

    def end(self) -> None:
        """Kill the nursery. Its children live on: the launcher is their parent."""
        if self._owner != os.getpid():  # this process is a fork of the owner
            self._home.close()
            return
        self.usable = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        reap_group(self.pid)
        self._home.close()


def reap_group(leader: int) -> None:
    """Reap the processes of a killed group that this process has adopted; call it after waiting for the leader.

    This process adopts orphans while it is a subreaper, that is while a nursery forks: children of the group, and the
    process between nursery and child if the nursery is killed just then.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-leader, 0)


def possible() -> bool:
    """Whether this system supports a nursery."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and subreaper.possible()


def _inherited(ignoring: Collection[str]) -> tuple[object, ...]:
    """Return all that a child inherits beside what each start hands over, and what imports may have read."""
    named = {name: value for name, value in environment().items() if name not in ignoring}
    status = Path("/proc/thread-self/status").read_bytes().splitlines()
    kept = [line for line in status if line.partition(b":")[0] in _INHERITED]
    limits = Path("/proc/self/limits").read_bytes()
    return command(""), import_path(), named, kept, limits, os.getpriority(os.PRIO_PROCESS, 0)


# -- between runs ------------------------------------------------------------------------------------------------------


class _Keep:
    """The nursery that waits for the next run, inside `kept`."""

    def __init__(self) -> None:
        self.wanted = False
        self.ignoring: frozenset[str] = frozenset()
        self.nursery: Nursery | None = None
        self.lock = threading.Lock()


_keep = _Keep()


@contextlib.contextmanager
def kept(ignoring: Collection[str] = ()) -> Iterator[None]:
    """Keep a nursery from run to run inside this context, as long as it serves this process.

    `ignoring` names environment variables that no import reads; children still get their current values.
    """
    if _keep.wanted:
        yield
        return
    _keep.wanted, _keep.ignoring = True, frozenset(ignoring)
    try:
        yield
    finally:
        _keep.wanted, _keep.ignoring = False, frozenset()
        with _keep.lock:
            left, _keep.nursery = _keep.nursery, None
        if left is not None:
            left.end()


def prepare() -> None:
    """Inside `kept`: start a nursery in parallel with what comes before the run."""
    give_back(take())


def take() -> Nursery:
    """Return the kept nursery if it serves, else a new one; the caller passes it to `give_back` later."""
    with _keep.lock:
        found = _keep.nursery
        if found is not None and not found.alive:
            found.end()
            found = _keep.nursery = None
        if found is not None and found.serves:
            _keep.nursery = None
            return found
    return Nursery(_keep.ignoring)


def give_back(nursery: Nursery) -> None:
    """Keep the nursery for the next run if wanted and none waits already, else end it."""
    with _keep.lock:
        if _keep.wanted and nursery.serves and _keep.nursery is None:
            _keep.nursery = nursery
            return
    nursery.end()


# -- the nursery's own process -----------------------------------------------------------------------------------------


def main(descriptor: int, launcher: int) -> None:
    """Be the nursery; in a child, be that child."""
    resume_when_parent_dies()
    home = socket.socket(fileno=descriptor)
    try:
        _preload()
        problem = _more_threads()
    except Exception as error:  # noqa: BLE001 - a fresh interpreter will show it, whatever it is
        problem = f"importing failed, {type(error).__name__}: {error}"
    if problem is not None:
        _end(home, problem)
    with contextlib.suppress(OSError):
        home.send(_READY)
    body, folder, control, stdout, stderr = _next_child(home, launcher)
    _become(folder, control, stdout, stderr)
    with os.fdopen(body, "rb") as file:
        file.seek(0)
        birth = msgspec.msgpack.decode(file.read(), type=Birth)
    _settle(birth)

    from paceline.engines.local import child

    known = set(sys.modules)
    try:
        child.begin(birth.name, control)
    except SystemExit as ended:
        leave(ended.code if isinstance(ended.code, int) else 1, known)


def _preload() -> None:
    """Import all that servers, workers and evaluators import, without computing anything."""
    gc.disable()
    from paceline import session  # noqa: F401
    from paceline.engines.local import child, server, shard_process  # noqa: F401

    child.leave_compiler_out()
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a child would write to every page that it shares with the others


def _more_threads() -> str | None:
    count = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - faster, and called at each fork
    return None if count == 1 else f"its imports have started {count - 1} threads"


def _end(home: socket.socket, why: str) -> NoReturn:
    with contextlib.suppress(OSError):
        home.send(os.fsencode(why)[:_LONGEST])
    os._exit(1)


def _next_child(home: socket.socket, launcher: int) -> list[int]:
    """Fork on request; return only in a child, with the descriptors that were sent for it."""
    watched = os.pidfd_open(launcher)
    if os.getppid() != launcher:  # it died before `watched` was opened
        os._exit(0)
    poller = select.poll()
    poller.register(home, select.POLLIN)
    poller.register(watched, select.POLLIN)
    while True:
        if not any(descriptor == home.fileno() for descriptor, _ in poller.poll()):
            os._exit(0)  # the launcher died
        _, given, _, _ = socket.recv_fds(home, 1, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not given:
            os._exit(0)
        problem = _more_threads()
        if problem is not None:
            _end(home, problem)
        if _fork_orphan():
            os.close(watched)
            home.close()
            return given
        for descriptor in given:
            os.close(descriptor)


def _fork_orphan() -> bool:
    """Fork a child whose parent is the launcher; return True in it. If a fork fails, the child's socket closes."""
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        forked = os.fork()
    except OSError:
        os._exit(1)
    if forked:
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    return True


def _become(folder: int, control: int, stdout: int, stderr: int) -> None:
    """Set up session, output and current folder, and send the launcher this child's pid."""
    resume_when_parent_dies()
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.fchdir(folder)
    for descriptor in (stdout, stderr, folder):
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the launcher died; reading the control socket will show it
        os.write(control, _PID.pack(os.getpid()))


def _settle(birth: Birth) -> None:
    """Reset what a fresh interpreter would initialize."""
    import multiprocessing.process

    import numpy as np

    os.environ.clear()
    os.environb.update(birth.environment)
    sys.path[:] = [os.fsdecode(folder) for folder in birth.path]
    sys.path_importer_cache.clear()
    sys.argv[1:] = []
    tempfile.tempdir = None
    with contextlib.suppress(OSError):  # the folder was removed
        multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    multiprocessing.process.current_process().authkey = os.urandom(32)
    np.random.seed()  # Python's generator reseeds itself after a fork, and torch's starts alike in every process
    _give_blas_its_threads()


def _give_blas_its_threads() -> None:
    """Set the number of threads that OpenBLAS would have started on import."""
    wishes = [int(found[0]) for name in _BLAS_WISHES if (found := re.match(r"\s*[1-9]\d*", os.environ.get(name, "")))]
    count = min([*wishes[:1], len(os.sched_getaffinity(0))])
    if count == 1:
        return
    core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
    library = ctypes.CDLL(core.__file__)  # resolves symbols of the libraries that the module is linked with
    for name in _BLAS_SETTERS:
        if hasattr(library, name):  # absent: another BLAS, which starts no threads on import
            getattr(library, name)(count)
            return


def leave(code: int, known: Iterable[str]) -> NoReturn:
    """Exit with the code; finish what the script has, and leave the rest to the kernel.

    Python would free every object of torch and of the other modules that the nursery had imported, whose names are
    `known`, and so copy most of the memory that all processes share: 0.2 s of a core for each of them. Python's own
    `multiprocessing` leaves its forked processes in the same way.

    Threads are waited for and exit handlers run, as ever. Then the script's own modules are emptied: a file that it
    never closed is written, and whatever else it holds ends as it would with the interpreter.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for module in _own_modules(known):
        module.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed or replaced by the script
            stream.flush()
    os._exit(code)


def _own_modules(known: Iterable[str]) -> list[ModuleType]:
    """Return `__main__` and the modules that the script imported, without those of installed packages."""
    names = [name for name in sys.modules if name not in set(known)]
    found = [sys.modules[name] for name in names if isinstance(sys.modules[name], ModuleType)]
    own = [each for each in found if (file := getattr(each, "__file__", None)) and not str(file).startswith(INSTALLED)]
    main = sys.modules.get("__main__")
    return own if main is None else [main, *own]
