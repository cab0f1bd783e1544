"""The process of one shard: it holds a range of the weights and follows the server's commands until the link closes."""

import contextlib
import gc
import selectors
import socket
from pathlib import Path

import torch
import zmq

from paceline.core.errors import InternalError
from paceline.engines.local import addresses, scratch
from paceline.engines.local.control import ShardRole, for_child
from paceline.shards import commands as c
from paceline.shards.remote_workers import RemoteWorkers
from paceline.shards.shard_host import ShardHost
from paceline.transport.base import Lost
from paceline.transport.shm import Channel
from paceline.transport.zeromq import ZeromqHub

LAST_WORDS_S = 5.0


def main(control: Channel) -> None:
    """Serve until the server closes the link. Raises `Lost` if the launcher is gone."""
    frame = control.receive()
    role = for_child(frame.data) if frame is not None else None
    if frame is None or not isinstance(role, ShardRole):
        raise InternalError(f"the first message of a shard must be its role, not {role!r}")
    torch.set_num_threads(role.threads)
    torch.set_grad_enabled(False)
    link = Channel(socket.socket(fileno=frame.descriptors[0]))
    folder = scratch.claim(Path(role.folder))
    try:
        remote = _listening(role, folder) if role.listens else None
    except zmq.ZMQError as error:
        text = f"--listen: shard {role.shard} cannot listen at {role.listen}, for tensors: {error.strerror}"
        link.send(c.encode(c.Fault("user", text, "")))
        link.finish(LAST_WORDS_S)
        return
    host = ShardHost(link, role.shard, role.shards, remote)
    host.introduce()
    gc.collect()
    gc.freeze()
    with contextlib.ExitStack() as last, selectors.DefaultSelector() as selector:
        if remote is not None:
            last.callback(remote.close)
            selector.register(remote, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        selector.register(link, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if control in ready:
                control.collect()
            if link in ready and not _follow(link, host):
                return
            if remote in ready:
                host.pump()


def _listening(role: ShardRole, folder: Path) -> RemoteWorkers:
    place = role.listen or addresses.of_socket(folder, "hub", over_tcp=role.over_tcp)
    return RemoteWorkers(ZeromqHub(place, role.secret.security))


def _follow(link: Channel, host: ShardHost) -> bool:
    """Carry out the commands that have come; return False once the server has closed the link."""
    try:
        link.listen()
        while (frame := link.buffered()) is not None:
            host.handle(frame)
    except Lost:
        return False
    return True
