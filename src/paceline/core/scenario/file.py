"""A scenario: speeds, jitter, network, interference and faults of a cluster, as plain data from a TOML file.

Every engine follows the same file: the simulator takes its times from it, real engines sleep the difference and inject
the events. Reading is strict: unknown keys and invalid values are errors, and so is a file without a cost model,
because a time of zero would look like a result.
"""

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import ScenarioError
from paceline.core.regular_files import read_text
from paceline.core.scenario.faults import MAX_WORKERS, ScenarioEvent, read_events, read_speed
from paceline.core.scenario.jitter import Jitter, read_jitter
from paceline.core.scenario.toml_fields import Fields
from paceline.core.scenario.traces import Cell, Traces
from paceline.core.scenario.words import describe
from paceline.core.values import nearest, shortened, shown

__all__ = [
    "Compute", "Network", "Scenario", "ScenarioEvent", "WorkerSpec", "as_data", "builtin_names", "builtin_text",
    "describe", "from_data", "load", "parse",
]  # fmt: skip

_TOP = ("seed", "compute", "network", "workers", "events", "run")
_NO_JITTER = Jitter()
MAX_BYTES = 256 << 10  # of a file: thousands of workers and events, and read in a second whatever stands in it
MAX_PARTS = 1000  # most dots on one side of an equals sign; a scenario needs one


class Compute(msgspec.Struct, frozen=True):
    """The cost of a sample."""

    seconds_per_sample: float  # at speed 1.0
    jitter: Jitter = _NO_JITTER


class Network(msgspec.Struct, frozen=True):
    """The network between workers and server; without a bandwidth the server's link is unlimited."""

    latency_ms: float = 0.0  # one way
    bandwidth_mbps: float | None = None  # the server's link, each direction
    jitter: Jitter = _NO_JITTER


class WorkerSpec(msgspec.Struct, frozen=True):
    """Speed and link of a worker; all workers of a `[[workers]]` entry share one."""

    speed: float = 1.0
    latency_ms: float | None = None  # None: the network's
    bandwidth_mbps: float | None = None  # of its own link; None: unlimited
    jitter: Jitter = _NO_JITTER  # of its compute times


class Scenario(msgspec.Struct, frozen=True):
    """A cluster and its events; a worker's id is its index in `workers`, and events are in order of time."""

    seed: int
    compute: Compute
    network: Network
    workers: tuple[WorkerSpec, ...]
    events: tuple[ScenarioEvent, ...]
    run: dict[str, Any]
    name: str

    @property
    def count(self) -> int:
        """Number of workers the run starts with."""
        return len(self.workers)

    def groups(self) -> list[tuple[range, WorkerSpec]]:
        """Return runs of consecutive workers with equal specs, as ranges of ids."""
        found: list[tuple[range, WorkerSpec]] = []
        first = 0
        for spec, alike in groupby(self.workers):
            after = first + sum(1 for _ in alike)
            found.append((range(first, after), spec))
            first = after
        return found


def builtin_names() -> list[str]:
    """Return the names of the built-in scenarios."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def builtin_text(name: str) -> str:
    """Return the text of a built-in scenario's file."""
    if name not in builtin_names():
        raise ScenarioError(f"no built-in scenario {shown(name)}; {nearest(name, builtin_names())}")
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def load(target: str | Path) -> Scenario:
    """Load a built-in scenario by name, or a file by path (`./name` for a file with a built-in's name)."""
    if isinstance(target, str) and target in builtin_names():
        return parse(builtin_text(target), target, Path())
    path = Path(target)
    try:
        text = read_text(path, MAX_BYTES)
    except FileNotFoundError:
        raise ScenarioError(
            f"no scenario {shown(str(target))}: neither a file nor built in; {nearest(path.stem, builtin_names())}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScenarioError(
            f"cannot read scenario {shown(str(path))}: {reason}; give the path of a TOML file"
        ) from error
    return _build(_toml(text, path.name), path.stem, path.parent, path.name)


def parse(text: str, name: str, folder: Path) -> Scenario:
    """Read a scenario from the text of a file; trace paths are relative to `folder`."""
    return _build(_toml(text, name), name, folder, name)


def from_data(data: dict[str, Any], folder: Path) -> Scenario:
    """Rebuild a scenario from the result of `as_data`, as held by a journal's header."""
    name = str(data.get("name", "scenario"))
    return _build({key: value for key, value in data.items() if key != "name"}, name, folder, name)


def as_data(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario as plain data in the form of its file: no absolute paths, speeds from tables as numbers."""
    compute, network = scenario.compute, scenario.network
    workers = [
        _without_none(
            count=len(ids),
            speed=spec.speed,
            latency_ms=spec.latency_ms,
            bandwidth_mbps=spec.bandwidth_mbps,
            jitter=None if spec.jitter == compute.jitter else spec.jitter.spec,
        )
        for ids, spec in scenario.groups()
    ]
    return {
        "name": scenario.name,
        "seed": scenario.seed,
        "compute": {"seconds_per_sample": compute.seconds_per_sample, "jitter": compute.jitter.spec},
        "network": _without_none(
            latency_ms=network.latency_ms, bandwidth_mbps=network.bandwidth_mbps, jitter=network.jitter.spec
        ),
        "workers": workers,
        "events": [event.as_data() for event in scenario.events],
        "run": scenario.run,
    }


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _folder() -> Traversable:
    return resources.files("paceline") / "scenarios"


def _toml(text: str, source: str) -> dict[str, Any]:
    try:
        # The parser's time is quadratic in the parts of a dotted key.
        if any(part.count(".") > MAX_PARTS for line in text.splitlines() for part in line.split("=")):
            raise RecursionError
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # including numbers with too many digits and deep nesting
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else shortened(str(error))
        raise ScenarioError(f"{source} is not valid TOML: {reason}; correct the syntax there") from error


def _build(data: dict[str, Any], name: str, folder: Path, source: str) -> Scenario:
    top, traces = Fields(data, source, "", _TOP), Traces(folder)
    compute = _read_compute(top, traces)
    network = _read_network(top, traces)
    speeds = _table_speeds(top, traces)
    workers = _read_workers(top, compute, traces, speeds)
    events = read_events(top, len(workers), speeds)
    _check_links(top, network, workers, events)
    return Scenario(
        seed=top.whole("seed", "give any whole number", at_least=0, at_most=2**63 - 1, default=0),
        compute=compute,
        network=network,
        workers=workers,
        events=events,
        run=_read_run(top),
        name=name,
    )


def _read_compute(top: Fields, traces: Traces) -> Compute:
    fix = "give the seconds a sample takes at speed 1.0, such as seconds_per_sample = 0.002 under [compute]"
    if not top.has("compute"):
        raise top.refusal("has no [compute] table, so no cost model", fix)
    fields = Fields(top.data["compute"], top.source, "[compute]", ("seconds_per_sample", "jitter"))
    return Compute(fields.number("seconds_per_sample", fix, above=0), read_jitter(fields, _NO_JITTER, traces))


def _read_network(top: Fields, traces: Traces) -> Network:
    known = ("latency_ms", "bandwidth_mbps", "jitter")
    fields = Fields(top.data.get("network", {}), top.source, "[network]", known)
    latency_ms = _read_latency(fields)
    return Network(latency_ms or 0.0, _read_bandwidth(fields), read_jitter(fields, _NO_JITTER, traces))


def _read_workers(top: Fields, compute: Compute, traces: Traces, speeds: dict[str, float]) -> tuple[WorkerSpec, ...]:
    groups: list[tuple[WorkerSpec, int]] = []
    free = MAX_WORKERS
    for number, entry in enumerate(top.tables("workers"), 1):
        known = ("count", "speed", "latency_ms", "bandwidth_mbps", "jitter")
        fields = Fields(entry, top.source, f"[[workers]] {number}", known)
        fix = f"a scenario holds 1 to {MAX_WORKERS} workers"
        count = fields.whole("count", fix, at_least=1, at_most=free, default=1)
        free -= count
        jitter = read_jitter(fields, compute.jitter, traces)
        spec = WorkerSpec(read_speed(fields, speeds), _read_latency(fields), _read_bandwidth(fields), jitter)
        groups.append((spec, count))
    if not groups:
        raise top.refusal("has no workers", "add a [[workers]] entry with count and speed")
    return tuple(chain.from_iterable(repeat(spec, count) for spec, count in groups))


def _check_links(
    top: Fields, network: Network, workers: tuple[WorkerSpec, ...], events: tuple[ScenarioEvent, ...]
) -> None:
    """Refuse a slow link of a worker whose messages take no time: it would slow nothing down."""
    for event in events:
        if event.kind != "slow_link" or network.bandwidth_mbps is not None:
            continue
        for worker in event.workers or range(len(workers)):
            spec = workers[worker] if worker < len(workers) else WorkerSpec()  # a newcomer has no link of its own
            if event.workers and spec.bandwidth_mbps is not None:
                continue
            if not (network.latency_ms if spec.latency_ms is None else spec.latency_ms):
                whose = f"worker {worker}'s messages take" if event.workers else "a message takes"
                raise top.refusal(
                    f"[[events]] (slow_link) at {event.at:g} s slows nothing down: {whose} no time",
                    "give latency_ms or bandwidth_mbps under [network] or in its [[workers]] entry",
                )


def _read_latency(fields: Fields) -> float | None:
    fix = "give the milliseconds one way"
    return fields.number("latency_ms", fix, at_least=0) if fields.has("latency_ms") else None


def _read_bandwidth(fields: Fields) -> float | None:
    fix = "give megabits per second, or leave it out for no limit"
    return fields.number("bandwidth_mbps", fix, above=0) if fields.has("bandwidth_mbps") else None


def _read_run(top: Fields) -> dict[str, Any]:
    run = top.data.get("run", {})
    return dict(Fields(run, top.source, "[run]", run if isinstance(run, dict) else ()).data)


def _table_speeds(top: Fields, traces: Traces) -> dict[str, float]:
    """Read every speed of the form trace:FILE:ROW:COLUMN and divide by the largest, so that the fastest is 1."""
    wanted: dict[str, dict[str, Cell]] = {}  # by file, each cell under its text
    for key in ("workers", "events"):
        for number, entry in enumerate(top.tables(key), 1):
            spec = entry.get("speed") if isinstance(entry, dict) else None
            if isinstance(spec, str):
                kind, _, rest = spec.partition(":")
                parts = rest.rsplit(":", 2)  # a path may contain colons, row and column may not
                if kind != "trace" or len(parts) != 3:
                    fields = Fields(entry, top.source, f"[[{key}]] {number}", entry)
                    fix = "write a number such as 0.5, or trace:FILE:ROW:COLUMN"
                    raise fields.refusal(f"speed must be a number or a cell of a table, not {shown(spec)}", fix)
                file, row, column = parts
                wanted.setdefault(file, {})[spec] = (row, column)
    cells: dict[str, float] = {}
    for file, specs in wanted.items():
        found = traces.cells(file, set(specs.values()))
        cells |= {spec: found[cell] for spec, cell in specs.items()}
    largest = max(cells.values(), default=1.0)
    return {spec: cell / largest for spec, cell in cells.items()}
