"""`paceline run`: train a script or a built-in task, then print the report."""

import contextlib
import inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from paceline import engines
from paceline.cli.live_screen import progress_shown
from paceline.cli.streams import logging_shown, output_kept_clean, say
from paceline.core import settings as configuration
from paceline.core import worker_count
from paceline.core.errors import DataError, OptionError, StorageError
from paceline.core.values import shown
from paceline.records import private_files, run_file

if TYPE_CHECKING:
    from paceline.launching import Run
    from paceline.records.report import Report

DEFAULT_TASK = "digits"

logger = logging.getLogger("paceline")
_OPPOSITES = {setting.name for setting in configuration.SETTINGS.values() if setting.about.opposite}


def serve(**given: Any) -> int:
    """Train SCRIPT, or a built-in task, on workers that join from other machines, and report how it went.

    On each of them: `paceline join HOST:PORT SCRIPT`. `--workers 2` begins with two; others may come at any time.
    """
    from paceline.engines.hosts import tokens

    tokens.take_from(os.environ)  # before any process is started
    given["workers"] = given.get("workers") or "1"
    return run(**{**given, "engine": "hosts", **_range_of(given["workers"], open_ended=True)})


def _range_of(workers: str, *, open_ended: bool) -> dict[str, str]:
    """Return the settings of a number of workers, or of a range such as 4..16 or, for who may come, 4.."""
    least, dots, most = workers.partition("..")
    if dots and not most and not open_ended:
        raise OptionError(f"--workers: {shown(workers)} has no end; say how many at most, such as {least}..16")
    return {"workers": least, **({"most_workers": most} if most else {})}


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the command line gave: a flag that it did not give is False to typer, unless it has an opposite."""
    return {name: value if value or name in _OPPOSITES else None for name, value in options.items()}


def run(
    script: str | None, arguments: list[str] | None, task: str | None, json: bool, quiet: bool, log_level: str | None,
    **given: Any,
) -> int:  # fmt: skip
    """Train SCRIPT, or a built-in task, on a cluster of unequal workers and report how it went."""
    given = given_options(given)
    with logging_shown(configuration.chosen_log_level(log_level, os.environ), quiet=quiet or json):
        if given.get("workers") is not None:
            given.update(_range_of(given["workers"], open_ended=given["engine"] == "hosts"))
        settings = settle(given, os.environ)
        train = workload(script, arguments or [], task)
        _make_places(settings)
        if not quiet:
            _say_what_was_assumed(settings, no_workload=script is None and task is None)
        _warn_of_misplaced_options(script, arguments or [])
        return _trained_and_reported(train, settings, json=json, quiet=quiet)


def resume(run: str, json: bool, quiet: bool, log_level: str | None, **given: Any) -> int:
    """Go on with a run from its newest checkpoint; RUN is its folder, its name in `runs`, or one of its checkpoints.

    Script, arguments and settings are those of that run; an option given here replaces its own.
    """
    given = given_options(given)
    with logging_shown(configuration.chosen_log_level(log_level, os.environ), quiet=quiet or json):
        folder = run_file.find(run, Path(given.get("runs_dir") or configuration.DEFAULT_RUNS_DIR))
        before = run_file.load(folder)
        if before.script is None and before.task is None:
            raise OptionError(
                f"{folder} is of a function that was given to launch(): call launch(..., resume={os.fspath(folder)!r})"
            )
        if not run_file.has_checkpoint(folder):
            raise OptionError(
                f"{folder} holds no checkpoint: it had no --checkpoint-every and was not interrupted while it trained; "
                "start it again with `paceline run`"
            )
        settings = settle({**given, "resume": os.fspath(folder)}, {}, before.settings)
        train = workload(before.script, before.arguments, before.task)
        _make_places(settings)
        if not quiet:
            say(f"going on with {folder}: {before.script or before.task} on {_crowd(settings)}")
            for line in run_file.differences(before.settings, settings):
                say(line)
            if before.folder != os.fspath(Path.cwd()) and before.script is not None:
                say(f"the run was started in {before.folder}: the script's own relative paths are taken from here")
        return _trained_and_reported(train, settings, json=json, quiet=quiet)


def _crowd(settings: configuration.RunConfig) -> str:
    return f"{settings.workers} worker{'s' * (settings.workers != 1)}"


def _trained_and_reported(
    train: Callable[[], None], settings: configuration.RunConfig, *, json: bool, quiet: bool
) -> int:  # fmt: skip
    """Train, and print the report; also that of a run which a full disk has ended."""
    try:
        finished = _train(train, settings, json=json, quiet=quiet)
    except StorageError as error:
        if error.report is not None:
            _print_report(cast("Report", error.report), json=json)
        raise
    _print_report(finished.summary, json=json)
    _say_how_it_ended(finished, quiet=quiet)
    return finished.exit_code


def _warn_of_misplaced_options(script: str | None, arguments: list[str]) -> None:
    """Warn of options of ours behind the script, unless the script's own text has them in quotes."""
    if script is None:
        return
    known = {setting.flag for setting in configuration.SETTINGS.values()} | {"--task", "--json", "--quiet"}
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    given = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
    ours = [flag for flag in given if flag in known and f'"{flag}"' not in text and f"'{flag}'" not in text]
    if ours:
        logger.warning(
            "%s after the script %s the script's own: for paceline, write `paceline run %s ... %s`",
            ", ".join(ours), "is" if len(ours) == 1 else "are", ours[0], script,
        )  # fmt: skip


def run_parameters(*, resumes: bool = False, serves: bool = False) -> Iterator[Parameter]:
    """Yield the parameters for typer: every declared setting, as text, and what only the command has."""

    def parameter(name: str, kind: Any, about: Any) -> Parameter:
        default = False if kind is bool else None
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])

    def option(name: str, kind: Any, *flags: str, metavar: str = "", text: str) -> Parameter:
        return parameter(name, kind, typer.Option(*flags, metavar=metavar or None, help=text, show_default=False))

    if resumes:
        about = typer.Argument(metavar="RUN", help="A run's folder, its name in `runs`, or a checkpoint's folder.")
        yield Parameter("run", Parameter.KEYWORD_ONLY, annotation=Annotated[str, about])
    else:
        texts = {"script": (str | None, "A training script."), "arguments": (list[str] | None, "Its own.")}
        for name, (kind, text) in texts.items():
            yield parameter(name, kind, typer.Argument(metavar=name.upper(), help=text, show_default=False))
        task = "A built-in task instead of a script (`paceline tasks`)."
        yield option("task", str | None, "--task", metavar="NAME", text=task)
    for setting in configuration.SETTINGS.values():
        if resumes and setting.name == "resume":
            continue
        about = setting.about
        for_others = about.of_hosts != about.of_clusters and about.of_hosts != serves
        if (for_others and not resumes) or (serves and setting.name == "engine"):
            continue
        switch: Any = bool | None if about.opposite else bool
        repeats = setting.default in ({}, ())
        kinds: Any = switch if setting.default is False else list[str] | None if repeats else str | None
        text = about.text + (f" Default: {setting.default_text}." if setting.default_text else "")
        metavar = "N[..[N]]" if serves and setting.name == "workers" else about.metavar
        text = "How many workers to begin with, and how many at most." if metavar == "N[..[N]]" else text
        flag = f"{setting.flag}/--{about.opposite}" if about.opposite else setting.flag
        yield option(setting.name, kinds, flag, metavar=metavar, text=text)
    yield option("json", bool, "--json", text="Print the report as one JSON object, and nothing else.")
    yield option("quiet", bool, "--quiet", "-q", text="The report alone: no progress, no notes.")
    levels = "debug, info, warning or error. Default: warning."
    yield option("log_level", str | None, "--log-level", metavar="LEVEL", text=levels)


for command in (run, resume, serve):
    taken = list(run_parameters(resumes=command is resume, serves=command is serve))
    command.__signature__ = inspect.Signature(taken, return_annotation=int)  # type: ignore[union-attr]
    command.__annotations__ = {each.name: each.annotation for each in taken}


def settle(
    given: Mapping[str, Any], environment: Mapping[str, str], before: Mapping[str, Any] | None = None
) -> configuration.RunConfig:
    """Return the settings in force, checked as far as possible before torch is loaded.

    `before` has those of the run to go on with, which take the place of a scenario's `[run]` table.
    """
    if before is not None:
        scenario = given.get("scenario") or before.get("scenario")
        given = {**given, "scenario": scenario}
        before = {name: value for name, value in before.items() if name != "scenario"}
        before = before if scenario is None else {**before, "workers": None}  # the scenario says how many
    from paceline import strategies
    from paceline.core.scenario import file as scenarios
    from paceline.records import scalar_logs

    name = configuration.chosen_scenario(given, environment)
    cluster = scenarios.load(name) if name is not None else None
    run_table = before if before is not None else cluster.run if cluster is not None else {}
    settings = configuration.resolve(given, environment, run_table, repeats=before is not None)
    by_default = cluster is None and engines.capabilities(settings.engine).virtual_time
    if by_default:
        name = configuration.DEFAULT_SCENARIO
        cluster = scenarios.load(name)
        settings = configuration.resolve(given, environment, cluster.run)
    configuration.require_possible(settings, engines.capabilities(settings.engine))
    workers = settings.workers or 0
    if cluster is not None and name is not None:
        workers = worker_count.agreed_workers(settings.workers, cluster.count, name, by_default=by_default)
        asked = configuration.resolve(given, environment, {}).workers
        worker_count.require_asked_for(cluster, workers if before is not None else asked)
    workers = workers or worker_count.usual_workers(_cuda_devices())
    scalar_logs.require(settings.log)
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
    if name is None and "workers" not in settings.given and settings.listen is None:
        where = "the cluster" if engines.capabilities(settings.engine).asks_a_cluster else "this machine"
        say(f"no --workers given: training on {workers} worker processes of {where}")
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
                private_files.make_folder(folder)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn an error of the operating system into a refusal that says what failed and why."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"{what}: {error.strerror}") from error


def workload(script: str | None, arguments: list[str], task: str | None) -> Callable[[], None]:
    """Return what to train: the script with its arguments, or a task."""
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
            if not json and not quiet and settings.listen is None:
                say(
                    f"starting {settings.workers} worker{'s' * (settings.workers != 1)}"
                )  # nothing else is shown for the next seconds
            until_the_end.enter_context(engines.prepared(settings))
        return _launched(train, settings, json=json, quiet=quiet)


def _launched(train: Callable[[], None], settings: configuration.RunConfig, *, json: bool, quiet: bool) -> "Run":
    from paceline.launching import launch

    if not json:
        with progress_shown(quiet=quiet) as listener:
            return launch(train, config=settings, progress=listener)
    with output_kept_clean(), progress_shown(quiet=quiet, json=True) as listener:
        return launch(train, config=settings, progress=listener)


def _say_how_it_ended(finished: "Run", *, quiet: bool) -> None:
    if finished.ended == "divergence":
        say("stopped by the convergence guard: the report's warnings say why")
    elif finished.ended == "interrupted" and not quiet:
        say("interrupted: the report covers the run up to here")
        if finished.folder is not None and run_file.has_checkpoint(finished.folder):
            say(f"to go on: paceline resume {shlex.quote(os.fspath(finished.folder))}")


def _print_report(report: "Report", *, json: bool) -> None:
    if json:
        from paceline.records.metrics import to_json

        print(to_json(report))
        return
    from rich.console import Console

    from paceline.records.text import show

    seen = sys.stdout.isatty() and sys.stderr.isatty() and logger.isEnabledFor(logging.WARNING)
    show(report, Console(), warnings=not seen)
