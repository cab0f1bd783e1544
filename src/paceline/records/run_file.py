"""How a run was started, kept in its folder as `run.json`, so that `paceline resume` needs no option again.

The journal's header says what a run was; this file says how to start it once more: script, arguments and settings, with
whole paths.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import OptionError
from paceline.core.scenario.file import builtin_names
from paceline.core.settings import SETTINGS, RunConfig
from paceline.core.values import nearest, shown, to_text
from paceline.records.private_files import write_text

NAME = "run.json"
FORMAT = 1
CHECKPOINTS = "checkpoints"
_HEAD = "checkpoint.json"  # of a checkpoint; the code that writes them loads torch, and this must not
_OF_ONE_START = ("resume", "journal")


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `run.json`. Without a script and a task, a function was given to `launch()`."""

    format: int = FORMAT
    script: str | None = None
    arguments: list[str] = []
    task: str | None = None
    folder: str  # that the command was given in
    settings: dict[str, Any]  # as in a scenario's [run] table, and `scenario`


def settings_to_repeat(config: RunConfig) -> dict[str, Any]:
    """Return the settings in force, as text, that make the same run again; paths are whole."""
    kept: dict[str, Any] = {}
    for setting in SETTINGS.values():
        value = getattr(config, setting.name)
        shared = setting.name == "batch_size" and config.global_batch is not None  # follows from `global_batch`
        if setting.name in _OF_ONE_START or shared or (value == setting.default and setting.name != "seed"):
            continue
        if isinstance(value, Path):
            value = os.path.abspath(value)  # noqa: PTH100 - as it is written: `resolve` would follow links
        elif setting.name == "scenario" and value not in builtin_names():
            value = os.path.abspath(value)  # noqa: PTH100
        is_off = value is None and setting.about.off is not None
        kept[setting.written] = setting.about.off if is_off else value if isinstance(value, dict) else to_text(value)
    return kept


def save(folder: Path, script: Path | None, arguments: list[str], task: str | None, config: RunConfig) -> None:
    """Write `run.json`."""
    written = RunFile(
        script=None if script is None else os.path.abspath(script),  # noqa: PTH100
        arguments=arguments,
        task=task,
        folder=os.fspath(Path.cwd()),
        settings=settings_to_repeat(config),
    )
    try:
        write_text(folder / NAME, json.dumps(msgspec.to_builtins(written), indent=1) + "\n")
    except OSError as error:
        raise OptionError(
            f"cannot write {folder / NAME}: {error.strerror}; free some space or choose another --runs-dir"
        ) from error


def find(given: str, runs_dir: Path) -> Path:
    """Return the folder of a run, given by its path, by its name in `runs_dir`, or by one of its checkpoints."""
    for folder in (Path(given), runs_dir / given):
        if folder.is_dir():
            return folder
    names = sorted(path.name for path in runs_dir.iterdir() if path.is_dir()) if runs_dir.is_dir() else []
    hint = nearest(given, names) if names else f"{runs_dir} holds no runs; give the path of a run's folder"
    raise OptionError(f"there is no run {shown(given)}, neither here nor in {runs_dir}; {hint}")


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run's folder has a checkpoint, or is one's own."""
    return (folder / _HEAD).is_file() or any((folder / CHECKPOINTS).glob(f"v*/{_HEAD}"))


def load(folder: Path) -> RunFile:
    """Read the `run.json` of a run's folder, or of the run that a checkpoint's folder belongs to."""
    if folder.parent.name == CHECKPOINTS and not (folder / NAME).is_file():
        folder = folder.parent.parent
    path = folder / NAME
    try:
        found = msgspec.convert(json.loads(path.read_bytes()), RunFile)
    except FileNotFoundError:
        raise OptionError(
            f"{folder} has no {NAME}, so its script and options are not known: give them again, `paceline run ... "
            f"--resume {folder} train.py`"
        ) from None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise OptionError(
            f"{path} cannot be read ({error}): `paceline run ... --resume {folder} train.py` goes without it"
        ) from error
    if found.format > FORMAT:
        raise OptionError(f"{path} has format {found.format}; this version reads up to {FORMAT}: install a newer one")
    return found


def differences(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return a line for each setting that is not what it was."""
    after = settings_to_repeat(config)
    lines = []
    for setting in SETTINGS.values():
        was, now = before.get(setting.written), after.get(setting.written)
        if was != now and setting.name in config.given:
            lines.append(
                f"{setting.flag} {_said(now, setting.default_text)} instead of {_said(was, setting.default_text)}"
            )
    return lines


def _said(value: Any, default: str) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={each}" for name, each in value.items())
    return str(value) if value is not None else default or "none"
