"""A scenario in words, so that a user can check what the file means."""

import math
from typing import TYPE_CHECKING

from paceline.core.scenario.faults import ScenarioEvent
from paceline.core.scenario.jitter import Jitter
from paceline.core.values import shown, visible

if TYPE_CHECKING:
    from paceline.core.scenario.file import Network, Scenario, WorkerSpec

SHOWN_GROUPS = 20
SHOWN_EVENTS = 30


def describe(scenario: "Scenario") -> str:
    """Describe the cluster, its best possible throughput and its events."""
    compute = scenario.compute
    lines = [
        f"{scenario.name}: {_counted(scenario.count, 'worker')}, seed {scenario.seed}",
        f"compute: {compute.seconds_per_sample * 1000:g} ms per sample at speed 1; {_jitter(compute.jitter)}",
        f"network: {_network(scenario.network)}",
        "workers:",
    ]
    rate, found = 1 / compute.seconds_per_sample, scenario.groups()
    groups = [
        f"  {_ids(ids)}: speed {spec.speed:.4g}, {spec.speed * rate:,.4g} samples/s{_own(spec, compute.jitter)}"
        for ids, spec in found
    ]
    lines += _shortened(groups, SHOWN_GROUPS, "groups of workers")
    lines.append(_limits(scenario.count, found, rate))
    if scenario.events:
        lines.append("events:")
        lines += _shortened([f"  {_event(event)}" for event in scenario.events], SHOWN_EVENTS, "events")
    if scenario.run:
        lines.append("run: " + ", ".join(f"{key} = {shown(value)}" for key, value in scenario.run.items()))
    return "\n".join(map(visible, lines))


def _limits(count: int, groups: "list[tuple[range, WorkerSpec]]", rate: float) -> str:
    """Compare the throughput of all speeds together with that of all workers at the slowest's pace."""
    speeds = [spec.speed for _, spec in groups]
    together = sum(len(ids) * spec.speed for ids, spec in groups) * rate
    in_step = count * min(speeds) * rate
    if math.isclose(together, in_step):
        return f"at most {together:,.4g} samples/s (jitter, network and events aside); all are equally fast"
    return (
        f"at most {together:,.4g} samples/s (jitter, network and events aside); with equal batches in step with the "
        f"slowest {in_step:,.4g}, {in_step / together:.0%} of that"
    )


def _jitter(jitter: Jitter) -> str:
    match jitter.kind:
        case "none":
            return "no jitter"
        case "lognormal":
            low, high = math.exp(-2 * jitter.sigma), math.exp(2 * jitter.sigma)
            return f"jitter {jitter.spec} (median 1, 95 % of the factors from {low:.3g} to {high:.3g})"
        case "exponential":
            return "jitter exponential (mean 1)"
        case "shifted_exponential":
            return f"jitter {jitter.spec} (at least {jitter.minimum:g}, mean {jitter.mean:g})"
        case "trace":
            rows = sum(map(len, jitter.rows))
            return f"jitter {jitter.spec} ({_counted(len(jitter.rows), 'recorded worker')}, {rows} batch times)"


def _network(network: "Network") -> str:
    if not network.latency_ms and network.bandwidth_mbps is None:
        return "no latency, server link without limit"
    link = "without limit" if network.bandwidth_mbps is None else f"{network.bandwidth_mbps:g} Mbit/s each way"
    return f"{network.latency_ms:g} ms one way, server link {link}; {_jitter(network.jitter)}"


def _own(spec: "WorkerSpec", usual: Jitter) -> str:
    parts = []
    if spec.latency_ms is not None:
        parts.append(f"{spec.latency_ms:g} ms one way")
    if spec.bandwidth_mbps is not None:
        parts.append(f"own link {spec.bandwidth_mbps:g} Mbit/s")
    if spec.jitter != usual:
        parts.append(_jitter(spec.jitter))
    return "".join(f", {part}" for part in parts)


def _event(event: ScenarioEvent) -> str:
    verb = {
        "slow": f"{event.factor or 1:g} times slower",
        "slow_link": ("link" if event.workers else "the server's line") + f" {event.factor or 1:g} times slower",
        "pause": "paused",
        "crash": "crashed",
        "rejoin": "back",
        "leave": "gone",
        "join": f"joined at speed {event.speed:.4g}",
        "partition": "cut off from the rest",
        "server_crash": "the server crashes",
        "duplicate": f"{event.share or 0:.0%} of messages arrive twice",
        "reorder": f"{event.share or 0:.0%} of messages arrive out of order",
    }[event.kind]
    lasts = "" if event.for_s is None else f" for {event.for_s:g} s"
    who = f"{_some(event.workers)}: " if event.workers else ""
    return f"at {event.at:g} s, {who}{verb}{lasts}"


def _some(workers: tuple[int, ...]) -> str:
    first, last = workers[0], workers[-1]
    if workers == tuple(range(first, last + 1)):
        return _ids(range(first, last + 1))
    listed = ", ".join(map(str, workers[:10]))
    return f"workers {listed}" + (f" and {len(workers) - 10} more" if len(workers) > 10 else "")


def _ids(ids: range) -> str:
    return f"worker {ids[0]}" if len(ids) == 1 else f"workers {ids[0]}-{ids[-1]}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _shortened(lines: list[str], most: int, what: str) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"  and {len(lines) - most} more {what}"]
