"""`paceline compare`: the same task under several strategies, each at its best, in a table with a verdict."""

import inspect
import os
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from paceline import engines
from paceline.cli.run_command import DEFAULT_TASK, given_options, run_parameters, settle, workload
from paceline.cli.streams import logging_shown, say
from paceline.core import settings as configuration
from paceline.core.errors import OptionError
from paceline.core.values import shown

if TYPE_CHECKING:
    from paceline.comparison.outcome import Comparison, Trial

_NOT_OF_MANY = ("resume", "journal")
_TUNE = "--tune"


class TuningCommand(TyperCommand):
    """Lets `--tune` take several words, as in `--tune lr=0.1,0.2 momentum=0,0.9 --seeds 5 train.py`.

    An option of the parser takes a fixed number of words, and the first word that no option takes is the script: what
    follows it is the script's own.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, each tuned option with a `--tune` of its own."""
        values = {flag for each in self.params if not getattr(each, "is_flag", True) for flag in each.opts}
        flags = {flag for each in self.params for flag in (*each.opts, *each.secondary_opts)} - values
        return super().parse_args(ctx, _each_tuned(args, values, flags))


def _each_tuned(words: list[str], values: set[str], flags: set[str]) -> list[str]:
    """Write `--tune` before each tuned option that follows another without it; leave the script and its words alone.

    `values` are the options that take a word, `flags` those that take none.
    """
    from paceline.comparison import trials

    done: list[str] = []
    rest = list(words)
    while rest:
        flag, sign, _ = rest[0].partition("=")
        if flag in values:
            count = 1 if sign else 2
        elif rest[0] in flags:
            count = 1
        elif _TUNE in done and trials.is_tuning(rest[0]) and not os.path.lexists(rest[0]):
            done.append(_TUNE)
            count = 1
        else:  # the script, or what the parser refuses
            break
        done += [flag, rest[0][len(flag) + 1 :]] if sign and flag == _TUNE else rest[:count]
        del rest[:count]
    return [*done, *rest]


def compare(
    script: str | None, arguments: list[str] | None, task: str | None, json: bool, csv: bool, quiet: bool, fresh: bool,
    log_level: str | None, strategy: list[str] | None, tune: list[str] | None, seeds: int, report: Path | None,
    **given: Any,
) -> int:  # fmt: skip
    """Train SCRIPT, or a built-in task, under several strategies, and say which is first and why.

    In the simulator unless --engine says otherwise. Runs that an earlier comparison has made are used again.
    """
    from paceline.comparison import run_commands, trials

    given = given_options(given)
    given["engine"] = given.get("engine") or engines.simulator()
    words = [each for each in (script, *(arguments or [])) if each is not None]
    tuned = trials.tuned_options(tune or [])
    asked = list(dict.fromkeys(strategy or []))
    if report is not None:
        _require_page(report)
    if script == "-" and (json or csv):
        raise OptionError("'-': --json and --csv print to standard output without it; leave it out")
    if json and csv:
        raise OptionError("give --json or --csv, not both")
    if not asked or (len(asked) < 2 and len(trials.option_sets(tuned)) < 2):
        there = f"only {shown(asked[0])}" if asked else "none"
        raise OptionError(f"--strategy: {there} is given; give two to compare, or one and --tune")
    with logging_shown(configuration.chosen_log_level(log_level, os.environ), quiet=quiet or json or csv):
        checked = [settle({**given, "strategy": each}, os.environ) for each in asked]
        workload(words[0] if words else None, words[1:], task)
        virtual = engines.capabilities(checked[0].engine).virtual_time
        what = words if words else ["--task", task or DEFAULT_TASK]
        carrier = run_commands.Commands(
            run_commands.written({name: value for name, value in given.items() if name not in ("runs_dir", "seed")}),
            what, checked[0].runs_dir or configuration.DEFAULT_RUNS_DIR,
            len(os.sched_getaffinity(0)) if virtual else 1, fresh=fresh,
        )  # fmt: skip

        ended = 0

        def tell(trial: "Trial", done: int, total: int) -> None:
            nonlocal ended
            ended += trial.failure is None
            if not quiet:
                say(f"{done} of {total}: {trial.name}, seed {trial.seed}: {_how(trial)}")

        try:
            found = trials.carried_out(asked, tuned, checked[0].seed, seeds, carrier, tell)
        except KeyboardInterrupt:
            runs = "1 run is" if ended == 1 else f"{ended} runs are"
            say(f"interrupted: {runs} kept, and the same command goes on with the others")
            raise
        comparison = trials.summary(found)
    _print(comparison, json=json, csv=csv)
    if report is not None:
        from paceline.comparison import comparison_page

        size = comparison_page.written(comparison, report)
        say(f"{report}: {size / 1e6:.1f} MB; it opens in any browser, offline")
    failed = [trial for trial in found if trial.failure is not None and not trial.tuning]
    for trial in failed:
        say(f"{trial.name}, seed {trial.seed} failed: {trial.failure}")
    return 1 if failed else 0


def _require_page(place: Path) -> None:
    """Refuse before any run is made what the page after all of them would fail at."""
    from paceline.records import page

    if place.suffix not in (".html", ".htm"):
        raise OptionError(f"--report: {shown(str(place))} must end in .html")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise OptionError(f"--report: cannot write into the folder {place.parent}; choose another place")
    page.require_script()


def _how(trial: "Trial") -> str:
    if trial.failure is not None:
        return f"failed: {' '.join(trial.failure.split())[-160:]}"
    again = " (made before)" if trial.reused else ""
    return f"{'the target was not reached' if trial.seconds is None else f'{trial.seconds:.4g} s'}{again}"


def _print(comparison: "Comparison", *, json: bool, csv: bool) -> None:
    from rich.console import Console

    from paceline.comparison import tables
    from paceline.records.journal import spelled_out

    if csv:
        print(tables.to_csv(comparison), end="")
    elif json:
        import msgspec

        data = spelled_out(msgspec.to_builtins(comparison))
        print(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        tables.show(comparison, Console())


def _parameters() -> Iterator[Parameter]:
    for each in run_parameters():
        if each.name == "strategy":
            about = typer.Option("--strategy", metavar="NAME[:OPTION=VALUE,...]", help="One of them; repeatable.")
            yield each.replace(annotation=Annotated[list[str] | None, about])
            tune = "Options of script or task: each strategy is judged with its best set. Repeatable."
            about = typer.Option("--tune", metavar="NAME=VALUE,...", help=tune)
            yield each.replace(name="tune", annotation=Annotated[list[str] | None, about])
            about = typer.Option("--seeds", metavar="N", min=1, max=1000, help="Runs of each strategy that are judged.")
            yield each.replace(name="seeds", annotation=Annotated[int, about], default=3)
        elif each.name == "json":
            text = "Print everything as one JSON object, and nothing else."
            yield each.replace(annotation=Annotated[bool, typer.Option("--json", help=text, show_default=False)])
            about = typer.Option("--csv", help="Print one line for each run, and nothing else.", show_default=False)
            yield each.replace(name="csv", annotation=Annotated[bool, about])
            about = typer.Option("--report", metavar="FILE.html", help="Also write a page that opens offline.")
            yield each.replace(name="report", annotation=Annotated[Path | None, about], default=None)
            about = typer.Option("--fresh", help="Make every run anew.", show_default=False)
            yield each.replace(name="fresh", annotation=Annotated[bool, about])
        elif each.name not in _NOT_OF_MANY:
            yield each


_taken = list(_parameters())
compare.__signature__ = inspect.Signature(_taken, return_annotation=int)  # type: ignore[attr-defined]
compare.__annotations__ = {each.name: each.annotation for each in _taken}
