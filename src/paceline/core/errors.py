"""One tree of errors, split by blame: the user's, a peer's, ours. Each class knows the exit code of a run it ends."""

from typing import ClassVar


class PacelineError(Exception):
    """Everything this package raises on purpose."""

    exit_code: ClassVar[int] = 4


class UserError(PacelineError):
    """The input is at fault; the message names the value, the bound and the fix."""

    exit_code = 2


class OptionError(UserError):
    """An option of a strategy, a task or a command that does not exist or cannot have this value."""


class ScenarioError(UserError):
    """A scenario file that cannot be read, or that asks for something impossible."""


class DataError(UserError):
    """Data that is missing or not in the form a task needs."""


class JournalError(UserError):
    """A file that is not a journal this version can read."""


class CheckpointError(UserError):
    """A folder that is not a checkpoint this version can go on from."""


class ScriptError(PacelineError):
    """The user's script raised in a worker; the original exception is the cause."""

    exit_code = 1


class DivergenceError(PacelineError):
    """The convergence guard stopped the run."""

    exit_code = 3


class PeerError(PacelineError):
    """A worker or server that went away or broke the protocol."""


class InternalError(PacelineError):
    """A broken promise of paceline's own; always worth a report."""
