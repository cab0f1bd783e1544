"""Shards as threads of the test's own process, behind the same sockets as real ones."""

import contextlib
import threading

import torch

from paceline.shards.shard_host import ShardHost
from paceline.shards.sharded_store import ShardLinks
from paceline.transport.shm import Channel


def _serve(link, shard, shards):
    torch.set_grad_enabled(False)  # of this thread
    host = ShardHost(link, shard, shards)
    host.introduce()
    host.serve()
    link.close()


class ShardDied(Exception):
    """Raised where a coordinator would wait for its end."""


def _died(shard):
    raise ShardDied(f"shard {shard}")


@contextlib.contextmanager
def shard_links(count):
    """Yield the links to so many shards."""
    pairs = [Channel.pair() for _ in range(count)]
    threads = [threading.Thread(target=_serve, args=(theirs, shard, count)) for shard, (_, theirs) in enumerate(pairs)]
    for thread in threads:
        thread.start()
    links = ShardLinks([mine for mine, _ in pairs], _died)
    try:
        yield links
    finally:
        links.close()
        for thread in threads:
            thread.join()
