"""`paceline calibrate`: measure a script on this machine and write a scenario that the simulator can compute with."""

import datetime
import os
import socket
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from paceline import engines
from paceline.cli.run_command import settle, workload
from paceline.cli.streams import logging_shown, say
from paceline.core import settings as configuration
from paceline.core.errors import OptionError
from paceline.core.events import Pushed
from paceline.core.scenario import file as scenarios
from paceline.core.scenario.fitting import Fit, Timed, fit, scenario_text, speed

if TYPE_CHECKING:
    from paceline.records.journal import Line

ENDLESS = 1e6  # epochs: the run is to end by its seconds
LONGER = 4  # times: for a measurement in which there were too few pushes, once


class PushTimes:
    """A sink of journal lines that keeps what pushes say about time."""

    def __init__(self) -> None:
        self.pushes: defaultdict[int, list[Timed]] = defaultdict(list)

    def write(self, line: "Line") -> None:
        """Keep a push."""
        event = getattr(line, "event", None)
        if isinstance(event, Pushed) and event.samples > 0:
            self.pushes[event.worker].append(
                Timed(event.samples, event.compute_s, event.transfer_s, event.bytes_up, event.bytes_down)
            )


def calibrate(
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="A training script.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its own.")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="A task instead of a script.")] = None,
    workers: Annotated[str | None, typer.Option("--workers", metavar="N", help="Also measure N side by side.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Of training, for each measurement.")] = 10.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: SCRIPT.toml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    batch_size: Annotated[str | None, typer.Option("--batch-size", metavar="B", help="As of `paceline run`.")] = None,
    threads: Annotated[str | None, typer.Option("--threads", metavar="N", help="As of `paceline run`.")] = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", metavar="FOLDER", help="As of `paceline run`.")] = None,
    options: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Likewise.")] = None,
) -> int:
    """Measure SCRIPT on this machine for some seconds, and write a scenario for `paceline run --engine sim`."""
    if script is None and task is None:
        raise OptionError("give the script to measure, or --task NAME")
    place = output or Path(f"{Path(script).stem if script is not None else task}.toml")
    if place.exists() and not force:
        raise OptionError(f"{place} exists: give --force to replace it, or another file by --output")
    if not os.access(place.parent, os.W_OK | os.X_OK):  # after measuring it would be too late
        raise OptionError(f"cannot write into the folder {place.parent}; choose another --output")
    given: dict[str, Any] = {
        "batch_size": batch_size, "threads": threads, "data_dir": data_dir, "options": options or None,
        "evaluate_every": "off", "epochs": ENDLESS, "strategy": "asp",
    }  # fmt: skip
    several = settle({**given, "workers": workers}, {}).workers if workers is not None else None
    train = workload(script, arguments or [], task)
    with logging_shown(configuration.chosen_log_level(None, os.environ)):
        alone = _measured(train, {**given, "workers": 1}, seconds)[0]
        together = _measured(train, {**given, "workers": several}, seconds) if several and several > 1 else {}
    what = script or f"--task {task}"
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    about = [f"Measured by `paceline calibrate` of {what} on {socket.gethostname()}, {now}:",
             f"1 worker, {alone.pushes} pushes of {alone.samples} samples."]  # fmt: skip
    text = scenario_text(alone, together, about)
    scenarios.parse(text, place.stem, place.parent)  # what is written can be read
    try:
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {place}: {error.strerror}; choose another --output") from error
    _print_findings(alone, together, place, what)
    return 0


def _measured(train: Any, given: dict[str, Any], seconds: float) -> dict[int, Fit]:
    """Return what each worker's pushes say when the script trains for some seconds; for longer if these are too few."""
    pushes = _pushes_in(train, given, seconds)
    try:
        return _fitted(pushes)
    except OptionError as error:
        longer = LONGER * seconds
        say(f"{str(error).partition(':')[0]}: once more, for {longer:g} s")
        return _fitted(_pushes_in(train, given, longer))


def _pushes_in(train: Any, given: dict[str, Any], seconds: float) -> dict[int, list[Timed]]:
    """Train for so long; return the pushes of each worker."""
    from paceline.launching import launch

    settings = msgspec.structs.replace(settle({**given, "max_seconds": seconds}, {}), runs_dir=None)
    say(f"measuring {settings.workers} worker{'s' * (settings.workers != 1)} for {seconds:g} s")
    watch = PushTimes()
    with engines.prepared(settings):
        launch(train, config=settings, sink=watch)
    return watch.pushes


def _fitted(pushes: dict[int, list[Timed]]) -> dict[int, Fit]:
    if not pushes:
        raise OptionError("the script pushed nothing: does it loop over session.batches() and call optimizer.step()?")
    return {worker: fit(pushes[worker], f"worker {worker}") for worker in sorted(pushes)}


def _print_findings(alone: Fit, together: dict[int, Fit], place: Path, what: str) -> None:
    print(f"1 worker, {alone.pushes} pushes of {alone.samples} samples:")
    print(
        f"  seconds per sample  {alone.seconds_per_sample:.4g} ({alone.seconds_per_sample * alone.samples:.4g} a push)"
    )
    print(f"  jitter              lognormal:{alone.sigma:.3g}")
    print(f"  transfer            {alone.transfer_s * 1000:.3g} ms a push beside computing")
    print(f"  model               {alone.bytes_up:,} bytes up, {alone.bytes_down:,} bytes down a push")
    for worker, each in together.items():
        print(f"  worker {worker} of {len(together)}       speed {speed(alone, each):.3g}, lognormal:{each.sigma:.3g}")
    print(f"wrote {place}; for the simulator: paceline run --engine sim --scenario {place} {what}")
