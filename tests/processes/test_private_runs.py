"""What other users of the host can see of a run: no port, no socket outside its private folder, no file."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import pytest
from launching import launch
from local_jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


class Watched(Job):
    """Whoever comes to a fifth batch notes which sockets the run's processes have, by their addresses."""

    def before_batch(self, worker, number):
        if number == 4:
            inodes = {name for process in run_of(os.getppid()) for name in sockets_of(process)}
            ports = [row[9] for row in rows("/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp")]
            unix = [row[7] for row in rows("/proc/net/unix") if len(row) > 7 and row[6] in inodes]
            lines = [f"port {inode}" for inode in ports if inode in inodes] + [f"unix {name}" for name in unix]
            (Path(self.notes) / "sockets").write_text("\n".join(lines))


def run_of(launcher):
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    return [int(process) for task in tasks for process in (task / "children").read_text().split()]


def sockets_of(process):
    entries = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        entries = list(Path(f"/proc/{process}/fd").iterdir())
    for entry in entries:
        name = ""
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(entry.readlink())
        if name.startswith("socket:["):
            yield name.removeprefix("socket:[").removesuffix("]")


def rows(*tables):
    return [line.split() for table in tables for line in Path(table).read_text().splitlines()[1:]]


@pytest.mark.parametrize(("transport", "expected"), [("zeromq", {"hub", "mail"}), ("shm", {"mail"})])
def test_no_port_is_opened_and_every_named_socket_is_in_the_private_folder(tmp_path, transport, expected):
    launch(Watched(tmp_path, 60, 3, 4, evaluates=False), strategy="gossip", transport=transport)
    found = (tmp_path / "sockets").read_text().splitlines()
    assert [line for line in found if line.startswith("port")] == []
    names = {Path(line.removeprefix("unix ")) for line in found}
    assert {name.name for name in names} == expected
    assert all(name.parents[2] == Path(tempfile.gettempdir()) for name in names)


@pytest.mark.parametrize("strategy", ["bsp", "gossip"])
def test_whatever_a_run_writes_is_its_owners_alone(tmp_path, strategy):
    before = os.umask(0)
    try:
        run = launch(Job(tmp_path, 60, 2, 4, evaluates=False), tmp_path, strategy=strategy, checkpoint_every="5v")
    finally:
        os.umask(before)
    written = [run.folder.parent, run.folder, *run.folder.rglob("*")]
    assert {"journal.jsonl", "report.json", "run.json", "model.safetensors", "server.log"} <= {p.name for p in written}
    assert any(path.parent.parent.name == "checkpoints" for path in written)
    open_to_others = {path.name: oct(path.stat().st_mode) for path in written if path.stat().st_mode & 0o077}
    assert open_to_others == {}
    assert all(stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600) for path in written)
