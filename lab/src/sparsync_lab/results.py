"""The results of the commands as plain Python values. The command line is loaded when they are asked for, not before."""

from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

# The file of each command, and what reads it.
_READERS = {"results.jsonl": "sparsync_lab.report.rows", "frontier.jsonl": "sparsync_lab.frontier.runs"}


def read_results(folder: str | PathLike[str]) -> list[dict[str, Any]]:  # Any: numbers, texts, None
    """Return what `sparsync compare` or `sparsync frontier` wrote into a folder: a dict for each training.

    All runs of a comparison are there, oldest first; "run" tells them apart, and the newest is the one that its report shows. Times are
    in seconds, sizes in bytes; None is what was not measured. Of pandas: `pandas.DataFrame(sparsync_lab.read_results("results"))`.

    Args:
        folder: that of --out, with results.jsonl or frontier.jsonl in it.

    Raises:
        ValueError: where it has neither, or one that is damaged.
    """
    for name, reader in _READERS.items():
        if (Path(folder) / name).is_file():
            return import_module(reader).rows(Path(folder))
    raise ValueError(
        f"{folder} has neither {' nor '.join(_READERS)}; give the folder that `sparsync compare` or `sparsync frontier` wrote with --out"
    )
