"""Temporary folders of the lab: gone however the program that made them ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync_lab import temporary
from sparsync_lab.temporary import temporary_folder

HOLD = """
import sys
from sparsync_lab.temporary import temporary_folder
with temporary_folder() as folder:
    (folder / "file").write_text("content")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_program_goes_when_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a program that runs stays, and so does one too young to be locked."""
    monkeypatch.setattr(temporary, "YOUNG_S", 0.0)
    killed, its = holder()
    running, kept = holder()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (its / "file").exists()
    try:
        with temporary_folder() as mine:
            assert mine.is_dir()
            assert not its.exists()
            assert (kept / "file").exists()
        assert not mine.exists()
    finally:
        running.communicate("")
    assert not kept.exists()


def test_a_folder_that_may_not_be_locked_yet_stays(folders: Path) -> None:
    young = folders / f"{temporary.PREFIX}young"
    young.mkdir()
    with temporary_folder():
        assert young.exists()
    os.utime(young, (0, 0))
    with temporary_folder():
        assert not young.exists()


def test_nothing_else_is_removed(folders: Path) -> None:
    temporary.remove(folders)
    assert folders.exists()
