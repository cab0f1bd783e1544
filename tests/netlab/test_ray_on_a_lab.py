"""docs/howto/ray.md, followed word by word on two hosts of a lab: from a laptop to a Ray cluster across them."""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import leaks
import pytest
import ray_clusters
from hosts import Site, wait_until

import netlab
from netlab import Lab

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "ray.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.M)
PROGRAMS = {
    "pip": (sys.executable, "-m", "pip"),
    "ray": (sys.executable, "-m", "ray.scripts.scripts"),
    "paceline": (sys.executable, "-m", "paceline"),
}


@pytest.fixture
def lab(nothing_left: leaks.Watch) -> Iterator[Lab]:
    ray_clusters.require()
    netlab.require()
    with Lab(hosts=2, rate="100mbit") as made:
        for host in made.hosts:
            made.tool("ip", host.index, "route add default dev eth0")  # Ray asks the route which address a host has
        yield made


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Ray's own folder, which all hosts share as they share all files, and its token authentication."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets need short names
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    yield {
        **os.environ, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    shutil.rmtree(folder)


def arguments(command: str, **replaced: str) -> list[str]:
    """The words of a command of the page, with the program's path."""
    for name, value in replaced.items():
        command = command.replace(name, value)
    program, *rest = shlex.split(command)
    return [*PROGRAMS[program], *rest]


def done(host: netlab.Host, folder: Path, environment: dict[str, str], words: list[str]) -> str:
    """What a command on a host says; it must succeed."""
    ran = host.run(words, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return str(ran.stdout + ran.stderr)


def test_five_commands_lead_from_a_laptop_to_a_cluster(
    lab: Lab, folder: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    install, first, head, further, last = COMMANDS
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    pip = [*arguments(install, paceline=str(source)), "--dry-run", "--no-index", "--no-build-isolation"]
    said = done(lab.hosts[0], folder, environment, pip)
    assert "Requirement already satisfied: ray" in said
    Site(folder, epochs=2)
    own = done(lab.hosts[0], folder, environment, arguments(first))
    assert "bsp · ray · 2 workers" in own
    assert "at the same path" in own
    wait_until(lambda: not lab.hosts[0].processes())  # what Ray leaves to end by itself
    assert list(Path(environment["RAY_TMPDIR"]).iterdir()) == [Path(environment["RAY_AUTH_TOKEN_PATH"])]
    done(lab.hosts[0], folder, environment, arguments(head))
    for host in lab.hosts[1:]:
        done(host, folder, environment, arguments(further, HEAD=lab.hosts[0].address))
    before = lab.hosts[0].bytes_sent()
    *words, script = arguments(last)
    across = done(lab.hosts[0], folder, environment, [*words, "--spread", "--servers", "2", script])
    assert "it travels with" in across
    assert "bsp · ray · 2 workers" in across
    assert across.count("over the network") >= 1
    assert lab.hosts[0].bytes_sent() > before
