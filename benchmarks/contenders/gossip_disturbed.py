"""What a slow node costs the others, and what is left of a run in which nodes die and others come."""

import statistics
from typing import Any

import msgspec

from contenders.bars import Bar
from contenders.gossip_runs import SLOW, Job, Ran, run
from contenders.gossip_trials import FIRST_FRESH, row
from contenders.kept_runs import KeptRuns


def disturb(job: Job, repeats: int, mbps: float, kept: KeptRuns) -> tuple[list[Bar], list[dict[str, Any]]]:
    """The chosen trial undisturbed, with one slow node on a line of that bandwidth, and with nodes dying and coming."""
    kinds: dict[str, dict[str, Any]] = {
        "even": {"mbps": mbps}, "one_slow": {"mbps": mbps, "slow": True}, "undisturbed": {}, "faults": {"faults": True},
    }  # fmt: skip
    seeds = range(FIRST_FRESH, FIRST_FRESH + repeats)
    jobs = [msgspec.structs.replace(job, seed=seed, **what) for what in kinds.values() for seed in seeds]
    made = kept.make(run, Ran, jobs)
    runs = {kind: made[i * repeats : (i + 1) * repeats] for i, kind in enumerate(kinds)}
    most = round(statistics.median(ran.bytes for ran in runs["undisturbed"]))
    rows = [{**row("disturbed", kind, job, seed, ran, most), "pace": ran.pace, "waiting": ran.waiting}
            for kind, each in runs.items() for seed, ran in zip(seeds, each, strict=True)]  # fmt: skip
    return judge(runs), rows


def judge(runs: dict[str, list[Ran]]) -> list[Bar]:
    """What must hold."""
    even, slow, calm, faulty = (runs[kind] for kind in ("even", "one_slow", "undisturbed", "faults"))
    pace = statistics.median(s.pace / e.pace for s, e in zip(slow, even, strict=True))
    waiting = statistics.median(s.waiting - e.waiting for s, e in zip(slow, even, strict=True))
    behind = statistics.mean(c.accuracy - f.accuracy for c, f in zip(calm, faulty, strict=True))
    return [
        Bar("slow_node_pace", pace, 0.99, True,
            f"steps per second of the others when one node is {1 / SLOW:g} times slower, against without it"),
        Bar("slow_node_waiting", waiting, 0.01, False, "share of their time that the others wait more because of it"),
        Bar("faults_behind", 100 * behind, 0.5, False,
            "points of accuracy behind the undisturbed run when 2 nodes are killed and 2 join in mid-run"),
    ]  # fmt: skip
