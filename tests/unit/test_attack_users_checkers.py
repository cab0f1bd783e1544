"""The checkers of the attacks by other users, and of those that stop and kill, find what is planted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from attacks import leftovers, other_users


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "tmp").mkdir()
    idle = subprocess.Popen(
        [sys.executable, "-c", "input()"], env={**os.environ, leftovers.TAG: "planted"}, stdin=-1, stdout=-1, text=True
    )
    found = leftovers.Victim(idle, "planted", tmp_path, {idle.pid})
    yield found
    found.close()


def test_a_process_a_file_and_shared_memory_that_are_left_are_found(victim):
    process = victim.command.pid
    assert victim.left() == [f"process {process}"]
    (victim.temporary / "paceline-abc").mkdir()
    blocks = [leftovers.Path(f"/dev/shm/{name}") for name in (f"torch_{process}_1_1", f"sem.paceline-ab_c-{process}-x")]
    for block in blocks:
        block.touch()
    assert sorted(victim.left()) == sorted(
        [f"process {process}", "temporary paceline-abc", *(f"shared memory {block.name}" for block in blocks)]
    )
    victim.close()
    assert not any(block.exists() for block in blocks)
    assert victim.processes() == []


@pytest.mark.parametrize("weight", [1e6, float("nan")])
def test_a_weight_that_a_stranger_has_set_is_found(tmp_path, weight):
    nodes = tmp_path / "runs" / "one" / "nodes"
    nodes.mkdir(parents=True)
    values = {"weight": torch.tensor([0.5, -0.25])}
    (nodes / "0.safetensors").write_bytes(safetensors.torch.save(values))
    before = other_users.digest(tmp_path)
    assert other_users.largest_weight(tmp_path) == 0.5
    (nodes / "1.safetensors").write_bytes(safetensors.torch.save({"weight": torch.tensor([weight])}))
    assert other_users.largest_weight(tmp_path) > other_users.LARGEST
    assert other_users.digest(tmp_path) != before


def test_a_run_without_a_model_is_no_success(tmp_path):
    assert other_users.largest_weight(tmp_path) == float("inf")


def test_a_file_that_is_open_to_all_is_read(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "journal.jsonl").write_text("{}")
    loot = other_users.Loot()
    other_users.read_along(tmp_path, loot)
    assert str(tmp_path / "runs" / "journal.jsonl") in loot.read


def test_every_attack_of_another_user_is_shown_to_succeed_before_the_mend():
    assert all(attack.before for attack in other_users.ATTACKS)


@pytest.mark.parametrize(("becomes_own", "found"), [(False, True), (True, False)])
def test_a_process_that_can_be_read_is_found_unless_it_becomes_the_strangers_own(becomes_own, found, monkeypatch):
    users = [-1, os.getuid() if becomes_own else -1]
    monkeypatch.setattr(os, "getuid", lambda: users.pop(0))
    loot = other_users.Loot()
    other_users.read_process(Path("/proc/self"), loot)
    assert bool(loot.read) is found


def test_of_a_process_that_has_ended_nothing_can_be_read():
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # still to be waited for
        loot = other_users.Loot()
        other_users._try_to_read(Path(f"/proc/{ended.pid}/maps"), loot)
        assert not loot.read
