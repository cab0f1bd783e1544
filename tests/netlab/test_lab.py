"""The lab itself: what crosses a cable is counted and held to its rate, a cut is silence, and nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import netlab
from netlab import Host, Lab, LabError, keeper, lab

PYTHON = [sys.executable, "-I", "-S", "-c"]
PORT = 5000  # free on every host of a lab
MEGABYTE = 1 << 20

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listening:
    print("listening", flush=True)
    while True:
        with listening.accept()[0] as connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
"""
SINK = """
import socket, sys, threading
def swallow(connection):
    while connection.recv(1 << 16): pass
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listening:
    print("listening", flush=True)
    while True:
        threading.Thread(target=swallow, args=(listening.accept()[0],), daemon=True).start()
"""
LINES = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    for line in sys.stdin:
        connection.sendall(line.encode())
        print(connection.recv(1 << 16).decode(), end="", flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
OWNER = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from netlab import Lab, keeper
with Lab(2) as lab:
    daemon = "import os, time\\nif os.fork() == 0:\\n os.setsid()\\n time.sleep(3600)"
    lab.hosts[0].run([sys.executable, "-c", daemon])
    lab.hosts[1].popen(["sleep", "3600"])
    while not all(host.processes() for host in lab.hosts):
        time.sleep(0.01)
    processes = [lab.keeper_pid, *(pid for host in lab.hosts for pid in host.processes())]
    facts = {
        "keeper": lab.keeper_pid,
        "processes": {pid: keeper.started_at(pid) for pid in processes},
        "groups": [held["group"] for held in lab.held if held["group"]],
    }
    print(json.dumps(facts), flush=True)
    time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def possible() -> None:
    netlab.require()


@contextlib.contextmanager
def serving(host: Host, program: str = ECHO) -> Iterator[None]:
    """A server on the host, which listens."""
    with host.popen([*PYTHON, program, host.address, str(PORT)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def talking(host: Host, to: Host) -> Iterator["subprocess.Popen[str]"]:
    """A connection that sends the lines it is given and prints what comes back."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with host.popen([*PYTHON, LINES, to.address, str(PORT)], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def until(condition: Any) -> None:
    """A test that waits in vain is ended by its time limit."""
    while not condition():
        time.sleep(0.005)


def has_begun(process: "subprocess.Popen[Any]", program: str = "sleep") -> bool:
    """Whether it has entered its host: until then it is the shell that goes there."""
    return Path(f"/proc/{process.pid}/comm").read_text().strip() == program


def remains(facts: dict[str, Any]) -> list[str]:
    """What is left of a lab, in words. The kernel keeps a namespace for a process inside or a descriptor on it."""
    groups = [Path(group) for group in facts["groups"]]
    found = [f"process {pid}" for pid in keeper.processes_in((), groups)]
    found += [f"process {pid}" for pid, at in facts["processes"].items() if keeper.started_at(int(pid)) == at]
    found += [f"group {group}" for group in groups if group.exists()]
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("net:["):
                found.append(f"descriptor {descriptor.name} on a namespace")
    return found


def facts_of(found: Lab) -> dict[str, Any]:
    """What is to be gone after the lab."""
    inside = [pid for host in found.hosts for pid in host.processes()]
    return {
        "keeper": found.keeper_pid,
        "processes": {pid: keeper.started_at(pid) for pid in [found.keeper_pid, *inside]},
        "groups": [held["group"] for held in found.held if held["group"]],
    }


# -- the network -----------------------------------------------------------------------------------------------------


def test_hosts_reach_one_another_and_have_names_of_their_own() -> None:
    own = Path("/proc/self/net/dev").read_text().count(":")
    with Lab(3) as built:
        first, second, third = built.hosts
        with serving(first):
            for host in (second, third):
                with talking(host, first) as connection:
                    say(connection, f"from {host.name}")
                    assert heard(connection) == f"from {host.name}"
        said = third.run(["hostname"], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == third.name == "host2"
        assert Path("/proc/self/net/dev").read_text().count(":") == own, "the machine's own network has changed"


def test_counters_see_what_crosses_a_cable_and_nothing_else(tmp_path: Path) -> None:
    with Lab(2) as built:
        first, second = built.hosts
        with serving(first, SINK):
            second.run([*PYTHON, SEND, first.address, str(PORT), str(MEGABYTE)], check=True)
            sent, received = second.bytes_sent(), first.bytes_received()
            assert MEGABYTE < sent < 1.2 * MEGABYTE
            assert MEGABYTE < received < 1.2 * MEGABYTE
            first.run([*PYTHON, SEND, first.address, str(PORT), str(MEGABYTE)], check=True)
            shared = "/dev/shm" if Path("/dev/shm").is_dir() else tmp_path
            with contextlib.ExitStack() as clean:
                block = Path(shared) / f"paceline-netlab-test-{os.getpid()}"
                clean.callback(block.unlink, missing_ok=True)
                first.run(["dd", "if=/dev/zero", f"of={block}", "bs=1M", "count=1"], check=True, capture_output=True)
                counted = second.run(["wc", "-c", block], check=True, capture_output=True, text=True)
                assert counted.stdout.split()[0] == str(MEGABYTE), "the hosts do not share memory"
        assert second.bytes_sent() + first.bytes_received() - sent - received < 10_000


def test_rates_hold_and_can_be_changed() -> None:
    """The slow host has sent little when the fast one is done: no clock is needed to see that."""
    with Lab(3, rate=[None, "1mbit", "30mbit"]) as built:
        first, slow, fast = built.hosts
        with serving(first, SINK):
            sending = slow.popen([*PYTHON, SEND, first.address, str(PORT), str(MEGABYTE)])
            until(lambda: slow.bytes_sent() > 10_000)
            fast.run([*PYTHON, SEND, first.address, str(PORT), str(MEGABYTE)], check=True)
            assert slow.bytes_sent() < MEGABYTE / 2 < MEGABYTE < fast.bytes_sent()
            for host in (slow, fast):
                queues = host.shaped()
                assert queues is not None
                assert queues[0].overlimits > 0, "no frame ever waited"
            assert first.shaped() is None
            slow.shape(None)
            assert slow.shaped() is None
            assert sending.wait() == 0
            first.shape("20mbit")  # what it gets waits in the switch
            fast.shape(None)
            fast.run([*PYTHON, SEND, first.address, str(PORT), str(MEGABYTE)], check=True)
            queues = first.shaped()
            assert queues is not None
            assert queues[1].overlimits > 0
            assert queues[1].bytes > MEGABYTE


def test_a_cut_is_silence_and_the_same_connection_goes_on_after_it() -> None:
    with Lab(2) as built:
        first, second = built.hosts
        with serving(first), talking(second, first) as connection:
            say(connection, "before")
            assert heard(connection) == "before"
            second.cut()
            sent, received = second.bytes_sent(), first.bytes_received()
            say(connection, "during")
            until(lambda: second.bytes_sent() > sent)
            assert first.bytes_received() == received
            second.heal()
            assert heard(connection) == "during"
            say(connection, "after")
            assert heard(connection) == "after"
            assert first.bytes_received() > received


def test_a_host_without_its_cable_keeps_address_and_connections() -> None:
    with Lab(2) as built:
        first, second = built.hosts

        def shown() -> str:
            said = second.run([str(lab._tool("ip")), "-br", "address", "show", "dev", "eth0"], capture_output=True)
            return str(said.stdout.decode())

        with serving(first), talking(second, first) as connection:
            say(connection, "before")
            assert heard(connection) == "before"
            second.unplug()
            until(lambda: "DOWN" in shown())
            assert second.address in shown()
            received = first.bytes_received()
            say(connection, "during")
            assert first.bytes_received() == received
            second.plug_in()
            assert heard(connection) == "during"


def test_two_labs_do_not_see_each_other() -> None:
    with Lab(2) as one, Lab(2) as other:
        assert [host.address for host in one.hosts] == [host.address for host in other.hosts]
        with serving(one.hosts[0]):
            with talking(one.hosts[1], one.hosts[0]) as connection:
                say(connection, "here")
                assert heard(connection) == "here"
                refused = other.hosts[1].run(
                    [*PYTHON, LINES, one.hosts[0].address, str(PORT)], stdin=subprocess.DEVNULL, capture_output=True
                )
            assert b"ConnectionRefusedError" in refused.stderr
            other.hosts[1].kill()
            assert one.hosts[0].processes()
        kept = facts_of(other)
    assert remains(kept) == []


# -- processors ------------------------------------------------------------------------------------------------------


def test_a_host_gets_no_more_than_its_share_of_the_processors() -> None:
    netlab.require(cores=True)
    with Lab(2, cores=[0.2, None]) as built:
        for host in built.hosts:
            host.popen([*PYTHON, "while True: pass"])
        groups = [Path(held["group"]) for held in built.held]

        def throttled(group: Path) -> int:
            return int(dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())["nr_throttled"])

        until(lambda: throttled(groups[0]) > 3)
        assert throttled(groups[1]) == 0


def test_a_host_uses_its_own_processors() -> None:
    mine = sorted(os.sched_getaffinity(0))
    program = "import os; print(sorted(os.sched_getaffinity(0)))"
    with Lab(2, cpus=[[mine[-1]], None]) as built:
        shown = [h.run([*PYTHON, program], capture_output=True, text=True, check=True).stdout for h in built.hosts]
    assert shown == [f"[{mine[-1]}]\n", f"{mine}\n"]


def test_processors_are_shared_out_to_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 4})
    assert lab.split_cpus(2) == [[1, 4], [3]]
    with pytest.raises(LabError, match="4 hosts with processors of their own need as many, and there are 3"):
        lab.split_cpus(4)


def test_a_power_cut_ends_one_host() -> None:
    netlab.require(cores=True)  # what has left its host's network is found by its group alone
    with Lab(2) as built:
        first, second = (host.popen(["sleep", "3600"]) for host in built.hosts)
        inner = built.hosts[0].popen([str(lab._tool("unshare")), "--net", "sleep", "3600"])
        until(lambda: all(map(has_begun, (first, inner, second))))
        assert built.hosts[0].processes() == {first.pid, inner.pid}
        built.hosts[0].kill()
        assert first.wait() == inner.wait() == -signal.SIGKILL
        assert second.poll() is None
        assert [host.processes() for host in built.hosts] == [set(), {second.pid}]


# -- nothing is left -------------------------------------------------------------------------------------------------


def test_leaving_the_block_removes_everything() -> None:
    with Lab(2) as built:
        process = built.hosts[0].popen(["sleep", "3600"])
        until(built.hosts[0].processes)
        facts = facts_of(built)
        assert {f"process {process.pid}", f"process {built.keeper_pid}"} <= set(remains(facts))
    assert remains(facts) == []
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(LabError, match="not open"):
        built.hosts[0].bytes_sent()


def test_a_process_that_is_only_just_started_is_ended_too() -> None:
    for _ in range(5):
        with Lab(1) as built:
            process = built.hosts[0].popen(["sleep", "3600"])
            facts = facts_of(built)
        assert remains(facts) == []
        assert process.returncode is not None


def test_an_exception_removes_everything() -> None:
    facts = {}

    def fail() -> None:
        with Lab(2) as built:
            built.hosts[1].popen(["sleep", "3600"])
            until(built.hosts[1].processes)
            facts.update(facts_of(built))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert remains(facts) == []


def test_a_lab_that_cannot_be_finished_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "SUBNET", "not an address")
    built = Lab(2)
    with pytest.raises(LabError, match="not an address"), built:
        pass
    groups = [held["group"] for held in built.held if held["group"]]
    assert remains({"processes": {}, "groups": groups}) == []
    with pytest.raises(LabError, match="not open"):
        built.hosts[0].kill()


@contextlib.contextmanager
def owned() -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A process with a lab, on whose hosts a daemon and an ordinary process run."""
    command = [sys.executable, "-c", OWNER, str(Path(netlab.__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert len(facts["processes"]) == 3
        yield process, facts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_killed_owner_leaves_nothing(number: signal.Signals) -> None:
    with owned() as (process, facts):
        process.send_signal(number)
        process.wait()
        until(lambda: not remains(facts))


def test_what_a_killed_keeper_leaves_is_removed_by_the_owner() -> None:
    with Lab(2) as built:
        process = built.hosts[0].popen(["sleep", "3600"])
        until(lambda: has_begun(process))
        facts = facts_of(built)
        os.kill(built.keeper_pid, signal.SIGKILL)
        until(lambda: keeper.started_at(facts["keeper"]) is None)
        with pytest.raises(LabError, match="keeper has ended with code -9"):
            built.hosts[0].kill()
    assert remains(facts) == []
    assert process.returncode == -signal.SIGKILL


def test_what_a_killed_keeper_and_owner_leave_is_removed_by_the_next_lab() -> None:
    netlab.require(cores=True)  # only groups have names by which another process finds them
    with owned() as (process, facts):
        os.kill(facts["keeper"], signal.SIGKILL)
        process.kill()
        process.wait()
        until(lambda: keeper.started_at(facts["keeper"]) is None)
        with Lab(1) as built:  # unless that of a test beside this one was faster
            assert remains(facts) == []
            assert Path(built.held[0]["group"]).exists()


def test_only_groups_whose_keeper_is_gone_are_removed() -> None:
    netlab.require(cores=True)
    root = keeper.group_root()
    assert root is not None
    private = root / f"netlab-test-{os.getpid()}"  # where no other lab looks
    mine = f"{os.getpid()}-{keeper.started_at(os.getpid())}"
    private.mkdir()
    try:
        with subprocess.Popen(["sleep", "3600"]) as stray, subprocess.Popen(["true"]) as gone:
            gone.wait()
            names = [f"{gone.pid}-{keeper.started_at(os.getpid())}-0", f"{os.getpid()}-1-0", f"{mine}-0"]
            groups = [keeper.make_group(private, f"{keeper.PREFIX}-{name}", None) for name in names]
            (groups[0] / "cgroup.procs").write_text(str(stray.pid))
            assert set(keeper.stale_groups(private)) == set(groups[:2])
            keeper.remove_stale(private)
            assert stray.wait() == -signal.SIGKILL
            assert [group.exists() for group in groups] == [False, False, True]
    finally:
        for group in [*private.glob(f"{keeper.PREFIX}-*"), private]:
            group.rmdir()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hosts": 0}, "hosts must be from 1 to 200, not 0"),
        ({"rate": "fast"}, "such as 100mbit, not 'fast'"),
        ({"rate": ["1mbit"]}, "rate has 1 values for 2 hosts"),
        ({"cores": 0.01}, "cores must be >= 0.1, not 0.01"),
    ],
)
def test_wrong_arguments_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(LabError, match=told):
        Lab(**{"hosts": 2, **options})


def test_where_no_lab_can_be_built_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 1000)
        assert netlab.why_not() == "a lab needs root to make network namespaces"
        with pytest.raises(LabError, match="needs root"):
            Lab(2)
        with pytest.raises(pytest.skip.Exception, match="needs root"):
            netlab.require()
    with monkeypatch.context() as other:
        other.setattr(lab, "PATH", "/nowhere")
        assert netlab.why_not() == "a lab needs iproute2 and util-linux: apt-get install iproute2 util-linux"
    with monkeypatch.context() as other:
        other.setattr(lab, "PROBE", "ip link add name probe type nothing")
        lab._tried.cache_clear()
        assert "this machine cannot build a lab" in str(netlab.why_not())
    lab._tried.cache_clear()


def test_a_quota_is_looked_for_where_groups_are_mounted(tmp_path: Path) -> None:
    first, second = tmp_path / "cpu,cpuacct", tmp_path / "unified"
    for folder in (first, second):
        folder.mkdir()
    mounts = f"cgroup {first} cgroup rw,cpu,cpuacct 0 0\ncgroup2 {second} cgroup2 rw 0 0\n"
    assert keeper.group_root(mounts) is None
    (second / "cgroup.subtree_control").write_text("cpu memory\n")
    assert keeper.group_root(mounts) == second
    (first / "cpu.cfs_quota_us").write_text("-1\n")
    assert keeper.group_root(mounts) == first
