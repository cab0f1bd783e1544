"""Every command of README and docs runs as a reader would run it, or says beside it why the tests do not.

A page's commands run in their order in one folder of its own, with the files that it has its readers save, the script
that its diff makes, and `examples/train.py` and `examples/uneven4.toml` where it has none. They run as they are
written; `PACELINE_MAX_VERSIONS` cuts the training short, since what is trained here is of no interest.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_python

import page_blocks
from paceline.cli import main
from paceline.comparison import run_commands
from page_blocks import ROOT, SHELLS, Block

VERSIONS = "12"
ORIGINALS = ROOT / "tests" / "scripts" / "originals"
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in page_blocks.all_pages()}
OTHERS = {"mkdir", "ls"}  # commands that are neither ours nor Python's, and harmless


def run_here(block: Block) -> bool:
    return block.language in SHELLS and not block.run_by and not block.not_run


COMMANDED = [name for name, text in PAGES.items() if any(map(run_here, page_blocks.blocks(text)))]


def patched(diff: str, folder: Path) -> None:
    """Write the script that a page's diff makes, under its own name and as train.py."""
    found = re.search(r"^--- a/(\w+\.py)$", diff, re.M)
    assert found is not None
    shutil.copy(ORIGINALS / found[1], folder / found[1])
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)
    shutil.copy(folder / found[1], folder / "train.py")


def run_command(line: str) -> None:
    """Run one line of a page; it must succeed."""
    words = shlex.split(line, comments=True)
    out = Path(words[words.index(">") + 1]) if ">" in words else None
    words = words[: words.index(">")] if out else words
    if words[0] == "cd":
        os.chdir(words[1])
    elif words[0] == "paceline" and out is None:
        assert main(words[1:]) == 0, line
    elif words[0] in ("paceline", "python"):
        start = ["-m", "paceline"] if words[0] == "paceline" else []
        done = warm_python.run([sys.executable, *start, *words[1:]])
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if out:
            out.write_text(done.stdout)
    else:
        assert words[0] in OTHERS, f"{line}: nothing here runs {words[0]}; say so below the block"
        subprocess.run(words, check=True)


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch, warm: type[warm_python.Popen]) -> Iterator[Path]:
    """An empty current folder with the example's script, in which training ends early and starts warm."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("train.py", "uneven4.toml"):
        shutil.copy(ROOT / "examples" / name, folder / name)
    monkeypatch.setenv("PACELINE_MAX_VERSIONS", VERSIONS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run_commands, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": warm}))
    yield folder
    os.chdir(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", COMMANDED)
def test_the_commands_of_a_page_run_in_their_order(name: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blocks = page_blocks.blocks(PAGES[name])
    for block in blocks:
        if block.language == "diff":  # a page may show what it comes to before the change
            patched(block.text, place)
    for block in blocks:
        if block.saved_as:
            Path(block.saved_as).write_text(block.text, encoding="utf-8")
        elif run_here(block):
            for line in block.commands:
                run_command(line)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", PAGES)
def test_shell_is_fenced_and_whoever_runs_a_block_knows_the_page(name: str) -> None:
    assert page_blocks.unfenced(PAGES[name]) == [], "fence commands as sh or console"
    for block in page_blocks.blocks(PAGES[name]):
        if block.language in SHELLS:
            assert block.commands, f"{name}: a block of shell without a command"
        if block.run_by.startswith("tests/"):
            assert Path(name).stem in (ROOT / block.run_by).read_text(encoding="utf-8"), block.run_by
        elif block.run_by:
            assert name in ("README.md", "docs/index.md")


def test_a_command_that_fails_or_is_unknown_is_noticed(place: Path) -> None:
    with pytest.raises(AssertionError, match="--strategi"):
        run_command("paceline run --strategi bsp train.py")
    with pytest.raises(AssertionError, match="say so below"):
        run_command("docker run image")


def test_blocks_files_and_reasons_are_read_as_written() -> None:
    text = "Save this as `a.toml`:\n\n```toml\nx = 1\n```\n\n```console\n$ paceline tasks  # all\nout\n```\n"
    text += "\n*Not run by the tests: why.*\n"
    saved, shell = page_blocks.blocks(text)
    assert (saved.saved_as, shell.saved_as, shell.not_run) == ("a.toml", "", "why.")
    assert shell.commands == ["paceline tasks  # all"]
    assert page_blocks.unfenced("Do:\n\n    paceline run\n\n    make test\n") != []
    (continued,) = page_blocks.blocks("```sh\n# why\npaceline run \\\n  train.py\n```\n")
    assert continued.commands == ["paceline run    train.py"]
