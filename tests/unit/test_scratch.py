"""A run's private temporary folder: where it is, who may enter it, and who removes it."""

import os
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from paceline.core.errors import OptionError
from paceline.engines.local import scratch


@pytest.fixture
def place(monkeypatch):
    """The usual place, with a short name, and empty in the end."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    folder.rmdir()


@pytest.fixture
def forked():
    """Run something in a fork, which then exits with 0 if it returned."""

    def run(act):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                act()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return pid

    return run


def test_it_is_made_in_the_usual_place_and_nobody_else_may_enter(place):
    run = scratch.make()
    assert run.parent == place
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    scratch.remove(run)
    assert not list(place.iterdir())


@pytest.mark.parametrize("why", ["too long", "open to all"])
def test_an_unfit_place_is_not_used_and_two_are_refused_by_name(tmp_path, monkeypatch, why):
    place = tmp_path / ("x" * 50)
    place.mkdir()
    if why == "open to all":
        place = Path(tempfile.mkdtemp(dir="/tmp"))
        place.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    run = scratch.make()
    assert run.parent == Path("/tmp")
    scratch.remove(run)
    monkeypatch.setattr(scratch, "SHORT", place)
    monkeypatch.setattr(scratch, "SHARED", place)
    words = "is longer than 63 bytes" if why == "too long" else "lets every user rename what is in it"
    with pytest.raises(OptionError, match=f"no place for a run's sockets: {place} {words}; set TMPDIR to a short path"):
        scratch.make()
    place.rmdir()


@pytest.mark.parametrize("replaced", ["a link", "open", "a file"])
def test_a_folder_that_was_replaced_is_not_entered(tmp_path, replaced):
    run = tmp_path / "run"
    if replaced == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        run.symlink_to(tmp_path / "theirs")
    elif replaced == "open":
        run.mkdir()
        run.chmod(0o711)
    else:
        run.touch(0o600)
    with pytest.raises(OptionError, match="is not a folder of user .* somebody else has replaced it; set TMPDIR"):
        scratch.claim(run)


def test_a_process_that_is_killed_is_cleared_away_by_whoever_reaps_it(place, forked):
    run = scratch.make()
    process = forked(lambda: (scratch.claim(run) / "socket").touch())
    other = forked(lambda: scratch.claim(run))
    semaphore = scratch.SHARED / f"sem.{run.name}-{process}-abc"
    block = scratch.SHARED / f"torch_{process}_1_1"
    for left in (semaphore, block):
        left.touch()
    scratch.clear(run, process, [process])
    assert not semaphore.exists()
    assert not block.exists()
    assert [each.name for each in run.iterdir()] == [str(other)]
    scratch.remove(run)


def test_without_a_launcher_everybody_removes_a_part_and_the_last_one_the_whole(place, forked):
    run = scratch.make()

    def leave():
        (scratch.claim(run) / "socket").touch()
        scratch.abandon([])

    first = forked(lambda: scratch.claim(run))
    forked(leave)
    assert [each.name for each in run.iterdir()] == [str(first)]
    (run / str(first)).rmdir()
    forked(leave)
    assert not list(place.iterdir())


def test_a_fork_of_a_process_removes_nothing_of_its_parents(place, forked):
    run = scratch.make()

    def fork_again():
        scratch.claim(run)
        forked(lambda: scratch.abandon([]))
        assert (run / str(os.getpid())).is_dir()

    forked(fork_again)
    scratch.remove(run)


def test_the_state_of_a_process():
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        while scratch.state_of(process.pid) != "T":
            time.sleep(0.001)
        process.kill()
    assert scratch.state_of(process.pid) is None
