"""Training scripts, run by a virtual worker's thread of this process or by a worker process."""

import os
import sys
import traceback
import types
from pathlib import Path

from paceline.core.errors import OptionError
from paceline.worker.enclosing_loops import lies_in_for


class Script:
    """A script file; each call runs it as `__main__` in a new module.

    Virtual workers of one process share the modules that it imports.
    """

    def __init__(self, path: Path, arguments: list[str]) -> None:
        self.path = path
        self.arguments = arguments
        self._code = _compiled(path)

    def settle_in(self) -> None:
        """Give this process the script's arguments and the folder it imports from, as `python script.py` would."""
        sys.argv = [str(self.path), *self.arguments]
        folder = os.fspath(self.path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)

    def __call__(self) -> None:
        module = types.ModuleType("__main__")
        module.__file__ = str(self.path)
        sys.modules["__main__"] = module  # so that the script's own classes can be pickled
        exec(self._code, module.__dict__)


def load_script(path: Path, arguments: list[str]) -> Script:
    """Return the script of this file, and give this process its arguments and import folder."""
    script = Script(path, arguments)
    script.settle_in()
    return script


def _compiled(path: Path) -> types.CodeType:
    try:
        return compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise OptionError(f"cannot read script {path}: {error.strerror}") from error
    except SyntaxError as error:
        raise OptionError(f"{path}, line {error.lineno}: {error.msg}") from error


def script_traceback(error: BaseException) -> str:
    """Return the traceback of a script's error, starting at the script's first frame."""
    frames = error.__traceback__
    while frames is not None and _is_ours(Path(frames.tb_frame.f_code.co_filename)):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def raised_in_loop(error: BaseException) -> bool:
    """Return whether a `for` loop of the script was left by this exception."""
    frames = error.__traceback__
    while frames is not None:
        code = frames.tb_frame.f_code
        if not _is_ours(Path(code.co_filename)) and lies_in_for(code, frames.tb_lasti):
            return True
        frames = frames.tb_next
    return False


def _is_ours(file: Path) -> bool:
    package = Path(__file__).parents[1]
    return file.is_relative_to(package) and not file.is_relative_to(package / "tasks")  # a task is a script
