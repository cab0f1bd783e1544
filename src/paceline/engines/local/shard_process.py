"""The process of one shard: it holds a range of the weights and follows the server's commands until the link closes."""

import gc
import selectors
import socket

import torch

from paceline.core.errors import InternalError
from paceline.engines.local.control import ShardRole, for_child
from paceline.shards.shard_host import ShardHost
from paceline.transport.base import Lost
from paceline.transport.shm import Channel


def main(control: Channel) -> None:
    """Serve until the server closes the link. Raises `Lost` if the launcher is gone."""
    frame = control.receive()
    role = for_child(frame.data) if frame is not None else None
    if frame is None or not isinstance(role, ShardRole):
        raise InternalError(f"the first message of a shard must be its role, not {role!r}")
    torch.set_num_threads(role.threads)
    torch.set_grad_enabled(False)
    link = Channel(socket.socket(fileno=frame.descriptors[0]))
    host = ShardHost(link, role.shard, role.shards)
    gc.collect()
    gc.freeze()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(link, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if control in ready:
                control.collect()
            if link in ready and not _follow(link, host):
                return


def _follow(link: Channel, host: ShardHost) -> bool:
    """Carry out the commands that have come; return False once the server has closed the link."""
    try:
        link.listen()
        while (frame := link.buffered()) is not None:
            host.handle(frame)
    except Lost:
        return False
    return True
