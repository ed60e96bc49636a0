"""The table of docs/kernels.md: `python -m studies bench kernels` for each backend of this machine, as Markdown on standard output.

    .venv/bin/python -m studies kernels_table [--rounds 9 --large 1e8]

Columns are runs, each with its own plain pass; a cell is the ratio to it, and in brackets where it should lie. Takes about four minutes
on an idle machine; on a busy one ratios are larger.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from sparsync import kernels
from studies import parts


def main(argv: Sequence[str]) -> None:
    options = _options(argv)
    columns = [(backend, "1e7", 0.01) for backend in kernels.backends() if backend.startswith("cpp/")]
    best = columns[0][0]
    columns += [(best, "1e7", 0.001), (best, "1e7", 0.02), (best, options.large, 0.01)]
    found = [_measured(*column, options.rounds) for column in columns]
    heads = [f"{backend}, n = {n}, {density:.1%}" for backend, n, density in columns]
    rows = [[case, *(_cell(each.get(case)) for each in found)] for case in found[0]]
    plain = [f"{next(iter(each.values()))['ceiling_gbytes_per_s']:.1f}" for each in found]
    print(parts.table(["case", *heads], [*rows, ["the plain pass, GB/s", *plain]]))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = parts.options("kernels_table", __doc__, writes=False)
    parser.add_argument("--rounds", default="9")
    parser.add_argument("--large", default="1e8", help="elements of the last column")
    return parser.parse_args(argv)


def _measured(backend: str, n: str, density: float, rounds: str) -> dict[str, dict[str, Any]]:  # Any: JSON
    command = [sys.executable, "-m", "studies", "bench", "kernels", "--backend", backend, "--n", n]
    command += ["--density", str(density), "--rounds", rounds]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {row["case"]: row for row in map(json.loads, lines)}


def _cell(row: dict[str, Any] | None) -> str:  # Any: JSON
    if row is None:
        return ""
    return f"{row['ratio']:.2f}" + (f" ({row['target']})" if row["target"] else "")
