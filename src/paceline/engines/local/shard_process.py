"""The process of one shard: it holds a range of the weights and follows the server's commands until the link closes."""

import gc
import socket
import sys
from pathlib import Path

import torch
import zmq

from paceline.core.errors import InternalError
from paceline.engines.local import addresses, scratch
from paceline.engines.local.control import ShardRole, for_child
from paceline.model import own_optimizer
from paceline.shards import commands as c
from paceline.shards.remote_links import CommandLink, RemoteShardEnd
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
    folder = scratch.claim(Path(role.folder))
    if role.server:
        own_optimizer.import_only(())  # importing a module runs it, and who commands is on another machine
    link = _linked(role, frame.descriptors)
    try:
        hub = _listening(role, folder) if role.listens else None
    except zmq.ZMQError as error:
        option = "--shard-at" if role.server else "--listen"
        text = f"{option}: shard {role.shard} cannot listen at {role.listen}, for tensors: {error.strerror}"
        link.send(c.encode(c.Fault("user", text, "")))
        if isinstance(link, Channel):
            link.finish(LAST_WORDS_S)
        link.close()
        return
    host = ShardHost(link, role.shard, role.shards, hub)
    host.introduce()
    gc.collect()
    gc.freeze()
    host.serve(control)
    link.close()


def _linked(role: ShardRole, descriptors: list[int]) -> CommandLink:
    """Return the link to the server."""
    if not role.server:
        return Channel(socket.socket(fileno=descriptors[0]))
    try:
        return RemoteShardEnd(role.server, role.token, role.secret.security, role.knocking_s)
    except Lost:
        sys.exit(f"shard {role.shard} cannot reach the server at {role.server}: see that this port is open there")


def _listening(role: ShardRole, folder: Path) -> ZeromqHub:
    place = role.listen or addresses.of_socket(folder, "hub", over_tcp=role.over_tcp)
    return ZeromqHub(place, role.secret.security)
