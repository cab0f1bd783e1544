"""Record which source files a marked window of a run passes through, in every process of the run.

`walks.py` copies this file as `sitecustomize.py` into a folder on PYTHONPATH, so every interpreter of a run loads it
before anything else and nothing in `src` knows of it. It needs only the standard library. A script marks a window with
`begin()` and `end()`; both write one byte of memory that all processes map, so the others record for the same time.

An event is one JSON line of `trace-<pid>.jsonl`: [seconds, thread, kind, file, held]. Kinds are `call` and `return` of
a function of the package, `send` and `recv` of a socket, `write` to a file, `wait` for sockets (its end, with the depth
of the stack), `begin` and `end` of a window. `held` lists the package's own objects among the arguments of a call or in
what a function returns.
"""

import json
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path

FOLDER = os.environ.get("PACELINE_WALKS")
SOURCE = os.environ.get("PACELINE_WALKS_SOURCE", "") + os.sep
MARK = 0.3125  # every element of the marked push's gradient; exact in every float format
NUMBERS = ("ticket", "push", "worker")
MOST = 50  # elements of a list that are looked at
DEEPEST = 3  # levels of fields and lists that are looked into

_window = None
_file = None
_here = True


def begin(name):
    """Record in all processes from here on, as the window `name`."""
    _window[0] = 1
    _write("begin", name)


def end():
    """Stop recording everywhere."""
    _write("end", "")
    _window[0] = 0


def leave_out():
    """Record nothing in this process: it takes part in the run, but the marked thing does not pass through it."""
    global _here
    _here = False


def signal_turn(number):
    """Let another process of the run go on: see `await_turn`."""
    _window[1] = number


def await_turn(number):
    """Wait until another process has called `signal_turn` with this number."""
    while _window[1] < number:
        time.sleep(0.002)


def _profile(frame, event, arg):
    if not (_window[0] and _here):
        return
    if event == "c_call":
        kind = _kind_of(arg)
        if kind is not None:
            _write(kind, frame.f_code.co_filename)
    elif event == "c_return" and arg.__name__ in ("select", "poll"):
        _write("wait", frame.f_code.co_filename, _depth_of(frame))
    elif event in ("call", "return") and frame.f_code.co_filename.startswith(SOURCE):
        held = []
        for name, value in list(frame.f_locals.items()) if event == "call" else [("", arg)]:
            if name != "self":
                _look(value, held, DEEPEST)
        _write(event, frame.f_code.co_filename, held)


def _kind_of(function):
    """Whether a built-in function moves bytes out of or into this process."""
    name, owner = function.__name__, getattr(function, "__self__", None)
    if isinstance(owner, socket.socket):
        return name[:4] if name.startswith(("send", "recv")) else None
    return "write" if name == "write" else None


def _depth_of(frame):
    depth = 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _look(value, held, depth, parent=None):
    """Describe objects of the package in `value`, in its fields and in lists of them."""
    kind = type(value)
    fields = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)
    if fields is None and isinstance(value, list | tuple | dict) and depth:
        for element in list(value.values() if isinstance(value, dict) else value)[:MOST]:
            _look(element, held, depth - 1, parent)
    if not str(kind.__module__).startswith("paceline.") or isinstance(value, type):
        return
    declared = fields or tuple(getattr(kind, "__dataclass_fields__", ()))
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    values = {name: getattr(value, name, None) for name in (*declared, *slots, *getattr(value, "__dict__", ()))}
    name = f"{kind.__module__}.{kind.__qualname__}"
    found = {"type": name, "id": id(value)}
    found |= {key: values[key] for key in NUMBERS if key in declared and type(values[key]) is int}
    found["record"] = bool(declared)
    found["marked"] = any(_is_marked(held_value) for held_value in values.values())
    found["line"] = bool(declared) and kind.__module__.endswith(".journal")
    found["decision"] = found["line"] and {"event", "actions"} <= set(declared)
    found["gradient_of"] = parent
    held.append(found)
    for key in declared if depth else ():
        _look(values[key], held, depth - 1, name if key == "gradient" else None)


def _is_marked(value):
    """Whether it is a tensor of the marked gradient, or a list that begins with one."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if type(value).__module__.partition(".")[0] != "torch" or not getattr(value, "numel", int)():
        return False
    return value.is_floating_point() and float(value.detach().reshape(-1)[0]) == MARK


def _write(kind, file, held=None):
    global _file
    if _file is None:
        _file = Path(FOLDER, f"trace-{os.getpid()}.jsonl").open("a", buffering=1)  # noqa: SIM115 - until the end
    event = [time.monotonic(), threading.get_ident(), kind, file.removeprefix(SOURCE)]
    _file.write(json.dumps([*event, held] if held else event) + "\n")


if FOLDER is not None:
    with Path(FOLDER, "window").open("r+b") as _shared:
        _window = mmap.mmap(_shared.fileno(), 2)
    threading.setprofile(_profile)
    sys.setprofile(_profile)
