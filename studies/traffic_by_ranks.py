"""A table of the traffic of a rank with few ranks and with many, on the same drawn gradients, counted in this process.

    .venv/bin/python -m studies traffic_by_ranks [--ranks 8,256 --elements 100000 --density 0.01 --steps 4]

Markdown on standard output: words of 4 bytes, means over ranks and steps without the first step, as multiples of d n, the elements
asked for; most: of any rank at any step, the first too. The ranks run one after the other on one core: 256 of them take a minute for
each scheme.
"""

import argparse
import statistics
from collections.abc import Sequence

import torch

from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.traffic.observe import Observed, Record
from sparsync_lab.traffic.stream import Synthetic
from studies import parts

SCHEMES = "micro,exdyna,oktopk,micro.published,exdyna.published,oktopk.published,topk"


def main(argv: Sequence[str]) -> None:
    options = _options(argv)
    torch.set_num_threads(1)
    ranks = [int(number) for number in options.ranks.split(",")]
    heads = [f"{what}, P = {P}" for P in ranks for what in ("union K", "words / dn", "most words / dn")]
    print(parts.table(["scheme", *heads], []))
    for choice in parse_schemes(options.schemes, options.density):
        cells = [cell for P in ranks for cell in _cells(choice, P, options)]
        print(parts.line([f"`{choice.label}`", *cells]), flush=True)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = parts.options("traffic_by_ranks", __doc__, writes=False)
    parser.add_argument("--ranks", default="8,256", help="numbers of ranks, by commas")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=4, help="at least 2; the first is not in the means")
    return parser.parse_args(argv)


def _cells(choice: SchemeChoice, P: int, options: argparse.Namespace) -> list[str]:
    stream = Synthetic(P, options.elements)
    observed = Observed(choice, P, stream.layout)
    records: list[Record] = [observed.reduce(step, stream.gradients(step)) for step in range(options.steps)]
    asked = observed.asked
    union = statistics.fmean(record["union"] for record in records[1:])
    words = statistics.fmean(each for record in records[1:] for each in record["words"])
    most = max(each for record in records for each in record["words"])
    return [f"{union:.0f}", f"{words / asked:.2f}", f"{most / asked:.2f}"]
