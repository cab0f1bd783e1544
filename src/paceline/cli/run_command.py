"""`paceline run`: train a script or a built-in task, then print the report."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from paceline import engines
from paceline.cli.streams import logging_shown, output_kept_clean, progress_shown, say
from paceline.core import settings as configuration
from paceline.core.errors import DataError, OptionError
from paceline.core.values import shown

if TYPE_CHECKING:
    from paceline.launching import Run

DEFAULT_TASK = "digits"


def run(
    script: str | None, arguments: list[str] | None, task: str | None, json: bool, quiet: bool, log_level: str | None,
    **given: Any,
) -> int:  # fmt: skip
    """Train SCRIPT, or a built-in task, on a cluster of unequal workers and report how it went."""
    given = {name: value or None for name, value in given.items()}  # a flag that was not given is False to typer
    with logging_shown(configuration.chosen_log_level(log_level, os.environ)):
        settings = settle(given, os.environ)
        train = _workload(script, arguments or [], task)
        _make_places(settings)
        if not quiet:
            _say_what_was_assumed(settings, no_workload=script is None and task is None)
        finished = _train(train, settings, json=json, quiet=quiet)
    _print_report(finished, json=json)
    _say_how_it_ended(finished, quiet=quiet)
    return finished.exit_code


def _parameters() -> Iterator[Parameter]:
    """Yield the parameters for typer: every declared setting, as text, and what only the command has."""

    def parameter(name: str, kind: Any, about: Any) -> Parameter:
        default = False if kind is bool else None
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])

    def option(name: str, kind: Any, *flags: str, metavar: str = "", text: str) -> Parameter:
        return parameter(name, kind, typer.Option(*flags, metavar=metavar or None, help=text, show_default=False))

    for name, kind, text in (("script", str | None, "A training script."), ("arguments", list[str] | None, "Its own.")):
        yield parameter(name, kind, typer.Argument(metavar=name.upper(), help=text, show_default=False))
    task = "A built-in task instead of a script (`paceline tasks`)."
    yield option("task", str | None, "--task", metavar="NAME", text=task)
    for setting in configuration.SETTINGS.values():
        kinds: Any = bool if setting.default is False else list[str] | None if setting.default == {} else str | None
        text = setting.about.text + (f" Default: {setting.default_text}." if setting.default_text else "")
        yield option(setting.name, kinds, setting.flag, metavar=setting.about.metavar, text=text)
    yield option("json", bool, "--json", text="Print the report as one JSON object, and nothing else.")
    yield option("quiet", bool, "--quiet", "-q", text="The report alone: no progress, no notes.")
    levels = "debug, info, warning or error. Default: warning."
    yield option("log_level", str | None, "--log-level", metavar="LEVEL", text=levels)


run.__signature__ = inspect.Signature(list(_parameters()), return_annotation=int)  # type: ignore[attr-defined]
run.__annotations__ = {each.name: each.annotation for each in _parameters()}


def settle(given: Mapping[str, Any], environment: Mapping[str, str]) -> configuration.RunConfig:
    """Return the settings in force, checked as far as possible before torch is loaded."""
    from paceline import strategies
    from paceline.core.scenario import file as scenarios

    name = configuration.chosen_scenario(given, environment)
    cluster = scenarios.load(name) if name is not None else None
    settings = configuration.resolve(given, environment, cluster.run if cluster is not None else {})
    by_default = cluster is None and engines.capabilities(settings.engine).virtual_time
    if by_default:
        name = configuration.DEFAULT_SCENARIO
        cluster = scenarios.load(name)
        settings = configuration.resolve(given, environment, cluster.run)
    configuration.require_possible(settings, engines.capabilities(settings.engine))
    workers = settings.workers or 0
    if cluster is not None and name is not None:
        workers = configuration.agreed_workers(settings.workers, cluster.count, name, by_default=by_default)
    workers = workers or configuration.usual_workers(_cuda_devices())
    strategies.checked(settings.strategy, settings.seed, workers)
    configuration.with_shared_batch(settings, workers)
    return msgspec.structs.replace(
        settings, scenario=name, workers=workers, runs_dir=settings.runs_dir or configuration.DEFAULT_RUNS_DIR
    )


def _cuda_devices() -> int:
    import torch  # only a run comes here, and it loads torch anyway

    return torch.cuda.device_count()


def _say_what_was_assumed(settings: configuration.RunConfig, *, no_workload: bool) -> None:
    name, workers = settings.scenario, settings.workers
    if name is None and "workers" not in settings.given:
        say(f"no --workers given: training on {workers} worker processes of this machine")
    elif name is not None and "scenario" not in settings.given:
        say(f"no --scenario given: simulating {name}, {workers} workers (`paceline scenario {name}`)")
    if no_workload:
        say(f"no script and no --task given: training the built-in task {DEFAULT_TASK}")


def _make_places(settings: configuration.RunConfig) -> None:
    data, journal, runs = settings.data_dir, settings.journal, settings.runs_dir
    with _refusing(f"--data-dir: cannot access {data}"):
        if data is not None and not data.is_dir():
            raise DataError(f"--data-dir: {data} is not a folder; give the one that holds the data set")
    with _refusing(f"--journal: cannot access {journal}"):
        if journal is not None and journal.is_dir():
            raise OptionError(f"--journal: {journal} is a folder; give a file in it, such as run.jsonl")
    for flag, folder in (("--runs-dir", runs), ("--journal", journal and journal.parent)):
        with _refusing(f"{flag}: cannot make the folder {folder}"):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn an error of the operating system into a refusal that says what failed and why."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"{what}: {error.strerror}") from error


def _workload(script: str | None, arguments: list[str], task: str | None) -> Callable[[], None]:
    if script is not None and task is not None:
        raise OptionError(f"give a script or --task, not both: got {script!r} and --task {task}")
    if script is not None:
        with _refusing(f"cannot read script {shown(script)}"):
            found = Path(script).is_file()
        if not found:
            raise OptionError(f"script {shown(script)} does not exist; give the path of a Python file, or --task NAME")
        from paceline.worker.scripts import load_script

        return load_script(Path(script), arguments)
    from paceline import tasks

    return tasks.get(task or DEFAULT_TASK)


def _train(train: Callable[[], None], settings: configuration.RunConfig, *, json: bool, quiet: bool) -> "Run":
    with contextlib.ExitStack() as until_the_end:
        if engines.capabilities(settings.engine).own_processes:
            if not json and not quiet:
                say(f"starting {settings.workers} workers")  # nothing else is shown for the next seconds
            until_the_end.enter_context(engines.prepared(settings))
        return _launched(train, settings, json=json, quiet=quiet)


def _launched(train: Callable[[], None], settings: configuration.RunConfig, *, json: bool, quiet: bool) -> "Run":
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
