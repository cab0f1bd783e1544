"""The forms in which messages are written: what each of their fields looks like on a wire, and their kinds' numbers.

Named after the messages they stand for. A form is an array of fields without names; messages of plain data need none.
"""

from typing import Any

import msgspec

from paceline.model.store import ModelSpec
from paceline.tables import messages as t
from paceline.transport import array_wire, peer_wire
from paceline.transport import messages as m

Form = tuple[str, tuple[int, ...]]  # of a tensor: dtype and shape
Scalar = bool | int | float | str | None
Options = dict[str, Scalar | tuple[Scalar, ...]]  # arrays come back as tuples, which is what torch's options are


class Wire(msgspec.Struct, array_like=True, gc=False):
    """Fields in their order, without names."""


class Tensors(Wire):
    """Two lists of tensors that lie in no region."""

    first: list[Form]
    second: list[Form | None]


class Hello(Wire):
    spec: ModelSpec
    tensors: Tensors | None  # None: they lie in the region
    reads: bool = False


class Gradient(Wire):
    missing: list[int]
    options: list[Options]
    changed: list[bool]
    loss: float | None
    norm: float | None
    slot: int | None
    tensors: Tensors | None


class Push(Wire):
    ticket: int
    samples: int
    gradient: Gradient | None
    kept: list[bytearray] | None
    nominal: int | None
    compute_s: float
    overrun_s: float


class Parameters(Wire):
    version: int
    tensors: Tensors | None
    lent: bool = False  # they lie in the server's own memory


class Allotment(Wire):
    epoch: int
    samples: int
    indices: bytearray | None


class Welcome(Wire):
    parameters: Parameters
    state: bytes | None


class Work(Wire):
    ticket: int
    allotment: Allotment
    parameters: Parameters | None
    position: float
    slot: int
    delay_s: float
    compute_s: float | None
    save: int | None
    sent_at: float | None
    phase: int | None
    step: int = 0


class Extra(Wire):
    allotment: Allotment | None
    compute_s: float | None


class Over(Wire):
    phase: int
    parameters: Parameters | None
    position: float
    run_over: bool
    save: int | None


class Evaluate(Wire):
    number: int
    parameters: Parameters


# A number once given to a kind stays its own. Kinds of either side are apart: neither end is taken for the other.
KINDS: dict[type[Any], tuple[int, type[Any]]] = {
    m.Hello: (1, Hello), m.Ready: (2, m.Ready), m.Push: (3, Push), m.More: (4, m.More), m.Done: (5, m.Done),
    m.Stop: (6, m.Stop), m.Note: (7, m.Note), m.Remark: (8, m.Remark), m.Asked: (9, m.Asked), m.State: (10, m.State),
    m.Evaluated: (11, m.Evaluated), m.Failed: (12, m.Failed), m.Ended: (13, m.Ended),
    m.Welcome: (65, Welcome), m.Work: (66, Work), m.Extra: (67, Extra), m.Over: (68, Over),
    m.Cancelled: (69, m.Cancelled), m.Evaluate: (70, Evaluate), m.Bye: (71, m.Bye),
}  # fmt: skip
_TABLES_TO_SERVER = (t.OpenTable, t.TableInit, t.Measures, t.Fetch, t.Forget, t.Tick, t.AtBarrier)
_TABLES_TO_WORKER = (
    t.Opened, t.Roster, t.Entered, t.Rows, t.Clocked, t.Included, t.Passed, t.EvaluateTables,
    t.Save,
)  # fmt: skip
KINDS |= {kind: (14 + i, array_wire.FORMS[kind]) for i, kind in enumerate(_TABLES_TO_SERVER)}
KINDS |= {kind: (72 + i, array_wire.FORMS[kind]) for i, kind in enumerate(_TABLES_TO_WORKER)}
KINDS |= {kind: (21 + i, array_wire.FORMS[kind]) for i, kind in enumerate(peer_wire.TO_SERVER)}
KINDS |= {kind: (81 + i, array_wire.FORMS[kind]) for i, kind in enumerate(peer_wire.TO_WORKER)}
TO_WORKER = 64  # kinds above it go to a worker
PREFIXES = {kind: bytes([number]) for kind, (number, _) in KINDS.items()}
DECODERS = {number: msgspec.msgpack.Decoder(wire) for number, wire in KINDS.values()}
NAMES = {number: kind.__name__ for kind, (number, _) in KINDS.items()}
ARRAY_KINDS = {KINDS[kind][0]: kind for kind in array_wire.FORMS}
