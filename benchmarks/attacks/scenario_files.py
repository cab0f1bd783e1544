"""Scenario files that somebody else has made, and one journal.

Fifty files try to make paceline write, read, run or hold what it should not: places and code in the `[run]` table, huge
counts, deep and long tables, numbers beyond all bounds, pipes and devices, links to secrets, compressed bombs, and
names that a terminal would obey. Each is checked (`paceline scenario --check`), described, and run in the simulator for
two updates. A file is held off if every command ends with exit code 2 and one line, or with success; if nothing is
written outside the run's own folder and nothing in it that another run could have; if no byte of a secret and no
control character is shown; and if no command needs 200 MB or 2 s of processor time more than a harmless file does.
"""

import gzip
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from attacks.harness import Attack, Target, Trial

BEFORE = "3b17ec6"
MEMORY, SECONDS = 200 << 20, 2.0  # more than a harmless file needs
PATIENCE = 90.0  # seconds until a command is killed, which counts as a failure
SECRET = "hunter2-do-not-show"
COST = "[compute]\nseconds_per_sample = 0.002\n"
HARMLESS = COST + "[[workers]]\ncount = 4\n"
JOINS = "[[events]]\nkind = 'join'\nat = 1\ncount = {count}\n"

Make = Callable[[Path], str | bytes | None]  # makes what is beside the file; the file's contents, None if it made that


def _in_run(line: str) -> Make:
    return lambda folder: f"{HARMLESS}[run]\n{line}\n"


def _trace(contents: bytes | str | Path, spec: str = "trace:beside") -> Make:
    """A trace with these contents, or a link to a path."""

    def make(folder: Path) -> str:
        place = folder / "beside"
        if isinstance(contents, Path):
            place.symlink_to(contents)
        else:
            place.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
        return f"[compute]\nseconds_per_sample = 0.002\njitter = '{spec}'\n[[workers]]\ncount = 4\n"

    return make


def _speed(contents: str | Path, cell: str = "a:b") -> Make:
    return lambda folder: (
        str(_trace(contents)(folder)).replace("jitter = 'trace:beside'\n", "") + (f"speed = 'trace:beside:{cell}'\n")
    )


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "file.toml")


def _socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket must be short
        try:
            made.bind("file.toml")
        finally:
            os.chdir(here)


def _link(to: str) -> Make:
    return lambda folder: (folder / "file.toml").symlink_to(to)  # type: ignore[func-returns-value]


def _trace_pipe(folder: Path) -> str:
    os.mkfifo(folder / "beside")
    return f"[compute]\nseconds_per_sample = 1\njitter = 'trace:beside'\n{HARMLESS.removeprefix(COST)}"


def _many_traces(folder: Path) -> str:
    rows = "".join(f"{n % 7},{n},{1 + n % 5}\n" for n in range(200_000))
    lines = []
    for number in range(300):
        if number < 20:
            (folder / f"t{number}").write_text(f"worker,time,seconds\n{rows}")
        lines.append(f"[[workers]]\njitter = 'trace:t{number % 20}'\n")
    return COST + "".join(lines)


FILES: dict[str, Make] = {
    # places and code
    "journal over an archive": _in_run("journal = 'precious.tar.gz'"),
    "journal over a script": _in_run("journal = 'precious.py'"),
    "journal anywhere": _in_run("journal = '/tmp/attack-scenario-journal.jsonl'"),
    "runs elsewhere": _in_run("runs_dir = '../elsewhere'"),
    "resume from elsewhere": _in_run("resume = '/etc'"),
    "data from elsewhere": _in_run("data_dir = '/etc'"),
    "code from a file": _in_run("strategy = 'precious.py:Mine'"),
    "code from a module": _in_run("strategy = 'precious:Mine:k=3'"),
    "another scenario": _in_run("scenario = 'even4'"),
    "options of the script": _in_run("set = {hidden = 5000000}"),
    "threads": _in_run("threads = 100000"),
    "a table in place of a name": _in_run("strategy = {a = 1}"),
    "home folder": _in_run("journal = '~/precious.py'"),
    # counts
    "ten million workers": lambda folder: f"{COST}[[workers]]\ncount = 10000000\n",
    "too many workers": lambda folder: f"{COST}[[workers]]\ncount = 99999999999\n",
    "many groups of many": lambda folder: COST + "[[workers]]\ncount = 9000000\n" * 40,
    "ten million join": lambda folder: HARMLESS + JOINS.format(count=9_999_990),
    "a million join in ten": lambda folder: HARMLESS + JOINS.format(count=100_000) * 10,
    "as many join as may": lambda folder: HARMLESS + JOINS.format(count=99_999),
    "many groups": lambda folder: COST + "[[workers]]\n" * 20_000,
    "workers by the table": _in_run("workers = 10000000"),
    "many events": lambda folder: HARMLESS + "[[events]]\nkind='slow'\nworker=0\nat=1\nfor=1\nfactor=2\n" * 3500,
    "long list of workers": lambda folder: (
        f"{HARMLESS}[[events]]\nkind = 'crash'\nat = 1\nworkers = [{','.join(map(str, range(40_000)))}]\n"
    ),
    "batches without end": _in_run("batch_size = 9223372036854775807"),
    "epochs without end": _in_run("epochs = 1e300"),
    # syntax
    "deep arrays": lambda folder: f"a = {'[' * 100_000}",
    "deep dots": lambda folder: "a." * 100_000 + "a = 1\n",
    "deep tables": lambda folder: "".join(f"[{'.'.join('a' * n)}]\n" for n in range(1, 600)),
    "inline tables": lambda folder: "a = " + "{a=" * 50_000,
    "duplicate keys": lambda folder: HARMLESS + "[compute]\nseconds_per_sample = 1\n",
    "long string": _in_run(f"strategy = '{'x' * 200_000}'"),
    "long key": lambda folder: f"{HARMLESS}[run]\n{'k' * 200_000} = 1\n",
    "many keys": lambda folder: HARMLESS + "[run]\n" + "".join(f"k{n} = 1\n" for n in range(20_000)),
    "too large a file": lambda folder: HARMLESS + "# harmless\n" * 3_000_000,
    "no text": lambda folder: b"\xff\xfe" + os.urandom(2000),
    "zero bytes": lambda folder: b"\0" * 100_000,
    # numbers
    "not a number": lambda folder: HARMLESS.replace("0.002", "nan"),
    "infinite": lambda folder: HARMLESS.replace("0.002", "inf"),
    "smallest number": lambda folder: HARMLESS.replace("0.002", "5e-324"),
    "largest number": lambda folder: HARMLESS.replace("0.002", "1.7e308"),
    "digits": lambda folder: f"seed = {'9' * 100_000}\n{HARMLESS}",
    "hexadecimal digits": lambda folder: f"seed = 0x{'f' * 100_000}\n{HARMLESS}",
    # files
    "a pipe": _pipe,
    "a socket": _socket,
    "a device": _link("/dev/zero"),
    "a folder": _link("/"),
    "a link to a secret": lambda folder: (folder / "file.toml").symlink_to("secret"),  # type: ignore[func-returns-value]
    "a pipe as trace": _trace_pipe,
    "a device as trace": _trace(Path("/dev/zero")),
    "a secret as trace": _trace(Path("secret")),
    "a secret as table": _speed(Path("secret")),
    "a secret by its path": _trace("", "trace:../{folder}/secret"),
    "a trace too large": _trace("worker,time,seconds\n" + "0,1,1\n" * 2_000_000),
    "a trace of one line": _trace('"' + "x" * 3_000_000),
    "many large traces": _many_traces,
    # a terminal
    "escapes in a key": lambda folder: f'{HARMLESS}[run]\n"\\u001b]0;owned\\u0007" = 1\n',
    "escapes in a jitter": lambda folder: f'{HARMLESS}jitter = "\\u001b[2J\\u009b31m"\n',
    "escapes in a strategy": _in_run('strategy = "\\u001b[31mbsp"'),
    "escapes in a trace": lambda folder: f'{HARMLESS}jitter = "trace:\\u001b[31m"\n',
    "escapes in the file": lambda folder: b"\x1b[31m\x1b]0;owned\x07" + HARMLESS.encode(),
}


class Used(NamedTuple):
    """How a command ended, and what it took."""

    code: int
    out: str
    err: str
    memory: int
    seconds: float


def used(target: Target, *arguments: str) -> Used:
    """Run a command of paceline, and measure it with all of its children."""
    place = target.folder / "work"
    files = [target.folder / f".{name}" for name in ("out", "err")]
    with files[0].open("wb") as out, files[1].open("wb") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments], cwd=place, env=target.environment(),
            stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30)),
        )  # fmt: skip
    began = time.monotonic()
    while True:
        done, status, took = os.wait4(child.pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() - began > PATIENCE:
            child.kill()
        time.sleep(0.01)
    child.returncode = os.waitstatus_to_exitcode(status)
    texts = [file.read_bytes().decode("utf-8", "replace") for file in files]
    return Used(child.returncode, *texts, took.ru_maxrss << 10, took.ru_utime + took.ru_stime)


COMMANDS = {
    "check": ("scenario", "--check", "file.toml"),
    "describe": ("scenario", "file.toml"),
    "run": ("run", "--engine", "sim", "--task", "digits", "--scenario", "file.toml", "--max-versions", "2",
            "--evaluate-every", "off", "--quiet", "--runs-dir", "runs"),
}  # fmt: skip
PRECIOUS = {
    "precious.py": b"open('executed', 'w')\n",
    "precious.tar.gz": gzip.compress(b"an archive"),
    "secret": f"{SECRET}:x\n{SECRET},{SECRET}\n".encode(),
}


def _work(target: Target, make: Make) -> Path:
    """Make a folder with one hostile file and what it must not touch."""
    place = target.folder / "work"
    place.mkdir()
    for name, contents in PRECIOUS.items():
        (place / name).write_bytes(contents)
    made = make(place)
    if isinstance(made, str):
        (place / "file.toml").write_text(made.replace("{folder}", place.name))
    elif isinstance(made, bytes):
        (place / "file.toml").write_bytes(made)
    return place


def _seen(place: Path) -> dict[str, bytes | None]:
    """All files around, apart from those in folders of runs."""
    found: dict[str, bytes | None] = {}
    for path in [*place.parent.rglob("*"), *Path("/tmp").glob("attack-scenario-*")]:
        name = str(path)
        if f"{place}/runs" not in name and not path.name.startswith(".") and "__pycache__" not in name:
            found[name] = path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else None
    return found


def faults_of(found: Used, harmless: Used) -> Iterator[str]:
    """What a hostile file must not bring about."""
    lines = found.err.strip().splitlines()
    if found.code not in (0, 2):
        yield f"exit code {found.code}: {(lines or [''])[-1][:200]}"
    if found.code == 2 and len([line for line in lines if "WARNING" not in line]) != 1:
        yield f"{len(lines)} lines instead of one"
    if "Traceback" in found.err:
        yield "a traceback"
    if SECRET in found.out + found.err:
        yield "a secret is shown"
    if any(not letter.isprintable() and letter != "\n" for letter in found.out + found.err):
        yield "control characters are shown"
    if len(found.out + found.err) > 20_000:
        yield f"{len(found.out + found.err):,} characters are shown"
    if found.memory > harmless.memory + MEMORY:
        yield f"{(found.memory - harmless.memory) >> 20} MB more than a harmless file"
    if found.seconds > harmless.seconds + SECONDS:
        yield f"{found.seconds - harmless.seconds:.1f} s more than a harmless file"


_harmless: dict[str, dict[str, Used]] = {}


def harmless(target: Target) -> dict[str, Used]:
    """What the commands need for a harmless file."""
    key = str(target.source)
    if key not in _harmless:
        place = _work(target, lambda folder: HARMLESS)
        _harmless[key] = {name: used(target, *command) for name, command in COMMANDS.items()}
        if any(each.code for each in _harmless[key].values()):
            raise RuntimeError(f"a harmless file is refused: {_harmless[key]}")
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        place.rmdir()
    return _harmless[key]


def hostile(target: Target, seed: int) -> Trial:
    """One file, by all commands."""
    name = list(FILES)[seed % len(FILES)]
    usual = harmless(target)
    place = _work(target, FILES[name])
    before = _seen(place)
    faults = []
    for command, arguments in COMMANDS.items():
        found = used(target, *arguments)
        faults += [f"{command}: {fault}" for fault in faults_of(found, usual[command])]
    after = _seen(place)
    changed = sorted(path for path in {*before, *after} if before.get(path, 0) != after.get(path, 0))
    faults += [f"{path} was written" for path in changed]
    for path in changed:
        if path.startswith("/tmp/attack-scenario-"):
            Path(path).unlink()
    last = (found.err or found.out).strip().splitlines()
    return Trial(not faults, f"{name}: " + "; ".join([*faults, (last or [""])[-1][:200]]))


def bomb(target: Target, seed: int) -> Trial:
    """A compressed journal of a few kilobytes holds gigabytes: one line, lines of nothing, or what is no line."""
    place = _work(target, lambda folder: HARMLESS)
    kinds = {"one line": b"a" * 1000, "no text": b"\0" * 1000, "brackets": b"[" * 1000}
    name, block = list(kinds.items())[seed % len(kinds)]
    (place / "bomb.jsonl.gz").write_bytes(gzip.compress(block * 1000) * 400)  # members follow one another
    little = used(target, "replay", "nothing.jsonl")
    faults = list(faults_of(used(target, "replay", "bomb.jsonl.gz"), little))
    over = used(target, *COMMANDS["run"], "--journal", "bomb.jsonl.gz")
    faults += [f"overwritten: {over.code}"] if over.code != 2 else []
    return Trial(not faults, f"{name}: " + "; ".join([*faults, over.err.strip()[-200:]]))


ATTACKS = [
    Attack("hostile scenario files", f"one of {len(FILES)} hostile files", hostile, len(FILES), before=7),
    Attack("compressed bombs", "a small compressed journal that holds gigabytes", bomb, 3, before=1),
]
