"""How the sockets of a run's hosts prove that they belong to it, by keys that all members derive from the join token.

Encrypted, the default: ZeroMQ's CURVE. Both ends prove their keys, and nobody else can read or change a byte. On a
trusted network: a password of the role, derived from the token, is sent in the clear when a connection begins, and
nothing is encrypted. It keeps out whoever is not on the wire; who reads the wire can replay it, and who takes the
server's address is not noticed.

Sockets in a private folder of one host need neither: the kernel tells whose process connects.
"""

from collections.abc import Collection

import zmq
from zmq.utils import z85

from paceline.core.errors import InternalError
from paceline.transport.gatekeeper import CURVE_HELLO, HANDSHAKE_MS, PLAIN_HELLO, Credentials, Gatekeeper
from paceline.transport.join_token import JoinToken, Role

ANSWER_MS = 1_000  # for a listener to answer a connection's first packet: longer than any network's way there and back
WRONG_KEYS = "the join token is another run's, or only one side was started with --trusted-network"


class Security:
    """The keys of one run for the sockets of this process."""

    def __init__(self, token: JoinToken, *, encrypted: bool = True) -> None:
        if encrypted and not zmq.has("curve"):
            raise InternalError("this build of ZeroMQ has no CURVE: install pyzmq from a wheel, or trust the network")
        self.encrypted = encrypted
        self._token = token

    def __repr__(self) -> str:
        return f"Security({self._token!r}, encrypted={self.encrypted})"

    def connect_as(self, socket: "zmq.Socket[bytes]", role: Role, to: Role) -> None:
        """Give the socket this role's key and that of the role it connects to; call it before `connect`.

        A listener may not hear this address for a while (`address_filter.py`), and ZeroMQ's own patience is minutes.
        """
        socket.setsockopt(zmq.CONNECT_TIMEOUT, ANSWER_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if self.encrypted:
            mine = self._token.keys(role)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, mine.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, mine.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._token.keys(to).public)
        else:
            socket.setsockopt(zmq.PLAIN_USERNAME, role.encode("ascii"))
            socket.setsockopt(zmq.PLAIN_PASSWORD, self._token.password(role))

    def listen_as(
        self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", role: Role,
        admits: Collection[Role],
    ) -> Gatekeeper:  # fmt: skip
        """Let the socket admit these roles alone; call it before `bind`, once in a context. Then close the socket by
        what it returns."""
        if self.encrypted:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._token.keys(role).secret)
            keys = [(z85.decode(self._token.keys(one).public),) for one in admits]
            return Gatekeeper(context, socket, Credentials(b"CURVE", keys, CURVE_HELLO))
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        words = [(one.encode("ascii"), self._token.password(one)) for one in admits]
        return Gatekeeper(context, socket, Credentials(b"PLAIN", words, PLAIN_HELLO))
