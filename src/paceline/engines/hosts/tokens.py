"""Where the join token comes from and goes to: a file, a variable or a terminal, and never a command line or a log."""

import contextlib
import getpass
import os
import stat
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from paceline.core.errors import OptionError
from paceline.core.regular_files import open_regular
from paceline.core.settings import TOKEN
from paceline.records import private_files
from paceline.records.logs import notice
from paceline.transport.join_token import JoinToken, new_token, read_token

NAME = "join-token"  # of the file in a run's folder
LONGEST = 4096  # bytes of a file that may be a token

_kept: list[str] = []  # what `take_from` found, for a launch in this process


def take_from(environment: MutableMapping[str, str]) -> str | None:
    """Return the token of the environment and remove it there, so that no script and no child ever has it."""
    found = environment.pop(TOKEN, None) or None
    if found is not None:
        _kept[:] = [found]
    return found


@contextlib.contextmanager
def of_a_run(file: Path | None, folder: Path | None) -> Iterator[JoinToken]:
    """Yield the token of a run that is served here; say where it is. One that was written for the run is removed."""
    kept, written = take_from(os.environ) or next(iter(_kept), None), None
    _kept.clear()
    if file is not None and file.exists():
        token = _read(file)
    elif kept is not None:
        token = read_token(kept)
    else:
        token = new_token()
        if file is None and sys.stderr.isatty():
            print(f"join token: {token.reveal()}", file=sys.stderr)  # on the terminal alone: a log would keep it
            notice(f"other machines take it from {TOKEN}, --token-file, or a prompt")
        else:
            written = file or (None if folder is None else folder / NAME)
            if written is None:
                raise OptionError("there is no terminal and no folder for the join token: give --token-file FILE")
            write_new(written)
            token = _read(written)
            notice(f"the join token is in {written}")
    try:
        yield token
    finally:
        if written is not None and file is None:
            with contextlib.suppress(OSError):
                written.unlink()


def write_new(file: Path) -> None:
    """Write a new token to a file that does not exist, for its owner alone."""
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, private_files.FILE_MODE), "w") as opened:
            opened.write(new_token().reveal() + "\n")
    except FileExistsError:
        raise OptionError(f"{file} exists: a token is never overwritten; give another file") from None
    except OSError as error:
        raise OptionError(f"cannot write {file}: {error.strerror}") from error


def for_joining(file: Path | None, environment: MutableMapping[str, str]) -> JoinToken:
    """Return the token with which this machine joins: from the file, the environment or a prompt, in this order."""
    given = take_from(environment)
    _kept.clear()
    if file is not None:
        return _read(file)
    if given is not None:
        return read_token(given)
    if not sys.stdin.isatty():
        raise OptionError(f"no join token: set {TOKEN}, or give --token-file FILE (it never goes on the command line)")
    try:
        return read_token(getpass.getpass("join token: "))
    except EOFError:
        raise OptionError("no join token was typed") from None


def _read(file: Path) -> JoinToken:
    try:
        with open_regular(file) as opened:
            status = os.fstat(opened.fileno())
            if status.st_mode & 0o077:
                raise OptionError(
                    f"--token-file: others may read {file} (mode {stat.S_IMODE(status.st_mode):o}): chmod 600 it, and "
                    "take a new token if they should not have it"
                )
            return read_token(opened.read(LONGEST).decode("ascii", errors="replace"))
    except OSError as error:
        raise OptionError(f"--token-file: cannot read {file}: {error.strerror}") from error
