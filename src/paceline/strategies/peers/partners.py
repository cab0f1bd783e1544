"""Shared bookkeeping of peers: which are present, and which is next.

Present peers are kept in node order, so that a choice does not depend on the order in which they joined. A random
choice costs O(1), one by place O(log n); only a peer that joins or leaves moves the others in the list.
"""

import random
from bisect import bisect_left
from typing import Literal

import msgspec

Choice = Literal["random", "ring", "exponential"]


class Partners(msgspec.Struct):
    """The nodes that this one can exchange with; never itself."""

    node: int = 0
    others: list[int] = []
    draws: int = 0

    def join(self, peer: int) -> None:
        """Add a peer that may be chosen."""
        if peer != self.node and peer not in self:
            self.others.insert(bisect_left(self.others, peer), peer)

    def leave(self, peer: int) -> None:
        """Remove a peer."""
        if peer in self:
            del self.others[bisect_left(self.others, peer)]

    def __contains__(self, peer: int) -> bool:
        place = bisect_left(self.others, peer)
        return place < len(self.others) and self.others[place] == peer

    def draw(self, choice: Choice, rng: random.Random) -> int:
        """Return one of the present peers; there must be one.

        `ring`: the next in node order; `exponential`: in turn the one 1, 2, 4, ... places further; both wrap around.
        """
        others = self.others
        turn, self.draws = self.draws, self.draws + 1
        if choice == "random":
            return others[rng.randrange(len(others))]
        further = 1 if choice == "ring" else 1 << turn % len(others).bit_length()
        here = bisect_left(others, self.node)
        place = (here + further) % (len(others) + 1)  # in the ring of all nodes, in which this one is at `here`
        return others[place if place < here else place - 1]
