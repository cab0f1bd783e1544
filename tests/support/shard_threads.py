"""Shards as threads of the test's own process, behind the same links as real ones."""

import contextlib
import secrets
import threading

import torch

from paceline.shards.remote_links import RemoteShardEnd, ShardPort
from paceline.shards.shard_host import ShardHost
from paceline.shards.sharded_store import ShardLinks
from paceline.transport.join_token import new_token
from paceline.transport.security import Security
from paceline.transport.shm import Channel
from paceline.transport.zeromq import ZeromqHub


def _serve(link, shard, shards, hub=None):
    torch.set_grad_enabled(False)  # of this thread
    host = ShardHost(link, shard, shards, hub)
    host.introduce()
    host.serve()
    link.close()


def _serve_from_afar(address, token, security, shard, shards, hub):
    _serve(RemoteShardEnd(address, token, security), shard, shards, hub)


class ShardDied(Exception):
    """Raised where a coordinator would wait for its end."""


def _died(shard):
    raise ShardDied(f"shard {shard}")


@contextlib.contextmanager
def shard_links(count, far=()):
    """Yield the links to so many shards; those with these numbers share no memory: their links are encrypted TCP, as
    all workers' are then."""
    security = Security(new_token())
    port = ShardPort("tcp://127.0.0.1:*", security) if far else None
    hubs = [ZeromqHub("tcp://127.0.0.1:*", security) if far else None for _ in range(count)]
    links, threads = [], []
    for shard in range(count):
        if shard in far:
            token = secrets.token_hex(16)
            links.append(port.expect(token))
            target, given = _serve_from_afar, (port.address, token, security)
        else:
            mine, theirs = Channel.pair()
            links.append(mine)
            target, given = _serve, (theirs,)
        threads.append(threading.Thread(target=target, args=(*given, shard, count, hubs[shard])))
    for thread in threads:
        thread.start()
    made = ShardLinks(links, _died)
    made.security = security  # for workers
    try:
        yield made
    finally:
        made.close()
        for thread in threads:
            thread.join()
