"""Three hosts on this machine, for a person to look at: one serves a run, the others join it.

    make netlab                                                  # digits by dasp, over cables of 100 Mbit/s
    python benchmarks/netlab_demo.py --ray --servers 2           # on a Ray cluster across the hosts, with two servers
    python benchmarks/netlab_demo.py --rate 1gbit --strategy bsp --task mnist --data-dir ../shared/data/mnist
    python benchmarks/netlab_demo.py --rates                     # how fast the hosts are to one another
    python benchmarks/netlab_demo.py 'ip -br address' 'ping -c 3 {host0}'

The run is `paceline serve` on the first host and `paceline join` on each of the others, with a token that was made for
it; after its report stands what went through each host's cable. With `--ray` a Ray cluster spans the hosts, and the run
is `paceline run --engine ray` on its head. Commands of your own run in a shell, the first on the
first host and so on; `{host0}` stands for that host's address. What they print is shown with the host's name in front.
The first one that fails ends them all; after Ctrl-C all may end by themselves, and a second one kills them. Needs root.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from ray_clusters import RayCluster

import results
from netlab import Host, Lab, LabError, bits_of
from paceline.engines.hosts import tokens

PORT = 7000
SECONDS = 0.7  # of each pair, about
UNSHAPED_BYTES = 200_000_000
SINK = """
import socket, sys, time
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listening:
    print("listening", flush=True)
    connection = listening.accept()[0]
    began, count, block = time.perf_counter(), 0, bytearray(1 << 20)
    while got := connection.recv_into(block):
        count += got
    print(count, time.perf_counter() - began)
"""
SOURCE = """
import socket, sys
block, left = bytes(1 << 16), int(sys.argv[3])
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while left > 0:
        connection.sendall(block[:left])
        left -= len(block)
"""


def measure(sender: Host, receiver: Host, count: int) -> dict[str, str | int | float]:
    """Send so many bytes over one TCP connection."""
    before = receiver.bytes_received()
    python = [sys.executable, "-I", "-S", "-c"]
    with receiver.popen([*python, SINK, receiver.address, str(PORT)], stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        sink.stdout.readline()
        sender.run([*python, SOURCE, receiver.address, str(PORT), str(count)], check=True)
        received, seconds = sink.stdout.readline().split()
    return {
        "from": sender.name,
        "to": receiver.name,
        "Mbit/s": round(8 * int(received) / float(seconds) / 1e6, 1),
        "MB sent": int(received) / 1e6,
        "MB counted at the switch": (receiver.bytes_received() - before) / 1e6,
    }


def show_rates(lab: Lab, rate: str | None) -> None:
    """Print what each host gets from each other one."""
    count = UNSHAPED_BYTES if rate is None else int(SECONDS * bits_of(rate) / 8)
    pairs = [(sender, receiver) for sender in lab.hosts for receiver in lab.hosts if sender is not receiver]
    print(results.table([measure(sender, receiver, count) for sender, receiver in pairs]))


def training(folder: Path, given: argparse.Namespace) -> list[str]:
    """The commands of a run: the first host serves, each of the others runs one worker."""
    token = folder / "token"
    tokens.write_new(token)
    program = [sys.executable, "-m", "paceline"]
    where = f"{{host0}}:{PORT}"
    data = [] if given.data_dir is None else ["--data-dir", os.fspath(given.data_dir.resolve())]
    common = ["--token-file", os.fspath(token), "--task", given.task, *data]
    serve = [
        *program, "serve", "--listen", where, "--workers", str(given.hosts - 1), "--threads", "1", "--strategy",
        given.strategy, "--servers", str(given.servers), "--runs-dir", os.fspath(folder / "runs"), *common,
    ]  # fmt: skip
    join = [*program, "join", *common, where]
    return [f"exec {shlex.join(words)}" for words in (serve, *[join] * (given.hosts - 1))]


def train_on_ray(lab: Lab, folder: Path, given: argparse.Namespace) -> int:
    """Train with a Ray cluster across the hosts: the server on the first, which is the head, a worker on each other."""
    data = [] if given.data_dir is None else ["--data-dir", os.fspath(given.data_dir.resolve())]
    command = [
        sys.executable, "-m", "paceline", "run", "--engine", "ray", "--workers", str(given.hosts - 1), "--strategy",
        given.strategy, "--servers", str(given.servers), "--runs-dir", os.fspath(folder / "runs"), "--task", given.task,
        *data,
    ]  # fmt: skip
    with RayCluster(cpus=1, lab=lab) as cluster:
        for _ in lab.hosts[1:]:
            cluster.add(cpus=1).wait()
        print("host0 $", shlex.join(["paceline", *command[3:]]), flush=True)
        variables = {**os.environ, **cluster.environment, "RAY_ADDRESS": cluster.address}
        return int(lab.hosts[0].run(command, env=variables, stdin=subprocess.DEVNULL).returncode)


def show_cables(lab: Lab) -> None:
    """Print how much went through the cable of each host."""
    print("\nthrough the cables, as the switch counted:\n")
    print(results.table([
        {"host": host.name, "address": host.address, "MB sent": host.bytes_sent() / 1e6,
         "MB received": host.bytes_received() / 1e6}
        for host in lab.hosts
    ]))  # fmt: skip


def with_addresses(command: str, hosts: Sequence[Host]) -> str:
    """The command with the addresses of hosts in place of `{host0}` and so on; other braces are the shell's."""
    for host in hosts:
        command = command.replace(f"{{{host.name}}}", host.address)
    return command


def run_commands(lab: Lab, commands: Sequence[str]) -> int:
    """Run a command on each host until all have ended or one has failed; return the code of the first that failed."""
    failed: list[int] = []
    ended = threading.Condition()
    running = [
        host.popen(["/bin/sh", "-c", with_addresses(command, lab.hosts)], stdin=subprocess.DEVNULL,
                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for host, command in zip(lab.hosts, commands, strict=False)
    ]  # fmt: skip
    left = len(running)

    def follow(host: Host, process: "subprocess.Popen[str]") -> None:
        nonlocal left
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{host.name} | {line}", end="", flush=True)
        process.stdout.close()
        code = process.wait()
        print(f"{host.name} | (ended with code {code})", flush=True)
        with ended:
            left -= 1
            if code:
                failed.append(code)
            ended.notify()

    threads = [threading.Thread(target=follow, args=pair) for pair in zip(lab.hosts, running, strict=False)]
    for thread in threads:
        thread.start()
    try:
        with ended:
            try:
                ended.wait_for(lambda: failed or not left)
            except KeyboardInterrupt:  # the commands have got it too
                ended.wait_for(lambda: not left)
    finally:
        for process in running:  # one that has not entered its host yet is not found there
            process.kill()
        for host in lab.hosts:
            host.kill()
        for thread in threads:
            thread.join()
    return failed[0] if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """Build the lab and use it."""
    parser = argparse.ArgumentParser(description="three hosts on this machine")
    parser.add_argument("commands", nargs="*", help="one for each host; without any, the hosts train")
    parser.add_argument("--rates", action="store_true", help="show how fast the hosts are to one another instead")
    parser.add_argument("--ray", action="store_true", help="train on a Ray cluster across the hosts")
    parser.add_argument("--servers", type=int, default=1, help="processes of the first host that hold the weights")
    parser.add_argument("--strategy", default="dasp", help="of the run")
    parser.add_argument("--task", default="digits", help="of the run, a built-in one")
    parser.add_argument("--data-dir", type=Path, help="of the task")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", default="100mbit", help="of each cable, such as 1gbit, or none")
    parser.add_argument("--cores", type=float, help="processor seconds per second that a host gets at most")
    given = parser.parse_args(arguments)
    rate = None if given.rate == "none" else given.rate
    if len(given.commands) > given.hosts:
        parser.error(f"{len(given.commands)} commands for {given.hosts} hosts; raise --hosts")
    if given.hosts < 2 and not given.commands:
        parser.error(f"--hosts must be >= 2, not {given.hosts}: one serves, the others join")
    try:
        with tempfile.TemporaryDirectory() as folder, Lab(hosts=given.hosts, rate=rate, cores=given.cores) as lab:
            if given.rates:
                show_rates(lab, rate)
                return 0
            if given.ray:
                code = train_on_ray(lab, Path(folder), given)
            else:
                code = run_commands(lab, given.commands or training(Path(folder), given))
            if not given.commands:
                show_cables(lab)
            return code
    except LabError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
