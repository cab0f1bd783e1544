"""Programs of Python that begin as forks: `Popen([sys.executable, "-m", "paceline", ...])` without importing torch.

`Popen` is that of `subprocess` for commands of this interpreter, with one difference: the process is a fork of a warm
interpreter, which has imported torch and paceline and has one thread, and so is the nursery of `paceline run`. Such a
process is a child of the test like any other: it has its own session, output, environment, folder and exit code. All
that happens after the imports is the same; what happens before is tested on interpreters marked `fresh`. `/proc` shows
the environment and the command line of the warm interpreter. Importing torch takes two seconds of a core, and a run on
fresh interpreters does it twice.
"""

import contextlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from unittest import mock

import cloudpickle

from paceline.engines.local import nursery

_BEGIN = (
    "import sys; own, sys.path[:] = [*sys.path], {path!r}; import warm_python; "
    "warm_python.main({home}, {launcher}, own)  # nursery"
)
_SIZE = 8  # bytes of a message's length


class _Warm(nursery.Nursery):
    """An interpreter like a nursery, whose children are programs; what they shall be comes with each of them."""

    def __init__(self):
        with mock.patch.object(nursery, "_BEGIN", _BEGIN):
            super().__init__()

    @property
    def serves(self):
        return self.alive


_kept: list[_Warm] = []


@contextlib.contextmanager
def kept():
    """Keep a warm interpreter inside this context; `Popen` needs one."""
    _kept.append(_Warm())
    try:
        yield
    finally:
        _kept.pop().end()


class Popen(subprocess.Popen):
    """A command of this interpreter with `-m MODULE`, `-c CODE` or a file; it always leads a session."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = others[:9]
        assert args[0] == sys.executable, f"only programs of this interpreter can be forked, not {args[0]}"
        assert not pass_fds
        environment = dict(os.environ if env is None else env)
        told = cloudpickle.dumps((list(args[1:]), environment, os.fspath(cwd or "."), preexec_fn))
        try:
            out = 1 if c2pwrite == -1 else c2pwrite
            born = _kept[-1].start("program", out, 2 if errwrite == -1 else errwrite)
            assert born is not None, "the warm interpreter has ended"
            with born.control as control:
                control.settimeout(None)
                socket.send_fds(control, [len(told).to_bytes(_SIZE, "big")], [0 if p2cread == -1 else p2cread])
                control.sendall(told)
            self.pid, self._child_created = born.pid, True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(command, *, timeout=None, **given):
    """`subprocess.run(command, capture_output=True, text=True)`."""
    with Popen(command, stdout=-1, stderr=-1, text=True, **given) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# -- the warm interpreter's own process --------------------------------------------------------------------------------


def main(descriptor, launcher, path):
    """Be the warm interpreter; in a child, be the program."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # a program has its own
    path = [entry for entry in path if entry not in inherited]
    nursery.resume_when_parent_dies()
    home = socket.socket(fileno=descriptor)
    nursery._preload()
    import sklearn.datasets  # noqa: F401 - tasks and scripts load its digits

    from paceline import cli  # noqa: F401
    from paceline.engines.local import launcher as of_runs  # noqa: F401

    assert nursery._more_threads() is None
    home.send(nursery._READY)
    body, folder, control, stdout, stderr = nursery._next_child(home, launcher)
    nursery._become(folder, control, stdout, stderr)
    with os.fdopen(body, "rb") as file:
        file.seek(0)
        nursery._settle(nursery.msgspec.msgpack.decode(file.read(), type=nursery.Birth))
    with socket.socket(fileno=control) as told:
        size, (stdin,), _, _ = socket.recv_fds(told, _SIZE, 1)
        with told.makefile("rb") as file:
            arguments, environment, place, before = pickle.loads(file.read(int.from_bytes(size, "big")))
    os.dup2(stdin, 0)
    os.close(stdin)
    os.chdir(place)
    _use(environment)
    _open_streams()
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    if before is not None:
        before()
    if arguments[:2] == ["-m", "paceline"]:  # it starts its nursery before the script can change anything
        nursery.subprocess = _Forking
    _exit_after(_run, arguments)


def _use(environment):
    os.environ.clear()
    os.environ.update(environment)


def _open_streams():
    """Open the standard streams: those of the warm interpreter know of another file."""
    at_once = "PYTHONUNBUFFERED" in os.environ
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        was = getattr(sys, name)
        binary = open(number, "wb" if number else "rb", buffering=0 if number and at_once else -1, closefd=False)  # noqa: SIM115
        lines = number > 0 and not at_once and (number == 2 or os.isatty(number))
        options = {"line_buffering": lines, "write_through": number > 0 and at_once}
        stream = io.TextIOWrapper(binary, was.encoding, was.errors, **options)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(arguments):
    """Be what comes after `python` on a command line."""
    sys.modules.pop("__main__")
    what, *rest = arguments
    if what == "-m":
        sys.argv[:], sys.path[:0] = rest, [os.getcwd()]  # noqa: PTH109
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv[:], sys.path[:0] = ["-c", *rest[1:]], [""]
        exec(compile(rest[0], "<string>", "exec"), vars(_fresh_main()))
    else:
        sys.argv[:], sys.path[:0] = arguments, [os.path.dirname(os.path.abspath(what))]  # noqa: PTH100, PTH120
        runpy.run_path(what, run_name="__main__")


def _fresh_main():
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    return main


def _exit_after(call, *arguments):
    """Make the call and exit as the interpreter would."""
    from paceline.engines.local.nursery import leave

    code, known = 0, set(sys.modules)
    try:
        call(*arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if code == 1 and isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    leave(code, known)


def _close_all_but(*kept):
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(descriptor)


def _forget_handlers():
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _ForkedNursery(subprocess.Popen):
    """A nursery that is a fork of its launcher, which has one thread."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = others[:9]
        if nursery._more_threads() is not None:  # forks of several threads are unsafe
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    os.setsid()
                    for number, descriptor in enumerate((p2cread, c2pwrite, errwrite)):
                        os.dup2(descriptor, number)
                    _close_all_but(*pass_fds)
                    _forget_handlers()
                    _use(env)
                    nursery.subprocess = subprocess
                    exec(args[-1], {})
                finally:
                    os._exit(1)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


class _Forking:
    """What the nursery's module uses of `subprocess`."""

    DEVNULL = subprocess.DEVNULL
    Popen = _ForkedNursery
    _args_from_interpreter_flags = staticmethod(subprocess._args_from_interpreter_flags)
