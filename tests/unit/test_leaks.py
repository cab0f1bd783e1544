"""The leak check is itself shown to catch what it is for."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import leaks
import pytest


@pytest.fixture
def watch(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    watch = leaks.Watch(temporary)
    monkeypatch.setenv(leaks.TAG, watch.tag)
    return watch


def complaints_about(watch, word):
    return [complaint for complaint in watch.left(patience_s=0.0) if word in complaint]


def test_a_quiet_test_leaves_nothing(watch):
    assert watch.left(patience_s=0.0) == []


def test_a_process_is_found_even_when_its_parent_is_gone(watch):
    code = (
        "import subprocess\n"
        "print(subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    orphan = int(parent.stdout)
    try:
        assert complaints_about(watch, f"process {orphan}")
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert watch.left() == []


def test_a_descriptor_is_found(watch):
    one, other = socket.socketpair()
    assert complaints_about(watch, "socket")
    one.close()
    other.close()
    descriptor = os.memfd_create("paceline-test")
    assert complaints_about(watch, "memfd")
    os.close(descriptor)
    assert watch.left(patience_s=0.0) == []


def test_a_thread_is_found(watch):
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="forgotten")
    thread.start()
    assert complaints_about(watch, "forgotten")
    go_on.set()
    thread.join()


def test_a_temporary_folder_is_found(watch):
    folder = Path(tempfile.mkdtemp(dir=watch.temporary))
    assert complaints_about(watch, folder.name)


@pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
def test_named_shared_memory_is_found(watch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f"torch_{gone.pid}_1_1", f"sem.paceline-abc_1-{gone.pid}-x", f"paceline-{os.getpid()}",
                 f"paceline-chaos-{gone.pid}-abc"):  # fmt: skip
        block = leaks.SHARED_MEMORY / name
        block.touch()
        try:
            assert complaints_about(watch, block.name)
        finally:
            block.unlink()


@pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
def test_a_folder_of_a_living_process_is_its_own(watch):
    folder = leaks.SHARED_MEMORY / f"paceline-chaos-{os.getpid()}-abc"
    folder.mkdir()
    try:
        assert complaints_about(watch, folder.name) == []
    finally:
        folder.rmdir()


@pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
def test_what_lay_there_is_nobodys_although_another_process_had_its_owners_number(tmp_path):
    namesake = subprocess.Popen(["sleep", "60"])
    block = leaks.SHARED_MEMORY / f"torch_{namesake.pid}_1_1"
    block.touch()
    try:
        watch = leaks.Watch(tmp_path)
        namesake.kill()
        namesake.wait()
        assert complaints_about(watch, block.name) == []
    finally:
        block.unlink()
