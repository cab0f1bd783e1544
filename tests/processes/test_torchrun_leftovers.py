"""Worker processes as scripts written for torchrun, DDP and Accelerate find them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clusters import Rows, mean_square, network
from launching import launch
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.core.errors import ScriptError, UserError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class Environment:
    """Notes the variables that each worker has before its first line."""

    def __init__(self, notes):
        self.notes = Path(notes)

    def __call__(self):
        known = {name: os.environ.get(name) for name in NAMES}
        session = paceline.init()
        (self.notes / f"{session.worker}.json").write_text(json.dumps(known))
        session.barrier()


def test_workers_have_torchruns_variables_and_the_launcher_keeps_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "17")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launch(Environment(tmp_path), tmp_path, workers=3)
    one = torch.cuda.device_count() == 1
    assert {int(file.stem): json.loads(file.read_text()) for file in tmp_path.glob("*.json")} == {
        n: {"RANK": str(n), "LOCAL_RANK": "0" if one else str(n), "WORLD_SIZE": "3"} for n in range(3)
    }
    assert os.environ["RANK"] == "17"
    assert "WORLD_SIZE" not in os.environ


class Connecting:
    """A script that still connects its processes itself."""

    def __init__(self, address):
        self.address = address

    def __call__(self):
        if self.address:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        torch.distributed.init_process_group("gloo")


class Raising:
    """As accelerate does where it finds RANK and no MASTER_ADDR."""

    def __call__(self):
        raise ValueError("Tried to launch on distributed, but `MASTER_ADDR` env was not set")


@pytest.mark.parametrize("address", [True, False])
def test_a_process_group_of_the_scripts_own_is_refused(tmp_path, address):
    expected = r"init_process_group\(\) was called in worker \d: the run connects its workers itself; remove the call"
    with pytest.raises(UserError, match=expected):
        launch(Connecting(address), tmp_path)


def test_a_framework_that_misses_its_launcher_is_explained(tmp_path):
    with pytest.raises(ScriptError, match=r"MASTER_ADDR.* the run's, which connects its workers itself; remove"):
        launch(Raising(), tmp_path)


def test_torchrun_is_refused_with_the_command_to_use(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import paceline\npaceline.init()\nprint('went on')\n")

    def run(**variables):
        clean = {name: value for name, value in os.environ.items() if name not in (*NAMES, "MASTER_ADDR")}
        command = [sys.executable, "train.py", "--lr", "0.1"]
        return subprocess.run(command, cwd=tmp_path, env={**clean, **variables}, capture_output=True, text=True)

    done = run(RANK="1", LOCAL_RANK="1", WORLD_SIZE="4", TORCHELASTIC_RUN_ID="none", MASTER_ADDR="127.0.0.1")
    assert done.returncode != 0
    assert "paceline run --workers 4 train.py --lr 0.1" in done.stderr
    assert "went on" not in done.stdout
    assert "went on" in run(RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none").stdout


class Wrapped:
    """A script whose model is in DistributedDataParallel, in a process group of each worker's own."""

    def __init__(self, wraps):
        self.wraps = wraps

    def __call__(self):
        session = paceline.init()
        model = network()
        if self.wraps:
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
            model = DistributedDataParallel(model, gradient_as_bucket_view=self.wraps == "views")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(Rows(48), batch_size=4, epochs=2):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
        if self.wraps:
            torch.distributed.destroy_process_group()


def test_a_model_in_ddp_trains_as_the_one_inside(tmp_path):
    plain, copied, views = [launch(Wrapped(wraps), tmp_path).model_state for wraps in (None, "copies", "views")]
    assert list(plain) == list(copied) == list(views)
    assert all(torch.equal(plain[name], copied[name]) and torch.equal(plain[name], views[name]) for name in plain)
