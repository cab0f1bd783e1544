"""Recipes for several machines in docs/howto: shell and YAML that parse, commands that the command line takes."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from paceline.cli import run_command
from paceline.cli.app import app, run_app
from paceline.engines.hosts import agent
from paceline.transport.join_token import new_token

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = "\n".join((HOWTO / f"{name}.md").read_text(encoding="utf-8") for name in ("cluster", "servers", "launchers"))
FENCED = re.findall(r"^```yaml\n(apiVersion.*?)^```", PAGE, re.M | re.S)
SNIPPETS = re.findall(r"^```yaml\n(env:.*?)^```", PAGE, re.M | re.S)
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
ENDS = {"&", "||", "&&", "|", ";"}
LAB = {
    "MASTER_ADDR": "lab1", "MASTER_PORT": "7000", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8", "token": "token.txt",
}  # fmt: skip
# Options of sbatch, torchrun, kubectl and docker.
FOREIGN = {
    "--nodes", "--ntasks-per-node", "--cpus-per-task", "--nnodes", "--nproc-per-node", "--no-python", "--from-file",
    "--network", "--name",
}  # fmt: skip


def commands_in(shell):
    """The words of every `paceline ...` in a piece of shell, whatever starts it."""
    for line in shell.splitlines():
        words = shlex.split(line, comments=True)
        if "paceline" in words:
            words = words[words.index("paceline") + 1 :]
            yield words[: next((place for place, word in enumerate(words) if word in ENDS), None)]


def pods():
    (text,) = FENCED
    for job in yaml.safe_load(text)["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        yield job["name"], container


COMMANDS = [*(each for block in SHELL for each in commands_in(block)), *(pod["command"][1:] for _, pod in pods())]


@pytest.fixture
def taken(folder, monkeypatch):
    """What a command line would do, in a folder with a script; nothing is trained."""
    found = []
    (folder / "train.py").touch()
    for name, value in {**LAB, "PACELINE_TOKEN": new_token().reveal()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(agent, "join", lambda _train, _task, _token, settings: found.append(settings) or 0)
    monkeypatch.setattr(agent, "hold", lambda _token, settings: found.append(settings) or 0)
    monkeypatch.setattr(run_command, "_trained_and_reported", lambda _train, settings, **_: found.append(settings) or 0)
    return found


def test_the_page_has_the_commands_that_are_looked_at():
    assert sorted(words[0] for words in COMMANDS) == ["join"] * 7 + ["run"] * 2 + ["serve"] * 6 + ["token"]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_command_line_takes_every_command_of_the_page(taken, words):
    given = [os.path.expandvars(word) for word in words]
    if "--token-file" in given:
        assert run_app(["token", LAB["token"]]) == 0
    assert run_app(given) == 0
    assert len(taken) == (words[0] != "token")


@pytest.mark.parametrize("words", [["join", "--wait-for", "3", "lab1:7000", "train.py"], ["serve", "--port", "7000"]])
def test_an_option_that_does_not_exist_is_noticed(taken, words):
    assert run_app(words) == 2
    assert not taken


def test_every_option_that_the_page_names_exists():
    known = {flag for command in app.registered_commands for flag in options_of(command)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert {"--wait", "--trusted-network", "--own-optimizers"} <= named
    assert named <= known | FOREIGN


def options_of(command):
    alone = typer.Typer(add_completion=False)
    alone.command()(command.callback)
    return [flag for parameter in typer.main.get_command(alone).params for flag in parameter.opts]


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.split("\n")[0])
def test_every_piece_of_shell_parses(block):
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_pods_find_each_other_and_have_the_token():
    (snippet,) = map(yaml.safe_load, SNIPPETS)
    found = dict(pods())
    (jobset,) = map(yaml.safe_load, FENCED)
    name = jobset["metadata"]["name"]
    serve, join = found["server"]["command"], found["worker"]["command"]
    port = int(serve[serve.index("--listen") + 1].rpartition(":")[2])
    assert [each["containerPort"] for each in found["server"]["ports"]] == [port, port + 1]
    assert f"{name}-server-0-0.{name}:{port}" in join
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    for container in found.values():
        assert container["env"] == snippet["env"]
        assert container["env"][0]["name"] == "PACELINE_TOKEN"
