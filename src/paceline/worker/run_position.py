"""Where the run stands, as this worker knows it: from its last grant, and from the end of each loop.

Schedulers follow it and `session.progress` shows it. All numbers are the run's, so they mean the same on a fast worker,
a slow one, and one that came late. A loop whose phase was over before this worker came to it leaves the run's numbers
as they were when that phase ended.
"""

import msgspec

from paceline.transport.messages import Standing


class RunProgress(msgspec.Struct, frozen=True):
    """How far the run had come at this worker's last grant, or at the end of the last loop. All workers count.

    `fraction` is the share of the loop's planned samples that are settled, from 0 to 1; it begins again with every loop
    and is 1 after one. `rounds`, `epochs` and `samples` go on from loop to loop.
    """

    fraction: float
    rounds: float
    epochs: float
    samples: int


class RunPosition:
    """The run's numbers, and where the script is: inside a loop or between two."""

    def __init__(self) -> None:
        self.inside = False
        self.granted = False  # this loop has had a grant; without one, the phase was over when the script came to it
        self.phase = -1  # of the latest loop
        self.rounds = 0.0
        self.standing = Standing()
        self.steps = 0  # calls of optimizer.step() by this worker

    @property
    def in_phase(self) -> float:
        """Rounds that the run has done in the latest loop's phase."""
        return self.rounds - self.standing.began

    @property
    def progress(self) -> RunProgress:
        standing = self.standing
        return RunProgress(standing.fraction, self.rounds, standing.epochs, standing.samples)

    def enter(self, phase: int) -> None:
        """Note that the script begins the loop of this phase."""
        self.inside, self.granted, self.phase = True, False, phase
