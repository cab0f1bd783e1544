"""Whether the packages that paceline declares are there, in versions it declares, and can be imported.

Packages are imported by a process of their own: one that hangs, or kills the process that imports it, is named as well
as one that raises, and `paceline doctor` itself loads none of them.
"""

import contextlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from paceline._version import __version__
from paceline.cli.findings import Finding, judged
from paceline.core.values import shortened

PYTHON = "3.11"  # as in pyproject.toml, where a test looks
MODULES = {"pyzmq": "zmq", "scikit-learn": "sklearn"}  # of packages that are not called like their module
COMPILED = ("msgspec", "numpy", "zmq", "safetensors", "torch")  # in this order: torch imports numpy
LONGEST_IMPORT_S = 120.0
WHAT_FOR = {
    "tasks": "some built-in tasks",
    "report": "`paceline report` and `compare --report`",
    "export": "TensorBoard's and Parquet's formats",
}
NOT_INSTALLED = "pip install -e . in the folder of the sources"

# What the process runs: it says what it begins, so that whoever waits knows what it died of.
_IMPORTS = """
import importlib, json, sys, warnings
def tell(*what): print("@@" + json.dumps(what), flush=True)
for name in sys.argv[1:]:
    tell("begins", name)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            module, facts = importlib.import_module(name), {}
            if name == "zmq":
                facts = {"curve": bool(module.has("curve")), "version": module.zmq_version()}
            if name == "torch":
                there = module.cuda.device_count() if module.cuda.is_available() else 0
                facts = {"built": module.version.cuda, "devices": [], "failed": None}
                try:
                    for number in range(there):
                        facts["devices"].append(module.cuda.get_device_name(number))
                        module.ones(2, device=f"cuda:{number}").sum().item()
                except Exception as error:
                    facts["failed"] = f"{type(error).__name__}: {error}"
                facts["said"] = [str(each.message) for each in said]
        tell("works", name, facts)
    except BaseException as error:
        tell("fails", name, f"{type(error).__name__}: {error}")
"""


class Requirement(NamedTuple):
    """A package that paceline declares, with its bounds as they are written."""

    name: str
    bounds: str
    extra: str | None = None

    @property
    def module(self) -> str:
        """What it is imported as."""
        return MODULES.get(self.name, self.name.replace("-", "_"))

    @property
    def wanted(self) -> str:
        """What pip takes."""
        return f"'{self.name}{self.bounds}'"


def declared() -> list[Requirement]:
    """Return what the installed paceline declares for users: what it needs, and the extras of `paceline[all]`."""
    found: list[Requirement] = []
    mine: set[str] = set()
    for text in metadata.requires("paceline") or []:
        what, _, marker = text.partition(";")
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)", marker)
        name, extras, bounds = re.fullmatch(r"\s*([\w.-]+)(?:\[([^]]*)\])?\s*\(?([^)]*?)\)?\s*", what).groups("")  # type: ignore[union-attr]
        if extra is not None and extra[1] == "all":
            mine.update(extras.split(","))
        else:
            found.append(Requirement(name, ",".join(sorted(bounds.split(","), reverse=True)), extra and extra[1]))
    return [each for each in found if each.extra is None or each.extra in mine]


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what marks a build or a release before the release."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(each) for each in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def fits(version: str, bounds: str) -> bool:
    """Whether a version keeps bounds such as `>=2.6,<3`."""
    for bound in filter(None, bounds.split(",")):
        sign, limit = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", bound).groups()  # type: ignore[union-attr]
        if (release(version) >= release(limit)) != (sign == ">="):
            return False
    return True


def python() -> Finding:
    """Check the interpreter."""
    version = platform.python_version()
    return judged("python", fits(version, f">={PYTHON}"), version, f">={PYTHON}", "make a virtual environment with it")


def own_version() -> Finding:
    """Check that what pip has installed is what runs."""
    found = installed("paceline")
    if found is None:
        return Finding("paceline", "warning", f"{__version__}, not installed: its needs are unknown", "", NOT_INSTALLED)
    told = __version__ if found == __version__ else f"{__version__}, while pip has installed {found}"
    return judged("paceline", found == __version__, told, "", NOT_INSTALLED, otherwise="warning")


def installed(name: str) -> str | None:
    """Return the version of a package that is installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needed(required: Iterable[Requirement], imported: dict[str, Any]) -> list[Finding]:
    """Check the packages that every run needs; `imported` is what `imports` says."""
    return [_needed(each, imported.get(each.module)) for each in required]


def _needed(each: Requirement, said: Any) -> Finding:
    version, fix = installed(each.name), f"pip install {each.wanted}"
    if version is None:
        return Finding(each.name, "problem", "not installed", each.bounds, fix)
    if isinstance(said, str):
        again = f"pip install --force-reinstall {each.wanted}"
        return Finding(each.name, "problem", f"{version}, cannot be imported: {said}", each.bounds, again)
    return judged(each.name, fits(version, each.bounds), version, each.bounds, fix, otherwise="warning")


def extras(required: Iterable[Requirement], engines: Sequence[str]) -> list[Finding]:
    """Check each optional group: nobody misses one that is not installed, but half of one is told."""
    groups: dict[str, list[Requirement]] = {}
    for each in required:
        if each.extra is not None:
            groups.setdefault(each.extra, []).append(each)
    return [_extra(name, group, engines) for name, group in groups.items()]


def _extra(name: str, group: list[Requirement], engines: Sequence[str]) -> Finding:
    what = WHAT_FOR.get(name, f"`--engine {name}`" if name in engines else f"paceline[{name}]")
    fix = f"pip install 'paceline[{name}]'"
    versions = {each: installed(each.name) if _is_there(each.module) else None for each in group}
    told = ", ".join(f"{each.name} {version or 'not installed'}" for each, version in versions.items())
    bounds = ", ".join(f"{each.name}{each.bounds}" for each in group)
    if not any(versions.values()):
        return Finding(name, "ok", f"not installed; only {what} need{'s' * (' and ' not in what)} it", "", fix)
    good = all(version is not None and fits(version, each.bounds) for each, version in versions.items())
    return judged(name, good, told, bounds, fix, otherwise="warning")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def imports(modules: Sequence[str] = COMPILED) -> dict[str, Any]:
    """Import modules in a process of their own; return what is known of each, or as text what went wrong."""
    found: dict[str, Any] = {}
    left = list(modules)
    while left:
        begun = None
        for kind, name, *more in _said(left):
            if kind == "begins":
                begun = name
            else:
                found[name] = more[0] if kind == "works" else shortened(" ".join(str(more[0]).split()))
        left = [name for name in left if name not in found]
        if left:  # the process has ended in the middle of one
            dead = begun if begun in left else left[0]
            found[dead] = "importing it kills the process, or takes too long"
            left.remove(dead)
    return found


def _said(modules: list[str]) -> list[list[Any]]:
    """Return what the process says until its end."""
    command = [sys.executable, "-P", "-c", _IMPORTS, *modules]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
            timeout=LONGEST_IMPORT_S,
        )  # fmt: skip
        out = done.stdout
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
    told = []
    for line in out.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            if line.startswith("@@"):
                told.append(json.loads(line[2:]))
    return told
