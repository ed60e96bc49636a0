"""The results of benchmarks as JSON lines, and the percentiles in them."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsync_lab.writable import check_file


def destination(path: str) -> str:
    """Return `path` itself. Raises RuntimeError, before anything is measured, where no file can be written there."""
    check_file(None if path == "-" else Path(path), "--json")
    return path


def write(rows: Sequence[Mapping[str, Any]], path: str) -> None:  # Any: JSON
    """Write one JSON line for each row to the file, or to standard output where `path` is "-"; numbers with 6 significant digits."""
    text = "".join(json.dumps(_rounded(row)) + "\n" for row in rows)
    sys.stdout.write(text) if path == "-" else Path(path).write_text(text)
    sys.stdout.flush()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p20, p50 and p80 of four values or more; those of fewer would lie outside them."""
    return {f"p{at}": float(np.percentile(values, at, method="weibull")) for at in (20, 50, 80)}


def _rounded(value: Any) -> Any:  # Any: JSON
    if isinstance(value, float):
        return value if value.is_integer() else float(f"{value:.6g}")  # bytes stay exact
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
