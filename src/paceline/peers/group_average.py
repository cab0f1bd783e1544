"""The average of a group's models, computed by its members among themselves.

Each member is responsible for one part of the model: the others send it their values of that part, and it sends them
the mean. So each member sends 2 (n - 1) / n models, as in a ring, in two rounds of messages. A member's message may
arrive before the coordinator's Group. If a member leaves during the average, the coordinator starts the next attempt
with the members that are not done.
"""

from collections.abc import Sequence

import torch

from paceline.peers.messages import Group
from paceline.transport.mail import Delivered, Kind, Mail, PeerHeader

Key = tuple[int, int, str]  # round, attempt, kind


class GroupAverage:
    """One node's part in averages, one at a time."""

    def __init__(self, node: int, incarnation: int, mail: Mail) -> None:
        self._node = node
        self._incarnation = incarnation
        self._mail = mail
        self._arrived: dict[Key, dict[int, list[torch.Tensor]]] = {}  # by sender
        self._group = Group(0, 0, [])
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._shapes: list[tuple[torch.dtype, torch.Size]] = []
        self._unsent: list[tuple[int, PeerHeader, list[torch.Tensor]]] = []
        self._means_sent = False
        self.done = True
        self.sent_bytes = 0

    def take(self, delivered: Delivered) -> None:
        """Keep a member's message, for this average or a later one."""
        header = delivered.header
        if (header.round, header.attempt) >= (self._group.round, self._group.attempt):
            self._arrived.setdefault((header.round, header.attempt, header.kind), {})[header.sender] = delivered.values

    def begin(self, group: Group, tensors: Sequence[torch.Tensor]) -> None:
        """Start averaging this node's tensors with the group's."""
        if group.round != self._group.round:
            self.sent_bytes = 0
        self._group = group
        self._arrived = {key: found for key, found in self._arrived.items() if key[:2] >= (group.round, group.attempt)}
        self._shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        kinds = dict.fromkeys(dtype for dtype, _ in self._shapes)
        self._flat = {k: torch.cat([t.detach().cpu().reshape(-1) for t in tensors if t.dtype == k]) for k in kinds}
        self._means_sent = self.done = False
        self._unsent = []
        for part, member in enumerate(group.members):
            if member != self._node:
                self._post(member, "part", part)

    def advance(self) -> bool:
        """Send and average what is possible by now; return whether the average is complete."""
        group, others = self._group, len(self._group.members) - 1
        self._unsent = [waiting for waiting in self._unsent if not self._mail.post(*waiting)]
        parts = self._found("part")
        if not self._means_sent and len(parts) >= others:
            self._means_sent = True
            mine = group.members.index(self._node)
            own = self._cut(mine)
            for place, view in enumerate(own):
                pieces = [parts[m][place].view(view.dtype) if m != self._node else view for m in group.members]
                view.copy_(torch.stack([piece.double() for piece in pieces]).mean(dim=0))
            for member in group.members:
                if member != self._node:
                    self._post(member, "mean", mine)
        means = self._found("mean")
        if self._means_sent and len(means) >= others and not self._unsent and not self.done:
            for part, member in enumerate(group.members):
                if member != self._node:
                    for view, mean in zip(self._cut(part), means[member], strict=True):
                        view.copy_(mean.view(view.dtype))
            self.done = True
        return self.done

    def result(self) -> list[torch.Tensor]:
        """Return the average, in the shapes of the tensors given to `begin`."""
        taken, found = dict.fromkeys(self._flat, 0), []
        for dtype, shape in self._shapes:
            begin = taken[dtype]
            taken[dtype] = begin + shape.numel()
            found.append(self._flat[dtype][begin : taken[dtype]].view(shape))
        return found

    def _found(self, kind: str) -> dict[int, list[torch.Tensor]]:
        found = self._arrived.get((self._group.round, self._group.attempt, kind), {})
        return {member: values for member, values in found.items() if member in self._group.members}

    def _cut(self, part: int) -> list[torch.Tensor]:
        """Return a view of that part of each flat buffer."""
        count = len(self._group.members)
        return [f[len(f) * part // count : len(f) * (part + 1) // count] for f in self._flat.values()]

    def _post(self, member: int, kind: Kind, part: int) -> None:
        group, values = self._group, self._cut(part)
        header = PeerHeader(
            "", self._node, self._incarnation, kind, round=group.round, attempt=group.attempt, part=part
        )
        self.sent_bytes += sum(value.nbytes for value in values)
        if not self._mail.post(member, header, values):
            self._unsent.append((member, header, values))
