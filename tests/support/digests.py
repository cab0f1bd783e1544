"""A run's journal, report and model as lines of text that another version of the code must reproduce.

A digest has sections, each a list of lines: what the central strategy decided, what each node decided, what was
observed, the numbers of the report, and the model. They stand apart so that a deliberate change of one of them is told
from a change of the others. Reasons and other words are left out: a better sentence is no other decision.

Times have 9 significant digits and nothing below 0.1 ns. Numbers that come out of tensors have 6, because sums are made
in another order on another processor.
"""

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WORDS = {"reason", "text", "folder"}
LATER = {"queued_down_s", "queued_up_s"}  # fields that the first digests do not have
MEASURED = {"loss", "norm", "mass", "inner_product", "metrics", "change", "changes", "distance", "value", "metric"}
REPORTED = (
    "strategy", "workers", "seed", "seconds", "versions", "pushes", "samples_used", "samples_discarded",
    "wait_fraction", "bytes_up", "bytes_down", "exchanges",
)  # fmt: skip
PER_WORKER = ("clock", "samples", "compute_s", "transfer_s", "wait_s", "lost_s")

Digest = dict[str, list[str]]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal as plain data."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(text) for text in file]


def digest(lines: Iterable[Mapping[str, Any]]) -> Digest:
    """What the lines of a journal say about decisions and observations."""
    found: Digest = {"decisions": [], "observations": []}
    for line in lines:
        match line["type"]:
            case "header":
                for section in found:
                    found[section].append(f"header strategy={line['strategy']} workers={line['workers']}")
            case "decision":
                found["decisions"].append(_decision(line))
            case "peer_decision":  # the order between nodes says nothing
                section = found.setdefault(f"decisions of node {line['node']}", [])
                section.append(f"life {line['life']}: {_decision(line)}")
            case "observation":
                found["observations"].append(_observation(line))
    return found


def with_report(found: Digest, report: Any) -> Digest:
    """The numbers of a report that hold no time of the machine."""
    text = [f"{name} {shown(getattr(report, name))}" for name in REPORTED]
    text += [f"staleness {shown([report.staleness.mean, report.staleness.p95, report.staleness.max])}"]
    text += [f"{name} {shown(value, 6)}" for name, value in sorted(report.metrics.items())]
    for worker in report.per_worker:
        text.append(f"worker {worker.worker}: {shown([getattr(worker, name) for name in PER_WORKER])}")
    for name, reads in sorted((report.table_reads or {}).items()):
        text.append(f"reads of {name}: {shown([reads.rows, reads.max_age, reads.ages])}")
    if report.target is not None:
        text.append(f"target {report.target.metric} at {shown(report.target.reached_at_seconds)}")
    text.append(f"warnings {len(report.warnings)}")
    return {**found, "report": text}


def with_values(found: Digest, section: str, tensors: Mapping[str, Any]) -> Digest:
    """Of each tensor or array its shape, its norm and a sum in which every element has a weight of its own."""
    text = []
    for name, tensor in sorted(tensors.items()):
        values = [float(value) for value in tensor.reshape(-1).tolist()]
        norm = math.sqrt(math.fsum(value * value for value in values))
        weighted = math.fsum(value * math.cos(place) for place, value in enumerate(values))
        text.append(f"{name} {'x'.join(map(str, tensor.shape))} norm={shown(norm, 6)} sum={shown(weighted, 6)}")
    return {**found, section: text}


def _decision(line: Mapping[str, Any]) -> str:
    event = line["event"]
    actions = " ; ".join(_told(action) for action in line["actions"])
    return f"{shown(event['at'])} {_told({key: value for key, value in event.items() if key != 'at'})} -> {actions}"


def _told(part: Mapping[str, Any]) -> str:
    return " ".join([part["kind"], *_fields(part)])


def _fields(part: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={shown(value, 6 if name in MEASURED else 9)}"
        for name, value in part.items()
        if name not in WORDS | LATER and name != "kind" and value is not None and value is not False
    ]


def _observation(line: Mapping[str, Any]) -> str:
    worker = f" w{line['worker']}" if line.get("worker") is not None else ""
    data = line.get("data", {})
    kind = [f"kind={data['kind']}"] if "kind" in data else []
    return " ".join([f"{shown(line['at'])} {line['what']}{worker}", *kind, *_fields(data)])


def shown(value: Any, digits: int = 9) -> str:
    """One spelling of a number, whatever types it comes in; lists and mappings in brackets."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        rounded = round(value, 10) if math.isfinite(value) and abs(value) < 1e-9 else value
        return f"{rounded + 0.0:.{digits}g}"
    if isinstance(value, Mapping):
        parts = (f"{name}:{shown(part, digits)}" for name, part in value.items() if name not in WORDS)
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(shown(part, digits) for part in value) + "]"
    return str(value)


def as_text(found: Digest) -> str:
    return "".join(f"== {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in sorted(found.items()))


def from_text(text: str) -> Digest:
    found: Digest = {}
    for line in text.splitlines():
        if line.startswith("== "):
            section = found.setdefault(line[3:], [])
        else:
            section.append(line)
    return found


def differences(kept: Digest, found: Digest) -> list[str]:
    """The first difference of each section that has one, with the last line that both have."""
    told = []
    for section in sorted(kept.keys() | found.keys()):
        old, new = kept.get(section, []), found.get(section, [])
        if old == new:
            continue
        place = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
        place = min(len(old), len(new)) if place is None else place
        before, was, comes = (lines[at] if 0 <= at < len(lines) else "nothing"
                              for lines, at in ((old, place - 1), (old, place), (new, place)))  # fmt: skip
        told.append(
            f"{section}: line {place + 1} differs (kept {len(old)} lines, found {len(new)})\n"
            f"  before: {before}\n  kept:   {was}\n  found:  {comes}"
        )
    return told
