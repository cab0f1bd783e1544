"""Processes that talk without a pause, end while nobody can show their last words, or end in a server's absence."""

import fcntl
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hosts import wait_until

from paceline.core.settings import RunConfig
from paceline.engines.local import child, control, scratch
from paceline.engines.local.children import Children, ProcessPlace
from paceline.engines.local.debugging import BreakpointHook
from paceline.engines.local.launcher import Launcher
from paceline.engines.local.output import READ, Console, Transcript, Voice
from paceline.engines.local.processes import Process
from paceline.engines.local.workload import packed
from paceline.records.journal import Header, Lines
from paceline.server.plan import Plan
from paceline.transport.base import Closed
from paceline.transport.shm import Channel

PIPE = 1 << 20


def plan(**settings):
    header = Header(engine="local", strategy="bsp", seed=0, workers=2)
    return Plan(config=RunConfig(workers=2, **settings), scenario=None, header=header, folder=None, journal=None)


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE)
    yield reader, writer
    os.close(reader)
    os.close(writer)


# -- output ------------------------------------------------------------------------------------------------------------


def test_one_look_takes_a_part_of_what_is_there(pipe):
    reader, writer = pipe
    shown = []
    voice = Voice(reader, shown.append, Transcript(None, ""))
    os.write(writer, b"y\n" * (PIPE // 2))
    assert voice.read()
    assert len(shown) == READ // 2
    voice.finish()
    assert len(shown) == PIPE // 2


def test_last_words_end_although_somebody_goes_on_talking(pipe):
    """What a process started may have its pipe and outlive its group."""
    reader, writer = pipe
    shown = []

    def show(line):
        shown.append(line)
        if len(shown) < 5000:
            os.write(writer, b"y\n")

    os.write(writer, b"y\n" * 1000)
    Voice(reader, show, Transcript(None, "")).finish()
    assert len(shown) == 1000


# -- processes ---------------------------------------------------------------------------------------------------------


class Broken(Console):
    def show(self, prefix, line, target):
        raise BrokenPipeError(32, f"{target} is closed")


def test_last_words_that_cannot_be_shown_leave_nothing_behind(nothing_left):
    run = scratch.make()
    process = Process("worker 0", Broken(), Transcript(None, ""), folder=run)
    folder = run / str(process.pid)
    folder.mkdir()
    for voice in process.voices:
        voice._partial += b"last words"
    with pytest.raises(BrokenPipeError, match="std(out|err) is closed"):
        process.reap()
    assert not folder.exists()
    scratch.remove(run)
    assert not process.alive
    assert process.reap() == process.code  # once is enough: its descriptors' numbers may be somebody else's


@pytest.mark.slow
def test_a_launcher_whose_output_broke_leaves_nothing_behind(nothing_left, monkeypatch):
    launcher = Launcher(plan(threads=1), packed(lambda: print("heard", flush=True)), Lines())
    monkeypatch.setattr(Console, "show", Broken.show)
    with pytest.raises(BrokenPipeError):
        launcher.run()


# -- a server's absence ------------------------------------------------------------------------------------------------


def test_a_restarted_server_hears_of_the_evaluators_end_though_a_newcomer_has_its_number():
    told = []
    children = Children(plan(transport="zeromq"), packed(print), Console(), lambda message, _: told.append(message))
    children.alive[ProcessPlace(2, 0)] = SimpleNamespace(pid=11, shares_memory=False)
    children._tokens[ProcessPlace(2, 0)] = "token"
    children._codes |= {ProcessPlace(2, 0, evaluator=True): 1, ProcessPlace(0, 0): -9, ProcessPlace(0, 1): -15}
    children.relink()
    assert told == [
        control.Linked(2, 0, False, 11, "token", loads=True),
        control.Exited(0, 1, False, -15),
        control.Exited(2, 0, True, 1),
    ]


def test_the_link_to_the_latest_server_is_told_from_those_to_earlier_ones():
    children, place = Children(plan(transport="zeromq"), packed(print), Console(), lambda *_: None), ProcessPlace(0, 0)
    children.occupy(place, SimpleNamespace(pid=11, shares_memory=False, send=lambda *_: None))
    assert not children.is_latest(place, 0)  # it has none
    children.listening("tcp://lab1:7001")
    assert children.is_latest(place, 1)
    children.relink()
    assert not children.is_latest(place, 1)  # its server is gone
    children.listening("tcp://lab1:7001")
    assert (children.is_latest(place, 1), children.is_latest(place, 2)) == (False, True)


def test_a_worker_says_which_of_its_links_it_has_lost(monkeypatch):
    monkeypatch.setattr(child, "end_own_group", lambda: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of the thread whose launcher is gone
    ours, theirs = map(Channel, socket.socketpair())
    links, waiting = child.WorkerLinks(theirs), ThreadPoolExecutor()
    for count, address in ((1, "tcp://lab1:7001"), (2, "tcp://lab1:7002")):
        found = waiting.submit(links._await)
        assert control.for_launcher(ours.receive().data) == control.LinkLost(count)
        ours.send(control.encode(control.Relinked(address)))
        assert found.result() == (address, [])
    for address in ("tcp://lab1:7003", "tcp://lab1:7004"):
        ours.send(control.encode(control.Relinked(address)))
    wait_until(lambda: links._given == 5)
    assert links._await() == ("tcp://lab1:7004", [])  # there is no need to ask for it
    found = waiting.submit(links._await)
    assert control.for_launcher(ours.receive().data) == control.LinkLost(5)
    ours.send(control.encode(control.Unlinked()))
    with pytest.raises(Closed):
        found.result()
    waiting.shutdown()
    ours.close()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "paceline-control"])
    theirs.close()


@pytest.mark.parametrize(
    ("servers", "childs", "wanted"),
    [
        ("the script of worker 0 exited with 1", ["a slip", "another"], "a slip"),
        ("the script of worker 0 exited with 1", [], "the script of worker 0 exited with 1"),
    ],
)
def test_a_scripts_own_words_say_more_than_its_exit_code(servers, childs, wanted):
    launcher = Launcher(plan(), packed(print), Lines())
    for text in childs:
        failure = control.Failure("script", text, "Traceback: here")
        launcher._on_child_word(None, control.encode(failure))
    launcher._on_finished(control.Finished("error", b"", control.Failure("script", servers)), [])
    assert launcher._outcome().failure.text == wanted
    launcher._leave_nothing()


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_server_is_told_of_a_debugger(monkeypatch, on_terminal):
    """A worker that stands at a breakpoint is not silent."""
    launcher, told = Launcher(plan(), packed(print), Lines()), []
    monkeypatch.setattr(launcher, "_send_to_server", told.append)
    for waits in (True, False):
        frame = control.encode(control.Debugging(waits, on_terminal))
        launcher._on_child_word(ProcessPlace(2, 0), frame)
        assert launcher._debugging is (waits and on_terminal)
    assert told == [control.Debugged(2, True), control.Debugged(2, False)]
    launcher._leave_nothing()


def test_a_debugger_without_a_terminal_is_announced(monkeypatch):
    announced = []

    def announce(waits, **how):
        announced.append((waits, how))

    hook = BreakpointHook(None, "no terminal", "train.py", lambda _: True, announce)
    monkeypatch.setattr(sys, "__breakpointhook__", lambda: None)
    hook()
    assert announced == []
    monkeypatch.setenv("PYTHONBREAKPOINT", "somewhere.set_trace")
    hook()
    assert announced == [(True, {"on_terminal": False})]


def test_what_the_server_knows_best_is_left_to_it():
    launcher = Launcher(plan(), packed(print), Lines())
    failure = control.Failure("peer", "worker 1 lost its server and could not go on")
    launcher._on_child_word(None, control.encode(failure))
    for text in ("the script of worker 0 exited with 3", "a slip"):
        traceback = "" if "exited" in text else "Traceback: there"
        told = control.Failure("script", text, traceback)
        launcher._on_finished(control.Finished("error", b"", told), [])
        assert launcher._outcome().failure == told
    launcher._leave_nothing()
