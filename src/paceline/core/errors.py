"""The package's exceptions, by who is at fault (user, peer, paceline), each with the exit code of a run it ends."""

from typing import ClassVar


class PacelineError(Exception):
    """Base class of everything this package raises on purpose."""

    exit_code: ClassVar[int] = 4


class UserError(PacelineError):
    """An error in the user's input; the message names the value, the bound and the fix."""

    exit_code = 2


class OptionError(UserError):
    """An unknown option of a strategy, task or command, or an invalid value for one."""


class ScenarioError(UserError):
    """A scenario file that cannot be read or is invalid."""


class DataError(UserError):
    """Data that is missing or not in the format a task needs."""


class JournalError(UserError):
    """A file that is not a journal this version can read."""


class CheckpointError(UserError):
    """A folder that is not a checkpoint this version can resume from."""


class StorageError(UserError):
    """Files of a run that could not be written, mostly on a full disk; the run has ended.

    `report` is the report of the run up to there, if it got that far.
    """

    report: object = None


class ScriptError(PacelineError):
    """The user's script raised in a worker; the original exception is the cause."""

    exit_code = 1


class DivergenceError(PacelineError):
    """The convergence guard stopped the run."""

    exit_code = 3


class PeerError(PacelineError):
    """A worker or server that went away or broke the protocol."""


class InternalError(PacelineError):
    """A bug in paceline; please report it."""
