"""Runs of real processes from the launcher's side: what a caller gets, and that nothing is left however it ends."""

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
from launching import launch, named_children

import paceline
from paceline.core import errors
from paceline.engines.local import interruption, scratch
from paceline.records import journal
from paceline.records.journal import Header, Lines
from paceline.records.metrics import fold

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


class Training:
    """A small regression; the hooks say what else a worker does, and where."""

    def __init__(self, epochs=2, at_batch=None, afterwards=None):
        self.epochs = epochs
        self.at_batch = at_batch
        self.afterwards = afterwards

    def __call__(self):
        torch.manual_seed(1)
        session = paceline.init()
        rows, model = Rows(40), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        measure = lambda model: {"loss": float(mean_square(model, rows.x, rows.y))}
        session.prepare(model, optimizer, evaluate=measure)
        for number, (x, y, _) in enumerate(session.batches(rows, batch_size=4, epochs=self.epochs)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            if self.at_batch is not None:
                self.at_batch(session, number)
        if self.afterwards is not None:
            self.afterwards(session)


def slip_in_worker_1(session, number):
    if session.worker == 1 and number == 2:
        print("about to slip")
        raise ValueError("a slip of the pen")


def slip_afterwards(session):
    if session.worker == 0:
        raise OSError("cannot save the model")


def test_what_a_caller_gets(tmp_path):
    lines, shown = Lines(), []
    run = launch(Training(epochs=30), tmp_path, sink=lines, progress=shown.append, evaluate_every="10v")
    assert (run.ended, run.exit_code, run.summary.engine, run.summary.samples_used) == ("done", 0, "local", 1200)
    assert lines == list(journal.read(run.journal))
    header = lines[0]
    assert isinstance(header, Header)
    assert header.host
    assert header.started.startswith("20")
    assert header.scenario is None
    assert shown == sorted(shown, key=lambda progress: progress.versions)
    network().load_state_dict(run.model_state)
    names = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    assert {"journal.jsonl", "report.json", "model.safetensors", "logs/server.log", "logs/worker-1.log"} <= names


def test_a_script_that_raises_ends_everything_and_is_the_first_thing_said(capsys):
    with pytest.raises(errors.ScriptError, match=r"ValueError in worker 1, batch 3.*a slip of the pen") as caught:
        launch(Training(epochs=10_000, at_batch=slip_in_worker_1))
    (note,) = caught.value.__notes__
    assert note.splitlines()[-1] == "ValueError: a slip of the pen"
    assert "slip_in_worker_1" in note
    assert capsys.readouterr() == ("[worker 1] about to slip\n", "")


def test_a_script_that_raises_after_training_fails_the_run():
    with pytest.raises(errors.ScriptError, match="cannot save the model"):
        launch(Training(afterwards=slip_afterwards), max_versions=2)


def test_a_thread_may_launch_and_a_worker_may_not():
    caught = []

    def nested(_):
        launch(Training())

    def body():
        try:
            launch(Training(afterwards=nested))
        except errors.UserError as error:
            caught.append(str(error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert caught
    assert "launch() was called inside a worker of another run" in caught[0]


def test_a_server_that_dies_without_a_checkpoint_ends_the_run():
    def kill_server(session, number):
        if session.worker == 0 and number == 3:
            os.kill(named_children(os.getppid())["server"], signal.SIGKILL)

    with pytest.raises(errors.PeerError, match=r"the server process was killed by SIGKILL, .*--checkpoint-every"):
        launch(Training(epochs=10_000, at_batch=kill_server))


def test_a_server_that_dies_goes_on_from_its_checkpoint(tmp_path, caplog):
    def kill_server_once(session, number):
        mark = tmp_path / "killed"
        saved = list(tmp_path.glob("runs/*/checkpoints/v*"))
        if session.worker == 0 and saved and not mark.exists():
            mark.touch()
            os.kill(named_children(os.getppid())["server"], signal.SIGKILL)

    run = launch(Training(epochs=12, at_batch=kill_server_once), folder=tmp_path, checkpoint_every="5v")
    assert (run.ended, run.summary.samples_used) == ("done", 480)
    assert [r.message for r in caplog.records if "the server process was killed by SIGKILL: going on" in r.message]


# -- programs of their own ---------------------------------------------------------------------------------------------

PROGRAM = """
import paceline, torch
def train():
    session = paceline.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    for number, (x,) in enumerate(session.batches(data, batch_size=4, epochs={epochs}, num_workers={loaders})):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if number == 5:
            print("under way", flush=True)
            if {stuck}:
                import signal, time
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
run = paceline.launch(train, workers=2, threads=1, evaluate_every="off", servers={servers})
print("ended", run.ended, run.summary.samples_used)
"""


def program(folder, popen=subprocess.Popen, **parts):
    path = folder / "program.py"
    path.write_text(PROGRAM.format(**{"epochs": 1, "loaders": 0, "stuck": False, "servers": 1, **parts}))
    return popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process, text, times=1):
    seen = []
    while times:
        line = process.stdout.readline()
        assert line, "".join(seen)
        seen.append(line)
        times -= text in line


@pytest.mark.fresh
def test_a_program_needs_no_guard_and_its_functions_no_module(tmp_path):
    with program(tmp_path) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "ended done 64" in output


def test_ctrl_c_ends_the_run_and_gives_the_report(tmp_path, warm):
    with program(tmp_path, warm, epochs=10**6) as process:
        wait_for(process, "under way", times=2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    assert "ended interrupted" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("stopped", "servers"), [("server", 1), ("worker 0", 1), ("shard 1", 2)])
@pytest.mark.fresh
def test_a_launcher_that_is_killed_takes_everybody_along(tmp_path, nothing_left, stopped, servers):
    """Whoever is stopped is resumed by the kernel, and removes its files; `nothing_left` looks for those, too."""
    with program(tmp_path, epochs=10**6, loaders=1, servers=servers) as process:
        wait_for(process, "under way", times=2)
        os.kill(named_children(process.pid)[stopped], signal.SIGSTOP)
        process.kill()
    while leaks.tagged_processes(nothing_left.tag):
        time.sleep(0.05)


def stop_and_interrupt(whom):
    """As worker 0: stop a process of the run, and then press Ctrl-C."""

    def act(session, number):
        if session.worker == 0 and number == 3:
            launcher = os.getppid()
            victim = named_children(launcher)[whom]
            os.kill(victim, signal.SIGSTOP)
            while scratch.state_of(victim) != "T":
                time.sleep(0.001)
            os.kill(launcher, signal.SIGINT)

    return act


@pytest.mark.parametrize("whom", ["server", "worker 1", "nursery", "shard 1"])
def test_one_ctrl_c_ends_the_run_with_its_report_though_somebody_is_stopped(whom):
    servers = 2 if whom.startswith("shard") else 1
    run = launch(Training(epochs=10**6, at_batch=stop_and_interrupt(whom)), servers=servers)
    assert run.ended == "interrupted"
    assert run.summary.samples_used > 0


def test_whoever_stays_stopped_after_ctrl_c_is_killed(monkeypatch):
    monkeypatch.setattr(interruption, "RESUMED_S", -1.0)  # nobody is resumed
    run = launch(Training(epochs=10**6, at_batch=stop_and_interrupt("server")))
    assert (run.ended, run.exit_code, run.summary.workers, run.summary.samples_used) == ("interrupted", 130, 2, 0)
    (said,) = run.summary.warnings
    assert "server process was killed by SIGKILL while the run was being interrupted: nothing of it was recor" in said


def test_an_interrupted_run_whose_server_dies_reports_from_its_journal_and_can_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(interruption, "RESUMED_S", -1.0)
    run = launch(Training(epochs=100, at_batch=stop_and_interrupt("server")), tmp_path, checkpoint_every="1v")
    assert (run.ended, run.exit_code) == ("interrupted", 130)
    assert run.summary.versions > 0
    assert str(run.journal) in run.summary.warnings[-1]
    assert run.summary.versions == fold(journal.read(run.journal)).versions
    assert (run.folder / "report.json").is_file()
    resumed = launch(Training(epochs=100), tmp_path, resume=run.folder)
    assert (resumed.ended, resumed.summary.samples_used) == ("done", 4000)


class LoadsForLong:
    """Worker 1 is killed and comes back, and its script takes its time before it has a model; meanwhile the server is
    killed. Worker 0 notes the versions that it has come to before and after."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self):
        notes = Path(self.folder)
        session = paceline.init()
        if (notes / "killed worker").exists() and session.worker == 1:
            (notes / "loading").touch()
            until = time.monotonic() + 30
            while not (notes / "went on").exists():
                time.sleep(0.02)
                if time.monotonic() > until:
                    (notes / "gave up").touch()
                    break
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        rows = torch.utils.data.TensorDataset(torch.randn(1_500, 4), torch.randn(1_500, 1))
        killed_at = None
        for number, (x, y) in enumerate(session.batches(rows, batch_size=5, epochs=2)):
            if session.worker == 0:
                time.sleep(0.01)
                killed_at = self.act(notes, number, killed_at)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    def act(self, notes, number, killed_at):
        """Kill worker 1, then, when its successor loads, the server; then see that training goes on."""
        if number == 20:
            (notes / "killed worker").touch()
            os.kill(named_children(os.getppid())["worker 1"], signal.SIGKILL)
        elif (notes / "loading").exists() and killed_at is None:
            os.kill(named_children(os.getppid())["server"], signal.SIGKILL)
            return number
        elif killed_at is not None and number == killed_at + 20:
            (notes / "went on").touch()
        return killed_at


def test_a_restarted_server_does_not_wait_for_a_script_that_nobody_waited_for(tmp_path):
    run = launch(LoadsForLong(tmp_path), tmp_path, strategy="bsp", respawn=True, checkpoint_every="5v")
    assert (tmp_path / "loading").exists()
    assert not (tmp_path / "gave up").exists()
    assert [line for line in journal.read(run.journal) if isinstance(line, Header) and line.restored is not None]


def kill_server_and_interrupt(session, number):
    """As worker 0: kill the server, and press Ctrl-C as soon as it has a successor."""
    if session.worker == 0 and number == 3:
        launcher = os.getppid()
        first = named_children(launcher)["server"]
        os.kill(first, signal.SIGKILL)
        while named_children(launcher).get("server", first) == first:
            time.sleep(0.001)
        os.kill(launcher, signal.SIGINT)


def test_ctrl_c_ends_a_run_whose_server_has_just_been_started_again(tmp_path):
    run = launch(Training(epochs=100, at_batch=kill_server_and_interrupt), tmp_path, checkpoint_every="1v")
    assert (run.ended, run.exit_code) == ("interrupted", 130)
    resumed = launch(Training(epochs=100), tmp_path, resume=run.folder)
    assert (resumed.ended, resumed.summary.samples_used) == ("done", 4000)


def test_whoever_asks_twice_does_not_wait(tmp_path, warm):
    with program(tmp_path, warm, epochs=10**6, stuck=True) as process:
        wait_for(process, "under way", times=2)  # and nobody will answer the first
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)  # two signals of one moment are one
        output, _ = process.communicate()
    assert "KeyboardInterrupt" in output
    assert process.returncode == -signal.SIGINT
