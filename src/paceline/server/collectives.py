"""The server's side of collective calls: `mean`, `gather` and `barrier`, which all workers make in the same order.

A call is answered once every worker whose script runs has made it. One that dies is no longer waited for, and its value
is left out. Calls that can never be answered are errors that name two workers: one in another call, in `prepare` or at
a loop, or one whose script has ended.

Scripts of respawned workers, of those that join late and of the evaluator run from their beginning, and so repeat calls
that are answered already: they get the answers that the others got. A resumed run begins without answers, since all of
its scripts run from the beginning and exchange again.
"""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import OptionError, UserError
from paceline.server.engine import EVALUATOR
from paceline.server.workers import WorkerRecord
from paceline.transport.messages import CollectiveAnswer, CollectiveCall, CollectiveKept
from paceline.transport.value_codec import PackedValue, pack_value, unpack_value

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

KEPT_BYTES = 64 << 20  # of past answers, for scripts that run from their beginning; few exchange more than numbers
SAME = "all workers must make the same calls of mean(), gather() and barrier() in the same order"


class Collectives:
    """The collective calls of one run."""

    def __init__(self, run: "ServerRun") -> None:
        self._run = run
        self._next = 0  # the number of the first call that has no answer yet
        self.waiting: dict[int, CollectiveCall] = {}  # for an answer, by worker
        self._evaluator: CollectiveCall | None = None  # it contributes nothing and gets the workers' answer
        self._passed: dict[tuple[int, int], int] = {}  # calls answered, by worker and incarnation
        self._kept: dict[int, CollectiveAnswer] = {}
        self._kept_bytes = 0

    def on_call(self, worker: int, record: WorkerRecord | None, message: CollectiveCall) -> None:
        """Handle a call of a worker, or of the evaluator."""
        if record is not None:
            self._run.has_come(record)
        if message.number < self._next:
            self._repeat(worker, message)
        elif record is None:
            self._evaluator = message
        else:
            self.waiting[worker] = message

    def on_kept(self, message: CollectiveKept) -> None:
        """Take over the last answer that the server before this one gave; some workers may not have got it."""
        if message.number < self._next:
            return
        self._next = message.number + 1
        self._keep(CollectiveAnswer(message.number, message.call, message.values, message.tensors))
        late = {worker: call for worker, call in sorted(self.waiting.items()) if call.number < self._next}
        for worker in late:
            del self.waiting[worker]
        for worker, call in late.items():
            self._repeat(worker, call)

    def left(self, worker: int) -> None:
        """Stop waiting for a worker whose script is gone."""
        self.waiting.pop(worker, None)
        if self.waiting:
            self.look()

    def left_the_phase(self) -> Set[int]:
        """Return the workers that wait in a call after they left the phase that a restarted server has to continue."""
        return self.waiting.keys() if self._unfinished_phase() is not None else frozenset()

    def _unfinished_phase(self) -> int | None:
        resumption = self._run.resumption
        return None if resumption is None or not resumption.workers_live else resumption.unfinished_phase

    def look(self) -> None:
        """Answer the call that all workers wait in, and raise if one of them waits in vain."""
        self._require_agreement()
        if self._run.workers.alive <= self.waiting.keys():
            self._answer()

    def _answer(self) -> None:
        calls, self.waiting = sorted(self.waiting.items()), {}
        number, call = calls[0][1].number, calls[0][1].call
        values = {worker: PackedValue(each.value, each.tensors) for worker, each in calls}
        found = [mean_of_values(values)] if call == "mean" else list(values.values())
        answer = CollectiveAnswer(number, call, [each.data for each in found], [each.tensors for each in found])
        self._next = number + 1
        self._keep(answer)
        evaluator, self._evaluator = self._evaluator, None
        for worker, _ in calls:
            self._send(worker, answer)
        if evaluator is not None:  # it is never ahead of the workers by more than their next call
            self.on_call(EVALUATOR, None, evaluator)

    def _send(self, worker: int, answer: CollectiveAnswer) -> None:
        record = self._run.workers.records.get(worker)
        if record is not None:
            self._passed[worker, record.incarnation] = answer.number + 1
        self._run.engine.send(worker, answer)

    def _keep(self, answer: CollectiveAnswer) -> None:
        self._kept[answer.number] = answer
        self._kept_bytes += _size(answer)
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= _size(self._kept.pop(min(self._kept)))

    def _repeat(self, worker: int, message: CollectiveCall) -> None:
        """Answer a call that the others have passed."""
        answer, who = self._kept.get(message.number), _name(worker)
        if answer is None:
            raise UserError(
                f"{who} asks for the answer to call {message.number + 1} of its script, {message.call}(), which the "
                f"others got earlier and which is no longer kept: a run keeps {KEPT_BYTES >> 20} MiB of answers, and a "
                "restarted server the last one; exchange less, or start the run again without --respawn or with "
                "--resume"
            )
        if answer.call != message.call:
            raise UserError(
                f"{who} calls {message.call}() as call {message.number + 1} of its script, where the others called "
                f"{answer.call}(): {SAME}"
            )
        self._send(worker, answer)

    def _require_agreement(self) -> None:
        first = min(self.waiting)
        mine = self.waiting[first]
        for worker, theirs in sorted(self.waiting.items()):
            if (theirs.number, theirs.call) != (mine.number, mine.call):
                raise UserError(f"worker {first} waits in {_spell(mine)}, worker {worker} in {_spell(theirs)}: {SAME}")
        for worker, record in sorted(self._run.workers.records.items()):
            elsewhere = None if worker in self.waiting else self._where(record, mine.number)
            if elsewhere is not None:
                raise UserError(f"worker {first} waits in {_spell(mine)}, and {elsewhere}: {SAME}")

    def _where(self, record: WorkerRecord, number: int) -> str | None:
        """Return what keeps a worker from ever making that call; None if it may come to it."""
        worker, script = record.worker, record.script
        if script.ended:
            passed = self._passed.get((worker, record.incarnation), 0)
            return f"the script of worker {worker} has ended without it" if passed <= number else None
        if script.gone:
            return None
        ready = self._run.workers.waiting.get(worker)
        if ready is not None and ready.phase != self._unfinished_phase():
            return f"worker {worker} has come to its next loop"
        what = self._run.exchange.waits_for_all(worker)
        return None if what is None else f"worker {worker} has come to {what}"


def mean_of_values(values: dict[int, PackedValue]) -> PackedValue:
    """Return the element-wise mean of the workers' values; raise where they differ in shape."""
    trees = {worker: unpack_value(value) for worker, value in sorted(values.items())}
    return pack_value(_mean(list(trees), list(trees.values()), "value"), "mean()")


def _mean(workers: Sequence[int], values: Sequence[Any], place: str) -> Any:
    first = values[0]
    for worker, value in zip(workers, values, strict=True):
        if _form(value) != _form(first):
            raise OptionError(
                f"mean(): {place} is {_form(value)} in worker {worker} and {_form(first)} in worker {workers[0]}: give "
                "values of the same form in all workers"
            )
    if isinstance(first, torch.Tensor):
        return _mean_tensor(values)
    if isinstance(first, list):
        return [_mean(workers, [v[i] for v in values], f"{place}[{i}]") for i in range(len(first))]
    if isinstance(first, dict):
        return {key: _mean(workers, [v[key] for v in values], f"{place}[{key!r}]") for key in first}
    return sum(float(value) for value in values) / len(values)


def _mean_tensor(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up in single precision at least; whole numbers and booleans have a mean in double precision."""
    first = values[0]
    if not (first.is_floating_point() or first.is_complex()):
        kind = into = torch.float64
    else:
        into = first.dtype
        small = first.dtype.itemsize < torch.float32.itemsize
        kind = torch.float32 if small else torch.complex64 if first.dtype == torch.complex32 else first.dtype
    total = first.to(kind, copy=True)
    for value in values[1:]:
        total += value.to(kind)
    return total.div_(len(values)).to(into)


def _form(value: Any) -> str:
    """Return what two values must have in common to have a mean."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(sorted(value)) or 'none'}"
    return "a number"


def _size(answer: CollectiveAnswer) -> int:
    return sum(PackedValue(*pair).nbytes for pair in zip(answer.values, answer.tensors, strict=True))


def _spell(call: CollectiveCall) -> str:
    return f"{call.call}(), call {call.number + 1} of its script"


def _name(worker: int) -> str:
    return "the evaluator" if worker == EVALUATOR else f"worker {worker}"
