"""How fast several workers were together, out of the times at which each finished its updates."""

import itertools
from collections.abc import Sequence

from contenders.questions import Train, Trained, Updated


def common_rate(done: Sequence[Sequence[float]]) -> Updated:
    """Updates per second between the moment the last worker had begun and the moment the first was through."""
    begin, end = max(times[0] for times in done), min(times[-1] for times in done)
    if end <= begin:
        raise ValueError(f"the workers never pushed at the same time ({end:.3f} <= {begin:.3f}): ask for more updates")
    inside = sum(begin < at <= end for times in done for at in times)
    return Updated(inside / (end - begin), sum(len(times) for times in done))


def trained(ends: Sequence[Sequence[float]], task: Train) -> Trained:
    """The answer of a training, from the moments at which each worker's steps ended."""
    settled = [times[task.warmup :] for times in ends]
    rate = common_rate(settled).updates_per_s * task.batch_size
    first = settled[0]
    return Trained(rate, [after - before for before, after in itertools.pairwise(first)])
