"""The laboratory of sparsync: the command `sparsync`, which trains, measures and predicts over rate-limited links."""

from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["read_results"]
# Results file -> module that reads it.
_READERS = {"results.jsonl": "sparsync_lab.report.rows", "frontier.jsonl": "sparsync_lab.frontier.runs"}


def read_results(folder: str | PathLike[str]) -> list[dict[str, Any]]:  # Any: numbers, texts, None
    """Read the results that `sparsync compare` or `sparsync frontier` wrote into a folder: a dict per training.

    All runs of a comparison are included, oldest first, and told apart by "run"; its report shows the newest. Times are in seconds, sizes
    in bytes; values that were not measured are None. For pandas: `pandas.DataFrame(sparsync_lab.read_results("results"))`.

    Args:
        folder: the folder given as --out, with results.jsonl or frontier.jsonl in it.

    Raises:
        ValueError: if it has neither file, or the file is damaged.
    """
    for name, reader in _READERS.items():
        if (Path(folder) / name).is_file():
            return import_module(reader).rows(Path(folder))
    raise ValueError(
        f"{folder} has neither {' nor '.join(_READERS)}; give the folder that `sparsync compare` or `sparsync frontier` wrote with --out"
    )
