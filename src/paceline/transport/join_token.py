"""The join token of a run, and the keys that members derive from it.

A token is one printable line: a prefix with the format's number, then in URL-safe base64 the run's public id, the
secret and a checksum. The checksum is against mistyped, cut and invented tokens; it proves nothing else.

The secret is the whole group's. Whoever holds the token derives every key of the run, those of the server included: it
keeps strangers out, and does not tell members apart. A member can act as any other and as the server, and nobody can be
shut out but by a new token. The token itself is never sent to another member.
"""

import base64
import hashlib
import hmac
import secrets
import string
from typing import Any, Literal, NoReturn, get_args

import zmq
from zmq.utils import z85

from paceline.core.errors import OptionError

FORMAT = 1
PREFIX = f"paceline{FORMAT}-"
RUN_BYTES, SECRET_BYTES, CHECKSUM_BYTES = 8, 32, 5  # 45 bytes: 60 characters of base64 without padding or spare bits
_BODY = (RUN_BYTES + SECRET_BYTES + CHECKSUM_BYTES) * 4 // 3
_ALPHABET = frozenset(string.ascii_letters + string.digits + "-_")
_WHERE = "copy the whole line that `paceline serve` has shown or written"

# node: a worker's mailbox, and whoever writes to it; shard: one of several servers, towards their coordinator
Role = Literal["server", "worker", "node", "shard"]
ROLES: tuple[Role, ...] = get_args(Role)


class _Secret:
    """Something that is neither shown nor serialized."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds a secret and cannot be pickled or copied")


class KeyPair(_Secret):
    """A Curve25519 key pair in ZeroMQ's printable form (Z85)."""

    __slots__ = ("public", "secret")

    def __init__(self, secret: bytes) -> None:
        """`secret` is 32 bytes."""
        self.secret = z85.encode(secret)
        self.public = zmq.curve_public(self.secret)

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class JoinToken(_Secret):
    """A run's public id and its secret. `reveal` alone shows the secret."""

    __slots__ = ("_secret", "run_id")

    def __init__(self, run_id: bytes, secret: bytes) -> None:
        if len(run_id) != RUN_BYTES or len(secret) != SECRET_BYTES:
            raise OptionError(f"a join token has {RUN_BYTES} bytes of run id and {SECRET_BYTES} of secret")
        self.run_id = run_id
        self._secret = secret

    def __repr__(self) -> str:
        return f"JoinToken(run {self.run_id.hex()})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JoinToken):
            return NotImplemented
        return self.run_id == other.run_id and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.run_id)

    def reveal(self) -> str:
        """Return the printable line, which lets its reader join the run."""
        content = self.run_id + self._secret
        return PREFIX + base64.urlsafe_b64encode(content + _checksum(content)).decode("ascii")

    def keys(self, role: Role) -> KeyPair:
        """Return the key pair of this role, the same at every member."""
        return KeyPair(self._derive("curve25519", role))

    def password(self, role: Role) -> bytes:
        """Return what this role shows to join without encryption. It reveals neither the token nor a key."""
        return self._derive("password", role).hex().encode("ascii")

    def _derive(self, purpose: str, role: Role) -> bytes:
        if role not in ROLES:
            raise OptionError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        label = f"paceline {FORMAT} {purpose} run {self.run_id.hex()} role {role}"
        return hmac.digest(self._secret, label.encode("ascii"), hashlib.sha256)


def new_token() -> JoinToken:
    """Make the token of a new run."""
    return JoinToken(secrets.token_bytes(RUN_BYTES), secrets.token_bytes(SECRET_BYTES))


def read_token(text: str) -> JoinToken:
    """Read the line that `reveal` returned; white space around it is ignored. An error shows nothing of the line."""
    line = text.strip()
    if not line:
        raise OptionError(f"the join token is empty; {_WHERE}")
    if not line.startswith(PREFIX):
        raise OptionError(
            f"the join token does not begin with {PREFIX}: it is of another version of paceline, or none; {_WHERE}"
        )
    body = line.removeprefix(PREFIX)
    if len(body) != _BODY:
        raise OptionError(f"the join token must have {_BODY} characters after {PREFIX}, not {len(body)}; {_WHERE}")
    if not set(body) <= _ALPHABET:
        raise OptionError(f"the join token has characters other than letters, digits, - and _; {_WHERE}")
    content = base64.urlsafe_b64decode(body)
    content, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(content)):
        raise OptionError(f"the join token's checksum is wrong: a character was changed; {_WHERE}")
    return JoinToken(content[:RUN_BYTES], content[RUN_BYTES:])


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(f"paceline {FORMAT} checksum ".encode("ascii") + content).digest()[:CHECKSUM_BYTES]
