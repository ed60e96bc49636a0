"""The two programs, `sparsync` and `python -m studies`, run in the process of the test."""

from sparsync_lab import cli
from studies import __main__ as studies

_STUDIES = "studies "


def run(command: str) -> None:
    """Run "compare --link none" as the command `sparsync`, and "studies bench kernels" as a study."""
    studies.main(command.removeprefix(_STUDIES).split()) if command.startswith(_STUDIES) else cli.main(command.split())


def program(command: str) -> str:
    """Return the name of `command` in its errors."""
    return "python -m studies" if command.startswith(_STUDIES) else "sparsync"
