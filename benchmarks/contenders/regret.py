"""The SSP publication's regret bound on a convex problem whose best point is known.

Ho et al., NIPS 2013, theorem 1: with P workers, T updates in all, losses that are convex and L-Lipschitz, and steps
`sigma / sqrt(t)`, `sigma = F / (L sqrt(2 (s + 1) P))`, the losses of all reads exceed those of the best point by at
most `4 F L sqrt(2 (s + 1) P T)`, where any two points x, x' that occur have `|x - x'|^2 / 2 <= F^2`.

A sample's loss is its mean distance along the coordinates, scaled so that L = 1. The best point is the coordinates'
median, since a run uses every sample equally often. `t` counts in the publication's order: clock by clock, and in each
the workers by their numbers.
"""

import math
from collections.abc import Callable

import msgspec
import torch

import paceline
from paceline.core.events import Pushed
from paceline.records.journal import Decision, Lines
from paceline.scenario import Scenario

WIDTH = 3  # coordinates
FAR = 1.0  # from the first point to the samples' centre
NOISE = 0.1
Steps = Callable[[int, int, int], float]  # of an update's number, the bound and the number of workers
F = FAR  # the largest |x - x'| is F sqrt(2); a run that leaves it breaks the theorem's premise and raises


class Regret(msgspec.Struct, frozen=True):
    """What all reads lost beyond the best point, and the most that the theorem allows."""

    found: float
    bound: float
    pushes: int
    bytes_per_clock: float
    wait: float

    @property
    def share(self) -> float:
        """Of the bound."""
        return self.found / self.bound


def samples(count: int) -> torch.Tensor:
    """Points around a centre that lies FAR from the origin."""
    chance = torch.Generator().manual_seed(1)
    centre = torch.full((WIDTH,), FAR / math.sqrt(WIDTH), dtype=torch.float64)
    return centre + NOISE * torch.randn(count, WIDTH, generator=chance, dtype=torch.float64)


def step_size(t: int, staleness: int, workers: int) -> float:
    """The publication's, of the t-th update."""
    return F / math.sqrt(2 * (staleness + 1) * workers) / math.sqrt(t)


class Descent:
    """The script: one sample a clock, and the step that the publication gives its update."""

    def __init__(self, clocks: int, staleness: int, steps: Steps = step_size, bounded: bool = True) -> None:
        self.clocks, self.staleness, self.steps, self.bounded = clocks, staleness, steps, bounded

    def __call__(self) -> None:
        session = paceline.init()
        workers = session.workers
        model = torch.nn.Module()
        model.point = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        data = samples(workers * 8)
        best = data.median(dim=0).values
        rows = torch.utils.data.TensorDataset(data)
        epochs = self.clocks * workers / len(data)
        for clock, (sample,) in enumerate(session.batches(rows, batch_size=1, epochs=epochs)):
            away = float((model.point.detach() - best).norm())
            if self.bounded and away**2 / 2 > F**2:
                raise ArithmeticError(f"a read is {away:.3g} from the best point: F = {F} is not a bound")
            optimizer.zero_grad()
            loss = (model.point - sample[0]).abs().sum() / math.sqrt(WIDTH)
            loss.backward()
            session.report(loss=loss)
            number = clock * workers + session.worker + 1
            # A push of one sample has mass 1 / workers, by which the rate is multiplied.
            optimizer.param_groups[0]["lr"] = workers * self.steps(number, self.staleness, workers)
            optimizer.step()


def measure(script: Descent, strategy: str, scenario: Scenario, seed: int = 0) -> Regret:
    """Run the script in virtual time and add up what its reads lost."""
    lines = Lines()
    done = paceline.launch(
        script, engine="sim", scenario=scenario, strategy=strategy, seed=seed, sink=lines, evaluate_every="off"
    )  # fmt: skip
    events = [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, Pushed)]
    workers, updates = scenario.count, len(events)
    data = samples(workers * 8)
    least = float((data - data.median(dim=0).values).abs().sum()) / math.sqrt(WIDTH) / len(data) * updates
    found = sum(event.loss or 0.0 for event in events) - least
    bound = 4 * F * math.sqrt(2 * (script.staleness + 1) * workers * updates)
    summary = done.summary
    return Regret(found, bound, updates, summary.bytes_down / updates, summary.wait_fraction or 0.0)
