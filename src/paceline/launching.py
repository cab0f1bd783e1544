"""Start a run from Python: `paceline.launch(train, workers=8, strategy="dasp")`."""

import datetime
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import context
from paceline import scenario as scenarios
from paceline._version import __version__
from paceline.config import DEFAULT_SCENARIO, ENGINES, RunConfig, agreed_workers, resolve
from paceline.errors import DivergenceError, OptionError
from paceline.journal import Header, Line, Sink, Writer, refuse_other_files
from paceline.logs import Log
from paceline.metrics import Metrics, Report, to_json
from paceline.running import Cause, Conduct, Progress
from paceline.scenario import Scenario
from paceline.store import model_state
from paceline.strategies import build, canonical


class Run:
    """A finished run: its report, where its journal lies, and the trained model."""

    def __init__(
        self,
        summary: Report,
        journal: Path | None,
        folder: Path | None,
        ended: Cause,
        state: dict[str, torch.Tensor] | None,
    ) -> None:
        self.summary = summary
        self.journal = journal
        self.folder = folder
        self.ended = ended
        self.model_state = state

    @property
    def exit_code(self) -> int:
        """What a command that made this run exits with."""
        return {"divergence": 3, "interrupted": 130, "error": 4}.get(self.ended, 0)


class _Tee:
    """Every line goes to the file, if there is one, to the fold and to the log."""

    def __init__(self, *sinks: Sink | None) -> None:
        self._sinks = [sink for sink in sinks if sink is not None]

    def write(self, line: Line) -> None:
        for sink in self._sinks:
            sink.write(line)


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

    `settings` are those of the command line: workers, strategy, seed, batch_size, epochs, max_versions, max_seconds,
    target, evaluate_every, on_divergence, options, data_dir, journal, runs_dir. A run that fails raises; one that was
    interrupted or stopped by the guard comes back and says so in `ended`.
    """
    cluster = _scenario(scenario if scenario is not None else (config.scenario if config is not None else None))
    if config is None:
        spelt = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        config = resolve(spelt, {}, cluster.run, spell=lambda name: name)
    elif settings:
        raise OptionError(f"give launch() a config or single settings, not both: {', '.join(sorted(settings))}")
    _require_engine(config, cluster)
    strategy = build(config.strategy, config.seed)
    strategy.check(cluster.count)
    folder = _folder(config)
    journal = config.journal or (folder / "journal.jsonl" if folder is not None else None)
    if journal is not None:
        refuse_other_files(journal)
    writer = Writer(journal) if journal is not None else None
    metrics = Metrics()
    header = _header(config, canonical(strategy), cluster)
    conduct = Conduct(config, strategy, _Tee(writer, metrics, Log(), sink), header, progress)
    try:
        _run(train, cluster, conduct)
    finally:
        if writer is not None:
            writer.close()
        report = metrics.report(str(journal) if journal is not None else None)
        if folder is not None:
            (folder / "report.json").write_text(to_json(report) + "\n")
    store = conduct.store_or_none
    return Run(report, journal, folder, conduct.cause or "done", model_state(store) if store is not None else None)


def _run(train: Callable[[], None], cluster: Scenario, conduct: Conduct) -> None:
    from paceline.engines.sim import engine  # engines are loaded when they are used

    threads = torch.get_num_threads()
    torch.set_num_threads(conduct.config.threads)
    try:
        with context.running():
            engine.run(train, cluster, conduct)
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


def _scenario(given: Scenario | str | None) -> Scenario:
    if isinstance(given, Scenario):
        return given
    return scenarios.load(given if given is not None else DEFAULT_SCENARIO)


def _require_engine(config: RunConfig, cluster: Scenario) -> None:
    if config.engine not in ENGINES:
        raise OptionError(f"engine must be one of {', '.join(ENGINES)}, not {config.engine!r}")
    agreed_workers(config.workers, cluster.count, cluster.name)


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


def _header(config: RunConfig, strategy: str, cluster: Scenario) -> Header:
    """A header of the simulator says nothing of the machine: no paths, no host, no hour."""
    options: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    for machine in ("data_dir", "journal", "runs_dir", "scenario", "strategy", "engine", "seed", "workers"):
        options.pop(machine)
    options["evaluate_every"] = str(config.evaluate_every)
    return Header(
        engine=config.engine,
        strategy=strategy,
        seed=config.seed,
        workers=cluster.count,
        options=options,
        scenario=scenarios.as_data(cluster),
        versions={"paceline": __version__, "torch": str(torch.__version__)},
    )


def load_script(path: Path, arguments: list[str]) -> Callable[[], None]:
    """A script file as a function that runs it as `__main__`, with these arguments as its own.

    Each call executes it in a module of its own; modules that it imports are shared between virtual workers.
    """
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise OptionError(f"cannot read script {path}: {error.strerror}") from error
    except SyntaxError as error:
        raise OptionError(f"{path}, line {error.lineno}: {error.msg}") from error

    def train() -> None:
        module = types.ModuleType("__main__")
        module.__file__ = str(path)
        sys.modules["__main__"] = module  # so that the script's own classes can be pickled
        exec(code, module.__dict__)

    sys.argv = [str(path), *arguments]
    folder = os.fspath(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return train
