"""What a run writes is its owner's alone, as far as the run has made it."""

import os
import stat

import pytest

from paceline.records import private_files


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _generous_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_what_is_made_is_the_owners_alone(tmp_path):
    folder = tmp_path / "runs" / "one" / "logs"
    private_files.make_folder(folder)
    private_files.write_text(folder / "text", "ü")
    private_files.write_bytes(folder / "bytes", b"1")
    with private_files.open_file(folder / "log", "ab") as file:
        file.write(b"at once")
        assert (folder / "log").read_bytes() == b"at once"
    assert (folder / "text").read_text(encoding="utf-8") == "ü"
    assert [mode(each) for each in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
    assert [mode(each) for each in folder.iterdir()] == [0o600] * 3


def test_what_exists_keeps_its_mode(tmp_path):
    (tmp_path / "runs").mkdir(mode=0o755)
    (tmp_path / "runs" / "journal").touch(0o644)
    private_files.make_folder(tmp_path / "runs" / "one")
    private_files.write_text(tmp_path / "runs" / "journal", "more")
    assert [mode(tmp_path / "runs" / each) for each in (".", "one", "journal")] == [0o755, 0o700, 0o644]
    with pytest.raises(FileExistsError):
        private_files.make_folder(tmp_path / "runs" / "one", exist_ok=False)
