"""What must hold in every journal, judged from its JSON lines alone: docs/reference has journal.md and strategies.md.

This shares no code with paceline, so a misunderstanding that its own checker has in common with it shows here. `faults`
returns one sentence for each breach.
"""

import gzip
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attacks.foreign_nodes import Nodes

Line = dict[str, Any]
Standing = tuple[int, int, int, int]  # versions, pushes, samples used and lost
CLOSE = 1e-9
SINGLE = {"asp", "ssp", "dssp"}  # every push is a version of its own, at once
WHOLE = {"bsp", "fastest_k", "adaptive_k", "adaptive_k_load", "balanced"}  # every version has mass 1
FRESH = {"bsp", "fastest_k", "adaptive_k", "adaptive_k_load", "balanced"}  # every push was computed on the latest one
STEADY = {"asp", "ssp", "dssp", "k_async"}  # a worker's clocks are consecutive


def read(path: Path) -> list[Line]:
    """The lines of a journal; one that was cut short at the end is left out."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    *whole, _ = data.split(b"\n")
    return [json.loads(line) for line in whole]


def faults(lines: Sequence[Line], *, ended: bool = True, whole: bool = False) -> list[str]:
    """What is wrong with a journal; `ended`: it must have its end line; `whole`: and all its data must be used up."""
    checker = Checker()
    for number, line in enumerate(lines, 1):
        checker.at_line = number
        checker.take(line)
    checker.close(ended=ended, whole=whole)
    return checker.found


def options_of(strategy: str) -> tuple[str, dict[str, str]]:
    """A strategy's name and options, from `name:option=value,option=value`."""
    name, _, text = strategy.partition(":")
    return name, dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)


class Grant:
    """Work that a worker has."""

    def __init__(self, through: int, extends: int | None, version: int) -> None:
        self.through, self.extends, self.version = through, extends, version


class Held:
    """A push that has arrived and is not settled."""

    def __init__(self, worker: int, clock: int, version: int, samples: int) -> None:
        self.worker, self.clock, self.version, self.samples = worker, clock, version, samples
        self.left_behind = False  # its process is gone


class Checker:
    """Follows a run, line by line."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.at_line = 0
        self._name, self._options = "", dict[str, str]()
        self._header: Line | None = None
        self._end: Line | None = None
        self._time = -math.inf
        self._restoring = False
        self._version, self._pushes, self._used, self._lost = 0, 0, 0, 0
        self._work: dict[int, int] = {}  # of workers present
        self._idle: dict[int, int] = {}
        self._clocks: dict[int, int] = {}
        self._grants: dict[int, Grant] = {}
        self._held: dict[int, Held] = {}
        self._cancelled: Counter[int] = Counter()  # by an action, whose observation is to follow
        self._last_apply: tuple[list[int], float] | None = None
        self._phases: list[Line] = []
        self._history: list[Standing] = []  # where the run has stood, less what was rolled back
        self._saved: set[int] = set()  # versions of which there is a checkpoint
        self._to_tell: Line | None = None  # what a restored server has to say it has rolled back
        self._nodes = Nodes(self._blame)

    def _blame(self, law: str, what: str) -> None:
        self.found.append(f"line {self.at_line}: {law}: {what}")

    def take(self, line: Line) -> None:
        """Follow one line."""
        if self._end is not None:
            self._blame("the end line is the last", f"{line.get('type')} {line.get('what', '')} follows it")
        kind = line["type"]
        if self._header is None and kind != "header":
            self._blame("a journal begins with its header", f"it begins with {kind}")
            self._header = {}
        if kind == "header":
            self._on_header(line)
        elif kind == "decision":
            self._on_decision(line["event"], line["actions"])
        elif kind == "peer_decision":
            self._nodes.take(line, weighted=self._options.get("form") == "weighted")
        elif kind == "observation":
            self._on_observation(line)
        else:
            self._blame("lines are of four types", kind)
        standing = self._standing()
        if not self._history or self._history[-1] != standing:
            self._history.append(standing)

    def _standing(self) -> "Standing":
        return self._version, self._pushes, self._used, self._lost

    def _on_header(self, line: Line) -> None:
        first, self._header = self._header is None, line
        self._name, self._options = options_of(line["strategy"])
        restored = line["restored"]
        if restored is not None:
            virtual = line["engine"] == "sim"
            if not first:
                self._roll_back(restored, virtual=virtual)
            self._version, self._pushes = restored["version"], restored["pushes"]
            self._used, self._lost = restored["samples_used"], restored["samples_lost"]
            self._work, self._idle, self._clocks, self._grants, self._held = {}, {}, {}, {}, {}
            self._cancelled.clear()
            self._restoring, self._time = True, -math.inf if first else self._time
            self._nodes = Nodes(self._blame, known=virtual)  # a real node may be sent messages of before
        elif not first:
            self._grants = {}

    def _roll_back(self, restored: Line, *, virtual: bool) -> None:
        """Judge where a restored server goes on: where the run once stood, and what came after that is void."""
        names = ("version", "pushes", "samples_used", "samples_lost")
        to: Standing = tuple(restored[name] for name in names)  # type: ignore[assignment]
        if to not in self._history:
            self._blame("a restored server goes on where the run once stood", f"{restored} is no such place")
        else:
            last = len(self._history) - 1 - self._history[::-1].index(to)
            del self._history[last + 1 :]
        if virtual and restored["version"] not in self._saved:
            self._blame("a restored server goes on from a checkpoint", f"there is none of {restored['version']}")
        held = sum(held.samples for held in self._held.values())
        lost = {"versions": self._version - to[0], "samples": self._used - to[2] + held, "pushes": self._pushes - to[1]}
        self._to_tell = lost if any(lost.values()) else None

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _on_decision(self, event: Line, actions: list[Line]) -> None:
        kind = event["kind"]
        if self._restoring and kind == "left":
            return  # of the workers in the checkpoint; what is decided has no effect
        self._restoring = False
        self._must_have_told()
        if event["at"] < self._time:
            self._blame("time goes forward", f"{kind} at {event['at']}, after {self._time}")
        self._time = event["at"]
        if kind == "joined":
            self._idle.pop(event["worker"], None)
            self._work[event["worker"]] = event["work"]
        elif kind == "left":
            self._on_left(event["worker"], event["cause"])
        elif kind == "pushed":
            self._on_pushed(event)
        elif kind == "applied":
            self._on_applied(event)
        for action in actions:
            self._on_action(action, event)

    def _must_have_told(self) -> None:
        if self._to_tell is not None:
            self._blame("what is rolled back is told", f"{self._to_tell} were, and nothing says so")
            self._to_tell = None

    def _on_left(self, worker: int, cause: str) -> None:
        if worker not in self._work and worker not in self._idle:
            self._blame("only who is there can leave", f"worker {worker} leaves ({cause})")
        grant = self._grants.pop(worker, None)
        if grant is not None and cause != "idle":
            self._blame(
                "a leaver's grant is taken back", f"worker {worker} leaves ({cause}) with clock {grant.through}"
            )
        for held in self._held.values():
            held.left_behind |= held.worker == worker
        work = self._work.pop(worker, None)
        self._clocks.pop(worker, None)
        if cause == "idle" and work is not None:
            self._idle[worker] = work
        else:
            self._idle.pop(worker, None)

    def _on_pushed(self, event: Line) -> None:
        worker, push, grant = event["worker"], event["push"], self._grants.pop(event["worker"], None)
        if worker not in self._work:
            self._blame("a worker that is gone does nothing", f"worker {worker} pushes {push}")
        if grant is None:
            self._blame("every push answers a grant", f"push {push} of worker {worker} answers none")
            grant = Grant(event["clock"], None, event["read_version"])
        if event["clock"] != grant.through:
            self._blame("a push is of the granted clock", f"push {push} is of {event['clock']}, not {grant.through}")
        if event["read_version"] != grant.version:
            self._blame(
                "a push is computed on the version of its grant",
                f"push {push} read {event['read_version']}, granted was {grant.version}",
            )
        held = self._held.get(push)
        if grant.extends is not None:
            if grant.extends != push or held is None or held.worker != worker:
                self._blame("a piece extends its own push", f"push {push} of worker {worker}, not {grant.extends}")
            elif event["samples"] < held.samples:
                self._blame("a piece adds samples", f"push {push} falls from {held.samples} to {event['samples']}")
        elif push != self._pushes + 1:
            self._blame("no push arrives twice or is skipped", f"push {push} follows push {self._pushes}")
        self._pushes = max(self._pushes, push)
        if event["samples"] < 0:
            self._blame("samples are counted from 0", f"push {push} has {event['samples']}")
        self._held[push] = Held(worker, event["clock"], event["read_version"], event["samples"])
        self._clocks[worker] = event["clock"]

    def _on_applied(self, event: Line) -> None:
        if event["version"] != self._version:
            self._blame("versions are consecutive", f"applied says {event['version']}, {self._version} were made")
        if self._last_apply is not None:
            pushes, mass = self._last_apply
            if list(event["pushes"]) != pushes or not math.isclose(event["mass"], mass, rel_tol=CLOSE):
                self._blame("applied tells of the apply", f"{event['pushes']} with mass {event['mass']}")

    def _on_action(self, action: Line, event: Line) -> None:
        kind = action["kind"]
        if kind == "apply":
            self._on_apply(action, event)
        elif kind == "discard" and self._held.pop(action["push"], None) is None:
            self._blame("only a held push is discarded", f"push {action['push']}")
        elif kind == "cancel":
            if self._grants.pop(action["worker"], None) is None:
                self._blame("only running work is cancelled", f"worker {action['worker']}")
            self._cancelled[action["worker"]] += 1
        elif kind == "grant":
            self._on_grant(action)

    def _on_apply(self, action: Line, event: Line) -> None:
        pushes, weights = list(action["pushes"]), [float(weight) for weight in action["weights"]]
        if len(set(pushes)) != len(pushes) or len(weights) != len(pushes):
            self._blame("an apply names each push once", f"{pushes} with weights {weights}")
        extended = {grant.extends for grant in self._grants.values()}
        taken = []
        for push in pushes:
            held = self._held.pop(push, None)
            if held is None:
                self._blame("no push is applied twice", f"push {push} is not held")
            elif push in extended:
                self._blame("a push is applied whole", f"push {push} is being extended")
            else:
                taken.append(held)
        mass = math.fsum(weights)
        if any(not weight >= 0 for weight in weights):
            self._blame("weights are not negative", f"{weights}")
        if len(taken) == len(weights):
            if any(held.samples == 0 and weight for held, weight in zip(taken, weights, strict=True)):
                self._blame("a push without samples weighs nothing", f"{pushes} with weights {weights}")
            self._judge_apply(taken, weights, mass, pushes, event)
        self._used += sum(held.samples for held in taken)
        if mass > 0:
            self._version += 1
        self._last_apply = (pushes, mass)

    def _judge_apply(
        self, taken: list[Held], weights: list[float], mass: float, pushes: list[int], event: Line
    ) -> None:
        """The promises of single strategies."""
        name, samples, present = self._name, sum(held.samples for held in taken), set(self._work)
        of_present = [held.worker for held in taken if not held.left_behind]
        if name in SINGLE and (len(taken) != 1 or event["kind"] != "pushed" or event["push"] != pushes[0]):
            self._blame(f"{name} applies every push at once", f"{pushes} at {event['kind']}")
        if name in SINGLE or name == "k_async":
            nominal = sum(self._work.values()) + sum(self._idle.values())
            for held, weight in zip(taken, weights, strict=True):
                if nominal and not math.isclose(weight, held.samples / nominal, rel_tol=CLOSE, abs_tol=CLOSE):
                    self._blame("the mass rule", f"{held.samples} samples of {nominal} weigh {weight}")
        if name in WHOLE and samples:
            if not math.isclose(mass, 1.0, rel_tol=1e-6):
                self._blame("the mass rule", f"a round of {name} has mass {mass}")
            for held, weight in zip(taken, weights, strict=True):
                if not math.isclose(weight, held.samples / samples, rel_tol=1e-6, abs_tol=CLOSE):
                    self._blame("the mass rule", f"{held.samples} of {samples} samples weigh {weight}")
        if name in FRESH and any(held.version != self._version for held in taken):
            self._blame(f"{name} merges pushes on the latest version", f"{pushes} onto {self._version}")
        if name in {"bsp", "fastest_k", "k_async"}:
            wanted = len(present) if name == "bsp" else min(int(self._options["k"]), len(present))
            if len(set(of_present)) != len(of_present):
                self._blame("one push of each worker", f"{pushes} are of workers {of_present}")
            if len(of_present) < wanted or (name == "bsp" and set(of_present) != present):
                self._blame(f"{name} waits for {wanted} of {len(present)}", f"{pushes} are of {of_present}")

    def _on_grant(self, action: Line) -> None:
        worker, through, extends = action["worker"], action["through"], action["extends"]
        if worker not in self._work:
            self._blame("a worker that is gone gets nothing", f"worker {worker} is granted clock {through}")
        if worker in self._grants:
            self._blame("one grant at a time", f"worker {worker} is granted clock {through}")
        if action["work"] < 1:
            self._blame("a grant is of some samples", f"worker {worker} is granted {action['work']}")
        version = self._version
        if extends is not None:
            held = self._held.get(extends)
            if held is None or held.worker != worker or held.clock != through:
                self._blame("a piece extends its own push", f"worker {worker} extends push {extends} at {through}")
            else:
                version = held.version
        elif worker in self._clocks:
            done = self._clocks[worker]
            if through <= done or (self._name in STEADY and through != done + 1):
                self._blame("clocks go on one by one", f"worker {worker} has done {done} and is granted {through}")
        self._clocks.setdefault(worker, through - 1)
        self._judge_lead(worker, through)
        self._grants[worker] = Grant(through, extends, version)

    def _judge_lead(self, worker: int, through: int) -> None:
        option = {"ssp": "staleness", "dssp": "upper"}.get(self._name)
        if option is None:
            return
        bound = float(self._options.get(option, {"ssp": 3, "dssp": 15}[self._name]))
        slowest = min(self._clocks[other] for other in self._work if other in self._clocks)
        if through - 1 - slowest > bound:
            self._blame(
                f"nobody leads by more than {bound:g}", f"worker {worker} begins clock {through}, slowest at {slowest}"
            )

    # -- observations ------------------------------------------------------------------------------------------------

    def _on_observation(self, line: Line) -> None:
        what, data, worker = line["what"], line["data"], line.get("worker")
        if what == "phase":
            self._phases.append(data)
        elif what == "cancelled":
            if data["cause"] == "cancel" and self._cancelled[worker]:
                self._cancelled[worker] -= 1
            elif self._grants.pop(worker, None) is None:
                self._blame("only running work is taken back", f"of worker {worker} ({data['cause']})")
        elif what in ("refused", "skipped"):
            self._lost += data["samples"]
        elif what == "discarded":
            if self._held.pop(data["push"], None) is None:
                self._blame("only a held push is discarded", f"push {data['push']}")
        elif what == "rolled_back":
            if data != self._to_tell:
                self._blame("what is rolled back is told", f"{data} instead of {self._to_tell}")
            self._to_tell = None
        elif what == "checkpoint":
            self._saved.add(data["version"])
            if data["version"] > self._version:
                self._blame("a checkpoint is of a version that exists", f"{data['version']} of {self._version}")
        elif what == "reads":
            self._on_reads(worker, data)
        elif what == "end":
            self._on_end(line)

    def _on_reads(self, worker: int | None, data: Line) -> None:
        bounds = {
            "bsp": 0.0,
            "ssp": float(self._options.get("staleness", 3)),
            "dssp": float(self._options.get("upper", 15)),
        }
        oldest = data["first"] + len(data["ages"]) - 1
        if data["first"] < 0 or oldest > bounds.get(self._name, math.inf):
            self._blame("no read is older than the bound", f"worker {worker} read {data['table']} {oldest} clocks old")

    def _on_end(self, line: Line) -> None:
        self._end, data = line, line["data"]
        self._must_have_told()
        if self._grants and data["cause"] != "error":
            self._blame("every grant is answered or taken back", f"workers {sorted(self._grants)} still have one")
        if data["versions"] != self._version:
            self._blame("versions are consecutive", f"{self._version} were made, the end says {data['versions']}")
        for name, counted in (("samples_used", self._used), ("samples_lost", self._lost)):
            if data[name] != counted:
                self._blame("every sample is counted once", f"{name}: {counted} counted, the end says {data[name]}")
        if self._held and data["cause"] != "error":
            self._blame("every push is settled", f"{sorted(self._held)} are still held at the end")
        whole = all(phase["sampling"] in ("epoch", "shard") and phase["size"] is not None for phase in self._phases)
        if data["cause"] == "done" and whole and self._phases and self._header is not None:
            wanted = sum({phase["phase"]: round(phase["size"] * phase["epochs"]) for phase in self._phases}.values())
            settled, shards = self._used + self._lost, any(phase["sampling"] == "shard" for phase in self._phases)
            if settled < wanted or (settled > wanted and not shards):  # shards end once that many are used
                text = f"{self._used} used and {self._lost} lost of {wanted}"
                self._blame("every sample of every epoch is settled once", text)

    def close(self, *, ended: bool, whole: bool) -> None:
        """Judge what can only be judged at the end."""
        if whole and self._end is not None and self._end["data"]["cause"] != "done":
            self._blame("a run comes to its end", f"it ended by {self._end['data']['cause']}")
        if ended and self._end is None:
            self._blame("a run that is over has its end line", "there is none")
        self._nodes.close()
