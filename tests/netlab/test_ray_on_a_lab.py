"""Ray clusters across hosts of a lab: docs/howto/ray.md followed word by word, and shards on a machine of their own."""

import contextlib
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
from hosts import SCRIPT, Site, wait_until
from ray_clusters import RayCluster

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


@contextlib.contextmanager
def lab_for_ray(hosts: int) -> Iterator[Lab]:
    ray_clusters.require()
    netlab.require()
    with Lab(hosts=hosts, rate="100mbit") as made:
        for host in made.hosts:
            made.tool("ip", host.index, "route add default dev eth0")  # Ray asks the route which address a host has
        yield made


@pytest.fixture
def lab(nothing_left: leaks.Watch) -> Iterator[Lab]:
    with lab_for_ray(2) as made:
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


HIDDEN = 3_000
GRADIENT_BYTES = 4 * (6 * HIDDEN + HIDDEN + HIDDEN + 1)


@pytest.mark.usefixtures("warm")
def test_parts_go_straight_to_the_machine_of_the_shards_which_come_back_with_it(
    nothing_left: leaks.Watch, folder: Path
) -> None:
    """The serving host sees commands, and the model when the run begins, goes back, at a checkpoint and at the end."""
    theirs = {"TMPDIR": str(nothing_left.temporary / "theirs")}
    with lab_for_ray(3) as lab, RayCluster(cpus=1, lab=lab) as cluster:
        head, trains, holds = lab.hosts
        cluster.add(0, 1).wait()
        Path(theirs["TMPDIR"]).mkdir()
        machine = cluster.add(2, host=holds, **theirs).wait()
        script = SCRIPT.replace("300", str(HIDDEN)).replace("lr=0.005", "lr=0.0001")
        with Site(folder, script, epochs=8, pause=0.05) as site:
            ran = site.command(
                "run", "run", *cluster.options, "--workers", "1", "--servers", "2", "--remote-shards", "2",
                "--worker-resources", "GPU=1", "--evaluate-every", "off", "--checkpoint-every", "60v",
                "--log-level", "info", "train.py", host=head, environment=cluster.environment,
            )  # fmt: skip
            wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/v*"))) > 0)
            machine.kill()
            ran.wait_for("waiting for 2 more shards to join", 2)
            shutil.rmtree(theirs["TMPDIR"])  # nobody was left to remove what is in it
            Path(theirs["TMPDIR"]).mkdir()
            cluster.add(2, host=holds, **theirs).wait()
            ran.wait_for("phase 0", 2)
            site.hurry()
            assert ran.end() == 0, ran.said
            assert re.search(r"of the server (was killed by|exited with).*: going on from", ran.said)
            # All hosts see one folder of logs, and each shows all of them.
            assert len(set(re.findall(r"pid=(\d+).*running worker", ran.said))) == 1
            assert len(set(re.findall(r"pid=(\d+).*running shard", ran.said))) == 4
            pushed = GRADIENT_BYTES * site.report["samples_used"] // 5
            assert holds.bytes_received() > pushed
            assert trains.bytes_sent() > pushed
            assert head.bytes_received() < pushed / 4
        Path(theirs["TMPDIR"]).rmdir()
