"""Whether this machine can carry a run: system, cores, memory, descriptors, shared memory, sockets, ports, devices."""

import os
import platform
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from paceline import engines
from paceline.cli.findings import Finding, judged
from paceline.core import worker_count
from paceline.core.machine_limits import available_bytes, granted_cores

GIB = 1 << 30
PROCESS_BYTES = GIB // 4  # of a process that has imported torch; from the nursery they share most of it
OTHER_PROCESSES = 3  # beside the workers: launcher, server, evaluation
USUAL_DESCRIPTORS = 1_024  # what systems give by default; scripts open files and sockets of their own
LOADER_BYTES = GIB  # a `DataLoader` with processes of its own hands batches over in /dev/shm; Docker gives 64 MiB
NAMED_MEMORY = Path("/dev/shm")
NVIDIA = Path("/dev/nvidiactl")
ELSEWHERE = "192.0.2.1"  # reserved for examples: nothing is sent to it, the system only chooses an own address
PATIENCE_S = 5.0


def system() -> Finding:
    """Check the operating system."""
    told = f"{platform.system()} {platform.release()}"
    simulator = engines.simulator()
    fixes = {
        "darwin": "expected to work and untested: report what does not",
        "win32": f"only --engine {simulator} can work; use Linux, or WSL, for real processes",
    }
    fix = fixes.get(sys.platform, f"untested: try --engine {simulator} first")
    return judged("system", sys.platform == "linux", told, "Linux", fix, otherwise="warning")


def cores() -> Finding:
    """Check how much of the processors this process gets."""
    may, there, granted = worker_count.cores(), os.cpu_count() or 1, granted_cores()
    told = f"{may} of {there}" + ("" if granted is None else f", control groups grant {granted:.2g}")
    if granted is not None and granted < may:
        fix = "processes are stopped when it is used up: raise the limit (docker run --cpus), or give --threads 1"
        return Finding("cores", "warning", told, f">= {may} granted", fix)
    fix = "workers take turns on it: allow more (taskset, docker run --cpuset-cpus), or use --engine sim"
    return judged("cores", may >= 2, told, ">= 2", fix, otherwise="warning")


def memory(workers: int) -> Finding:
    """Check that processes with torch fit into what is left, before there is any model."""
    left = available_bytes()
    if left is None:
        return Finding("memory", "warning", "this system does not say how much is left", "", "watch it yourself")
    least, enough = 2 * PROCESS_BYTES, (workers + OTHER_PROCESSES) * PROCESS_BYTES
    told, bound = f"{left / GIB:.1f} GiB available", f">= {enough / GIB:.1f} GiB for {workers} workers"
    fix = "end other programs, raise the control group's limit (docker run --memory), or use fewer workers"
    return judged("memory", left >= enough, told, bound, fix, otherwise="warning" if left >= least else "problem")


def descriptors(workers: int) -> Finding:
    """Check the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitness = engines.fitness()
    need = fitness.descriptors(workers)
    told = f"{fitness.shown_limit(soft)} (hard limit {fitness.shown_limit(hard)})"
    fix = fitness.more_descriptors(workers, soft, hard)
    if 0 <= soft < need:
        return Finding("descriptors", "problem", told, f">= {need} for {workers} workers", fix)
    good = soft < 0 or soft >= USUAL_DESCRIPTORS
    return judged("descriptors", good, told, f">= {USUAL_DESCRIPTORS}", fix, otherwise="warning")


def shared_memory() -> Finding:
    """Share memory as a run does."""
    fitness = engines.fitness()
    wrong = fitness.shared_memory()
    kind = "anonymous" if fitness.has_anonymous_memory() else "files of the temporary folder"
    fix = "allow memfd_create (seccomp), free memory, or train over sockets: --transport zeromq"
    return judged("shared memory", wrong is None, wrong or kind, "", fix)


def loader_memory() -> Finding | None:
    """Check the memory that processes of a `DataLoader` share; None where there is no such place."""
    if not NAMED_MEMORY.is_dir():
        return None
    free = shutil.disk_usage(NAMED_MEMORY).free
    fix = "DataLoader(num_workers > 0) may die of it: docker run --shm-size=2g, or --ipc=host"
    told, bound = f"{free / GIB:.2g} GiB free", f">= {LOADER_BYTES / GIB:g} GiB"
    return judged(str(NAMED_MEMORY), free >= LOADER_BYTES, told, bound, fix, otherwise="warning")


def private_sockets() -> Finding:
    """Connect sockets where a run has its own."""
    wrong = engines.fitness().private_sockets()
    return judged("sockets", wrong is None, wrong or "in a private folder", "", "set TMPDIR to a folder of your own")


def loopback() -> Finding:
    """Listen and connect at a port of the loopback."""
    wrong = _unreachable("127.0.0.1")
    fix = "bring the loopback up (ip link set lo up); `serve`, `join` and clusters on this machine need it"
    return judged("loopback", wrong is None, wrong or "a port answers", "", fix, otherwise="warning")


def own_address() -> Finding:
    """Listen and connect at the address by which other machines know this one."""
    fix = "connect it, or allow it in the firewall; only `serve`, `join` and clusters need it"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
        except OSError as error:
            return Finding("own address", "warning", f"none but the loopback's ({error.strerror})", "", fix)
        address = probe.getsockname()[0]
    wrong = _unreachable(address)
    return judged("own address", wrong is None, wrong or address, "", fix, otherwise="warning")


def _unreachable(address: str) -> str | None:
    try:
        with socket.create_server((address, 0)) as listener:
            listener.settimeout(PATIENCE_S)
            with socket.create_connection(listener.getsockname(), PATIENCE_S), listener.accept()[0]:
                return None
    except OSError as error:
        return f"a port of {address} does not answer: {error.strerror or error}"


def encryption(zmq: Any) -> Finding:
    """Check that hosts can encrypt; `zmq` is what importing it said, a text if it failed."""
    has = isinstance(zmq, dict) and zmq["curve"]
    told = f"ZeroMQ {zmq['version']}{'' if has else ' without CURVE'}" if isinstance(zmq, dict) else "no ZeroMQ"
    fix = "install pyzmq from a wheel; without it `serve` and `join` need --trusted-network"
    return judged("encryption", has, told, "CURVE", fix, otherwise="warning")


def devices(torch: Any) -> Finding:
    """Tell CUDA's devices, each of which was tried; `torch` is what importing it said."""
    if not isinstance(torch, dict):
        return Finding("devices", "warning", "unknown, as torch cannot be imported", "", "see torch")
    there = ", ".join(f"cuda:{number} {name}" for number, name in enumerate(torch["devices"]))
    if torch["failed"]:
        fix = "free or repair it, or hide it: CUDA_VISIBLE_DEVICES="
        return Finding("devices", "problem", f"{there}, which fails: {torch['failed']}", "", fix)
    if there:
        return Finding("devices", "ok", there)
    if NVIDIA.exists():
        built = f"torch is built for CUDA {torch['built']}" if torch["built"] else "torch is built without CUDA"
        said = "".join(f"; {' '.join(text.split())}" for text in torch["said"])
        fix = "install torch for your driver's CUDA, and look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Finding("devices", "warning", f"none, though there is an NVIDIA driver: {built}{said}", "", fix)
    return Finding("devices", "ok", "no CUDA: processors")


def quick_start() -> Finding:
    """Start processes as a run does by default."""
    wrong = engines.fitness().quick_start()
    fix = "nothing must be done: processes start as fresh interpreters, seconds later (--start fresh)"
    return judged("start", wrong is None, wrong or "from a nursery", "nursery", fix, otherwise="warning")
