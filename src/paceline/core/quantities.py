"""Settings that are more than one number: a target, an interval, how long a worker may be silent, resources."""

import re
from typing import Annotated, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from paceline.core.errors import OptionError
from paceline.core.values import FINITE, read, shown

Unit = Literal["v", "s", "e"]

FALLING = ("loss", "error", "perplexity")  # metrics that are better when they are smaller
_TARGET = re.compile(r"(?P<metric>[A-Za-z_][\w.\-/]*)\s*(?P<sign>>=|<=|=)\s*(?P<value>\S+)")
_EVERY = re.compile(r"(?P<amount>\d+(?:\.\d*)?|\.\d+)(?P<unit>[vse])")
_NUMBER = r"\d+(?:\.\d+)?|\.\d+"
_PATIENCE = re.compile(rf"(?P<floor>{_NUMBER})(?:\.\.(?P<ceiling>{_NUMBER}))?")
_RESOURCE = re.compile(rf"(?P<name>[A-Za-z_][\w.:\-]*)\s*=\s*(?P<amount>{_NUMBER})(?:e(?P<zeros>\d\d?))?")
_USUAL_NAMES = {"cpu": "CPU", "gpu": "GPU"}
USUAL_CEILING_S = 600.0  # of a patience whose floor alone is given


class Target(msgspec.Struct, frozen=True):
    """A value of a metric that ends the run once it is reached."""

    metric: str
    value: float
    upwards: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `accuracy=0.93`, `accuracy>=0.9` or `loss<=0.5`."""
        found = _TARGET.fullmatch(text.strip())
        try:
            value = read(found["value"], Annotated[float, Meta(ge=-FINITE, le=FINITE)], "") if found else None
        except OptionError:
            value = None
        if not found or value is None:
            raise OptionError(
                "must be a metric and a finite number, such as accuracy=0.93, accuracy>=0.9 or loss<=0.5, "
                f"not {shown(text)}"
            )
        metric, sign = found["metric"], found["sign"]
        return cls(metric, value, sign == ">=" or (sign == "=" and not metric.lower().endswith(FALLING)))

    def met(self, value: float) -> bool:
        """Return whether this value reaches the target; NaN never does."""
        return value >= self.value if self.upwards else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.upwards else '<='}{self.value:g}"


class Every(msgspec.Struct, frozen=True):
    """An interval in versions (`v`), seconds (`s`) or epochs (`e`)."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `50v`, `10s` or `0.1e`."""
        found = _EVERY.fullmatch(text.strip())
        if not found or not 0 < float(found["amount"]) <= FINITE:
            raise OptionError(
                "must be a number > 0 and a unit, such as 50v (versions), 10s (seconds) or 0.1e (epochs), "
                f"not {shown(text)}"
            )
        amount, unit = float(found["amount"]), found["unit"]
        if unit == "v" and not amount.is_integer():
            raise OptionError(f"must be in whole versions: write {max(1, round(amount))}v instead of {shown(text)}")
        return cls(amount, unit)  # type: ignore[arg-type]  # the pattern admits these three only

    def __str__(self) -> str:
        return f"{self.amount:g}{self.unit}"


class Patience(msgspec.Struct, frozen=True):
    """How long a worker may be silent: its own steps decide, between these two numbers of seconds."""

    from_numbers: ClassVar[bool] = True  # `launch(worker_timeout=30)`
    floor: float
    ceiling: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `30..600`, or `30` alone."""
        found = _PATIENCE.fullmatch(text.strip())
        wanted = "must be seconds, such as 30, 30..600 (at least, at most) or off"
        if not found:
            raise OptionError(f"{wanted}, not {shown(text)}")
        floor = float(found["floor"])
        ceiling = float(found["ceiling"]) if found["ceiling"] else max(floor, USUAL_CEILING_S)
        if not floor <= ceiling <= FINITE:
            raise OptionError(f"{wanted}; the second of {shown(text)} must be >= the first")
        return cls(floor, ceiling)

    def __str__(self) -> str:
        return f"{self.floor:g}..{self.ceiling:g}"


def patience_or_none(given: Patience) -> Patience | None:
    """Return None for a patience of 0 seconds, which means no limit."""
    return given if given.floor > 0 else None


def resource_amounts(text: str) -> dict[str, float]:
    """Read what a process asks a cluster for, such as `CPU=2,GPU=0.5,memory=2e9`; what is 0 is left out."""
    amounts: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        found = _RESOURCE.fullmatch(part)
        name = _USUAL_NAMES.get(found["name"].lower(), found["name"]) if found else ""
        if not found or name in amounts:
            wrong = f"{name} is there twice" if found else f"not {shown(part)}"
            raise OptionError(f"must be names and amounts >= 0, such as CPU=2,GPU=0.5,memory=2e9; {wrong}")
        amounts[name] = float(found["amount"]) * 10 ** int(found["zeros"] or 0)
    return {name: amount for name, amount in amounts.items() if amount}


def resources_written(text: str) -> str:
    """Return the resources in their usual spelling."""
    return ",".join(f"{name}={amount:.15g}" for name, amount in resource_amounts(text).items())
