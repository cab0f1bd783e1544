"""Checks of a task's options and data folder, which name what is wrong before training starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from paceline.core.errors import DataError, OptionError
from paceline.core.values import closest, shown

Number = TypeVar("Number", int, float)


def within(name: str, value: Number, low: Number, high: Number | None = None) -> Number:
    """Return `value` if it lies in [low, high], else raise."""
    if high is None and not value >= low:
        raise OptionError(f"{name} must be >= {low}, not {value}; give --set {name}={low} or more")
    if high is not None and not low <= value <= high:
        raise OptionError(f"{name} must lie between {low} and {high}, not {value}; try --set {name}={high}")
    return value


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices, else raise."""
    if value in choices:
        return value
    near = closest(value, choices) or choices[0]
    raise OptionError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}; give --set {name}={near}")


def require_folder(task: str, folder: Path | None, contents: str, example: str) -> Path:
    """Return the data folder of a task that needs one, else raise."""
    if folder is None:
        raise DataError(f"task {task} needs a data folder with {contents}; give one, as in --data-dir {example}")
    if not folder.is_dir():
        raise DataError(f"task {task} needs a data folder with {contents}; {folder} is not a folder: check --data-dir")
    return folder


def require_file(folder: Path, *names: str) -> Path:
    """Return the first of these files that the folder has, else raise."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{' or '.join(names)} is missing in {folder.resolve()}; put it there or change --data-dir")
