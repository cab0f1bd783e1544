"""Results say which sources they are of: looked at in a git repository of their own."""

import argparse
import json
import subprocess

import pytest

import results
import sources
from sources import Sources


@pytest.fixture
def tree(tmp_path):
    """A repository with one commit that has everything a measurement reads, and a result."""
    for name in ("src/paceline/core.py", "benchmarks/bench_x.py", "benchmarks/results/x.md", "docs/index.md",
                 "pyproject.toml", "constraints.txt", ".gitignore"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("__pycache__/\n" if name == ".gitignore" else "one\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(tree, *arguments):
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(tree):
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "--no-verify", "-m", "change")


def given(*arguments):
    parser = argparse.ArgumentParser()
    sources.add_options(parser)
    return parser.parse_args(arguments)


def test_a_clean_tree_has_its_commit(tree):
    assert sources.look(tree) == Sources(git(tree, "rev-parse", "--short", "HEAD"))
    assert sources.look(tree).tree == "clean"
    assert sources.checked(given(), tree).clean


@pytest.mark.parametrize(
    "name",
    ["src/paceline/core.py", "src/paceline/new.py", "benchmarks/bench_x.py", "pyproject.toml", "constraints.txt"],
)
def test_an_uncommitted_change_is_refused_and_named(tree, name):
    (tree / name).write_text("two\n")
    assert sources.look(tree).tree == f"not clean ({name})"
    with pytest.raises(
        SystemExit, match=rf"the tree is not clean \({name}\): commit or stash first, or give --unclean"
    ):
        sources.checked(given(), tree)
    found = sources.checked(given("--unclean"), tree)
    assert not found.clean
    commit(tree)
    assert sources.look(tree).clean


def test_a_staged_and_a_deleted_file_count_too(tree):
    (tree / "src/paceline/core.py").unlink()
    (tree / "constraints.txt").write_text("two\n")
    git(tree, "add", "constraints.txt")
    assert set(sources.look(tree).problems) == {"src/paceline/core.py", "constraints.txt"}


@pytest.mark.parametrize("name", ["benchmarks/results/x.md", "docs/index.md", "src/__pycache__/core.pyc"])
def test_what_no_measurement_reads_may_change(tree, name):
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("two\n")
    assert sources.look(tree).clean


def test_many_changes_are_counted(tree):
    for number in range(5):
        (tree / f"src/{number}.py").write_text("")
    assert sources.look(tree).tree == "not clean (src/0.py, src/1.py, src/2.py and 2 more)"


def test_without_git_the_commit_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SystemExit, match="git cannot tell the commit"):
        sources.checked(given(), tmp_path)
    found = sources.checked(given("--commit", "abc1234"), tmp_path)
    assert (found.commit, found.tree) == ("abc1234", "a copy, not checked")


def test_a_commit_that_git_contradicts_is_refused(tree):
    with pytest.raises(SystemExit, match=r"--commit 0123abc: git says that this tree is at"):
        sources.checked(given("--commit", "0123abc"), tree)
    assert sources.checked(given("--commit", git(tree, "rev-parse", "HEAD")), tree).clean


def test_a_page_says_what_it_is_of(tmp_path, monkeypatch):
    unclean = Sources("abc1234", ("src/paceline/core.py",))
    page = results.write("x", "python x.py", [], [], "Notes.", unclean, tmp_path)
    assert "commit abc1234 · tree: not clean (src/paceline/core.py) · " in page.read_text()
    assert json.loads((tmp_path / "x.json").read_text())["tree"] == "not clean (src/paceline/core.py)"
    monkeypatch.setattr(sources, "look", lambda: Sources("abc1234"))
    page = results.write("x", "python x.py", [], [], "Notes.", Sources("abc1234"), tmp_path)
    assert "commit abc1234 · tree: clean · " in page.read_text()


def test_sources_that_change_while_they_are_measured_make_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "look", lambda: Sources("def5678"))
    monkeypatch.setattr(results.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "aside"))
    with pytest.raises(SystemExit, match=r"this is no result of commit abc1234; what was measured is in .*aside"):
        results.write("x", "python x.py", [], [{"ms": 1.5}], "Notes.", Sources("abc1234"), tmp_path / "results")
    assert not (tmp_path / "results").exists()
    kept = json.loads((tmp_path / "aside" / "x.json").read_text())
    assert kept["rows"] == [{"ms": 1.5}]
    assert kept["tree"] == "not clean (the sources changed while they were measured)"
