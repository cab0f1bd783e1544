"""A lab: hosts, the cables between them and a switch, for as long as a `with` block lasts.

                  namespace of the switch
      host0 eth0 ======== port0 \\
      host1 eth0 ======== port1 -- bridge
      host2 eth0 ======== port2 /

Every host has a network and a host name of its own, and nothing else: files, /dev/shm, processes and the clock are this
machine's. So a test must look at the byte counters to know that something went over the network. They are those of the
switch's ports and count whole frames; a large TCP segment that was never cut counts its headers once.

Nothing is added to the machine's own network, and addresses mean nothing outside: several labs at once have the same
ones. What a lab leaves is a control group per host, and the keeper removes it (keeper.py).
"""

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from netlab import keeper

SUBNET = "10.77.0"  # of every lab; the first host has the address .1
MOST_HOSTS = 200
PATH = os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])  # which not every user looks into
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "taskset": "util-linux"}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST_S = 0.002  # a bucket of tokens for so long: timers are late by tens of microseconds when the processors are busy
LEAST_BURST = 1 << 14  # bytes: some ten frames
QUEUE_S = 0.05  # that a frame waits at most in the switch before it is dropped: about 600 KB at 100 Mbit/s
CARD_QUEUE = 1000 * 1514  # bytes that wait in a host: as many frames as a network card's queue has by default
FRAME = 1600  # bytes; a bucket that holds none lets nothing through
START_S = 30.0
PROBE = (
    "ip link add name probe type bridge && ip link add name port type veth peer name eth0 && "
    "tc qdisc add dev eth0 root tbf rate 1mbit burst 64kb latency 50ms"
)

Given = TypeVar("Given")


class LabError(RuntimeError):
    """A lab could not be built or changed."""


class Queue(NamedTuple):
    """What one end of a shaped cable has done, by the kernel's counters."""

    bytes: int  # that went through
    overlimits: int  # how often a frame had to wait for the rate
    drops: int  # frames that found the queue full


def why_not(*, cores: bool = False) -> str | None:
    """Why no lab can be built here; None if one can. With `cores`, one whose hosts have shares of the processors."""
    if sys.platform != "linux":
        return f"a lab needs Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "a lab needs root to make network namespaces"
    missing = {package for tool, package in TOOLS.items() if _tool(tool) is None}
    if missing:
        return f"a lab needs {' and '.join(sorted(missing))}: apt-get install {' '.join(sorted(missing))}"
    if cores and keeper.group_root() is None:
        return "shares of processors need a writable control group with a processor quota"
    return _tried()


def require(*, cores: bool = False) -> None:
    """Skip the test if no lab can be built here."""
    import pytest  # benchmarks use labs without it

    reason = why_not(cores=cores)
    if reason is not None:
        pytest.skip(reason)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=PATH)


@functools.cache
def _tried() -> str | None:
    """Bridge, cable and rate in a namespace that is gone at once; None if they can be made."""
    done = subprocess.run(
        [str(_tool("unshare")), "--net", "/bin/sh", "-c", PROBE],
        env={"PATH": PATH}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"this machine cannot build a lab: {done.stderr.strip()}" if done.returncode else None


class Host:
    """One host of a lab. Commands run as this user, on this machine's files, in the host's network."""

    def __init__(self, lab: "Lab", index: int, cpus: Collection[int] | None) -> None:
        self.index = index
        self.name = f"host{index}"
        self.address = f"{SUBNET}.{index + 1}"
        self._lab = lab
        self._port = f"port{index}"
        self._cpus = None if cpus is None else sorted(cpus)

    def command(self, arguments: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command that runs another one on this host, for callers that start processes themselves.

        It replaces itself: the process has the number that was started, and a signal to it reaches the command. A
        program that is not there ends with code 127.
        """
        held = self._lab.held[self.index]
        enter = [str(_tool("nsenter")), f"--net={held['net']}", f"--uts={held['uts']}", "--"]
        if self._cpus is not None:
            enter += [str(_tool("taskset")), "-c", ",".join(map(str, self._cpus))]
        group = held["group"]
        join = f"echo 0 > {shlex.quote(group)}/cgroup.procs && " if group else ""
        return ["/bin/sh", "-c", f'{join}exec {shlex.join(enter)} "$@"', "sh", *(os.fspath(word) for word in arguments)]

    def popen(self, arguments: Sequence[str | os.PathLike[str]], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process on this host, with the options of `subprocess.Popen`. It is killed when the lab ends."""
        process = subprocess.Popen(self.command(arguments), **options)
        self._lab.started.append(process)
        return process

    def run(self, arguments: Sequence[str | os.PathLike[str]], **options: Any) -> "subprocess.CompletedProcess[Any]":
        """Run a process on this host until it ends, with the options of `subprocess.run`."""
        return subprocess.run(self.command(arguments), **options)

    def entry(self) -> Callable[[], None]:
        """Return what moves a process here for the rest of its life. It can be pickled for a fork with one thread."""
        held = self._lab.held[self.index]
        return functools.partial(keeper.move, held["group"], self._cpus, held["net"], held["uts"])

    def processes(self) -> set[int]:
        """The numbers of all processes on this host."""
        return keeper.processes_in(*self._inside())

    def kill(self) -> None:
        """Kill every process on this host at once, as a power cut would."""
        left = keeper.kill_all(*self._inside())
        if left:
            raise LabError(f"{self.name}: processes {sorted(left)} do not end")

    def _inside(self) -> tuple[set[int], list[Path]]:
        """Its namespace and its group, where it has one: what makes a namespace of its own is still in the group."""
        assert self._lab.keeper_pid  # which holds the namespace: its number is nobody else's
        held = self._lab.held[self.index]
        return {held["namespace"]}, [Path(held["group"])] if held["group"] else []

    def bytes_sent(self) -> int:
        """Bytes that this host has put on its cable; also those that a cut keeps from going further."""
        return self._lab.port_counters(self._port)[0]

    def bytes_received(self) -> int:
        """Bytes that the switch has sent to this host."""
        return self._lab.port_counters(self._port)[1]

    def cut(self) -> None:
        """Let the switch drop all frames from and to this host; it sees silence, and connections stay open."""
        self._lab.on_switch(f"link set dev {self._port} nomaster")

    def heal(self) -> None:
        """Let the switch pass this host's frames again. TCP goes on when it next tries to send."""
        self._lab.on_switch(f"link set dev {self._port} master switch")

    def unplug(self) -> None:
        """Take the cable out: as `cut`, and this host's interface loses its carrier."""
        self._lab.on_switch(f"link set dev {self._port} down")

    def plug_in(self) -> None:
        """Put the cable back in."""
        self._lab.on_switch(f"link set dev {self._port} up")

    def shape(self, rate: str | None, *, burst: int | None = None, queue_s: float = QUEUE_S) -> None:
        """Limit both directions of this host's cable to a rate such as `100mbit`; None takes the limit away.

        After silence, `burst` bytes go through at full speed. What this host sends waits in its own long queue; what it
        gets waits in the switch, which drops a frame that would wait for more than `queue_s`. A cable has no delay.
        """
        if queue_s <= 0:
            raise LabError(f"queue_s must be > 0, not {queue_s}")
        for device, where in (("eth0", self.index), (self._port, None)):
            if rate is None:
                if self._lab.queue(device, where) is not None:
                    self._lab.tool("tc", where, f"qdisc del dev {device} root")
                continue
            bits_per_s = bits_of(rate)
            bucket = max(LEAST_BURST, int(bits_per_s / 8 * BURST_S)) if burst is None else burst
            if bucket < FRAME:
                raise LabError(f"burst must be >= {FRAME} bytes, which is one frame, not {bucket}")
            waiting = f"limit {CARD_QUEUE}b" if where is not None else f"latency {queue_s * 1e6:.0f}us"
            limit = f"rate {bits_per_s:.0f}bit burst {bucket}b {waiting}"
            self._lab.tool("tc", where, f"qdisc replace dev {device} root tbf {limit}")

    def shaped(self) -> tuple[Queue, Queue] | None:
        """The counters of what this host sends and of what it gets; None if its cable has no rate."""
        sends, gets = self._lab.queue("eth0", self.index), self._lab.queue(self._port, None)
        return None if sends is None or gets is None else (sends, gets)


class Lab:
    """Hosts joined by a switch. `rate`, `cores` and `cpus` are one value for all hosts or a sequence with one each.

    `cores` is processor seconds per second that a host gets at most, `cpus` the numbers of the processors it may use.
    Leaving the `with` block kills every process on the hosts.
    """

    def __init__(
        self, hosts: int = 3, *,
        rate: str | Sequence[str | None] | None = None,
        cores: float | Sequence[float | None] | None = None,
        cpus: Collection[int] | Sequence[Collection[int] | None] | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= hosts <= MOST_HOSTS:
            raise LabError(f"hosts must be from 1 to {MOST_HOSTS}, not {hosts}")
        self._rates = _each("rate", hosts, rate, isinstance(rate, str))
        self._cores = _each("cores", hosts, cores, isinstance(cores, int | float))
        numbers = cpus is not None and all(isinstance(number, int) for number in cpus)
        for rated in filter(None, self._rates):
            bits_of(rated)
        for share in self._cores:
            if share is not None and share < keeper.LEAST_SHARE:
                raise LabError(f"cores must be >= {keeper.LEAST_SHARE}, not {share}")
        reason = why_not(cores=any(share is not None for share in self._cores))
        if reason is not None:
            raise LabError(reason)
        self.hosts = [Host(self, index, own) for index, own in enumerate(_each("cpus", hosts, cpus, numbers))]
        self.started: list[subprocess.Popen[Any]] = []
        self.held: list[dict[str, Any]] = []
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Lab":
        keeper.remove_stale(keeper.group_root())
        try:
            self._start_keeper()
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def keeper_pid(self) -> int:
        """The process that holds this lab; it stands in the switch's namespace."""
        if self._keeper is None:
            raise LabError("the lab is not open: use it in a `with` block")
        if self._keeper.poll() is not None:
            raise LabError(f"the lab's keeper has ended with code {self._keeper.returncode}; build the lab again")
        return self._keeper.pid

    def close(self) -> None:
        """Kill every process on the hosts and remove all of it."""
        if self._keeper is None:
            return
        ending, self._keeper = self._keeper, None
        for process in self.started:  # one that has not entered its host yet would not be found there
            process.kill()
        assert ending.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            ending.stdin.write("end\n")
            ending.stdin.flush()
        try:
            _, complaint = ending.communicate(timeout=2 * keeper.PATIENCE_S)
        except subprocess.TimeoutExpired:
            ending.kill()
            _, complaint = ending.communicate()
        if ending.returncode:
            # By group and not by namespace: the kernel may have given the number of one that is gone to another lab's.
            keeper.remove_stale(keeper.group_root())
        for process in self.started:
            process.wait()
        self.started.clear()
        if ending.returncode > 0:
            raise LabError(f"the lab's keeper ended with code {ending.returncode}: {complaint.strip()}")

    def _start_keeper(self) -> None:
        hosts = [{"name": host.name, "cores": cores} for host, cores in zip(self.hosts, self._cores, strict=True)]
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, json.dumps({"owner": os.getpid(), "hosts": hosts})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            return  # `close` tells why
        for held in json.loads(line):
            for kind in ("net", "uts"):
                held[kind] = f"/proc/{self._keeper.pid}/fd/{held[kind]}"
            self.held.append(held)

    def _connect(self) -> None:
        """Switch, cables, addresses, rates."""
        if not self.held:
            raise LabError("the lab's keeper ended at its start")
        switch = ["link set lo up", "link add name switch type bridge mcast_snooping 0", "link set switch up"]
        for host, held in zip(self.hosts, self.held, strict=True):
            port = f"port{host.index}"
            switch += [
                f"link add name {port} type veth peer name eth0 netns {held['net']}",
                f"link set {port} master switch up",
            ]
        self.on_switch(*switch)
        for host in self.hosts:
            up = ["link set lo up", f"address add {host.address}/24 dev eth0", "link set eth0 up"]
            self.tool("ip", host.index, *up)
        for host, rate in zip(self.hosts, self._rates, strict=True):
            if rate is not None:
                host.shape(rate)

    # -- for hosts ---------------------------------------------------------------------------------------------------

    def tool(self, name: str, where: int | None, *lines: str, options: Sequence[str] = ("-batch", "-")) -> str:
        """Give lines to `ip` or `tc` in the network of a host, or of the switch; return what it prints."""
        net = f"/proc/{self.keeper_pid}/ns/net" if where is None else self.held[where]["net"]
        done = subprocess.run(
            [str(_tool("nsenter")), f"--net={net}", "--", str(_tool(name)), *options],
            input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise LabError(f"{name} {'; '.join(lines)}: {done.stderr.strip()}")
        return done.stdout

    def on_switch(self, *lines: str) -> None:
        """Change the switch by lines for `ip`."""
        self.tool("ip", None, *lines)

    def queue(self, device: str, where: int | None) -> Queue | None:
        """The counters of an interface's queue; None if it has no rate."""
        shown = json.loads(self.tool("tc", where, options=("-s", "-j", "qdisc", "show", "dev", device)))
        for queue in shown:
            if queue.get("kind") == "tbf":
                return Queue(queue["bytes"], queue["overlimits"], queue["drops"])
        return None

    def port_counters(self, port: str) -> tuple[int, int]:
        """Bytes that came into a port of the switch and that went out of it."""
        for line in Path(f"/proc/{self.keeper_pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == port:
                counted = numbers.split()
                return int(counted[0]), int(counted[8])
        raise LabError(f"the switch has no {port}")


def split_cpus(hosts: int) -> list[list[int]]:
    """Share this process's processors out to so many hosts, as evenly as it goes."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < hosts:
        raise LabError(f"{hosts} hosts with processors of their own need as many, and there are {len(mine)}")
    return [mine[place::hosts] for place in range(hosts)]


def bits_of(rate: str) -> float:
    """Bits per second of a rate such as `100mbit`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or float(found[1]) == 0:
        raise LabError(f"a rate must be a number > 0 with kbit, mbit or gbit, such as 100mbit, not {rate!r}")
    return float(found[1]) * UNITS[found[2]]


def _each(name: str, hosts: int, given: Any, one: bool) -> list[Any]:
    """One value per host, where `one` value may stand for all."""
    if given is None or one:
        return [given] * hosts
    if len(given) != hosts:
        raise LabError(f"{name} has {len(given)} values for {hosts} hosts; give one for each, or one for all")
    return list(given)
