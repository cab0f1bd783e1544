"""The command-line application, and the exit code for each way of ending.

0 done, 1 the script failed (or a replay differs), 2 bad input, 3 stopped by the convergence guard, 4 an internal
error, 130 Ctrl-C. Bad input prints one line on standard error; only an internal error shows frames of this package.
"""

import errno
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from paceline._version import __version__
from paceline.cli.calibrate_command import calibrate
from paceline.cli.compare_command import TuningCommand, compare
from paceline.cli.doctor_command import doctor
from paceline.cli.inspect_commands import check_strategy, replay, scenario, strategies, tasks
from paceline.cli.join_command import join, token
from paceline.cli.report_command import export, report, watch
from paceline.cli.run_command import resume, run, serve
from paceline.cli.streams import never_refusing, say, termination_as_interrupt
from paceline.core.errors import DivergenceError, PacelineError, PeerError, ScriptError, UserError
from paceline.worker.scripts import script_traceback

INTERRUPTED = 130
# The public name of a usage error differs between versions of typer; the parent of BadParameter is it in all of them.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="paceline",
    help="Train PyTorch models on uneven clusters: a strategy decides who waits for whom.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Arguments after the script are the script's own, options included.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(resume)
app.command(cls=TuningCommand, context_settings={"allow_interspersed_args": False})(compare)
app.command(context_settings={"allow_interspersed_args": False})(serve)
app.command(context_settings={"allow_interspersed_args": False})(join)
app.command(context_settings={"allow_interspersed_args": False})(calibrate)
app.command()(report)
app.command()(watch)
app.command()(export)
app.command()(token)
app.command()(strategies)
app.command()(check_strategy)
app.command()(scenario)
app.command()(replay)
app.command()(tasks)
app.command()(doctor)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"paceline {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def run_app(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    never_refusing()
    given = None if arguments is None else list(arguments)
    try:
        with termination_as_interrupt():
            ended = app(args=given, prog_name="paceline", standalone_mode=False)
    except _UsageError as error:
        return _refuse(error.format_message())  # type: ignore[attr-defined]
    except ScriptError as error:
        print(_traceback(error), file=sys.stderr, end="")
        return _refuse(str(error), error.exit_code)
    except (UserError, DivergenceError, PeerError) as error:
        return _refuse(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  # every other exception is an internal error
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return _refuse("no more files may be open in this process: raise the limit (ulimit -n 4096)")
        return _confess(error)
    return ended if isinstance(ended, int) else 0


def _traceback(error: ScriptError) -> str:
    """Return the script's traceback: of the exception itself, or as another process reported it."""
    if error.__cause__ is not None:
        return script_traceback(error.__cause__)
    return "".join(f"{note}\n" for note in getattr(error, "__notes__", []))


def _refuse(message: str, code: int = UserError.exit_code) -> int:
    say(" ".join(message.splitlines()))  # a file's name may hold line breaks, but the message is one line
    return code


def _confess(error: Exception) -> int:
    traceback.print_exception(error, file=sys.stderr)
    say(f"internal error in version {__version__}: please report it with the lines above and the run's journal")
    return PacelineError.exit_code
