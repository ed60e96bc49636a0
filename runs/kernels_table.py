"""The table of docs/kernels.md: `sparsync bench kernels` for each backend of this machine, as Markdown on standard output.

    .venv/bin/python runs/kernels_table.py [--rounds 9 --large 1e8]

Columns are runs, each with its own plain pass; a cell is the ratio to it, and in brackets where it should lie. Takes about four minutes
on an idle machine; on a busy one ratios are larger.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from sparsync import kernels


def main() -> None:
    options = _options()
    columns = [(backend, "1e7", 0.01) for backend in kernels.backends() if backend.startswith("cpp/")]
    best = columns[0][0]
    columns += [(best, "1e7", 0.001), (best, "1e7", 0.02), (best, options.large, 0.01)]
    found = [_measured(*column, options.rounds) for column in columns]
    heads = [f"{backend}, n = {n}, {density:.1%}" for backend, n, density in columns]
    print(_line(["case", *heads]), _line(["---"] * (1 + len(heads))), sep="\n")
    for case in found[0]:
        print(_line([case, *(_cell(rows.get(case)) for rows in found)]))
    print(
        _line(["the plain pass, GB/s", *(f"{next(iter(rows.values()))['ceiling_gbytes_per_s']:.1f}" for rows in found)])
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", default="9")
    parser.add_argument("--large", default="1e8", help="elements of the last column")
    return parser.parse_args()


def _measured(backend: str, n: str, density: float, rounds: str) -> dict[str, dict[str, Any]]:  # Any: JSON
    command = [sys.executable, "-m", "sparsync.lab.cli", "bench", "kernels", "--backend", backend, "--n", n]
    command += ["--density", str(density), "--rounds", rounds]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {row["case"]: row for row in map(json.loads, lines)}


def _cell(row: dict[str, Any] | None) -> str:  # Any: JSON
    if row is None:
        return ""
    return f"{row['ratio']:.2f}" + (f" ({row['target']})" if row["target"] else "")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
