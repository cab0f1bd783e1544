"""What a check of this machine has found, and how one that fails in an unforeseen way is told."""

from collections.abc import Callable
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """One line: what was looked at, what it is, what it should be and what to do about it."""

    name: str
    level: Level
    found: str
    bound: str = ""
    fix: str = ""


def judged(
    name: str, good: bool, found: str, bound: str = "", fix: str = "", *, otherwise: Level = "problem"
) -> Finding:
    """Return a finding that is `ok`, or `otherwise` with its fix."""
    return Finding(name, "ok", found, bound) if good else Finding(name, otherwise, found, bound, fix)


def tried(name: str, check: Callable[[], Finding], otherwise: Level = "problem") -> Finding:
    """Make a check; if the system refuses it, that is what was found."""
    try:
        return check()
    except OSError as error:
        return Finding(name, otherwise, f"cannot be checked: {error.strerror or error}")
