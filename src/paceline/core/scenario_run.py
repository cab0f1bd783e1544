"""The `[run]` table of a scenario file: which settings it may give.

A scenario file is data that may come from anybody. So it names no place that is read or written, no code, and nothing
that only a script can judge; these come from whoever starts the run.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from paceline.core.errors import OptionError
from paceline.core.values import shown

PLACE = "a scenario file names no place of this machine"
SCRIPTS = "the options of a script may name files and sizes, which a scenario file does not decide"
MACHINE = "a scenario file does not decide how this machine is used"
OTHER = "a scenario file names no other one"

# A registered name, and options that each begin with `name=`. Anything else could be a file or a module with a class.
_REGISTERED = re.compile(r"\s*[A-Za-z_]\w*\s*(?::\s*(?:\w+\s*=.*)?)?", re.S)


class Declared(Protocol):
    """What this module needs to know of a setting."""

    @property
    def name(self) -> str: ...
    @property
    def written(self) -> str: ...
    @property
    def flag(self) -> str: ...
    @property
    def variable(self) -> str: ...
    @property
    def about(self) -> Any: ...


def refuse_what_is_not_data(run: Mapping[str, Any], settings: Iterable[Declared]) -> None:
    """Raise if the table gives a setting that only whoever starts the run may give."""
    for setting in settings:
        if setting.written not in run:
            continue
        reason = setting.about.not_in_scenario
        if setting.name == "strategy" and not _is_registered(run[setting.written]):
            reason = f"a scenario file names no code, and {shown(run[setting.written])} is not a registered name"
        if reason:
            raise OptionError(
                f"[run] {setting.written}: {reason}; give {setting.flag}, {setting.variable} or "
                f"launch({setting.name}=...) instead"
            )


def _is_registered(strategy: Any) -> bool:
    """Return whether a strategy is given by a name and options; what is no text is refused later, as any bad value."""
    return not isinstance(strategy, str) or _REGISTERED.fullmatch(strategy) is not None
