"""The process that holds a lab's namespaces and ends the lab, however its owner ends.

    python -I -S keeper.py '{"owner": 4711, "hosts": [{"name": "host0", "cores": 0.5}, ...]}'

Namespaces have no names here, so no mount has to be undone: they exist as long as this process has them open or a
process is inside. The keeper stays in the namespace of the switch and holds those of the hosts as descriptors, which it
lists in one line of output. When its input says `end`, or when its owner dies, it kills every process inside, removes
the control groups and ends; the kernel then removes namespaces, interfaces and addresses.

Only the control groups have names. They name the keeper, so that the next lab can tell and remove those of a keeper
that was killed itself (`remove_stale`). This file needs nothing but the standard library.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
PREFIX = "paceline-netlab"
NAMED = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<started>\d+)-\d+")
PERIOD_US = 10_000  # of a host's share of the processors; the kernel's own 100 ms would let a host stand still too long
LEAST_SHARE = 0.1  # of a core: the kernel takes no quota below 1 ms
PATIENCE_S = 20.0  # for killed processes to be gone; one that waits for a disk takes a while


# -- processes -------------------------------------------------------------------------------------------------------


def processes_in(namespaces: Collection[int], groups: Iterable[Path] = ()) -> set[int]:
    """Every living process inside network namespaces (given by inode) or control groups, this one not included."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it is gone, or a zombie
                if (folder / "ns" / "net").stat().st_ino in namespaces:
                    found.add(int(folder.name))
    for group in groups:
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
    return found - {os.getpid()}


def kill_all(namespaces: Collection[int], groups: Iterable[Path] = ()) -> set[int]:
    """Kill until none is left, since a dying process may be starting others; return those that would not go."""
    until = time.monotonic() + PATIENCE_S
    while (left := processes_in(namespaces, groups)) and time.monotonic() < until:
        _kill(left)
        time.sleep(0.002)
    return left


def _kill(processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def started_at(pid: int) -> int | None:
    """When a process started, in ticks of this machine; None if it has ended. With the number it is unique."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(facts[18])


# -- control groups --------------------------------------------------------------------------------------------------


def group_root(mounts: str | None = None) -> Path | None:
    """The folder in which control groups with a processor quota can be made; None if there is none.

    A second version whose root does not hand the processor on is left as it is: changing that would outlive the lab.
    """
    for line in (Path("/proc/self/mounts").read_text() if mounts is None else mounts).splitlines():
        _, name, kind, options, *_ = line.split()
        root = Path(name)
        if kind == "cgroup" and "cpu" in options.split(","):
            usable = (root / "cpu.cfs_quota_us").exists()
        elif kind == "cgroup2":
            handed_on = root / "cgroup.subtree_control"
            usable = handed_on.exists() and "cpu" in handed_on.read_text().split()
        else:
            usable = False
        if usable and os.access(root, os.W_OK):
            return root
    return None


def make_group(root: Path, name: str, cores: float | None) -> Path:
    """Make a control group; what runs in it gets at most `cores` seconds of processor time per second."""
    group = root / name
    group.mkdir()
    if cores is not None:
        quota = round(cores * PERIOD_US)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    return group


def end(namespaces: Collection[int], groups: Collection[Path]) -> str:
    """Kill every process inside and remove the control groups; return in words what would not go.

    A process on its way in joins its group first, so the group cannot be removed before it is killed.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        processes = processes_in(namespaces, groups)
        _kill(processes)
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        stuck = [str(group) for group in groups if group.exists()]
        if not processes and not stuck:
            return ""
        if time.monotonic() > until:
            return f"processes {sorted(processes)}, control groups {stuck}"
        time.sleep(0.002)


def stale_groups(root: Path) -> list[Path]:
    """Control groups of labs whose keeper is gone."""
    found = []
    for group in root.glob(f"{PREFIX}-*"):
        named = NAMED.fullmatch(group.name)
        if named is not None and started_at(int(named["pid"])) != int(named["started"]):
            found.append(group)
    return found


def remove_stale(root: Path | None) -> None:
    """Kill what is left of labs whose keeper was killed, and remove their control groups."""
    stale = stale_groups(root) if root is not None else []
    if stale:
        end((), stale)


# -- namespaces ------------------------------------------------------------------------------------------------------


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")


def enter(namespace: str) -> None:
    """Go into a namespace, given by its file; later threads and children are there, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns {namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def move(group: str, cpus: Collection[int] | None, *namespaces: str) -> None:
    """Go into a host's group, onto its processors and into its namespaces."""
    if group:
        Path(group, "cgroup.procs").write_text("0")
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    for namespace in namespaces:
        enter(namespace)


def _enter_new_network(name: str) -> None:
    """Go into a network of its own. IPv6 is off, so that nothing is sent but what tests send."""
    _unshare(CLONE_NEWNET | CLONE_NEWUTS)
    encoded = name.encode()
    ctypes.CDLL(None).sethostname(encoded, len(encoded))
    for scope in ("all", "default"):
        switch = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
        if switch.exists():
            switch.write_text("1")


def _open(kind: str) -> int:
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def main() -> int:
    """Hold the namespaces until the end; 1 if something would not go."""
    given = json.loads(sys.argv[1])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)  # a terminal sends them to all; the owner's end is this one's
    try:
        owner = os.pidfd_open(given["owner"])
    except ProcessLookupError:
        return 0
    if os.getppid() != given["owner"]:  # it died before, and its number belongs to another process
        return 0
    root = group_root()
    namespaces: set[int] = set()
    groups: list[Path] = []
    try:
        hosts = []
        for number, host in enumerate(given["hosts"]):
            _enter_new_network(host["name"])
            net, uts = _open("net"), _open("uts")
            namespaces.add(os.fstat(net).st_ino)
            group = None
            if root is not None:
                name = f"{PREFIX}-{os.getpid()}-{started_at(os.getpid())}-{number}"
                group = make_group(root, name, host["cores"])
                groups.append(group)
            hosts.append({"net": net, "uts": uts, "namespace": os.fstat(net).st_ino, "group": group and str(group)})
        _enter_new_network("switch")
        namespaces.add(Path("/proc/self/ns/net").stat().st_ino)
        print(json.dumps(hosts), flush=True)
        _wait_for_the_end(owner)
    finally:
        left = end(namespaces, groups)
    if left:
        print(f"still there: {left}", file=sys.stderr)
    return 1 if left else 0


def _wait_for_the_end(owner: int) -> None:
    """Until the input has a word or ends, or the owner is gone. A fork of the owner may keep the input open."""
    ended = select.poll()
    ended.register(owner, select.POLLIN)
    ended.register(sys.stdin.fileno(), select.POLLIN)
    ended.poll()


if __name__ == "__main__":
    sys.exit(main())
