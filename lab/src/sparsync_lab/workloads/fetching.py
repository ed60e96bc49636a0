"""Running the package managers that fetch data: apt-get and npm."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

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
