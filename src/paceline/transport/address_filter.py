"""Addresses that a listening socket does not hear for a while: the kernel drops what they send to it.

Whoever connects without a key costs this process a handshake, and a flood of such connections most of a core. So an
address with many connections that have shown no key is not heard: a filter on the listening socket (classic BPF, which
needs no rights) drops its packets before there is a connection. Connections that exist are not touched, nor is anybody
with another address. Who holds a key behind the same address has to wait, so the time is short, and such a member
connects anew every second (`Security.connect_as`): the kernel's own attempts grow apart, at the same moments as the
strangers'. Beside a flood that goes on it competes with the flood for MOST_KNOCKS places each time.
"""

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable

MOST_KNOCKS = 128  # connections of one address that have shown no key: as many as the kernel accepts ahead
FORGIVEN_S = 20.0  # of them, in each second
# That an address is not heard: twice as long each time, until it keeps quiet. 128 handshakes in 8 s cost little, and a
# machine that has lost its connection is missed after 30 s.
FIRST_S, LONGEST_S = 2.0, 8.0
MOST_ADDRESSES = 200  # in the filter, the newest
_SO_ATTACH_FILTER = 26
_PROTOCOL, _NETWORK = 0xFFFFF000, 0xFFF00000  # offsets: SKF_AD_OFF + SKF_AD_PROTOCOL, SKF_NET_OFF
_LOAD_HALF, _LOAD_WORD, _IF_EQUAL, _RETURN = 0x28, 0x20, 0x15, 0x06
_IPV4, _IPV6 = 0x0800, 0x86DD
_SOURCE = {4: 12, 6: 8}  # where an IP header has it; of IPv6 the network's half counts
_WHOLE = 0xFFFF


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


class Knocks:
    """How often each address has connected without showing a key, and which of them are not heard."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._seen = 0.0
        self._deaf: dict[str, tuple[float, float]] = {}  # until when, and for how long
        self.deaf_to: frozenset[str] = frozenset()

    def knocked(self, address: str) -> None:
        """Count a connection."""
        self._counts[address] = self._counts.get(address, 0.0) + 1.0

    def showed_key(self, address: str) -> None:
        """Forget a connection that turned out to be a member's."""
        if address in self._counts:
            self._counts[address] -= 1.0

    def look(self, now: float) -> bool:
        """Let time pass; return whether other addresses are not to be heard from now on."""
        forgiven, self._seen = FORGIVEN_S * (now - self._seen), now
        for address, count in list(self._counts.items()):
            until, before = self._deaf.get(address, (0.0, 0.0))
            if count > MOST_KNOCKS and until < now:
                seconds = min(LONGEST_S, 2 * before) if before else FIRST_S
                self._deaf[address] = (now + seconds, seconds)
                count = MOST_KNOCKS / 2
            self._counts[address] = count - forgiven
            if count <= forgiven:
                del self._counts[address]
        self._deaf = {a: (until, s) for a, (until, s) in self._deaf.items() if now < until + s}
        heard_not = [address for address, (until, _) in self._deaf.items() if now < until][-MOST_ADDRESSES:]
        changed, self.deaf_to = self.deaf_to != frozenset(heard_not), frozenset(heard_not)
        return changed


def set_filter(listening: int, addresses: Iterable[str]) -> None:
    """Have the kernel drop what these addresses send to this listening socket, and nothing else."""
    code = _program(addresses)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = bytes(_Program(len(code) // 8, ctypes.addressof(buffer)))
    with contextlib.suppress(OSError):  # it is closed already
        found = socket.socket(fileno=listening)
        try:
            found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        finally:
            found.detach()


def _program(addresses: Iterable[str]) -> bytes:
    """Return the filter: for each address, whether the packet's source is it; then the packet passes."""
    steps: list[tuple[int, int, int, int]] = []
    for text in sorted(addresses):
        address = ipaddress.ip_address(text.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        place, words = _SOURCE[address.version], struct.unpack(">IIII"[: 1 + len(address.packed) // 4], address.packed)
        words = words[:2]
        kind = _IPV4 if address.version == 4 else _IPV6
        steps += [(_LOAD_HALF, 0, 0, _PROTOCOL), (_IF_EQUAL, 0, 2 * len(words) + 1, kind)]
        for number, word in enumerate(words):
            rest = 2 * (len(words) - number) - 1
            steps += [(_LOAD_WORD, 0, 0, _NETWORK + place + 4 * number), (_IF_EQUAL, 0, rest, word)]
        steps.append((_RETURN, 0, 0, 0))
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (_RETURN, 0, 0, _WHOLE)])
