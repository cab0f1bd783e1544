"""Log a run to the logger `paceline` as it happens. Importing sets up no handler."""

import logging

from paceline.records.journal import Decision, Line, Observation

logger = logging.getLogger("paceline")
NOTICE = "paceline_notice"  # attribute of records that are no warnings

LEVELS = {"warning": logging.WARNING, "phase": logging.INFO, "scenario": logging.INFO, "evaluation": logging.INFO,
          "end": logging.INFO}  # fmt: skip


def notice(text: str) -> None:
    """Tell the user what the run does; the command line prints it without a level, or not at all if asked to be quiet.

    A warning to any other handler, so that a program that sets up no logging sees it too.
    """
    logger.warning(text, extra={NOTICE: True})


class Log:
    """A journal sink that logs warnings, the course of the run at info, and every decision's reasons at debug."""

    def __init__(self) -> None:
        self._decisions = logger.isEnabledFor(logging.DEBUG)

    def write(self, line: Line) -> None:
        if isinstance(line, Observation):
            self._observed(line)
        elif self._decisions and isinstance(line, Decision):
            for action in line.actions:
                logger.debug("%.6g s: %s: %s", line.event.at, type(action).__name__.lower(), action.reason)

    def _observed(self, line: Observation) -> None:
        level = LEVELS.get(line.what, logging.DEBUG)
        if line.what == "warning":
            logger.log(level, "%s", line.data["text"])
        elif logger.isEnabledFor(level):
            who = "" if line.worker is None else f" worker {line.worker}"
            data = ", ".join(f"{key} {value}" for key, value in line.data.items())
            logger.log(level, "%.6g s:%s %s: %s", line.at, who, line.what, data)
