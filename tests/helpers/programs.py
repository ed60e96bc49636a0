"""The two programs, `sparsync` and `python -m studies`, run in the process of the test, and commands in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sparsync_lab import cli
from studies import __main__ as studies

_STUDIES = "studies "
SOURCE = Path(__file__).parents[2] / "src"
# HACK: torch itself aborts now and then when a process ends while a thread of gloo lets go of a tensor (pytorch/pytorch#190489): one
# exit in some hundreds of examples/plain_ddp.py, which has nothing of ours in it. So a command that ends like this is run once more.
ABORTED_AT_EXIT = "terminate called without an active exception"


def run(command: str) -> None:
    """Run "compare --link none" as the command `sparsync`, and "studies bench kernels" as a study."""
    studies.main(command.removeprefix(_STUDIES).split()) if command.startswith(_STUDIES) else cli.main(command.split())


def program(command: str) -> str:
    """Return the name of `command` in its errors."""
    return "python -m studies" if command.startswith(_STUDIES) else "sparsync"


def output_of(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command of a user in `folder`, with several ranks in mind, and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    once = partial(subprocess.run, command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    done = once()
    if done.returncode and ABORTED_AT_EXIT in done.stderr:
        done = once()
    assert done.returncode == 0, done.stderr
    return done.stdout
