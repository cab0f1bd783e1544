"""Processes from a nursery: what they find, how their ends are seen, and what becomes of them without it."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import leaks
import pytest
import torch
from clusters import Rows, mean_square, network
from launching import launch

import paceline
from paceline.cli import main
from paceline.core import errors
from paceline.engines.local import nursery, scratch
from paceline.engines.local.output import Console, Transcript
from paceline.engines.local.processes import Process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

ORDINARY = nursery._BEGIN  # as it is before the suite's own nursery imports more than users' do


class Training:
    """A small regression; `at_batch` says what else a worker does."""

    def __init__(self, at_batch=lambda session, number: None, **loading):
        self.at_batch = at_batch
        self.loading = loading

    def __call__(self):
        torch.manual_seed(1)
        session = paceline.init()
        rows, model = Rows(40), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(rows, batch_size=4, epochs=2, **self.loading)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            self.at_batch(session, number)


@pytest.fixture(autouse=True)
def _ordinary(monkeypatch):
    monkeypatch.setattr(nursery, "_BEGIN", ORDINARY)


@pytest.fixture
def own():
    """A nursery of this test alone, which may not survive it."""
    made = nursery.Nursery(ignoring=["PYTEST_CURRENT_TEST"])
    yield made
    made.end()


@pytest.fixture
def kept():
    """The nursery of the session, for tests that leave it as it is."""
    made = nursery.take()
    yield made
    nursery.give_back(made)


@pytest.fixture
def taken(monkeypatch):
    """The nurseries that runs have taken."""
    found, take = [], nursery.take
    monkeypatch.setattr(nursery, "take", lambda: found.append(take()) or found[-1])
    return found


def process_from(given):
    return Process("worker 0", Console(), Transcript(None, ""), given)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def is_fresh(process):
    return process._popen is not None


def origin():
    """Where this process comes from: a fork keeps the arguments of the interpreter that it is a fork of."""
    return "nursery" if any("nursery import" in argument for argument in sys.orig_argv) else "fresh"


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")


def warned(caplog):
    return [record.getMessage() for record in caplog.records if "fresh interpreters" in record.getMessage()]


# -- what a process finds ----------------------------------------------------------------------------------------------

# Everything that a script could notice of the interpreter it runs in. Run by a program with flags, a path and an
# environment of its own, which changes some of them while its nursery is already there.
FINDINGS = """
import ctypes, gc, json, logging, multiprocessing, os, random, resource, signal, sys, tempfile, threading, warnings
from pathlib import Path

def findings():
    import numpy as np, torch, multiprocessing.process, numpy._core._multiarray_umath as blas
    blas_threads = ctypes.CDLL(blas.__file__).scipy_openblas_get_num_threads64_()
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "environment": dict(os.environ), "c environment": [os.environ.get("CHANGED"), _getenv("CHANGED")],
        "path": sys.path, "flags": list(sys.flags), "argv": sys.argv, "warnings": sys.warnoptions,
        "filters": [str(f) for f in warnings.filters], "options": sys._xoptions, "careful": sys.flags.bytes_warning,
        "folder": os.getcwd(), "original folder": multiprocessing.process.ORIGINAL_DIR,
        "temporary": tempfile.gettempdir().replace(str(os.getpid()), "own"),
        "status": [line for line in status if line.split(":")[0] in
            ("Umask", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "Threads")],
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)],
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "parent": os.getppid(), "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "nice": os.nice(0),
        "stdin": os.readlink("/proc/self/fd/0"), "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0]
            for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
        "streams": [[s.encoding, s.isatty(), s.line_buffering, s.write_through] for s in (sys.stdout, sys.stderr)],
        "torch threads": torch.get_num_threads(), "blas threads": blas_threads, "grad": torch.is_grad_enabled(),
        "torch seed": torch.initial_seed(), "numpy": float(np.random.rand()), "python": random.random(),
        "main": sorted(vars(sys.modules["__main__"])), "gc": [gc.isenabled(), gc.get_threshold()],
        "logging": [str(h) for h in logging.getLogger().handlers], "start": multiprocessing.get_start_method(),
        "command": Path("/proc/self/cmdline").read_text(),
        "origin": "nursery" if any("nursery import" in a for a in sys.orig_argv) else "fresh",
        "compiler": "torch._dynamo" in sys.modules, "hash": hash("paceline"),
    }

def _getenv(name):
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = getenv(name.encode())
    return found and found.decode()

def train():
    import paceline
    session = paceline.init()
    Path(session.option("into", "")).write_text(json.dumps(findings()))

if __name__ == "__main__":
    import paceline
    from paceline.engines.local import nursery
    with nursery.kept(ignoring=("CHANGED", "TMPDIR")):
        nursery.prepare()
        os.environ["CHANGED"] = "later"
        os.environ["TMPDIR"] = sys.argv[1]
        os.chdir(sys.argv[1])
        for start in ("nursery", "fresh"):
            into = {"into": f"{sys.argv[1]}/{start}.json"}
            paceline.launch(train, workers=1, threads=2, evaluate_every="off", start=start, options=into)
"""


@pytest.mark.fresh
def test_a_process_finds_what_a_fresh_interpreter_finds(tmp_path):
    (tmp_path / "program.py").write_text(FINDINGS)
    (tmp_path / "there").mkdir()
    flags = ["-b", "-W", "ignore::ImportWarning", "-X", "utf8", "-X", "own=1"]
    environment = {**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "ÜMLAUT": "ß"}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run(
        [sys.executable, *flags, tmp_path / "program.py", tmp_path / "there"],
        env=environment, cwd=tmp_path, check=True, timeout=300,
    )  # fmt: skip
    ours, fresh = (json.loads((tmp_path / "there" / f"{start}.json").read_text()) for start in ("nursery", "fresh"))
    assert ours.pop("command").startswith("paceline: worker 0")
    assert fresh.pop("command").startswith("paceline: worker 0")
    assert (ours.pop("origin"), fresh.pop("origin")) == ("nursery", "fresh")
    for name in fresh:
        assert ours[name] == fresh[name], name
    assert ours["environment"]["CHANGED"] == "later"
    assert ours["c environment"] == ["later", "later"]
    assert ours["careful"] == 1
    assert ours["options"]["own"] == "1"


def test_brothers_share_no_random_state(tmp_path):
    def train():
        import multiprocessing
        import uuid

        import numpy

        drawn = [numpy.random.default_rng().random(), uuid.uuid4().hex, multiprocessing.current_process().authkey.hex()]
        (tmp_path / f"{paceline.init().worker}.json").write_text(json.dumps(drawn))

    launch(train)
    one, other = (json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(2))
    assert not set(one) & set(other)


def test_the_nursery_has_one_thread_and_its_children_are_the_launchers(kept):
    process = process_from(kept)
    try:
        assert len(list(Path(f"/proc/{kept.pid}/task").iterdir())) == 1
        assert parent_of(process.pid) == os.getpid()
        assert scratch.group_of(process.pid) == [process.pid]
        assert kept.usable
        while command_of(process.pid) != "paceline: worker 0":  # the last that it does before its role
            time.sleep(0.01)
        assert len(list(Path(f"/proc/{kept.pid}/fd").iterdir())) == 5  # streams, socket, the launcher's handle
    finally:
        process.reap()


@pytest.mark.parametrize(
    "way", ["fork", *(pytest.param(way, marks=pytest.mark.soak) for way in ("forkserver", "spawn"))]
)
def test_loaders_work_in_its_children(taken, way):
    done = launch(Training(num_workers=2, multiprocessing_context=way))
    assert done.summary.samples_used == 80
    assert taken[0].usable


@pytest.mark.fresh
def test_its_imports_ask_nothing_of_cuda():
    code = (
        "import torch\n"
        "def refuse(*_): raise SystemExit('a CUDA call')\n"
        "for name in ('is_available', 'device_count', 'init', '_lazy_init', 'current_device', 'is_initialized'):\n"
        "    assert hasattr(torch.cuda, name); setattr(torch.cuda, name, refuse)\n"
        "from paceline.engines.local.nursery import _preload\n"
        "_preload()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_signal_that_ended_a_process_is_seen_with_and_without_the_nursery(own, orphaned):
    processes = {number: process_from(own) for number in (signal.SIGKILL, signal.SIGSEGV)}
    if orphaned:
        os.kill(own.pid, signal.SIGKILL)
        own.end()
    for number, process in processes.items():
        os.kill(process.pid, number)
        while not process.exited:
            time.sleep(0.01)
        assert process.reap() == -number


def test_an_exit_code_is_seen_after_the_nurserys_death(taken, caplog, tmp_path):
    def end_oneself(session, number):
        wait_for(tmp_path / "killed")
        if session.worker == 1 and number == 1:
            os._exit(7)

    kill_when_taken(taken, tmp_path / "killed")
    with pytest.raises(errors.ScriptError, match="the script of worker 1 exited with 7"):
        launch(Training(end_oneself))
    assert not warned(caplog)  # nothing had to be started after it


def kill_when_taken(taken, killed):
    """As soon as both workers are there; `killed` appears when that is done, and scripts wait for it."""
    before = set(children_of_this_process())  # other tests keep processes, too

    def kill():
        while not taken or len(set(children_of_this_process()) - before - {str(taken[0].pid)}) < 3:
            time.sleep(0.005)
        os.kill(taken[0].pid, signal.SIGKILL)
        killed.touch()

    threading.Thread(target=kill, daemon=True).start()


def wait_for(file):
    while not file.exists():
        time.sleep(0.005)


def children_of_this_process():
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


# -- without a nursery -------------------------------------------------------------------------------------------------


@pytest.mark.fresh
def test_a_nursery_that_is_killed_takes_nobody_along_and_later_processes_are_fresh(taken, caplog, tmp_path):
    def die_once(session, number):
        mark = tmp_path / f"{session.worker}"
        first = not mark.exists()
        if number in (0, 2):
            mark.write_text(origin())
        wait_for(tmp_path / "killed")
        if session.worker == 1 and number == 0 and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if session.worker == 0 and number == 2:
            wait_for(tmp_path / "1")
            while (tmp_path / "1").read_text() != "fresh":
                time.sleep(0.01)

    kill_when_taken(taken, tmp_path / "killed")
    done = launch(Training(die_once), strategy="asp", respawn=True)
    assert done.summary.samples_used == 80
    assert (tmp_path / "0").read_text() == "nursery"
    assert (tmp_path / "1").read_text() == "fresh"
    assert warned(caplog) == ["processes start as fresh interpreters, which takes longer: no nursery (it has ended)"]


@pytest.mark.parametrize("when", ["before", "while it imports"])
@pytest.mark.fresh
def test_without_the_nursery_a_run_starts_fresh_processes(taken, caplog, monkeypatch, when):
    take = nursery.take

    def killed():
        found = nursery.Nursery(ignoring=["PYTEST_CURRENT_TEST"]) if when == "while it imports" else take()
        if when == "before":
            while found.starting:
                found.listen()
        os.kill(found.pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(nursery, "take", killed)
    done = launch(Training(), workers=1)
    assert done.summary.samples_used == 80
    assert len(warned(caplog)) == 1


MOMENTS_S = (0.0, 0.002, 0.005, 0.008, 0.012, 0.02)


@pytest.mark.parametrize(
    "moment", [pytest.param(s, marks=() if s == 0.005 else pytest.mark.soak) for s in MOMENTS_S]
)  # fmt: skip
def test_a_nursery_that_is_killed_in_the_middle_of_a_start(own, moment):
    own.listen()
    threading.Thread(target=lambda: (time.sleep(moment), os.kill(own.pid, signal.SIGKILL))).start()
    processes = []
    while own.usable:
        processes.append(process_from(own))
    try:
        assert all(parent_of(process.pid) == os.getpid() for process in processes)
        assert [is_fresh(process) for process in processes] == [False] * (len(processes) - 1) + [True]
    finally:
        for process in processes:
            process.reap()
    # And `nothing_left` finds neither a process nor a zombie once the nursery has been ended.


def test_one_that_was_stopped_in_the_middle_and_then_killed_is_given_up(own, caplog):
    own.listen()
    os.kill(own.pid, signal.SIGSTOP)
    threading.Thread(target=lambda: (time.sleep(0.1), os.kill(own.pid, signal.SIGKILL))).start()
    process = process_from(own)
    try:
        assert is_fresh(process)
        assert len(warned(caplog)) == 1
    finally:
        process.reap()


@pytest.mark.fresh
def test_imports_that_start_a_thread_make_processes_fresh_and_are_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    done = launch(Training(), workers=1)
    assert done.summary.samples_used == 80
    (said,) = warned(caplog)
    assert "its imports have started 1 threads" in said


@pytest.mark.fresh
def test_start_fresh_uses_none(taken, tmp_path):
    def train():
        (tmp_path / "origin").write_text(origin())
        Training()()

    assert launch(train, workers=1, start="fresh").summary.samples_used == 80
    assert not taken
    assert (tmp_path / "origin").read_text() == "fresh"


# -- between runs ------------------------------------------------------------------------------------------------------


def test_it_serves_the_next_run_as_long_as_the_process_is_the_same_to_it(taken, monkeypatch):
    for changed in (False, False, True, False):
        with monkeypatch.context() as change:
            if changed:
                change.setenv("MKL_NUM_THREADS", "1")
            assert launch(Training()).ended == "done"
    first, second, other, again = [each.pid for each in taken]
    assert first == second == again != other


def with_umask():
    before = os.umask(0o077)
    return lambda: os.umask(before)


def with_one_core():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    return lambda: os.sched_setaffinity(0, before)


def with_a_folder_to_import_from():
    sys.path.insert(0, "/nowhere")
    return lambda: sys.path.remove("/nowhere")


def with_a_signal_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR1, before)


def with_a_variable():
    os.environ["MKL_DYNAMIC"] = "TRUE"
    return lambda: os.environ.pop("MKL_DYNAMIC")


CHANGES = [with_umask, with_one_core, with_a_folder_to_import_from, with_a_signal_ignored, with_a_variable]


def test_a_process_that_has_changed_is_not_served(kept):
    for change in CHANGES:
        assert kept.serves
        back = change()
        try:
            assert not kept.serves, change.__name__
        finally:
            back()


@pytest.mark.parametrize("moment", ["at once", "ready"])
@pytest.mark.fresh
def test_it_ends_with_the_process_that_has_it(nothing_left, moment):
    wait = "made.listen(); " if moment == "ready" else ""
    code = f"from paceline.engines.local.nursery import Nursery; made = Nursery(); {wait}print(made.pid, flush=True);"
    with subprocess.Popen([sys.executable, "-c", code + "import time; time.sleep(1000)"], stdout=-1) as program:
        pid = int(program.stdout.readline())
        while pid not in leaks.tagged_processes(nothing_left.tag):  # a process shows no environment while it begins
            time.sleep(0.02)
        program.kill()
    while leaks.tagged_processes(nothing_left.tag):
        time.sleep(0.02)


PROGRAM = """
import os, signal, paceline, torch
from paceline.engines.local import nursery

def train():
    session = paceline.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for x, in session.batches(torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=4, epochs=10**6):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

def take_and_stop(take=nursery.take):
    made = take()
    os.kill(made.pid, signal.SIGSTOP)
    print(made.pid, flush=True)
    return made

nursery.take = take_and_stop
done = paceline.launch(train, workers=1, threads=1, evaluate_every="off")
print(done.ended)
"""


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.fresh
def test_ctrl_c_is_heard_while_a_nursery_starts(times):
    """Once: the run ends as soon as there is a server to say so. Twice: at once."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=-1, stderr=-1, text=True) as program:
        stopped = int(program.stdout.readline())
        for _ in range(times):
            program.send_signal(signal.SIGINT)
            time.sleep(0.2)  # two signals of one moment are one
        if times == 1:
            os.kill(stopped, signal.SIGCONT)
        said, complained = program.communicate()
    if times == 1:
        assert (program.returncode, said) == (0, "interrupted\n"), complained
    else:
        assert "KeyboardInterrupt" in complained
        assert program.returncode == -signal.SIGINT


def test_it_is_given_up_once(own, caplog):
    os.kill(own.pid, signal.SIGKILL)
    for _ in range(2):
        process_from(own).reap()
    assert len(warned(caplog)) == 1


ENDING = """
import atexit, gzip, sys, threading, time
import torch
import paceline
import beside

session = paceline.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
for (x,) in session.batches(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
never_closed = open("never_closed", "w")
never_closed.write("all of it")
packed = gzip.open("packed.gz", "wt")
packed.write("with its end")
beside.note("of a module")


def later():
    time.sleep(0.3)
    open("thread", "w").write("waited for")


threading.Thread(target=later).start()
atexit.register(lambda: open("handler", "w").write(f"after {open('thread').read()}"))
print("no line feed", end="")
sys.exit(0)
"""


def test_a_script_ends_as_in_an_interpreter_of_its_own(folder, capfd):
    """Though its process does not free what all processes share: what the script holds is finished, in order."""
    (folder / "train.py").write_text(ENDING)
    (folder / "beside.py").write_text("log = open('beside', 'w')\nnote = log.write\n")
    assert main(["run", "--workers", "1", "--threads", "1", "--evaluate-every", "off", "train.py"]) == 0
    found = {name: Path(name).read_text() for name in ("never_closed", "beside", "thread", "handler")}
    assert found == {
        "never_closed": "all of it", "beside": "of a module", "thread": "waited for", "handler": "after waited for",
    }  # fmt: skip
    assert gzip.decompress(Path("packed.gz").read_bytes()) == b"with its end"
    assert "no line feed" in "".join(capfd.readouterr())
