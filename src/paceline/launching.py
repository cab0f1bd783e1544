"""Start a run from Python: `paceline.launch(train, workers=8, strategy="dasp")`.

Not public: import `Run` and `launch` from `paceline`.
"""

import datetime
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from paceline._version import __version__
from paceline.core.errors import OptionError
from paceline.core.scenario import file as scenarios
from paceline.core.scenario.file import Scenario
from paceline.core.settings import (
    DEFAULT_SCENARIO,
    SETTINGS,
    Capabilities,
    Divergence,
    EngineName,
    Every,
    LogTool,
    NonFinite,
    Patience,
    RunConfig,
    ScaleRate,
    Start,
    Target,
    Transport,
    Unset,
    require_possible,
    resolve,
    unset,
    with_shared_batch,
)
from paceline.core.worker_count import agreed_workers, require_asked_for, usual_threads, usual_workers
from paceline.model.own_optimizer import handed_over
from paceline.records import private_files, run_file, scalar_logs
from paceline.records.journal import Header, Sink, Tee
from paceline.records.journal_file import require_usable
from paceline.records.metrics import Report
from paceline.server.plan import Cause, Plan
from paceline.server.progress import Progress
from paceline.strategies import Machine, checked, is_peer, machine_class, require_findable, written
from paceline.strategies.base import DEFAULTS
from paceline.strategies.sources import require_not_loading
from paceline.worker.scripts import Script, load_script

__all__ = ["Run", "launch", "load_script"]

# Settings that describe the machine, or have a field of their own in the header.
_NOT_OPTIONS = (
    "data_dir",
    "journal",
    "runs_dir",
    "log",
    "resume",
    "given",
    "scenario",
    "strategy",
    "engine",
    "seed",
    "workers",
    "start",
    "listen",
    "token_file",
    "address",
    "working_dir",
    "resource_timeout",
)
_OF_PROCESSES = tuple(setting.name for setting in SETTINGS.values() if setting.about.of_processes)


class Run:
    """A finished run, as `paceline.launch()` returns it.

    `summary` is its report, `ended` says why it ended ("done", "target", "limit", "divergence" or "interrupted"),
    `journal` and `folder` say where its files are (None: nothing was written). `model_state` is the trained model's
    `state_dict`; a run on tables has `tables` instead, arrays by name.
    """

    summary: Report
    journal: Path | None
    folder: Path | None
    ended: Cause
    model_state: dict[str, torch.Tensor] | None
    tables: dict[str, Any] | None

    def __init__(
        self,
        summary: Report,
        journal: Path | None,
        folder: Path | None,
        ended: Cause,
        state: dict[str, torch.Tensor] | None,
        tables: dict[str, Any] | None = None,
        nodes: dict[int, dict[str, torch.Tensor]] | None = None,
    ) -> None:
        self.summary = summary
        self.journal = journal
        self.folder = folder
        self.ended = ended
        self.model_state = state
        self.tables = tables
        self._nodes = nodes

    @property
    def nodes(self) -> dict[int, dict[str, torch.Tensor]]:
        """The model of each node at the end of its loop, in a run without a server. After a run of real processes they
        are read from its folder; without `runs_dir` there are none."""
        if self._nodes is None:
            files = sorted((self.folder / "nodes").glob("*.safetensors")) if self.folder is not None else []
            self._nodes = {int(file.stem): safetensors.torch.load_file(file) for file in files}
        return self._nodes

    @property
    def exit_code(self) -> int:
        """The exit code for a command that made this run."""
        return {"divergence": 3, "interrupted": 130, "error": 4}.get(self.ended, 0)

    def __repr__(self) -> str:
        from paceline.records.text import one_line  # it loads rich

        return f"Run({one_line(self.summary, self.ended)})"

    def _repr_html_(self) -> str:
        from paceline.records.notebook import html  # it loads rich

        folder = [] if self.folder is None else [("folder", str(self.folder))]
        return html(self.summary, [("ended", self.ended), *folder])


def launch(
    train: Callable[[], None],
    *,
    config: RunConfig | None = None,
    progress: Callable[[Progress], None] | None = None,
    sink: Sink | None = None,
    optimizers: Sequence[type[torch.optim.Optimizer]] = (),
    engine: EngineName = unset.engine,
    scenario: Scenario | str | Path | None = unset.scenario,
    strategy: str | Machine | type[Machine] = unset.strategy,
    workers: int | None = unset.workers,
    seed: int = unset.seed,
    batch_size: int | None = unset.batch_size,
    global_batch: int | None = unset.global_batch,
    scale_lr: ScaleRate = unset.scale_lr,
    epochs: float | None = unset.epochs,
    max_versions: int | None = unset.max_versions,
    max_seconds: float | None = unset.max_seconds,
    target: Target | str | None = unset.target,
    evaluate_every: Every | str | None = unset.evaluate_every,
    on_divergence: Divergence = unset.on_divergence,
    on_nonfinite: NonFinite = unset.on_nonfinite,
    options: Mapping[str, str | float] = unset.options,
    data_dir: Path | str | None = unset.data_dir,
    threads: int | None = unset.threads,
    transport: Transport = unset.transport,
    servers: int = unset.servers,
    remote_shards: int | None = unset.remote_shards,
    start: Start = unset.start,
    respawn: bool = unset.respawn,
    worker_timeout: Patience | str | float | None = unset.worker_timeout,
    checkpoint_every: Every | str | None = unset.checkpoint_every,
    checkpoint_keep: int = unset.checkpoint_keep,
    resume: Path | str | None = unset.resume,
    journal: Path | str | None = unset.journal,
    runs_dir: Path | str | None = unset.runs_dir,
    log: Sequence[LogTool] = unset.log,
    listen: str | None = unset.listen,
    most_workers: int | None = unset.most_workers,
    token_file: Path | str | None = unset.token_file,
    own_optimizers: str | None = unset.own_optimizers,
    trusted_network: bool = unset.trusted_network,
    address: str | None = unset.address,
    working_dir: Path | str | None = unset.working_dir,
    worker_resources: str = unset.worker_resources,
    server_resources: str = unset.server_resources,
    shard_resources: str = unset.shard_resources,
    spread: bool = unset.spread,
    resource_timeout: float = unset.resource_timeout,
) -> Run:
    """Run `train` on every worker, wait for the end, and return the finished run.

    `train` is a function without arguments that begins with `paceline.init()`. The settings are those of the command
    line, explained in docs/reference/settings.md; alternatively `config` holds all of them. `progress` is called as the
    run goes on, and `sink` gets every line of the journal. `optimizers` are classes of your own that the server could
    not import, such as those of a notebook.

    A run that fails raises an error. One that was interrupted, or that the convergence guard stopped, returns and says
    so in `ended`.
    """
    arguments = locals()  # the parameters and nothing else, since this is the first line
    settings = {name: arguments[name] for name in SETTINGS if not isinstance(arguments[name], Unset)}
    require_not_loading("a call of launch()")
    if settings.get("strategy") is not None:
        settings["strategy"] = written(strategy)
    config, cluster, workers = _settled(config, settings)
    config, restore = _resumed(config, workers)
    config = msgspec.structs.replace(config, strategy=_strategy(config, workers))
    scalar_logs.require(config.log)
    if not callable(train):
        raise OptionError(f"launch() takes a function, not {train!r}: `paceline run` takes the path of a script")
    _require_descriptors(config, workers)
    plan = msgspec.structs.replace(_plan(config, cluster, workers, restore), optimizers=handed_over(optimizers))
    _say_how_to_repeat(plan, train)
    from paceline import engines  # each is loaded when it is asked for

    with scalar_logs.opened(config.log, plan.folder, plan.header) as scalars:
        lines = sink if scalars is None else Tee(scalars, sink)
        done = engines.load(config.engine).launch(train, plan, lines, progress)
    left = done.left
    return Run(done.report, plan.journal, plan.folder, done.cause, left.model, left.tables, left.nodes or None)


def _capabilities(engine: str) -> Capabilities:
    from paceline import engines

    return engines.capabilities(engine)


def _require_descriptors(config: RunConfig, workers: int) -> None:
    """Refuse what the limit of open files does not allow, if this machine is to carry the processes."""
    from paceline import engines

    can = _capabilities(config.engine)
    if can.own_processes and not can.asks_a_cluster:
        engines.fitness().require_descriptors(workers, raised=can.open_to_joiners)


def _settled(config: RunConfig | None, settings: dict[str, Any]) -> tuple[RunConfig, Scenario | None, int]:
    """Return the settings in force, the scenario (None on real processes without one), and the number of workers."""
    given = settings.pop("scenario", None)
    if config is not None and settings:
        raise OptionError(f"give launch() a config or single settings, not both: {', '.join(sorted(settings))}")
    if given is None and config is not None:
        given = config.scenario
    cluster = given if isinstance(given, Scenario) else None if given is None else scenarios.load(given)
    settled = config or resolve(settings, {}, cluster.run if cluster is not None else {}, spell=lambda each: each.name)
    if cluster is None and _capabilities(settled.engine).virtual_time:
        cluster = scenarios.load(DEFAULT_SCENARIO)
        settled = config or resolve(settings, {}, cluster.run, spell=lambda each: each.name)
    can = _capabilities(settled.engine)
    require_possible(settled, can)
    if cluster is not None:
        workers = agreed_workers(settled.workers, cluster.count, cluster.name)
        require_asked_for(cluster, workers if config is not None else settings.get("workers"))
    else:
        workers = settled.workers or usual_workers(torch.cuda.device_count())
    threads = usual_threads(settled, workers, can)
    settled = with_shared_batch(settled, workers)
    return msgspec.structs.replace(settled, workers=workers, threads=threads), cluster, workers


def _resumed(config: RunConfig, workers: int) -> tuple[RunConfig, Path | None]:
    """Return the settings, completed from the checkpoint to resume from, and that checkpoint's path."""
    if config.resume is None:
        return config, None
    from paceline.server.checkpoint import resuming  # loaded only when used

    found = resuming.checkpoint_at(config.resume)
    return resuming.settings_of(found, config, workers), found.path


def _strategy(config: RunConfig, workers: int) -> str:
    """Return the strategy as a journal writes it, a file by its whole path; refuse one that the run cannot use."""
    spelled = checked(config.strategy, config.seed, workers)
    if is_peer(spelled) and config.on_divergence == "bsp":
        name = machine_class(spelled).name
        raise OptionError(f"{name} has no server that could go on under bsp: give --on-divergence stop")
    if is_peer(spelled) and config.scale_lr != "none":
        raise OptionError(
            f"--scale-lr {config.scale_lr}: under {machine_class(spelled).name} each node steps by itself, over its "
            "own batch, so nothing grows with the workers: leave it out"
        )
    if is_peer(spelled) and config.servers > 1:
        raise OptionError(
            f"--servers {config.servers}: under {machine_class(spelled).name} each node has its own model, and no "
            "server holds the weights: leave it out"
        )
    if _capabilities(config.engine).own_processes:
        require_findable(spelled)
    return spelled


def _plan(config: RunConfig, cluster: Scenario | None, workers: int, restore: Path | None) -> Plan:
    """Return the plan of a run with these settings, and make its folder if they ask for one."""
    crashes = cluster is not None and any(event.kind == "server_crash" for event in cluster.events)
    restarts = _capabilities(config.engine).restarts_server
    if crashes and restarts and config.checkpoint_every is None and restore is None:
        raise OptionError("the scenario's server_crash needs a checkpoint to go on from: give --checkpoint-every")
    if config.checkpoint_every is not None and config.runs_dir is None:
        raise OptionError("checkpoint_every needs a folder to write to: give runs_dir, too")
    folder = _folder(config)
    journal = config.journal or (folder / "journal.jsonl" if folder is not None else None)
    if journal is not None:
        require_usable(journal)
    header = _header(config, cluster, workers)
    return Plan(
        config=config, scenario=cluster, header=header, folder=folder, journal=journal, restore=restore,
        remote_shards=config.remote_shards or 0,
    )  # fmt: skip


def _say_how_to_repeat(plan: Plan, train: Callable[[], None]) -> None:
    """Leave in the run's folder what `paceline resume` needs; only real processes have checkpoints to resume from."""
    if plan.folder is None or not _capabilities(plan.config.engine).own_processes:
        return
    script, task = (train, None) if isinstance(train, Script) else (None, _task_of(train))
    path, arguments = (script.path, script.arguments) if script is not None else (None, [])
    run_file.save(plan.folder, path, arguments, task, plan.config)


def _task_of(train: Callable[[], None]) -> str | None:
    """Return the name of a built-in task."""
    room, _, name = getattr(train, "__module__", "").rpartition(".")
    return name if room == "paceline.tasks" and getattr(train, "__name__", "") == "train" else None


def _folder(config: RunConfig) -> Path | None:
    """Make a folder for this run alone, however many begin in one second."""
    if config.runs_dir is None:
        return None
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "-", machine_class(config.strategy).name)
    for attempt in range(1000):
        folder = config.runs_dir / (f"{stamp}-{name}" + (f"-{attempt}" if attempt else ""))
        try:
            private_files.make_folder(folder, exist_ok=False)
        except FileExistsError:
            continue
        except OSError as error:
            raise OptionError(
                f"cannot make the run's folder {folder}: {error.strerror}; choose another --runs-dir"
            ) from error
        return folder
    raise OptionError(f"{config.runs_dir} has 1000 runs of this second; choose another --runs-dir")


def _header(config: RunConfig, cluster: Scenario | None, workers: int) -> Header:
    """Return the journal's header; in virtual time it says nothing of the machine: no paths, no host, no time."""
    options: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    can = _capabilities(config.engine)
    real = not can.virtual_time
    not_here = (setting.name for setting in SETTINGS.values() if not setting.about.allowed(can))
    for name in {*_NOT_OPTIONS, *(() if real else _OF_PROCESSES), *not_here}:
        options.pop(name)
    for name in ("evaluate_every", "worker_timeout"):
        options[name] = "off" if getattr(config, name) is None else str(getattr(config, name))
    if real or config.checkpoint_every is not None:
        options["checkpoint_every"] = None if config.checkpoint_every is None else str(config.checkpoint_every)
    else:
        del options["checkpoint_every"], options["checkpoint_keep"]
    return Header(
        defaults=DEFAULTS,
        engine=config.engine,
        strategy=config.strategy,
        seed=config.seed,
        workers=workers,
        options=options,
        scenario=None if cluster is None else scenarios.as_data(cluster),
        versions={"paceline": __version__, "torch": str(torch.__version__)},
        host=socket.gethostname() if real else None,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds") if real else None,
    )
