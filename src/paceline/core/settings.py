"""The settings of a run and where each comes from: the one place that ranks their sources.

First the command line, then `PACELINE_*` variables (this module alone knows them), then the scenario's `[run]` table,
then the defaults below. A value that cannot be used is reported together with the source that gave it.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec

from paceline.core.errors import OptionError

ENGINES = ("local", "sim")
DEFAULT_SCENARIO = "uneven8"  # the simulator's; real processes are as fast as they are
USUAL_WORKERS = 4  # at most, where neither a scenario nor CUDA devices say how many
DEFAULT_RUNS_DIR = Path("runs")
PREFIX = "PACELINE_"

Divergence = Literal["warn", "stop", "bsp"]
NonFinite = Literal["skip", "stop"]
Transport = Literal["shm", "zeromq"]
Unit = Literal["v", "s", "e"]

_FALLING = ("loss", "error", "perplexity")  # metrics that are better when they are smaller
_TARGET = re.compile(r"(?P<metric>[A-Za-z_][\w.\-/]*)\s*(?P<sign>>=|<=|=)\s*(?P<value>\S+)")
_EVERY = re.compile(r"(?P<amount>\d+(?:\.\d*)?|\.\d+)(?P<unit>[vse])")


class Target(msgspec.Struct, frozen=True):
    """A metric's value that ends the run once it is met."""

    metric: str
    value: float
    upwards: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `accuracy=0.93`, `accuracy>=0.9` or `loss<=0.5`."""
        found = _TARGET.fullmatch(text.strip())
        value = _finite(found["value"]) if found else None
        if not found or value is None:
            raise OptionError(
                f"a target is a metric and a finite number, such as accuracy=0.93, accuracy>=0.9 or loss<=0.5, "
                f"not {text!r}"
            )
        metric, sign = found["metric"], found["sign"]
        return cls(metric, value, sign == ">=" or (sign == "=" and not metric.lower().endswith(_FALLING)))

    def met(self, value: float) -> bool:
        """Whether this value reaches the target; NaN never does."""
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
        if not found or float(found["amount"]) <= 0:
            raise OptionError(
                f"an interval is a number > 0 and a unit, such as 50v (versions), 10s (seconds) or 0.1e (epochs), "
                f"not {text!r}"
            )
        amount, unit = float(found["amount"]), found["unit"]
        if unit == "v" and not amount.is_integer():
            raise OptionError(f"versions are whole: write {max(1, round(amount))}v instead of {text!r}")
        return cls(amount, unit)  # type: ignore[arg-type]  # the pattern admits these three only

    def __str__(self) -> str:
        return f"{self.amount:g}{self.unit}"


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set about a run; what is None is left to the script or the scenario."""

    engine: str = "local"
    strategy: str = "bsp"
    scenario: str | None = None  # a built-in's name or a file; None: `sim` has its default, `local` emulates nothing
    workers: int | None = None  # None: as many as the scenario has, or as suit the machine
    seed: int = 0  # of shuffles, the model's start and the strategy's chance; times have the scenario's own
    batch_size: int | None = None  # samples per worker and push; None: what the script gives `batches`
    epochs: float | int | None = None  # None: what the script gives `batches`
    max_versions: int | None = None
    max_seconds: float | None = None  # virtual in `sim`
    target: Target | None = None
    evaluate_every: Every | None = Every(0.1, "e")  # a share of the data, so many small versions mean no more tries
    on_divergence: Divergence = "warn"
    on_nonfinite: NonFinite = "skip"  # what a push with infinities or NaN does to the run; it is refused either way
    options: dict[str, str] = {}  # what `session.option` finds
    data_dir: Path | None = None
    journal: Path | None = None  # None: in the run's folder
    runs_dir: Path | None = None  # None: the run has no folder
    threads: int | None = None  # of torch, per process; a seed fixes the journal for one thread count only
    transport: Transport = "shm"
    respawn: bool = False  # a worker that died comes back as a newcomer
    checkpoint_every: Every | None = None  # in versions or seconds
    checkpoint_keep: int = 3  # the newest ones; two could both be of a run that had already gone wrong
    resume: Path | None = None  # the folder of a run, or of one of its checkpoints
    given: tuple[str, ...] = ()  # the settings that somebody chose


def resolve(
    command_line: Mapping[str, Any],
    environment: Mapping[str, str],
    scenario_run: Mapping[str, Any],
    *,
    spell: Callable[[str], str] = lambda name: "--" + name.replace("_", "-"),
) -> RunConfig:
    """The settings in force. `None` and empty variables count as not given.

    `spell` says how the first source writes a setting's name: as a flag unless told otherwise.
    """
    _refuse_misspelt_variables(environment)
    sources: list[tuple[Mapping[str, Any], Callable[[str], str]]] = [
        (_known(command_line, "setting"), spell),
        (_from_environment(environment), lambda name: PREFIX + name.upper()),
        (_known(scenario_run, "key of the scenario's [run] table", without="scenario"), lambda name: f"[run] {name}"),
    ]
    settings: dict[str, Any] = {}
    for values, origin in reversed(sources):
        for name, value in values.items():
            if name == "options":
                merged = {**settings.get("options", {}), **_read(_options, value, origin("set"))}
                settings["options"] = merged
            else:
                settings[name] = _read(_READERS[name], value, origin(name))
    return RunConfig(**settings, given=tuple(sorted(settings)))


def chosen_scenario(command_line: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """The scenario that was asked for; it is needed before its own `[run]` table can be ranked."""
    given = command_line.get("scenario") or environment.get(PREFIX + "SCENARIO") or None
    return None if given is None else str(given)


def chosen_workers(command_line: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """The number of workers that was asked for, if one was."""
    given = command_line.get("workers") or environment.get(PREFIX + "WORKERS") or None
    return None if given is None else str(given)


def chosen_log_level(command_line: str | None, environment: Mapping[str, str]) -> str:
    """The level of the `paceline` logger: debug, info, warning (unless told otherwise) or error."""
    variable = PREFIX + "LOG_LEVEL"
    given = command_line or environment.get(variable) or "warning"
    origin = "--log-level" if command_line else variable
    return str(_read(_one_of("debug", "info", "warning", "error"), given.lower(), origin))


def require_possible(config: RunConfig) -> None:
    """Refuse settings that are good each for itself and contradict each other."""
    if config.engine not in ENGINES:
        raise OptionError(f"engine must be one of {', '.join(ENGINES)}, not {config.engine!r}")
    if config.target is not None and config.evaluate_every is None:
        raise OptionError(f"the target {config.target} is never reached with --evaluate-every off; leave one out")
    if config.engine == "local":
        return
    given = {
        "--checkpoint-every": config.checkpoint_every is not None,
        "--resume": config.resume is not None,
        "--respawn": config.respawn,
        "--transport": config.transport != "shm",
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise OptionError(f"{flag}: the engine {config.engine} has no such thing; leave it out, or use --engine local")


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usual_workers(devices: int) -> int:
    """How many workers suit this machine: one for each CUDA device, else a few of its cores and at least 2."""
    return devices or max(2, min(cores(), USUAL_WORKERS))


def usual_threads(config: RunConfig, workers: int) -> int:
    """Torch's threads in each process, where nobody said: a share of the cores, in the simulator always the same."""
    if config.threads is not None:
        return config.threads
    return max(1, cores() // workers) if config.engine == "local" else 1


def agreed_workers(asked: int | None, present: int, scenario: str, *, by_default: bool = False) -> int:
    """The scenario says how many workers there are; a different wish is an error, never a silent change."""
    if asked is None or asked == present:
        return present
    which = f"scenario {scenario}" + (", taken because none was given," if by_default else "")
    raise OptionError(
        f"--workers: {which} has {present} workers, not {asked}; leave --workers out, or give a scenario file with "
        f"{asked} workers (`paceline scenario {scenario}` prints one to start from)"
    )


def nearest(name: str, valid: Iterable[str]) -> str:
    """How an error goes on after an unknown name: the likeliest valid one, or all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names)}"


def _known(values: Mapping[str, Any], kind: str, without: str = "") -> dict[str, Any]:
    valid = {*_READERS, "set"} - {without}
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name not in valid and name != "options":
            raise OptionError(f"unknown {kind} {name!r}; {nearest(name, valid)}")
        if value is not None:
            known["options" if name == "set" else name] = value
    return known


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    given = {name: environment.get(PREFIX + name.upper(), "") for name in (*_READERS, "set")}
    return {"options" if name == "set" else name: value for name, value in given.items() if value}


def _refuse_misspelt_variables(environment: Mapping[str, str]) -> None:
    valid = [PREFIX + name.upper() for name in (*_READERS, "set", "log_level")]
    for variable in environment:
        # Only near misses: variables of other programs may share the prefix.
        if variable.startswith(PREFIX) and variable not in valid:
            close = difflib.get_close_matches(variable, valid, 1, cutoff=0.85)
            if close:
                raise OptionError(f"unknown variable {variable}; did you mean {close[0]}?")


def _read(reader: Callable[[Any], Any], value: Any, origin: str) -> Any:
    try:
        return reader(value)
    except OptionError as error:
        raise OptionError(f"{origin}: {error}") from None


def _whole(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        try:
            number = int(str(value)) if not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or number < least:
            raise OptionError(f"must be a whole number >= {least}, not {value!r}")
        return number

    return read


def _positive(value: Any) -> float:
    number = _finite(value)
    if number is None or number <= 0:
        raise OptionError(f"must be a finite number > 0, not {value!r}")
    return number


def _epochs(value: Any) -> float | int:
    number = _positive(value)
    return int(number) if number.is_integer() else number


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and not isinstance(value, bool) else None


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise OptionError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise OptionError(f"must be a name, not {value!r}")
    return str(value)


def _path(value: Any) -> Path:
    return Path(_text(value)).expanduser()


def _target(value: Any) -> Target:
    return value if isinstance(value, Target) else Target.parse(str(value))


def _every(value: Any) -> Every:
    return value if isinstance(value, Every) else Every.parse(str(value))


def _every_or_off(value: Any) -> Every | None:
    return None if value == "off" else _every(value)


def _every_checkpoint(value: Any) -> Every:
    every = _every(value)
    if every.unit == "e":
        raise OptionError(f"must be in versions or seconds, such as 100v or 60s, not {str(every)!r}")
    return every


def _flag(value: Any) -> bool:
    flags = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in flags:
        raise OptionError(f"must be true or false, not {value!r}")
    return flags[str(value).lower()]


def _options(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(name): _spelled(given) for name, given in value.items()}
    pairs = value.split(",") if isinstance(value, str) else list(value)
    options = {}
    for pair in pairs:
        name, sign, given = str(pair).partition("=")
        if not sign or not name.strip():
            raise OptionError(f"must be name=value, such as lr=0.1, not {pair!r}")
        options[name.strip()] = given.strip()
    return options


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "engine": _one_of(*ENGINES),
    "strategy": _text,
    "scenario": _text,
    "workers": _whole(1),
    "seed": _whole(0),
    "batch_size": _whole(1),
    "epochs": _epochs,
    "max_versions": _whole(1),
    "max_seconds": _positive,
    "target": _target,
    "evaluate_every": _every_or_off,
    "on_divergence": _one_of(*get_args(Divergence)),
    "on_nonfinite": _one_of(*get_args(NonFinite)),
    "data_dir": _path,
    "journal": _path,
    "runs_dir": _path,
    "threads": _whole(1),
    "transport": _one_of(*get_args(Transport)),
    "respawn": _flag,
    "checkpoint_every": _every_checkpoint,
    "checkpoint_keep": _whole(1),
    "resume": _path,
}
