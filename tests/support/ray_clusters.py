"""A real Ray cluster for tests: one `ray start` for each machine, on this host or on hosts of a lab (tests/netlab).

Ray's token authentication is on. The process of the tests never loads ray: commands in its forks do.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import leaks
import pytest
from hosts import PATIENCE_S, free_ports

TAG = "PACELINES_TEST_NODE"  # names the processes of one machine, whoever started them
OBJECTS = 80_000_000  # bytes of the object store, which a run does not use


def require():
    """Skip the test where Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'paceline[ray]'")


class Node:
    """One machine of the cluster."""

    def __init__(self, tag, log, process, host=None):
        self.tag = tag
        self.log = log
        self._process = process
        self._host = host

    def processes(self):
        """All processes of this machine, by number."""
        return leaks.processes_with(TAG, self.tag)

    def wait(self):
        """Wait until it is part of the cluster."""
        until = time.monotonic() + PATIENCE_S
        while "Ray runtime started" not in self.log.read_text():
            assert self._process.poll() is None, f"ray start has ended: {self.log.read_text()}"
            assert time.monotonic() < until, f"ray does not start: {self.log.read_text()}"
            time.sleep(0.02)
        return self

    def kill(self):
        """Kill everything at once, as a power cut would."""
        until = time.monotonic() + PATIENCE_S
        if self._host is not None:
            self._host.kill()  # also those whose names have covered their environment
        while found := self.processes():
            assert time.monotonic() < until, f"these do not end: {found}"
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait()


class RayCluster:
    """A head with these processors, and machines that come and go. `lab`: each is a host, the head is the first."""

    def __init__(self, cpus, gpus=0, lab=None, python=sys.executable, environment=None):
        """`python`, `environment`: what Ray runs with, instead of this interpreter's."""
        self._folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets need short names
        self._lab = lab
        self._nodes = []
        self.address = f"{'127.0.0.1' if lab is None else lab.hosts[0].address}:{free_ports() if lab is None else 6379}"
        self._python = python
        self.environment = {
            **(environment or {}),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_health_check_period_ms": "200",  # a dead machine refuses five checks; a slow one has 10 s for each
        }
        (self._folder / "token").write_text(secrets.token_hex(32))
        self._how = ("--head", "--port", self.address.rpartition(":")[2], "--include-dashboard", "false")
        self._cpus, self._gpus = cpus, gpus

    def __enter__(self):
        try:
            self.add(self._cpus, self._gpus, *self._how).wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for node in reversed(self._nodes):
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def head(self):
        return self._nodes[0]

    @property
    def options(self):
        """Of `paceline run`, for a run on this cluster."""
        return ("--engine", "ray", "--address", self.address, "--threads", "1")

    @property
    def logs(self):
        """Everything that Ray has logged, actors included."""
        return {
            log: log.read_text(errors="replace")
            for log in self._folder.glob("head/session_2*/logs/**/*")
            if log.is_file()
        }

    def add(self, cpus, gpus=0, *how, host=None, **variables):
        """Start one more machine; `wait` for it. On a lab it is the next host, or this one, whose machine is gone."""
        number, tag = len(self._nodes), uuid.uuid4().hex
        host = self._lab.hosts[number] if self._lab is not None and host is None else host
        command = [
            self._python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
            "--num-cpus", str(cpus), "--num-gpus", str(gpus), "--object-store-memory", str(OBJECTS),
            *(how or ("--address", self.address)), *(("--temp-dir", str(self._folder / "head")) if how else ()),
            *(() if host is None else ("--node-ip-address", host.address)),
        ]  # fmt: skip
        log = self._folder / f"{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command if host is None else host.command(command), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **self.environment, **variables, TAG: tag},
            )  # fmt: skip
        self._nodes.append(Node(tag, log, process, host))
        return self._nodes[-1]
