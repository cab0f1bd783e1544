"""The diffs of the how-to pages: each applies to its original, makes the committed port, and what it makes trains.

`pytest --rewrite tests/scripts/test_howto.py` writes the diffs between originals and ports into the pages.
"""

import difflib
import re
import subprocess
from pathlib import Path

import loop_runs
import pytest
import torch

from paceline.cli import main
from scripts.catalogue import FOLDER, LOOPS, MODULES, ORIGINALS

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
BLOCK = re.compile(r"^```diff\n(.*?)^```$", re.M | re.S)
HEADER = re.compile(r"^--- \S*?(\w+)\.py.*\n\+\+\+ .*\n", re.M)
SCRIPTS = {"plain": "sgd", "nanogpt": "nanogpt", "gan": "gan", "accelerate": "with_accelerate", "fabric": "with_fabric"}
IN_SIM = ["accelerate", "fabric"]  # the loops of the other pages run there as loops
DIFFS = {page.stem: found for page in sorted(HOWTO.glob("*.md")) for found in BLOCK.findall(page.read_text())}


def original_of(diff):
    """The script that a diff begins with."""
    return ORIGINALS / f"{HEADER.search(diff).group(1)}.py"


def patched(diff, folder):
    """Apply the diff to a copy of its original; return the file."""
    script = folder / "train.py"
    script.write_text(original_of(diff).read_text())
    (folder / "page.diff").write_text(HEADER.sub("--- a/train.py\n+++ b/train.py\n", diff))
    subprocess.run(["git", "apply", "page.diff"], cwd=folder, check=True)
    return script


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_shows_the_change_from_original_to_port(name, request):
    texts = [(folder / f"{SCRIPTS[name]}.py").read_text().splitlines(keepends=True) for folder in (ORIGINALS, FOLDER)]
    expected = "".join(difflib.unified_diff(*texts, "a/" + SCRIPTS[name] + ".py", "b/" + SCRIPTS[name] + ".py"))
    page = HOWTO / f"{name}.md"
    if request.config.getoption("--rewrite"):
        text = BLOCK.sub("DIFF", page.read_text())
        page.write_text(text.replace("DIFF", f"```diff\n{expected}```", 1))
    assert BLOCK.findall(page.read_text()) == [expected]


@pytest.mark.parametrize("name", [name for name in DIFFS if name in SCRIPTS])  # others have tests of their own
def test_its_diff_applies_and_what_comes_of_it_trains_alone(name, tmp_path):
    script = patched(DIFFS[name], tmp_path)
    port = FOLDER / original_of(DIFFS[name]).name
    if port.exists():
        assert script.read_text() == port.read_text()
    with loop_runs.comparable():
        loop_runs.run_alone(script, tmp_path / "result.pt")
    assert loop_runs.read(tmp_path / "result.pt").keys() >= {"model", "optimizer", "score"}


@pytest.mark.parametrize("name", IN_SIM)
def test_on_virtual_workers_it_trains_as_well_as_alone(name, tmp_path):
    port = FOLDER / f"{SCRIPTS[name]}.py"
    loop_runs.run_alone(port, tmp_path / "alone.pt")
    given = ["run", "--engine", "sim", "--workers", "8", "--batch-size", "4", "--runs-dir", str(tmp_path / "runs")]
    with loop_runs.as_script(port, []):
        assert main([*given, str(port), str(tmp_path / "sim.pt")]) == 0
    scores = [torch.load(tmp_path / f"{where}.pt")["score"] for where in ("alone", "sim")]
    assert scores[1] > scores[0] - 0.04
    assert scores[0] > 0.8


def test_every_script_is_in_the_catalogue_or_on_a_page():
    shown = {original_of(diff).name for diff in DIFFS.values()}
    known = {"catalogue.py", *MODULES, *shown, *(loop.port.name for loop in LOOPS)}
    ports = {path.name for path in FOLDER.glob("*.py") if not path.name.startswith("test_")}
    assert ports <= known
    assert {path.name for path in ORIGINALS.glob("*.py")} <= known


def test_a_diff_that_does_not_fit_is_noticed(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        patched(DIFFS["plain"].replace(" torch.manual_seed(0)\n", " torch.manual_seed(1)\n"), tmp_path)
