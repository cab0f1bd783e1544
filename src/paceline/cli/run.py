"""`paceline run`: train a script or a built-in task, then print the report."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cli import run_options as options
from paceline.cli.progress import progress_shown
from paceline.cli.streams import logging_shown, output_kept_clean, say
from paceline.core import settings as configuration
from paceline.core.errors import DataError, OptionError

if TYPE_CHECKING:
    from paceline.launching import Run

DEFAULT_TASK = "digits"


def run(
    script: options.Script = None,
    arguments: options.Arguments = None,
    task: options.Task = None,
    engine: options.Engine = None,
    scenario: options.ScenarioName = None,
    strategy: options.Strategy = None,
    workers: options.Workers = None,
    seed: options.Seed = None,
    batch_size: options.BatchSize = None,
    epochs: options.Epochs = None,
    max_versions: options.MaxVersions = None,
    max_seconds: options.MaxSeconds = None,
    target: options.TargetText = None,
    evaluate_every: options.EvaluateEvery = None,
    on_divergence: options.OnDivergence = None,
    on_nonfinite: options.OnNonFinite = None,
    set_options: options.Set = None,
    data_dir: options.DataDir = None,
    threads: options.Threads = None,
    transport: options.TransportName = None,
    respawn: options.Respawn = False,
    checkpoint_every: options.CheckpointEvery = None,
    checkpoint_keep: options.CheckpointKeep = None,
    resume: options.Resume = None,
    journal: options.JournalFile = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    log_level: options.LogLevel = None,
) -> int:
    """Train SCRIPT, or a built-in task, on a cluster of unequal workers and report how it went."""
    given = {
        "engine": engine, "scenario": scenario, "strategy": strategy, "workers": workers, "seed": seed,
        "batch_size": batch_size, "epochs": epochs, "max_versions": max_versions, "max_seconds": max_seconds,
        "target": target, "evaluate_every": evaluate_every, "on_divergence": on_divergence, "set": set_options,
        "data_dir": data_dir, "threads": threads, "journal": journal, "runs_dir": runs_dir,
        "on_nonfinite": on_nonfinite, "transport": transport, "respawn": respawn or None,
        "checkpoint_every": checkpoint_every, "checkpoint_keep": checkpoint_keep, "resume": resume,
    }  # fmt: skip
    with logging_shown(configuration.chosen_log_level(log_level, os.environ)):
        settings = settle(given, os.environ)
        train = _workload(script, arguments or [], task)
        _make_places(settings)
        if not quiet:
            _say_what_was_assumed(settings, given, os.environ, no_workload=script is None and task is None)
        finished = _train(train, settings, json=json, quiet=quiet)
    _print_report(finished, json=json)
    _say_how_it_ended(finished, quiet=quiet)
    return finished.exit_code


def settle(given: Mapping[str, Any], environment: Mapping[str, str]) -> configuration.RunConfig:
    """The settings in force, checked as far as that is possible before torch is loaded."""
    from paceline import strategies
    from paceline.core.scenario import file as scenarios

    name = configuration.chosen_scenario(given, environment)
    cluster = scenarios.load(name) if name is not None else None
    settings = configuration.resolve(given, environment, cluster.run if cluster is not None else {})
    by_default = cluster is None and settings.engine == "sim"
    if by_default:
        name = configuration.DEFAULT_SCENARIO
        cluster = scenarios.load(name)
        settings = configuration.resolve(given, environment, cluster.run)
    configuration.require_possible(settings)
    workers = settings.workers or 0
    if cluster is not None and name is not None:
        workers = configuration.agreed_workers(settings.workers, cluster.count, name, by_default=by_default)
    workers = workers or configuration.usual_workers(_cuda_devices())
    strategies.checked(settings.strategy, settings.seed, workers)
    return msgspec.structs.replace(
        settings, scenario=name, workers=workers, runs_dir=settings.runs_dir or configuration.DEFAULT_RUNS_DIR
    )


def _cuda_devices() -> int:
    import torch  # asked only of a run, which loads it anyway

    return torch.cuda.device_count()


def _say_what_was_assumed(
    settings: configuration.RunConfig, given: Mapping[str, Any], environment: Mapping[str, str], *, no_workload: bool
) -> None:
    name, workers = settings.scenario, settings.workers
    if name is None and configuration.chosen_workers(given, environment) is None:
        say(f"no --workers given: training on {workers} worker processes of this machine")
    elif name is not None and configuration.chosen_scenario(given, environment) is None:
        say(f"no --scenario given: simulating {name}, {workers} workers (`paceline scenario {name}`)")
    if no_workload:
        say(f"no script and no --task given: training the built-in task {DEFAULT_TASK}")


def _make_places(settings: configuration.RunConfig) -> None:
    if settings.data_dir is not None and not settings.data_dir.is_dir():
        raise DataError(f"--data-dir: {settings.data_dir} is not a folder; give the one that holds the data set")
    if settings.journal is not None and settings.journal.is_dir():
        raise OptionError(f"--journal: {settings.journal} is a folder; give a file in it, such as run.jsonl")
    for flag, folder in (
        ("--runs-dir", settings.runs_dir),
        ("--journal", settings.journal and settings.journal.parent),
    ):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"{flag}: cannot make the folder {folder}: {error.strerror}") from error


def _workload(script: str | None, arguments: list[str], task: str | None) -> Callable[[], None]:
    if script is not None and task is not None:
        raise OptionError(f"give a script or --task, not both: got {script!r} and --task {task}")
    if script is not None:
        if not Path(script).is_file():
            raise OptionError(f"script {script!r} does not exist; give the path of a Python file, or --task NAME")
        from paceline.worker.scripts import load_script

        return load_script(Path(script), arguments)
    from paceline import tasks

    return tasks.get(task or DEFAULT_TASK)


def _train(train: Callable[[], None], settings: configuration.RunConfig, *, json: bool, quiet: bool) -> "Run":
    from paceline.launching import launch

    if not json:
        with progress_shown(quiet=quiet) as listener:
            return launch(train, config=settings, progress=listener)
    with output_kept_clean(), progress_shown(quiet=quiet) as listener:
        return launch(train, config=settings, progress=listener)


def _say_how_it_ended(finished: "Run", *, quiet: bool) -> None:
    if finished.ended == "divergence":
        say("stopped by the convergence guard: the report's warnings say why")
    elif finished.ended == "interrupted" and not quiet:
        say("interrupted: the report covers the run up to here")


def _print_report(finished: "Run", *, json: bool) -> None:
    if json:
        from paceline.records.metrics import to_json

        print(to_json(finished.summary))
        return
    from rich.console import Console

    from paceline.records.text import show

    show(finished.summary, Console())
