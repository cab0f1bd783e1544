"""The shards of a run that are on machines which joined for that (`paceline join --shard`).

They begin with their server and end with it: to a restarted one, what they hold is of no use. A machine outlives that
and holds a shard of the next server, preferably the same one. Machines beyond those needed stand by. A shard connects
to the server, and says there where workers find it; launcher and agent tell it nothing but where the server is.
"""

import secrets

from paceline.engines.hosts.join_listener import JoinedProcess, JoinListener
from paceline.engines.local.control import ShardLinked, ShardRole, encode
from paceline.server.plan import Plan


class RemoteShards:
    """The last shards of the run, as many as are on other machines."""

    def __init__(self, plan: Plan, listener: JoinListener) -> None:
        self._plan = plan
        self._listener = listener
        servers = plan.config.servers
        self._numbers = range(servers - plan.remote_shards, servers)
        self._tokens: dict[JoinedProcess, str] = {}  # of those that were started with the latest server

    @property
    def missing(self) -> int:
        """How many more machines are needed to start a server."""
        return max(0, len(self._numbers) - len(self._listener.free(shard=True)))

    def start(self) -> list[JoinedProcess]:
        """Start all of them."""
        free = self._listener.free(shard=True)
        before = {host.last: host for host in free}
        others = [host for host in free if host.last not in self._numbers or before[host.last] is not host]
        hosts = [before.get(number) or others.pop(0) for number in self._numbers]
        processes = [self._listener.start(host, number) for host, number in zip(hosts, self._numbers, strict=True)]
        self._tokens = {process: secrets.token_hex(16) for process in processes}
        return processes

    def announced(self, process: JoinedProcess) -> ShardLinked:
        """Return what the server is told of a shard."""
        return ShardLinked(process.number, self._tokens[process])

    def send_roles(self, server: str) -> None:
        """Tell all of them where their server is. The join token is not sent: their machines have it."""
        config = self._plan.config
        for process, token in self._tokens.items():
            role = ShardRole(
                process.number, config.servers, config.threads or 1, "", listens=True, server=server, token=token
            )
            process.send(encode(role))

    def process_of(self, shard: int) -> JoinedProcess | None:
        """Return the process of this shard of the latest server; None if it is on the server's machine."""
        return next((process for process in self._tokens if process.number == shard), None)
