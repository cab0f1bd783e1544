"""Where tasks find their files: the folder of `--data-dir`, and errors that say what was looked for and where."""

from pathlib import Path

from paceline.core.errors import DataError


def require_folder(task: str, folder: Path | None, contents: str, example: str) -> Path:
    """The data folder of a task that cannot do without one."""
    if folder is None:
        raise DataError(f"task {task} needs a data folder with {contents}; give one, as in --data-dir {example}")
    if not folder.is_dir():
        raise DataError(f"task {task} needs a data folder with {contents}; {folder} is not a folder: check --data-dir")
    return folder


def require_file(folder: Path, *names: str) -> Path:
    """The first of these names that the folder has."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{' or '.join(names)} is missing in {folder.resolve()}; put it there or change --data-dir")
