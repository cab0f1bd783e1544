"""The settings of a run, each declared once, and the ranking of their sources.

A field of `RunConfig` declares a setting: its type, bounds, default and `About` define the option of `paceline run`,
the `PACELINE_*` variable, the key of a scenario's `[run]` table, the parameter of `launch()` and its line in
docs/reference/settings.md. The command line ranks first, then the variables (read by this module alone), then the
`[run]` table, then the defaults. An error about a value names the source that gave it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_type_hints

import msgspec
from msgspec import Meta

from paceline.core.errors import OptionError
from paceline.core.quantities import Every as Every
from paceline.core.quantities import Patience as Patience
from paceline.core.quantities import Target as Target
from paceline.core.quantities import patience_or_none, resources_written
from paceline.core.scenario_run import MACHINE, OTHER, PLACE, SCRIPTS, refuse_what_is_not_data
from paceline.core.values import FINITE, closest, nearest, read, shown, to_text

DEFAULT_SCENARIO = "uneven8"  # of the simulator; real processes need none
DEFAULT_RUNS_DIR = Path("runs")
PREFIX = "PACELINE_"
TOKEN = PREFIX + "TOKEN"  # the variable of the join token, which is no setting and is read by `serve` and `join` alone
LAST_PORT = 65_534  # the port after it carries tensors
NEAR_MISS = 0.15  # share of a variable's letters that may differ; low, as other programs may use the prefix

EngineName = Literal["local", "hosts", "ray", "sim"]
Divergence = Literal["warn", "stop", "bsp"]
NonFinite = Literal["skip", "stop"]
Transport = Literal["shm", "zeromq"]
Start = Literal["nursery", "fresh"]
ScaleRate = Literal["none", "linear", "sqrt"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogTool = Literal["tensorboard", "wandb", "trackio", "csv"]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0, le=FINITE)]


class About(NamedTuple):
    """The help text of a setting, and where it may be given."""

    text: str
    metavar: str = ""
    default: str = ""  # in words, where the declared default is not enough
    why: str = ""  # the reason for the default
    written: str = ""  # its name on the command line, in variables and in `[run]`, if not the field's
    off: str | None = None  # the word that stands for None
    not_in_scenario: str = ""  # why a scenario's `[run]` table may not give it; empty: it may
    of_processes: bool = False  # not supported by the simulator
    of_hosts: bool = False  # for workers that join by hand: an option of `paceline serve` alone, or of clusters as well
    of_clusters: bool = False  # for engines that ask a cluster's scheduler for their workers
    opposite: str = ""  # the flag that says no, of one that says yes
    then: Callable[[Any], Any] | None = None  # a final check or conversion of the value

    def allowed(self, engine: "Capabilities") -> bool:
        """Whether this engine has such a setting."""
        if not (self.of_hosts or self.of_clusters):
            return True
        return self.of_clusters if engine.asks_a_cluster else self.of_hosts and engine.open_to_joiners


def _whole_where_possible(epochs: float) -> float:
    return int(epochs) if epochs.is_integer() else epochs


def _without_epochs(every: Every) -> Every:
    if every.unit == "e":
        raise OptionError(f"must be in versions or seconds, such as 100v or 60s, not {str(every)!r}")
    return every


EVERY_ADDRESS = ("0.0.0.0", "[::]", "*")  # of a machine: to listen at, not to connect to


def host_and_port(text: str) -> str:
    """Check an address to listen at or connect to, such as 10.0.0.1:7000, lab3:7000 or [fe80::1]:7000."""
    host, colon, port = text.strip().rpartition(":")
    plain = host.startswith("[") == host.endswith("]") and (":" not in host or host.startswith("["))
    if not colon or not host or not plain or not port.isascii() or not port.isdigit() or any(map(str.isspace, host)):
        raise OptionError(f"must be HOST:PORT, such as 10.0.0.1:7000, not {shown(text)}")
    if not 1 <= int(port) <= LAST_PORT:
        raise OptionError(f"the port must be between 1 and {LAST_PORT}, not {shown(port)}")
    return f"{host}:{int(port)}"


def cluster_address(text: str) -> str:
    """Check the address of a cluster: `auto`, or where its head listens."""
    if text.strip().startswith("ray://"):
        raise OptionError(
            f"Ray's client is not supported ({shown(text)}); run the command on a machine of the cluster, or by `ray "
            "job submit`, with auto"
        )
    return text.strip() if text.strip() == "auto" else host_and_port(text)


# fmt: off
class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a run; None leaves a value to the script or the scenario."""

    engine: Annotated[EngineName, About(
        "Where workers run: local, this machine; hosts, who joins; ray, a Ray cluster; sim, a virtual one.",
        "NAME")] = "local"
    scenario: Annotated[str | None, About(
        "The cluster, which local emulates: a built-in name or a TOML file.", "NAME|FILE",
        default=f"none, in sim {DEFAULT_SCENARIO}", not_in_scenario=OTHER)] = None
    strategy: Annotated[str, About(
        "Who waits for whom: a name (`paceline strategies`), or a class as FILE.py:CLASS or MODULE:CLASS.",
        "NAME[:OPTION=VALUE,...]")] = "bsp"
    workers: Annotated[Annotated[int, Meta(ge=1, le=10_000_000)] | None, About(
        "How many workers; must agree with the scenario. On ray also a range, 4..16.", "N",
        default="the scenario's, else one per CUDA device, else 2 to 4 by the cores")] = None
    seed: Annotated[Annotated[int, Meta(ge=0)], About(
        "Of shuffles, the model's start and the strategy's chance.", "K",
        why="times and faults follow the scenario's own seed")] = 0
    batch_size: Annotated[Count | None, About(
        "Samples per worker and push, instead of what the script gives `batches`.", "B")] = None
    global_batch: Annotated[Count | None, About(
        "Samples of all workers together, shared equally: a worker's batch is this over their number.", "B")] = None
    scale_lr: Annotated[ScaleRate, About(
        "Multiply the script's learning rate by the number of workers, or by its square root.", "none|linear|sqrt",
        why="a rate means what the script says, until one asks for more")] = "none"
    epochs: Annotated[Positive | None, About(
        "Passes over the data, instead of the script's; in all, where it has a loop around `batches`.", "E",
        then=_whole_where_possible)] = None
    max_versions: Annotated[Count | None, About("End after this many updates of the model.", "N")] = None
    max_seconds: Annotated[Positive | None, About("End after this many seconds (virtual in sim).", "T")] = None
    target: Annotated[Target | None, About(
        "End when reached, such as accuracy=0.93 or 'loss<=0.5'.", "METRIC=VALUE")] = None
    evaluate_every: Annotated[Every | None, About(
        "In versions, seconds or epochs: 50v, 10s, 0.1e; off starts no evaluator.", "N{v|s|e}|off", off="off",
        why="a share of the data, so that many small versions mean no more evaluations")] = Every(0.1, "e")
    on_divergence: Annotated[Divergence, About(
        "When the loss explodes: say so, end, or go on as bsp.", "warn|stop|bsp")] = "warn"
    on_nonfinite: Annotated[NonFinite, About(
        "When a push holds NaN or infinities: go on without it, or end.", "skip|stop")] = "skip"
    options: Annotated[dict[str, str], About(
        "For `session.option(NAME, ...)` of script or task; repeatable.", "NAME=VALUE", written="set",
        not_in_scenario=SCRIPTS)] = {}
    data_dir: Annotated[Path | None, About("Where the data sets are.", "FOLDER", not_in_scenario=PLACE)] = None
    threads: Annotated[Count | None, About(
        "Of torch in each process; part of what a seed fixes.", "N",
        default="cores over workers, on ray a worker's CPUs, in sim 1",
        why="processes that share cores would only fight over them", not_in_scenario=MACHINE)] = None
    transport: Annotated[Transport, About(
        "How workers and server talk: shared memory, or ZeroMQ on private sockets.", "shm|zeromq",
        of_processes=True)] = "shm"
    servers: Annotated[Annotated[int, Meta(ge=1, le=64)], About(
        "How many processes hold the weights or tables, each a part.", "N",
        why="one is enough until its core or its link is the limit", of_processes=True, not_in_scenario=MACHINE)] = 1
    remote_shards: Annotated[Annotated[int, Meta(ge=0, le=64)] | None, About(
        "How many of --servers are elsewhere: on machines that join for that, or on ray in own actors.", "M",
        default="none", of_hosts=True, of_clusters=True, not_in_scenario=MACHINE)] = None
    start: Annotated[Start, About(
        "How processes are started: from one that has imported torch, or as fresh interpreters.", "nursery|fresh",
        why="importing torch once is faster than once in each process", of_processes=True)] = "nursery"
    respawn: Annotated[bool, About(
        "A worker whose process died comes back as a newcomer.", of_processes=True)] = False
    worker_timeout: Annotated[Patience | None, About(
        "Go on without a worker that is silent for unusually long: at least, and at most, so many seconds.",
        "S[..S]|off", off="off", then=patience_or_none,
        why="its own steps decide between the two; off, or 0, waits for ever")] = Patience(30.0, 600.0)
    checkpoint_every: Annotated[Every | None, About(
        "Save all that is needed to go on, in versions or seconds: 100v, 60s.", "N{v|s}", default="never",
        then=_without_epochs)] = None
    checkpoint_keep: Annotated[Count, About(
        "How many checkpoints are kept, the newest.", "K",
        why="two could both be of a run that had already gone wrong")] = 3
    resume: Annotated[Path | None, About(
        "Go on from a run's newest checkpoint, or from this checkpoint.", "FOLDER", of_processes=True,
        not_in_scenario=PLACE)] = None
    journal: Annotated[Path | None, About(
        "Put the journal here (.gz: compressed).", "FILE", default="in the run's folder", not_in_scenario=PLACE)] = None
    runs_dir: Annotated[Path | None, About(
        "Where the folder of each run is made.", "FOLDER", default=f"{DEFAULT_RUNS_DIR}; in launch() none",
        not_in_scenario=PLACE)] = None
    log: Annotated[tuple[LogTool, ...], About(
        "Write scalars for this tool as the run goes on, in the run's folder (wandb offline); repeatable.",
        "tensorboard|wandb|trackio|csv", not_in_scenario=PLACE)] = ()
    listen: Annotated[str | None, About(
        "Where workers of other machines join; tensors use the next port, and --servers one more each.",
        "HOST:PORT", of_hosts=True,
        not_in_scenario=MACHINE, then=host_and_port)] = None
    most_workers: Annotated[Count | None, About(
        "Turn away who would be one worker more; on ray, ask for so many.", "N",
        default="no limit; on ray as many as at first", of_hosts=True, of_clusters=True,
        not_in_scenario=MACHINE)] = None
    token_file: Annotated[Path | None, About(
        "Take the join token from this file, or write a new one to it (mode 0600).", "FILE",
        default="shown on a terminal, else in the run's folder", of_hosts=True, not_in_scenario=PLACE)] = None
    own_optimizers: Annotated[str | None, About(
        "Let the server import these optimizers of your own, and no others beside torch's.", "MODULE:CLASS[,...]",
        default="none", why="importing a module runs it, and workers of other machines name it", of_hosts=True,
        of_clusters=True, not_in_scenario=PLACE)] = None
    trusted_network: Annotated[bool, About(
        "Do not encrypt: everybody on the network can read and change what is sent.", of_hosts=True,
        of_clusters=True, not_in_scenario=MACHINE)] = False
    address: Annotated[str | None, About(
        "The Ray cluster: auto, or HOST:PORT of its head.", "auto|HOST:PORT",
        default="RAY_ADDRESS, else a Ray of this machine, which ends with the run", of_clusters=True,
        not_in_scenario=MACHINE, then=cluster_address)] = None
    working_dir: Annotated[Path | None, About(
        "Send this folder to every machine by Ray's runtime environment; the script must be in it.", "FOLDER",
        default="each has the script at the same path", of_clusters=True, not_in_scenario=PLACE)] = None
    worker_resources: Annotated[str, About(
        "What each worker asks Ray for: CPU, GPU, memory (bytes) and resources of your own.", "NAME=AMOUNT,...",
        of_clusters=True, then=resources_written, not_in_scenario=MACHINE)] = "CPU=1"
    server_resources: Annotated[str, About(
        "The same for the server, its other shards and the evaluator together.", "NAME=AMOUNT,...", of_clusters=True,
        then=resources_written, not_in_scenario=MACHINE)] = "CPU=1"
    shard_resources: Annotated[str, About(
        "The same for each of the remote shards.", "NAME=AMOUNT,...", of_clusters=True, then=resources_written,
        why="a shard is one process", not_in_scenario=MACHINE)] = "CPU=1"
    spread: Annotated[bool, About(
        "Place the first workers, and remote shards, on as many machines as possible; --pack, on as few.",
        opposite="pack", of_clusters=True, not_in_scenario=MACHINE)] = False
    resource_timeout: Annotated[Positive, About(
        "Seconds to wait for what the first workers ask for.", "S",
        why="a cluster that grows needs minutes for a machine", of_clusters=True, not_in_scenario=MACHINE)] = 300.0
    given: tuple[str, ...] = ()  # settings that any source gave
# fmt: on


class Setting(NamedTuple):
    """One declared setting."""

    name: str
    declared: Any
    default: Any
    about: About

    @property
    def written(self) -> str:
        """Its name outside of Python."""
        return self.about.written or self.name

    @property
    def flag(self) -> str:
        """Its option of `paceline run`."""
        return "--" + self.written.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.written.upper()

    @property
    def default_text(self) -> str:
        """Its default in words; empty where there is none."""
        if self.about.default or self.default in (None, False, {}, ()):
            return self.about.default
        return to_text(self.default)

    def read(self, value: Any, origin: str) -> Any:
        """Convert a given value; `origin` names its source in errors."""
        about = self.about
        found = read(value, self.declared, f"{origin}:", none=about.off)
        try:
            return about.then(found) if about.then is not None and found is not None else found
        except OptionError as error:
            raise OptionError(f"{origin}: {error}") from None


def _declared() -> dict[str, Setting]:
    hints = get_type_hints(RunConfig, include_extras=True)
    nothing = RunConfig()
    return {
        name: Setting(name, hint, getattr(nothing, name), about)
        for name, hint in hints.items()
        for about in getattr(hint, "__metadata__", ())
        if isinstance(about, About)
    }


SETTINGS = _declared()
_EXCLUSIVE = {"batch_size": "global_batch", "global_batch": "batch_size"}  # two ways to say the same


class Unset:
    """Placeholder of a setting that was not given; its repr is the default, so that `help(launch)` shows it."""

    def __init__(self, default: Any) -> None:
        self.default = default

    def __repr__(self) -> str:
        return repr(self.default)


class _AllUnset:
    def __getattr__(self, name: str) -> Unset:
        return Unset(SETTINGS[name].default)


unset = cast(RunConfig, _AllUnset())  # `seed: int = unset.seed`: a parameter that shows whether it was given


def resolve(
    command_line: Mapping[str, Any], environment: Mapping[str, str], scenario_run: Mapping[str, Any], *,
    spell: Callable[[Setting], str] = lambda setting: setting.flag, repeats: bool = False,
) -> RunConfig:  # fmt: skip
    """Merge the sources into one configuration. `None` and empty variables count as not given.

    `spell` returns how the first source writes a setting: by default as a flag. `repeats`: the last source is not a
    scenario's table but the settings of an earlier run, which may hold all of them.
    """
    _refuse_misspelt_variables(environment)
    if not repeats:
        refuse_what_is_not_data(scenario_run, SETTINGS.values())
    in_run = {setting.written for setting in SETTINGS.values() if repeats or not setting.about.not_in_scenario}
    of_variables = {setting.written: environment.get(setting.variable) or None for setting in SETTINGS.values()}
    sources: list[tuple[dict[str, Any], Callable[[Setting], str]]] = [
        (_known(scenario_run, "key of the scenario's [run] table", in_run), lambda setting: f"[run] {setting.written}"),
        (_known(of_variables, "variable", of_variables), lambda setting: setting.variable),
        (_known(command_line, "setting", [*of_variables, "options"]), spell),
    ]
    settings: dict[str, Any] = {}
    for values, origin in sources:
        for name, value in values.items():
            found = SETTINGS[name].read(value, origin(SETTINGS[name]))
            if name in _EXCLUSIVE and _EXCLUSIVE[name] not in values:
                settings.pop(_EXCLUSIVE[name], None)  # of a source that ranks lower
            settings[name] = {**settings.get(name, {}), **found} if isinstance(found, dict) else found
    return RunConfig(**settings, given=tuple(sorted(settings)))


def chosen_scenario(command_line: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Return the requested scenario, which `resolve` needs for its `[run]` table."""
    setting = SETTINGS["scenario"]
    for given, origin in (
        (command_line.get("scenario"), setting.flag),
        (environment.get(setting.variable), setting.variable),
    ):
        if given:
            return str(setting.read(given, origin))
    return None


def chosen_log_level(command_line: str | None, environment: Mapping[str, str]) -> str:
    """Return the level of the `paceline` logger: debug, info, warning (the default) or error."""
    variable = PREFIX + "LOG_LEVEL"
    given = command_line or environment.get(variable) or "warning"
    return str(read(given.lower(), LogLevel, "--log-level:" if command_line else f"{variable}:"))


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do."""

    virtual_time: bool = False  # needs a scenario; its journal holds nothing of the machine or the time of day
    own_processes: bool = False  # workers are processes that start, die and can be restarted
    restarts_server: bool = False  # restarts a dead server from a checkpoint
    open_to_joiners: bool = False  # workers join from outside at any time, so a run without workers waits for some
    asks_a_cluster: bool = False  # gets its workers' places from a cluster's scheduler, and each has resources


def is_elastic(config: RunConfig) -> bool:
    """Whether more workers may join than the run begins with."""
    return (config.most_workers or 0) > (config.workers or 0)


def require_possible(config: RunConfig, engine: Capabilities) -> None:
    """Refuse settings that contradict each other or the engine."""
    if config.target is not None and config.evaluate_every is None:
        raise OptionError(f"the target {config.target} is never reached with --evaluate-every off; leave one out")
    if config.batch_size is not None and config.global_batch is not None:
        raise OptionError(
            f"--batch-size {config.batch_size} is per worker and --global-batch {config.global_batch} for all of them: "
            "leave one out"
        )
    if config.scale_lr != "none" and config.global_batch is not None:
        raise OptionError(
            f"--scale-lr {config.scale_lr} is for updates that grow with the workers, and with --global-batch "
            f"{config.global_batch} they do not: leave one out"
        )
    if config.most_workers is not None and config.most_workers < (config.workers or 1):
        raise OptionError(
            f"--most-workers {config.most_workers} is less than the {config.workers or 1} that the run begins with; "
            "raise it, or begin with fewer"
        )
    if config.remote_shards and config.remote_shards > (config.servers if config.servers > 1 else 0):
        raise OptionError(
            f"--remote-shards {config.remote_shards} is more than the shards of --servers {config.servers}, which has "
            f"{config.servers if config.servers > 1 else 'none'}; lower it, or give --servers "
            f"{max(2, config.remote_shards)} or more"
        )
    last = LAST_PORT + 1 - (config.servers if config.servers > 1 else 0)
    if config.listen is not None and int(config.listen.rpartition(":")[2]) >= last:
        raise OptionError(
            f"--listen {config.listen}: with --servers {config.servers} the {config.servers + 1} ports after it are "
            f"used, too; choose one below {last}"
        )
    if engine.open_to_joiners and not engine.asks_a_cluster and config.listen is None:
        raise OptionError(f"the {config.engine} engine needs an address for workers to join at: --listen HOST:PORT")
    for setting in SETTINGS.values():
        if not setting.about.allowed(engine) and getattr(config, setting.name) != setting.default:
            users = ["`paceline serve`"] * setting.about.of_hosts + ["--engine ray"] * setting.about.of_clusters
            raise OptionError(
                f"{setting.flag} is not supported by the {config.engine} engine: it is for {' and '.join(users)}; "
                "remove it"
            )
    if engine.own_processes:
        return
    for setting in SETTINGS.values():
        if setting.about.of_processes and getattr(config, setting.name) != setting.default:
            raise OptionError(
                f"{setting.flag} is not supported by the {config.engine} engine; remove it, or use --engine local"
            )


def with_shared_batch(config: RunConfig, workers: int) -> RunConfig:
    """Return the settings with each worker's batch size, where `global_batch` gives that of all workers together.

    All workers have one batch size, since a round is `workers` equal batches; so the total must be divisible.
    """
    total = config.global_batch
    if total is None:
        return config
    share, rest = divmod(total, workers)
    if rest:
        nearest_valid = [workers * size for size in (share, share + 1) if size]
        raise OptionError(
            f"--global-batch: {total} samples cannot be shared equally by {workers} workers; give "
            f"{' or '.join(map(str, nearest_valid))}, or another number of workers"
        )
    return msgspec.structs.replace(config, batch_size=share)


def rate_factor(scale: str, workers: int) -> float:
    """Return what `scale_lr` multiplies the script's learning rate by."""
    return {"linear": float(workers), "sqrt": math.sqrt(workers)}.get(scale, 1.0)


def _known(values: Mapping[str, Any], kind: str, valid: Iterable[str]) -> dict[str, Any]:
    """Return the given values by field name; raise on an unknown name."""
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name not in valid:
            raise OptionError(f"unknown {kind} {shown(name)}; {nearest(name, valid)}")
        if value is not None:
            known["options" if name == "set" else name] = value
    return known


def _refuse_misspelt_variables(environment: Mapping[str, str]) -> None:
    valid = [*(setting.variable for setting in SETTINGS.values()), PREFIX + "LOG_LEVEL", TOKEN]
    for variable in environment:
        if variable.startswith(PREFIX) and variable not in valid:
            close = closest(variable, valid, NEAR_MISS)
            if close is not None:
                raise OptionError(f"unknown variable {variable}; did you mean {close}?")
