"""`paceline doctor`: look at packages and machine, and say in one line each what is there and what to fix."""

import sys
from typing import Annotated, Any, get_args

import msgspec
import typer

from paceline._version import __version__
from paceline.cli import machine_checks, package_checks
from paceline.cli.findings import Finding, tried
from paceline.cli.streams import logging_shown
from paceline.core import worker_count
from paceline.core.errors import UserError
from paceline.core.settings import EngineName
from paceline.core.values import visible

STYLES = {"ok": "32", "warning": "33", "problem": "31"}  # of a terminal


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> int:
    """Check this machine and its packages, and say what to fix (exit code 2 if something stops a run)."""
    with logging_shown("critical"):  # what goes wrong is a finding
        found = findings()
    problems = sum(each.level == "problem" for each in found)
    if json:
        told = {"paceline": __version__, "fit": not problems, "checks": msgspec.to_builtins(found)}
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        for each in found:
            print(line(each, coloured=sys.stdout.isatty()))
        warnings = sum(each.level == "warning" for each in found)
        end = "nothing stops a run" if not problems else f"{_counted(problems, 'problem')} to fix before a run"
        print(f"\n{end}" + (f", {_counted(warnings, 'warning')}" if warnings else ""))
    return UserError.exit_code if problems else 0


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def findings() -> list[Finding]:
    """Make all checks."""
    required = package_checks.declared() if package_checks.installed("paceline") else []
    imported = package_checks.imports()
    found = [package_checks.python(), package_checks.own_version()]
    found += package_checks.needed([each for each in required if each.extra is None], imported)
    torch: Any = imported["torch"]
    workers = worker_count.usual_workers(len(torch["devices"]) if isinstance(torch, dict) else 0)
    found += [
        tried("system", machine_checks.system),
        tried("cores", machine_checks.cores),
        tried("memory", lambda: machine_checks.memory(workers)),
        tried("descriptors", lambda: machine_checks.descriptors(workers)),
        tried("shared memory", machine_checks.shared_memory),
    ]
    loaders = machine_checks.loader_memory()
    found += [loaders] if loaders is not None else []
    found += [
        tried("sockets", machine_checks.private_sockets),
        tried("loopback", machine_checks.loopback, "warning"),
        tried("own address", machine_checks.own_address, "warning"),
        machine_checks.encryption(imported["zmq"]),
        machine_checks.devices(torch),
    ]
    if isinstance(torch, dict):  # a nursery imports it
        found.append(tried("start", machine_checks.quick_start, "warning"))
    return found + package_checks.extras(required, get_args(EngineName))


def line(finding: Finding, *, coloured: bool = False) -> str:
    """Return a finding as one line."""
    level = f"{finding.level:<8}"
    if coloured:
        level = f"\x1b[{STYLES[finding.level]}m{level}\x1b[0m"
    bound = f" ({finding.bound})" if finding.bound else ""
    fix = f": {finding.fix}" if finding.fix else ""
    return f"{level} {finding.name:<14} {visible(finding.found)}{bound}{fix}"
