"""What an increment does to the rows of a table, at the server and in the view of the worker that made it.

`add` is the publication's. `adagrad:rate=R` treats an increment as a direction of ascent and steps along it by
R / sqrt(sum of squares so far), element by element; the sums travel with the rows. `clip:limit=L` cuts each element of
what one worker adds in one clock to [-L, L]. Until a row is fetched again the worker sees its own increments as these
rules would have applied them one by one.
"""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import OptionError

Array = npt.NDArray[Any]
TINY = 1e-10  # below any square that matters; an element never touched is not divided by zero


class Rule(msgspec.Struct, frozen=True):
    """Increments are added."""

    remembers = False  # whether each element has a second number that travels with it
    fits_integers = True

    def change(self, deltas: Array, history: Array | None) -> Array:  # noqa: ARG002 - most rules remember nothing
        """By how much these increments move their elements; `history` is updated in place."""
        return deltas


class Clip(Rule, frozen=True):
    """Increments are cut to a range."""

    limit: float

    def change(self, deltas: Array, history: Array | None) -> Array:  # noqa: ARG002
        limit = deltas.dtype.type(self.limit)
        return np.clip(deltas, -limit, limit)


class Adagrad(Rule, frozen=True):
    """Increments are directions, with steps that shrink by the squares seen so far."""

    rate: float

    remembers = True
    fits_integers = False

    def change(self, deltas: Array, history: Array | None) -> Array:
        assert history is not None  # `remembers` says so
        history += deltas * deltas
        return np.asarray(deltas.dtype.type(self.rate) * deltas / np.sqrt(history + deltas.dtype.type(TINY)))


ADD = Rule()
FORMS = "add, clip:limit=NUMBER or adagrad:rate=NUMBER"


def parse_rule(text: str) -> Rule:
    """The rule of that name."""
    if text == "add":
        return ADD
    name, _, option = str(text).partition(":")
    key, _, number = option.partition("=")
    kinds: dict[tuple[str, str], type[Clip] | type[Adagrad]] = {("clip", "limit"): Clip, ("adagrad", "rate"): Adagrad}
    kind = kinds.get((name, key))
    if kind is None:
        raise OptionError(f"a table's update must be {FORMS}, not {text!r}")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise OptionError(f"{name}'s {key} must be a number > 0, not {number!r}")
    return kind(value)
