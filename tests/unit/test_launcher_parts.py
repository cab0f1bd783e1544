"""The parts of the launcher, each by itself: messages, output, workloads, and processes without a server."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import clusters
import pytest

import paceline
from paceline.core import errors
from paceline.core.settings import Every, RunConfig, Target
from paceline.engines.local import control, nursery
from paceline.engines.local.children import Children, ProcessPlace
from paceline.engines.local.launcher import Restarts
from paceline.engines.local.loop import Loop
from paceline.engines.local.output import Console, Transcript, Voice
from paceline.engines.local.result_handover import Outcome, as_failure
from paceline.engines.local.server import Relay
from paceline.engines.local.workload import packed, unpacked
from paceline.records.journal import Decision, Header, Observation
from paceline.records.journal_file import JournalWriteError
from paceline.records.metrics import Metrics, to_json
from paceline.server.plan import Plan, how_it_ended
from paceline.transport.base import Lost
from paceline.transport.messages import Ended, Failed
from paceline.transport.shm import Channel, ShmServerEnd
from paceline.worker.scripts import Script

HEADER = Header(engine="local", strategy="bsp", seed=0, workers=2)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_setup_arrives_as_it_was_sent():
    config = RunConfig(
        target=Target.parse("loss=0.5"), checkpoint_every=Every.parse("10v"), runs_dir=Path("runs"), epochs=2, threads=1
    )
    plan = Plan(
        config=config,
        scenario=clusters.cluster(1.0, 0.5, jitter="lognormal:0.1", events=clusters.event("crash", 1.0, worker=0)),
        header=HEADER,
        journal=Path("j.jsonl"),
        folder=None,
    )
    setup = control.Setup(plan=plan, relay=True, folder="/tmp/paceline-1")
    assert control.for_server(control.encode(setup)) == setup


def test_what_is_no_message_is_refused():
    with pytest.raises(errors.PeerError, match="a control message for the launcher cannot be read"):
        control.for_launcher(b"\x93garbage")


def test_a_log_gets_its_lines_at_once_and_a_listener_all_of_them():
    decision = Decision(paceline.core.events.TimerFired(1.0, "t"), [])
    warning, quiet = Observation(1.0, "warning", {"text": "hm"}), Observation(2.0, "report", {"name": "x"})
    sent = []
    for everything, expected in ((False, [[warning]]), (True, [[decision, warning], [quiet]])):
        sent.clear()
        sink = Relay(sent.append, everything=everything)
        for line in (decision, warning, quiet):
            sink.write(line)
        sink.flush()
        assert [parcel.lines() for parcel in sent] == expected


@pytest.mark.parametrize(
    ("blame", "kind"),
    [
        ("storage", errors.StorageError),
        ("user", errors.UserError),
        ("script", errors.ScriptError),
        ("peer", errors.PeerError),
        ("internal", errors.InternalError),
    ],
)
def test_a_failure_is_raised_by_its_blame_with_the_others_traceback(blame, kind):
    failure = control.Failure(blame, "it broke", "Traceback: there\n")
    outcome = Outcome(cause="error", encoded_report=b"", failure=failure, model=None)
    with pytest.raises(kind, match="it broke") as caught:
        outcome.raise_failure()
    assert caught.value.__notes__ == ["Traceback: there"]
    assert outcome.report is None


def test_a_full_disk_does_not_cost_the_report():
    report = Metrics().report(None, None)
    failure = as_failure(JournalWriteError("no room"))
    outcome = Outcome(cause="error", encoded_report=to_json(report).encode(), failure=failure, model=None)
    with pytest.raises(errors.StorageError, match="no room") as caught:
        outcome.raise_failure()
    assert caught.value.report == report


def test_restarts_are_in_vain_when_somebody_trained_or_the_checkpoint_was_not_taken_up():
    here, further = Path("v20"), Path("v40")
    restarts = Restarts(None)
    for trained, serves, place, in_vain in [
        (True, True, here, 1), (False, True, here, 1), (False, True, here, 1), (False, False, here, 2),
        (True, False, here, 3), (False, True, further, 0), (True, True, further, 1),
    ]:  # fmt: skip
        restarts.serves = serves
        restarts.count(place, trained=trained)
        assert restarts.in_vain == in_vain
        assert not restarts.serves
    assert restarts.in_a_row == 2


def test_exit_codes_in_words():
    assert [how_it_ended(code) for code in (3, -9, -250)] == [
        "exited with 3",
        "was killed by SIGKILL",
        "was killed by signal 250",
    ]


# -- output ------------------------------------------------------------------------------------------------------------


def test_output_is_shown_in_whole_lines_and_kept_as_it_came(tmp_path):
    shown = []
    transcript = Transcript(tmp_path, "worker 2")
    reader, writer = os.pipe()
    voice = Voice(reader, shown.append, transcript)
    for text in ("one\ntw", "o\n\n10%\r50%\r100%\n", "caf\xc3\xa9".encode("latin-1").decode("latin-1")):
        os.write(writer, text.encode("latin-1"))
        assert voice.read()
    assert shown == ["one", "two", "", "100%"]
    os.write(writer, b"x" * 60_000)
    voice.read()
    os.close(writer)
    assert not voice.read()
    voice.finish()
    assert shown[-1] == "café" + "x" * 60_000
    os.close(reader)
    transcript.close()
    kept = (tmp_path / "logs" / "worker-2.log").read_bytes()
    assert kept == "one\ntwo\n\n10%\r50%\r100%\ncafé".encode() + b"x" * 60_000


def test_a_muted_stage_shows_nothing(capsys):
    stage = Console()
    stage.show("[server] ", "heard", "stdout")
    stage.show("[server] ", "warned", "stderr")
    stage.muted = True
    stage.show("[server] ", "unheard", "stderr")
    assert capsys.readouterr() == ("[server] heard\n", "[server] warned\n")


# -- workloads ---------------------------------------------------------------------------------------------------------


def role(workload):
    return control.Role(
        worker=0, incarnation=0, workers=1, evaluator=False, seed=0, options={}, batch_size=None, epochs=None,
        data_dir=None, threads=1, script=workload.script, arguments=workload.arguments,
        function=workload.function, sys_path=list(sys.path), transport="shm", address="", token="",
    )  # fmt: skip


def test_an_importable_function_goes_by_its_name():
    workload = packed(clusters.network)
    assert b"clusters" in workload.function
    assert len(workload.function) < 200
    assert unpacked(role(workload)) is clusters.network


def test_a_function_of_a_module_that_nobody_can_import_goes_by_value():
    module = types.ModuleType("made_up_at_run_time")
    exec("TABLE = [1, 2]\ndef inner(): return TABLE\ndef train(): return inner()", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        workload = packed(module.train)
    finally:
        del sys.modules[module.__name__]
    assert unpacked(role(workload))() == [1, 2]


def test_a_script_goes_by_its_path(folder):
    Path("train.py").write_text("import sys; print(sys.argv)\n")
    workload = packed(Script(Path("train.py"), ["--depth", "3"]))
    assert (workload.script, workload.arguments, workload.function) == ("train.py", ["--depth", "3"], None)


def test_what_cannot_travel_is_refused_with_a_way_out():
    lock = threading.Lock()
    with pytest.raises(errors.OptionError, match=r"cannot hand .*lock.* make what it uses inside the function"):
        packed(lambda: lock.acquire())


# -- processes without a server ----------------------------------------------------------------------------------------


class Alone:
    """The launcher's loop around its children, with a test in the server's place."""

    def __init__(self, train, folder=None, **settings):
        config = RunConfig(threads=1, workers=2, **settings)
        plan = Plan(config=config, scenario=None, header=HEADER, folder=folder, journal=None)
        self.told = []
        self.links = []
        self.said = []
        self.stage = Console()
        self.nursery = None if config.start == "fresh" else nursery.take()
        self.children = Children(plan, packed(train), self.stage, self.tell, self.nursery)
        self.loop = Loop()

    def tell(self, message, descriptors):
        self.told.append(message)
        if descriptors:
            self.links.append(ShmServerEnd(Channel(socket.socket(fileno=os.dup(descriptors[0])))))

    def start(self, place):
        process = self.children.start(place)
        heard = lambda frame: self.said.append(control.for_launcher(frame.data))
        self.loop.watch(process, heard, lambda: self.children.reap(place))
        return process

    def until(self, condition):
        while not condition():
            self.loop.turn(0.05)  # a link that a test looks at is none of the loop's

    def exits(self):
        self.until(lambda: not self.children.alive)
        return [message.code for message in self.told if isinstance(message, control.Exited)]

    def heard_on(self, link):
        found = []
        with contextlib.suppress(Lost):
            while (message := self.links[link].collect()) is not None:
                found.append(message)
        return found

    def close(self):
        for place in list(self.children.alive):
            self.children.reap(place)
        for link in self.links:
            link.close()
        self.loop.close()
        if self.nursery is not None:
            nursery.give_back(self.nursery)


@pytest.fixture
def alone(nothing_left):
    made = []

    def make(*arguments, **settings):
        made.append(Alone(*arguments, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["nursery", "fresh"])
def test_a_script_that_ends(alone, tmp_path, capsys, start):
    def train():
        import sys

        session = paceline.init()
        print("worker", session.worker, "of", session.workers)
        print("aside", file=sys.stderr)

    crew = alone(train, tmp_path, start=start)
    crew.start(ProcessPlace(1, 0))
    assert crew.exits() == [0]
    assert crew.heard_on(0) == [Ended()]
    assert capsys.readouterr() == ("[worker 1] worker 1 of 2\n", "[worker 1] aside\n")
    log = (tmp_path / "logs" / "worker-1.log").read_text()
    assert sorted(log.splitlines()) == ["aside", "worker 1 of 2"]


def raises():
    raise ValueError("a slip")


def blames_the_user():
    raise errors.OptionError("k must be >= 1, not 0")


def exits_with_3():
    sys.exit(3)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["nursery", "fresh"])
@pytest.mark.parametrize(
    ("train", "blame", "text"),
    [
        (raises, "script", "the script raised ValueError in worker 0, batch 0: a slip"),
        (blames_the_user, "user", "k must be >= 1, not 0"),
        (exits_with_3, "script", "the script of worker 0 exited with 3"),
    ],
)
def test_a_script_that_fails_says_so_to_server_and_launcher(alone, train, blame, text, start):
    crew = alone(train, start=start)
    crew.start(ProcessPlace(0, 0))
    assert crew.exits() == [1]
    (failed,) = crew.heard_on(0)
    assert isinstance(failed, Failed)
    assert (failed.blame, failed.text) == (blame, text)
    assert crew.said == [control.Failure(blame, text, failed.traceback)]
    assert ("in raises" in failed.traceback) == (train is raises)
    assert "child.py" not in failed.traceback


@pytest.mark.slow
def test_equal_places_draw_equal_numbers_and_later_processes_others(alone, tmp_path):
    def train():
        import random

        import numpy
        import torch

        path = tmp_path / f"{paceline.init().worker}.txt"
        with path.open("a") as file:
            print(torch.rand(1).item(), numpy.random.rand(), random.random(), file=file)

    crew = alone(train)
    for incarnation in (0, 0, 1):
        crew.start(ProcessPlace(0, incarnation))
        crew.exits()
    first, second, later = (tmp_path / "0.txt").read_text().splitlines()
    assert first == second
    assert not set(first.split()) & set(later.split())


@pytest.mark.slow
@pytest.mark.parametrize("start", ["nursery", "fresh"])
def test_what_a_worker_started_goes_with_it(alone, start):
    def train():
        import os
        import time

        if os.fork() == 0:
            time.sleep(1000)
        print("forked", flush=True)
        time.sleep(1000)

    crew = alone(train, start=start)
    shown = []
    crew.stage.show = lambda prefix, line, target: shown.append(line)
    process = crew.start(ProcessPlace(0, 0))
    crew.until(lambda: shown == ["forked"])
    os.kill(process.pid, signal.SIGKILL)  # the leader alone
    assert crew.exits() == [-signal.SIGKILL]  # and `nothing_left` finds no process


@pytest.mark.slow
def test_a_link_that_broke_is_replaced_and_one_that_will_not_be_is_closed(alone):
    def train():
        from paceline.transport.base import Closed, Lost
        from paceline.worker import context

        endpoint = context.current().endpoint
        try:
            endpoint.receive()
        except Lost:
            endpoint.reconnect()
        endpoint.send(paceline.transport.messages.Note("back", 1.0))
        try:
            endpoint.receive()
        except Lost:
            try:
                endpoint.reconnect()
            except Closed:
                print("closed", flush=True)

    crew = alone(train)
    crew.start(ProcessPlace(0, 0))
    crew.links[0]._channel.close()  # a server that dies says nothing
    crew.children.relink()
    crew.until(lambda: crew.links[1]._channel.poll(0.01))
    assert [message.name for message in crew.heard_on(1)] == ["back"]
    crew.children.unlink()
    crew.links[1]._channel.close()
    assert crew.exits() == [0]


STEP_EVERY_OPTIMIZER = """
import torch
from paceline.engines.local.child import leave_compiler_out

leave_compiler_out()
for kind in vars(torch.optim).values():
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(4, 2))
        optimizer = kind([parameter], lr=0.5)
        gradient = torch.ones(4, 2)
        parameter.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
        optimizer.step(lambda: parameter.sum()) if kind is torch.optim.LBFGS else optimizer.step()
        assert not torch.equal(parameter.detach(), torch.ones(4, 2)), kind
        print(kind.__name__)
"""


@pytest.mark.slow
def test_every_optimizer_of_torch_steps_without_the_compiler():
    done = subprocess.run([sys.executable, "-c", STEP_EVERY_OPTIMIZER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"SGD", "Adam", "Adafactor", "Muon", "SparseAdam", "LBFGS"} <= set(done.stdout.split())
