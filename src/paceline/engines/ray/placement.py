"""Ray itself: found or started, asked for a placement group, and what it says when something is missing.

A Ray of our own has a private session folder and an authentication token, which end with it.
"""

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline.core.errors import OptionError
from paceline.core.quantities import resource_amounts
from paceline.core.settings import RunConfig, cluster_address
from paceline.core.worker_count import usual_cpus
from paceline.engines.local import scratch
from paceline.records import private_files
from paceline.records.logs import notice

ANSWER_S = 10.0  # for a cluster's head to accept a connection
NOTICE_S = 5.0  # of waiting for room before that is said
OWN_S = 30.0  # for a Ray of our own, which does not grow, to have what it was started with
SOCKETS = 66  # bytes of the longest socket name below Ray's folder
START = "start one with `ray start --head`, or leave --address out for a Ray of this machine"


def load() -> Any:
    """Import ray, or say what to install."""
    try:
        import ray
    except ImportError as error:
        raise OptionError(f"the ray engine needs Ray ({error}): pip install 'paceline[ray]'") from None
    return ray


@contextlib.contextmanager
def connected(config: RunConfig, workers: int) -> Iterator[bool]:
    """Connect to Ray until the context ends, unless that is done already; yield whether it is a Ray of our own."""
    address = config.address or os.environ.get("RAY_ADDRESS")  # a job has this variable
    if "ray" in sys.modules and load().is_initialized():
        if config.address not in (None, "auto") or config.working_dir is not None:
            raise OptionError("--address, --working-dir: this program is connected already; give them to ray.init()")
        yield False
        return
    with contextlib.ExitStack() as until_the_end:
        options = {"address": address} if address else until_the_end.enter_context(_own(config, workers))
        ray = load()
        if address:
            _require_answer(cluster_address(address))
        travels = {} if config.working_dir is None else {"working_dir": os.fspath(config.working_dir.absolute())}
        until_the_end.callback(ray.shutdown)
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(logging_level=logging.WARNING, runtime_env=travels, **options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            why = f"{reason_of(error)}; {START}" if address else reason_of(error)
            raise OptionError(f"--engine ray: no Ray at {address or 'this machine'}: {why}") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray would end this process; for us it ends the run, with a report
        yield not address


@contextlib.contextmanager
def _own(config: RunConfig, workers: int) -> Iterator[dict[str, Any]]:
    """Yield what a Ray of this machine is started with; afterwards nothing of it is left."""
    folder, before = scratch.make(inside=SOCKETS), set(os.environ)
    try:
        with private_files.open_file(folder / "ray-token", "wb") as file:
            file.write(secrets.token_hex(32).encode())
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", os.fspath(folder / "ray-token"))
        if "ray" not in sys.modules:  # it reads this when it is imported
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Our processes notice when an actor is gone, and remove their files; killed by Ray they could not.
        os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
        cpus, inner = usual_cpus(config, workers), folder / "r"  # Ray lets all users write to the one that it is given
        yield {"address": "local", "num_cpus": cpus, "include_dashboard": False, "_temp_dir": os.fspath(inner)}
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_") and name not in before]:
            del os.environ[name]  # ours, and what Ray has set meanwhile
        scratch.remove(folder)


def _require_answer(address: str) -> None:
    """Raise if nobody is there: Ray would try for long and say little."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise OptionError(f"--address: no Ray answers at {address} ({error.strerror or error}): {START}") from error


def actor_options(resources: str) -> dict[str, Any]:
    """Return the options of an actor that asks for these resources."""
    amounts = resource_amounts(resources)
    usual = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    asked = {option: amounts.pop(name) for name, option in usual.items() if name in amounts}
    return {"num_cpus": 0, **asked, "resources": amounts, "max_restarts": 0}


@contextlib.contextmanager
def placed(config: RunConfig, workers: int, name: str, *, own: bool) -> Iterator[Any]:
    """Yield a placement group for the server, on this machine, remote shards and first workers; remove it then."""
    ray, here = load(), node_address()
    server = {f"node:{here}": 0.001, **resource_amounts(config.server_resources)}  # every machine has such a resource
    asked = f"{config.server_resources or 'nothing'} for the server, on this machine ({here})"
    bundles, remote = [server], config.remote_shards or 0
    for what, count, each in (("shard", remote, config.shard_resources), ("worker", workers, config.worker_resources)):
        if count and not resource_amounts(each):
            raise OptionError(f"--{what}-resources: a {what} must ask for something, such as CPU=0.1")
        bundles += [resource_amounts(each)] * count
        asked += f", {count} times {each} for {what}s" * (count > 0)
    group = ray.util.placement_group(bundles, "SPREAD" if config.spread else "PACK", name)
    try:
        _await(group, OWN_S if own else config.resource_timeout, asked)
        yield group
    finally:
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone, and the group with it
            ray.util.remove_placement_group(group)


def node_address() -> str:
    """Return the address of this machine in the cluster."""
    ray = load()
    own = ray.get_runtime_context().get_node_id()
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own))


def _await(group: Any, patience_s: float, asked: str) -> None:
    until, tell_at = time.monotonic() + patience_s, time.monotonic() + NOTICE_S
    while not group.wait(timeout_seconds=min(1.0, patience_s)):
        if time.monotonic() >= min(until, tell_at):
            text = f"asked for {asked}; the cluster has {_resources()}"
            if time.monotonic() >= until:
                options = "--workers, --worker-resources, --shard-resources, --server-resources"
                fix = f"ask for less ({options}), or raise --resource-timeout"
                raise OptionError(f"no room in the Ray cluster for {patience_s:g} s: {text}; {fix}")
            notice(f"waiting for room in the Ray cluster: {text}")
            tell_at = math.inf


def _resources() -> str:
    """Return what the cluster has, and what of that is free."""
    ray = load()
    free, nodes = ray.available_resources(), sum(node["Alive"] for node in ray.nodes())
    amounts = (
        f"{name}={amount:g} ({free.get(name, 0.0):g} free)"
        for name, amount in sorted(ray.cluster_resources().items())
        if not name.startswith(("node:", "object_store"))
    )
    return ", ".join([f"{nodes} machine{'s' * (nodes != 1)}", *amounts])


def reason_of(error: Exception) -> str:
    """Return what Ray says about a failure or the end of an actor, in one line."""
    fields = ("class_name", "actor_id", "pid", "namespace", "name:", "ip:")
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(fields))[:500] or type(error).__name__
