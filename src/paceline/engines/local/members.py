"""The processes of a run as the server knows them: their links, their memory, and what each was told to do."""

from typing import Protocol

import torch

from paceline.model.regions import SLOTS, Region
from paceline.model.store import out_of_slot
from paceline.server.workers import GrantOrder, Held
from paceline.transport.messages import Hello, ToServer, ToWorker


class Link(Protocol):
    """The server's end of one process's link."""

    @property
    def region(self) -> Region | None: ...

    @property
    def wants_write(self) -> bool: ...

    def flush(self) -> None: ...

    def deliver(self, message: ToWorker) -> None: ...

    def collect(self) -> ToServer | None: ...

    def close(self) -> None: ...


class Member:
    """One process that runs the script: a worker, or the evaluator."""

    def __init__(self, worker: int, incarnation: int, pid: int, link: Link, *, evaluator: bool) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.pid = pid
        self.link = link
        self.evaluator = evaluator
        self.hello: Hello | None = None  # said, and not yet answered
        self.ended = False  # its script came to its end
        self.gone = False  # its process is no more, or it was told to leave
        self.left = False  # without a crash
        self.hung_up = False  # its link is closed
        self.order: GrantOrder | None = None  # the grant it computes
        self.attempt = 0
        self.bytes_down = 0
        self.slot: int = 0  # used last
        self.pushed = False
        self.computing = False  # it was told to and has not pushed since: it may look at messages late
        self.asked_for_state: int | None = None
        self.meant_to_die = False  # its scenario has it so: nobody brings it back but the scenario

    @property
    def name(self) -> str:
        return "the evaluator" if self.evaluator else f"worker {self.worker}"

    @property
    def at_its_end(self) -> bool:
        """Whether its script ended by itself, or it was told to leave."""
        return self.ended or self.left

    def free_slot(self, held: dict[int, Held]) -> int:
        """Where its next push is to lie: not where a held one does, or after that has been copied to another place."""
        region = self.link.region
        if region is None or not held:
            return self.slot
        taken: dict[int, Held] = {}
        for push in held.values():
            gradient = push.gradient
            if push.worker == self.worker and gradient is not None and gradient.slot is not None:
                lies_here = gradient.views is region.slots[gradient.slot].views
                if lies_here:  # and not in the memory of a process before it
                    taken[gradient.slot] = push
        free: int | None = next((slot for slot in (self.slot, *range(SLOTS)) if slot not in taken), None)
        if free is not None:
            self.slot = free
            return free
        oldest = next(iter(taken))  # pushes are held in the order of their coming
        held_gradient = taken[oldest].gradient
        if held_gradient is not None:
            taken[oldest].gradient = out_of_slot(held_gradient)
        self.slot = oldest
        return oldest


def region_of(member: Member) -> Region:
    """Its memory; a process that has prepared a model has one."""
    region = member.link.region
    if region is None:
        raise RuntimeError(f"{member.name} has prepared no model")
    return region


def initial_values(hello: Hello) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The model a worker came with, apart from its memory."""
    return [value.clone() for value in hello.values], [buffer.clone() for buffer in hello.buffers]
