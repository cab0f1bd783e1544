"""Random factors that are a pure function of (seed, stream, worker, attempt).

Nothing is drawn in sequence: each factor is computed from a hash of its coordinates. So every strategy and every engine
sees the same times in whatever order it asks, and a worker costs one integer of memory. The hash is splitmix64's
finalizer (Steele, Lea, Flood, OOPSLA 2014) over a counter, without its last shift, as only the high bits are used.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import msgspec

from paceline.core.scenario.toml_fields import Fields
from paceline.core.scenario.traces import Traces
from paceline.core.values import nearest, shown

Kind = Literal["none", "lognormal", "exponential", "shifted_exponential", "trace"]
FORMS = {
    "none": "none",
    "lognormal": "lognormal:SIGMA",
    "exponential": "exponential",
    "shifted_exponential": "shifted_exponential:MIN,MEAN",
    "trace": "trace:FILE",
}
MAX_SIGMA = 10.0  # one draw in 10^15 is a factor of e^80; anything beyond is a typo

# One stream per purpose, so that a worker's compute time and its latency are independent.
COMPUTE, UP, DOWN, MESSAGE_FAULT = 0, 1, 2, 3
_STREAMS = 4

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIT = 2.0**-52

Draw = Callable[[int, int, int], float]  # (key of the worker, worker, attempt) -> factor


class Jitter(msgspec.Struct, frozen=True):
    """A distribution of factors; `spec` is its text in the scenario file."""

    spec: str = "none"
    kind: Kind = "none"
    sigma: float = 0.0
    minimum: float = 0.0
    mean: float = 1.0
    rows: tuple[tuple[float, ...], ...] = ()  # trace only: the factors of each of its workers


def read_jitter(fields: Fields, default: Jitter, traces: Traces) -> Jitter:
    """Read the `jitter` key of a table."""
    if not fields.has("jitter"):
        return default
    fix = f"write one of {' | '.join(FORMS.values())}"
    spec = fields.text("jitter", fix)
    kind, _, arguments = spec.partition(":")
    match kind:
        case "none" | "exponential" if not arguments:
            return Jitter(spec, kind)
        case "lognormal":
            (sigma,) = _numbers(fields, spec, arguments, 1, fix)
            if not 0 <= sigma <= MAX_SIGMA:
                raise fields.refusal(
                    f"jitter {shown(spec)}: sigma must be >= 0 and <= {MAX_SIGMA:g}, not {sigma:g}",
                    "0.1 is a usual value",
                )
            return Jitter(spec, kind, sigma=sigma) if sigma else Jitter(spec)
        case "shifted_exponential":
            minimum, mean = _numbers(fields, spec, arguments, 2, fix)
            if not 0 <= minimum < mean:
                raise fields.refusal(
                    f"jitter {shown(spec)}: MIN must be >= 0 and < MEAN, not {minimum:g} and {mean:g}",
                    "such as shifted_exponential:0.5,1",
                )
            return Jitter(spec, kind, minimum=minimum, mean=mean)
        case "trace" if arguments:
            file = Path(arguments)
            # Keep only the name of an absolute path: journals of the simulator hold nothing of the machine.
            kept = f"trace:{file.name if file.is_absolute() else arguments}"
            return Jitter(kept, kind, rows=traces.batch_factors(arguments))
    known = kind in FORMS
    raise fields.refusal(
        f"jitter {shown(spec)} is not a jitter", f"write {FORMS[kind]}" if known else nearest(kind, FORMS)
    )


def _numbers(fields: Fields, spec: str, arguments: str, count: int, fix: str) -> list[float]:
    try:
        numbers = [float(part) for part in arguments.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise fields.refusal(f"jitter {shown(spec)} needs {count} number{'s' * (count > 1)} after the colon", fix)
    return numbers


def worker_key(seed: int, worker: int) -> int:
    """Return the hash key of a worker's draws."""
    return _hash(_seed_key(seed) + (worker + 1) * _STEP)


@lru_cache(maxsize=16)
def _seed_key(seed: int) -> int:
    """Return the part of a key that all workers of a scenario share."""
    return _hash(seed + _STEP)


def _hash(number: int) -> int:
    number &= _MASK
    number = (number ^ (number >> 30)) * _MIX_1 & _MASK
    number = (number ^ (number >> 27)) * _MIX_2 & _MASK
    return number ^ (number >> 31)


def uniform(key: int, stream: int, attempt: int) -> float:
    """Return a number in [0, 1)."""
    return (_hash(key + stream * _STEP + attempt * _STREAMS * _STEP) >> 12) * _UNIT


def draw_of(jitter: Jitter, stream: int) -> Draw | None:
    """Return the function that draws factors, or None if there is no jitter."""
    match jitter.kind:
        case "none":
            return None
        case "lognormal":
            return _lognormal(jitter.sigma, stream * _STEP)
        case "exponential":
            return _exponential(0.0, 1.0, stream * _STEP)
        case "shifted_exponential":
            return _exponential(jitter.minimum, jitter.mean - jitter.minimum, stream * _STEP)
        case "trace":
            return _replayed(jitter.rows)


# The hash is inlined: a call would cost a fifth of the draw. Adding 0.5 keeps the uniform off 0 and 1.


def _lognormal(sigma: float, offset: int) -> Draw:
    exponent, exp, stride = NormalDist(0.0, sigma).inv_cdf, math.exp, _STREAMS * _STEP

    def draw(key: int, _worker: int, attempt: int) -> float:
        z = (key + offset + attempt * stride) & _MASK
        z = (z ^ (z >> 30)) * _MIX_1 & _MASK
        return exp(exponent(((((z ^ (z >> 27)) * _MIX_2 & _MASK) >> 12) + 0.5) * _UNIT))

    return draw


def _exponential(minimum: float, mean_above: float, offset: int) -> Draw:
    log, stride = math.log, _STREAMS * _STEP

    def draw(key: int, _worker: int, attempt: int) -> float:
        z = (key + offset + attempt * stride) & _MASK
        z = (z ^ (z >> 30)) * _MIX_1 & _MASK
        return minimum - mean_above * log(((((z ^ (z >> 27)) * _MIX_2 & _MASK) >> 12) + 0.5) * _UNIT)

    return draw


def _replayed(rows: tuple[tuple[float, ...], ...]) -> Draw:
    workers = len(rows)

    def draw(_key: int, worker: int, attempt: int) -> float:
        row = rows[worker % workers]
        return row[attempt % len(row)]

    return draw
