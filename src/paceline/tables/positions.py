"""Where every worker stands in a checkpoint of tables, so that each of its clocks is in the tables exactly once.

A worker's clocks are numbered: incarnation, barriers passed, clock. It sends its state for a checkpoint at the end of a
clock, when the server has gone on already. So a checkpoint holds the tables as they were when it began, and beside them
the clocks that each worker had sent up to its state and that were not in the tables then: the messages on their way of
Chandy and Lamport (Distributed snapshots, 1985). A restored server passes these clocks on first. A worker that is
started again goes on behind them; one that lives on sends again what it sent after them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.core.errors import PeerError
from paceline.core.updates import Contents
from paceline.tables import messages as t
from paceline.tables.rowwise import Array

INCREMENTS = "increments.safetensors"  # in a checkpoint: of clocks that were not in the tables
OF_SHARD = "increments-{}.safetensors"  # likewise, where several servers hold them
CLOCKS = "clocks"  # in a checkpoint's head: the positions
SaveTicks = Callable[[Path, Mapping[str, t.TickParts]], dict[str, tuple[int, int]]]  # each under its name in the file


class Position(msgspec.Struct):
    """One worker's: the clocks in the tables, and those that it sent after them."""

    incarnation: int
    era: int  # barriers that this process has passed
    applied: int
    ticks: list[t.Tick] = []
    gone: bool = False  # its process was lost; the others do not wait for its clock

    @property
    def clock(self) -> int:
        """Clocks completed."""
        return self.applied + len(self.ticks)


class Cut:
    """The positions of a checkpoint under way."""

    def __init__(self, positions: dict[int, Position], loose: list[t.Tick], repeats: int) -> None:
        """`loose` are clocks of processes that are gone; `repeats` barriers had been passed before a resume."""
        self.positions = positions
        self._loose = loose
        self._repeats = repeats
        self._open = set(positions)  # whose states have not come

    def record(self, worker: int, tick: t.Tick) -> None:
        """Note a clock that was sent after the checkpoint began; it counts if the worker's state has not come."""
        if worker in self._open:
            self.positions[worker].ticks.append(tick)

    def close(self, worker: int, *, lost: bool = False) -> None:
        """Fix a worker's position: its state has come, or its script has ended. `lost`: its process was."""
        self._open.discard(worker)
        if lost and worker in self.positions:
            found = self.positions[worker]
            self._loose += found.ticks
            self.positions[worker] = Position(found.incarnation, found.era, found.clock, gone=True)

    def contents(self, names: Sequence[str], save: SaveTicks | None = None) -> Contents:
        """Return what the checkpoint records; `names` are those of the tables, by number. `save` lets several servers
        write what they hold."""
        tensors: dict[str, torch.Tensor] = {}
        held: dict[str, t.TickParts] = {}
        head = {
            "repeats": max([self._repeats, *(position.era for position in self.positions.values())]),
            "repeated": self._repeats,
            "workers": {
                str(worker): {
                    "incarnation": position.incarnation,
                    "era": position.era,
                    "applied": position.applied,
                    "gone": position.gone,
                    "ticks": [
                        _written(tick, f"{worker}.{tick.through}", names, tensors, held) for tick in position.ticks
                    ],
                }
                for worker, position in sorted(self.positions.items())
            },
            "loose": [_written(tick, f"gone.{i}", names, tensors, held) for i, tick in enumerate(self._loose)],
        }
        files = {INCREMENTS: tensors} if tensors else {}
        if save is None or not held:
            return Contents(files, {CLOCKS: head})
        return Contents(files, {CLOCKS: head}, lambda folder: (save(folder, held), {}))


def _written(
    tick: t.Tick, key: str, names: Sequence[str], tensors: dict[str, torch.Tensor], held: dict[str, t.TickParts]
) -> dict[str, Any]:
    """Add a clock's increments to the tensors, or to what others hold, and return what describes it."""
    logs: list[list[str]] = []
    if tick.parts is not None:
        held[key] = tick.parts
    for log in tick.logs:
        place = f"{key}.{len(logs)}"
        if tick.parts is None:
            add_log(tensors, place, log.rows, log.sums)
        logs.append([names[log.table], place])
    return {"through": tick.through, "work": tick.work, "loss": tick.loss, "era": tick.era, "logs": logs}


def add_log(tensors: dict[str, torch.Tensor], place: str, rows: Array | None, sums: Array) -> None:
    """Add one clock's increments to one table, under this name."""
    tensors[f"{place}.sums"] = _tensor(sums)
    if rows is not None:
        tensors[f"{place}.rows"] = _tensor(rows)


def _saved_increments(files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the increments in a checkpoint of any number of servers: each has its rows of them."""
    names = [INCREMENTS, *(OF_SHARD.format(shard) for shard in range(len(files)))]
    held = [files[name] for name in names if name in files]
    return {key: torch.cat([each[key] for each in held]) for key in (held[0] if held else ())}


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _read(data: Mapping[str, Any], numbers: Mapping[str, int], tensors: Mapping[str, Any]) -> t.Tick:
    logs = []
    for name, place in data["logs"]:
        rows = tensors.get(f"{place}.rows")
        logs.append(t.TableLog(numbers[name], None if rows is None else rows.numpy(), tensors[f"{place}.sums"].numpy()))
    loss = None if data["loss"] is None else float(data["loss"])
    return t.Tick(data["through"], data["work"], logs, loss, era=data["era"], again=True)


class RestoredPositions:
    """The positions of the checkpoint that a run continues from."""

    def __init__(self, *, live: bool = False, of_this_run: bool = False) -> None:
        """`live`: only the server was started again; `of_this_run`: its own processes wrote the checkpoint."""
        self._live = live
        self._of_this_run = of_this_run
        self._positions: dict[int, Position] = {}
        self._loose: list[t.Tick] = []  # clocks whose workers do not come back
        self.repeats = 0  # barriers that scripts call again: they passed them before they were resumed

    def load(
        self, contents: Contents, data: Mapping[str, Any], numbers: Mapping[str, int],
        keep: Callable[[t.Tick], t.Tick] = lambda tick: tick,
    ) -> None:  # fmt: skip
        """Read the positions of a checkpoint; one of an older version has none. `keep` takes in each clock."""
        if CLOCKS not in data:
            return
        head, tensors = data[CLOCKS], _saved_increments(contents.files)
        self.repeats = head["repeated"] if self._of_this_run else head["repeats"]
        self._loose = [keep(_read(tick, numbers, tensors)) for tick in head["loose"]]
        slowest = min((found["applied"] for found in head["workers"].values() if not found["gone"]), default=0)
        for worker, found in head["workers"].items():
            if found["gone"]:
                if not self._live:  # it makes none of its clocks twice, and nobody waits for those that it missed
                    self._positions[int(worker)] = Position(0, 0, max(slowest, found["applied"]))
                continue
            ticks = [keep(_read(tick, numbers, tensors)) for tick in found["ticks"]]
            if not self._of_this_run:  # other processes count barriers from 0
                ticks = [msgspec.structs.replace(tick, era=0) for tick in ticks]
            era = found["era"] if self._of_this_run else 0
            self._positions[int(worker)] = Position(found["incarnation"], era, found["applied"], ticks)

    @property
    def absent(self) -> dict[int, Position]:
        """The positions of workers that may still come."""
        return {} if self._live else dict(self._positions)

    def leave_behind(self, members: Iterable[int]) -> None:
        """Begin without workers that are not among these: nobody else will pass on the clocks that they sent."""
        members = set(members)
        for worker, position in self._positions.items():
            if worker not in members:
                self._loose += position.ticks
                self._positions[worker] = Position(position.incarnation, position.era, position.clock)

    def take_loose(self) -> list[t.Tick]:
        """Return the clocks that nobody will pass on, once."""
        loose, self._loose = self._loose, []
        return loose

    def place(self, worker: int, incarnation: int, standing: t.ClockStanding | None) -> Position | None:
        """Return where this process goes on; None if it starts at the slowest worker's clock, as a newcomer."""
        found = self._positions.pop(worker, None)
        # After a resume processes count from 0 again, and one that died before it began leaves its place to the next.
        same = not self._live or incarnation == (found.incarnation if found and self._of_this_run else 0)
        if found is not None and not same:
            self._loose += found.ticks
            found = None
        if standing is None:
            return found
        if found is None:
            return Position(incarnation, standing.era, standing.clock)
        if (found.era, found.clock) < (standing.era, standing.clock):
            raise PeerError(
                f"the checkpoint has {found.clock} clocks of worker {worker}, which can send again only those after "
                f"{standing.clock}: start the run again with --resume"
            )
        return found
