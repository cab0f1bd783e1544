"""Start a run from Python: `paceline.launch(train, workers=8, strategy="dasp")`."""

import contextlib
import datetime
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from paceline._version import __version__
from paceline.core.errors import DivergenceError, InternalError, OptionError, UserError
from paceline.core.scenario import file as scenarios
from paceline.core.scenario.file import Scenario
from paceline.core.settings import (
    DEFAULT_SCENARIO,
    RunConfig,
    agreed_workers,
    require_possible,
    resolve,
    usual_threads,
    usual_workers,
)
from paceline.model.store import model_state, state_of
from paceline.records.journal import Header, Sink, Tee, Writer, refuse_other_files
from paceline.records.logs import Log
from paceline.records.metrics import Metrics, Report, to_json
from paceline.records.replay import started
from paceline.server.plan import Plan
from paceline.server.run_control import Cause, Conduct, Progress
from paceline.strategies import checked, is_peer
from paceline.worker import context
from paceline.worker.scripts import load_script

__all__ = ["Run", "launch", "load_script"]

# Of the machine, or with a place of its own in the header.
_NOT_OPTIONS = (
    "data_dir",
    "journal",
    "runs_dir",
    "resume",
    "given",
    "scenario",
    "strategy",
    "engine",
    "seed",
    "workers",
)
_OF_PROCESSES = ("transport", "respawn", "checkpoint_every", "checkpoint_keep")


class Run:
    """A finished run: its report, where its journal lies, and the trained model, or its tables as arrays by name."""

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
        """Each node's own model when its loop was over, in a run without a server; real processes leave them in the
        run's folder, and without one nobody keeps them."""
        if self._nodes is None:
            files = sorted((self.folder / "nodes").glob("*.safetensors")) if self.folder is not None else []
            self._nodes = {int(file.stem): safetensors.torch.load_file(file) for file in files}
        return self._nodes

    @property
    def exit_code(self) -> int:
        """What a command that made this run exits with."""
        return {"divergence": 3, "interrupted": 130, "error": 4}.get(self.ended, 0)


def launch(
    train: Callable[[], None],
    *,
    config: RunConfig | None = None,
    scenario: Scenario | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    sink: Sink | None = None,
    **settings: Any,
) -> Run:
    """Run `train` on every worker and wait for the end.

    `settings` are those of the command line: engine, workers, strategy, seed, batch_size, epochs, max_versions,
    max_seconds, target, evaluate_every, on_divergence, on_nonfinite, options, data_dir, journal, runs_dir, threads,
    transport, respawn, checkpoint_every, checkpoint_keep, resume. A run that fails raises; one that was interrupted or
    stopped by the guard comes back and says so in `ended`.
    """
    config, cluster = _settled(config, scenario, settings)
    workers = cluster.count if cluster is not None else config.workers or usual_workers(torch.cuda.device_count())
    config = msgspec.structs.replace(config, workers=workers, threads=usual_threads(config, workers))
    restore = None
    if config.resume is not None:
        from paceline.server.checkpoint import resuming  # checkpoints are loaded when they are used

        found = resuming.checkpoint_at(config.resume)
        config, restore = resuming.settings_of(found, config, workers), found.path
    spelled = _strategy(config, workers)
    if not callable(train):
        raise OptionError(f"launch() takes a function, not {train!r}: `paceline run` takes the path of a script")
    crashes = cluster is not None and any(event.kind == "server_crash" for event in cluster.events)
    if crashes and config.engine == "local" and config.checkpoint_every is None and restore is None:
        raise OptionError("the scenario's server_crash needs a checkpoint to go on from: give --checkpoint-every")
    if config.checkpoint_every is not None and config.runs_dir is None:
        raise OptionError("checkpoint_every needs a folder to write to: give runs_dir, too")
    folder = _folder(config)
    journal = config.journal or (folder / "journal.jsonl" if folder is not None else None)
    if journal is not None:
        refuse_other_files(journal)
    header = _header(config, spelled, cluster, workers)
    plan = Plan(config=config, scenario=cluster, header=header, folder=folder, journal=journal, restore=restore)
    if config.engine == "local":
        return _on_processes(train, plan, progress, sink)
    return _simulated(train, plan, progress, sink)


def _strategy(config: RunConfig, workers: int) -> str:
    """The strategy as a journal writes it; refused where the run could not have it."""
    spelled = checked(config.strategy, config.seed, workers)
    if is_peer(spelled) and config.on_divergence == "bsp":
        name = spelled.split(":")[0]
        raise OptionError(f"{name} has no server that could go on under bsp: give --on-divergence stop")
    return spelled


def _settled(
    config: RunConfig | None, scenario: Scenario | str | None, settings: dict[str, Any]
) -> tuple[RunConfig, Scenario | None]:
    """The settings in force and the cluster they are for; real processes need none."""
    if config is not None and settings:
        raise OptionError(f"give launch() a config or single settings, not both: {', '.join(sorted(settings))}")
    given = scenario if scenario is not None else (config.scenario if config is not None else None)
    cluster = given if isinstance(given, Scenario) else None if given is None else scenarios.load(given)
    if config is None:
        spelt = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        config = resolve(spelt, {}, cluster.run if cluster is not None else {}, spell=lambda name: name)
        if cluster is None and config.engine == "sim":
            cluster = scenarios.load(DEFAULT_SCENARIO)
            config = resolve(spelt, {}, cluster.run, spell=lambda name: name)
    elif cluster is None and config.engine == "sim":
        cluster = scenarios.load(DEFAULT_SCENARIO)
    require_possible(config)
    if cluster is not None:
        agreed_workers(config.workers, cluster.count, cluster.name)
    return config, cluster


def _on_processes(
    train: Callable[[], None], plan: Plan, progress: Callable[[Progress], None] | None, sink: Sink | None
) -> Run:
    from paceline.engines.local.launcher import Launcher  # engines are loaded when they are used
    from paceline.engines.local.workload import packed

    if context.current() is not None:
        raise UserError(
            "launch() was called inside a worker of another run: run the file that calls it with `python`, not with "
            "`paceline run`, or leave the call out"
        )
    outcome = Launcher(plan, packed(train), Log(), sink, progress).run()
    with contextlib.closing(outcome):
        report = outcome.report
        if report is not None:
            _write_report(report, plan.folder)
        outcome.raise_failure()
        if report is None:
            raise InternalError(f"the run ended ({outcome.cause}) without a report")
        state = outcome.state()
        if not outcome.tables or state is None:
            return Run(report, plan.journal, plan.folder, outcome.cause, state)
        tables = {name: tensor.numpy() for name, tensor in state.items()}
        return Run(report, plan.journal, plan.folder, outcome.cause, None, tables)


def _simulated(
    train: Callable[[], None], plan: Plan, progress: Callable[[Progress], None] | None, sink: Sink | None
) -> Run:
    writer = Writer(plan.journal) if plan.journal is not None else None
    metrics = Metrics()
    conduct = Conduct(plan.config, started(plan.header), Tee(writer, metrics, Log(), sink), plan.header, progress)
    try:
        _run(train, plan, conduct)
    finally:
        if writer is not None:
            writer.close()
        report = metrics.report(str(plan.journal) if plan.journal is not None else None)
        _write_report(report, plan.folder)
    store = conduct.store_or_none
    state = model_state(store) if store is not None else None
    tables = conduct.tables.snapshot() if conduct.tables is not None else None
    nodes = {node: state_of(conduct.store.spec, *model) for node, model in conduct.node_models.items()}
    return Run(report, plan.journal, plan.folder, conduct.cause or "done", state, tables, nodes)


def _run(train: Callable[[], None], plan: Plan, conduct: Conduct) -> None:
    from paceline.engines.sim import engine

    if plan.scenario is None:
        raise InternalError("the simulator was given no scenario")
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.config.threads or 1)
    try:
        with context.running():
            engine.run(train, plan.scenario, conduct)
    except KeyboardInterrupt:
        conduct.cause = "interrupted"
        conduct.coordinator.observe_end("interrupted")
    except DivergenceError:
        pass  # the guard's verdict is in the report, and the run comes back with it
    except Exception as error:
        conduct.cause = "error"
        conduct.coordinator.observe("error", {"text": str(error)})
        conduct.coordinator.observe_end("error")
        raise
    finally:
        torch.set_num_threads(threads)


def _write_report(report: Report, folder: Path | None) -> None:
    if folder is not None:
        (folder / "report.json").write_text(to_json(report) + "\n")


def _folder(config: RunConfig) -> Path | None:
    """A folder of its own for each run, however many begin in one second."""
    if config.runs_dir is None:
        return None
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = config.strategy.split(":")[0]
    for attempt in range(1000):
        folder = config.runs_dir / (f"{stamp}-{name}" + (f"-{attempt}" if attempt else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise OptionError(
                f"cannot make the run's folder {folder}: {error.strerror}; choose another --runs-dir"
            ) from error
        return folder
    raise OptionError(f"{config.runs_dir} has 1000 runs of this second; choose another --runs-dir")


def _header(config: RunConfig, strategy: str, cluster: Scenario | None, workers: int) -> Header:
    """A header of the simulator says nothing of the machine: no paths, no host, no hour."""
    options: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    real = config.engine == "local"
    for name in (*_NOT_OPTIONS, *(() if real else _OF_PROCESSES)):
        options.pop(name)
    options["evaluate_every"] = "off" if config.evaluate_every is None else str(config.evaluate_every)
    if real:
        options["checkpoint_every"] = None if config.checkpoint_every is None else str(config.checkpoint_every)
    return Header(
        engine=config.engine,
        strategy=strategy,
        seed=config.seed,
        workers=workers,
        options=options,
        scenario=None if cluster is None else scenarios.as_data(cluster),
        versions={"paceline": __version__, "torch": str(torch.__version__)},
        host=socket.gethostname() if real else None,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds") if real else None,
    )
