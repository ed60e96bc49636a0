"""What many buckets cost: the backward pass of a DDP model that hardly computes, for each scheme, beside DDP's own all-reduce.

    python -m studies bench buckets [--ranks 4 --link 10gbit --elements 4000000 --buckets 1,4,16 --schemes dense,topk --join 4,0] [--json -]

`--join 4,0`: with buckets joined up to 4 MB, as `attach` does, and as DDP makes them. Needs root or a user namespace. One JSON line a case.
The cases of one number of buckets are interleaved, in changing order; `ratio` is the median over rounds of a case's seconds to those of
DDP's own all-reduce in the same round, `to_dense` to those of `attach` with Dense. `limit_s` is the least time that the link needs for the
payload of a rank, without framing; `bits` is that payload per parameter per step.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync import Options, attach
from sparsync.core import generator
from sparsync.runtime.handle import Handle
from sparsync_lab.netlab import parse_rate, restart_with_rights
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.workers.process import Emit, Place
from studies.bench.interleave import interleaved
from studies.bench.output import destination, write
from studies.bench.ranks import TIMEOUT_S, clocked, rows_of_ranks, telling

SCHEMES = (
    "dense,topk:values=int8,two_shot:density=0.05:values=int4,micro:density=0.05:values=int4,"
    "exdyna:density=0.05:values=int4,oktopk:density=0.05:values=int4"
)
OWN, DENSE = "DDP's own all-reduce", "dense"
WARMUP = 4  # rounds: DDP makes its buckets in the first


class Flat(nn.Module):
    """Parameters of equal size whose gradients are given numbers, at next to no cost."""

    def __init__(self, elements: int, buckets: int) -> None:
        super().__init__()
        each = elements // buckets
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(each)) for _ in range(buckets))
        numbers = torch.randn(each, generator=generator(0, "buckets", dist.get_rank()))
        self.gradients = [numbers * (1 + part) for part in range(buckets)]

    def forward(self) -> Tensor:
        """Return a loss whose gradient is `gradients`."""
        return torch.stack([part @ grad for part, grad in zip(self.parts, self.gradients, strict=True)]).sum()


@dataclass
class BucketCase:
    """One model under one scheme, and whether its buckets are joined."""

    name: str
    buckets: int
    run: Callable[[], None]
    handle: Handle | None
    join_mb: float | None


def main(arguments: Sequence[str]) -> None:
    """Measure and write JSON lines."""
    options = _options(arguments)
    parse_rate(options.link)
    parse_schemes(options.schemes, options.density)
    restart_with_rights("sparsync_lab.cli", ["bench", "buckets", *arguments])
    write(rows_of_ranks("studies.bench.buckets:measure", options), options.json)


def measure(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: the options
    """Measure all cases on this rank; the task of every worker."""
    options = argparse.Namespace(**spec)
    for buckets in map(int, options.buckets.split(",")):
        for row in _rows(_cases(options, buckets), options, place, emit):
            emit({"kind": "row", "row": row})


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m studies bench buckets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--link", default="10gbit", help="rate of each rank's link, both ways (default: 10gbit)")
    add("--elements", type=int, default=4_000_000, help="of the gradient, float32 (default: 4000000)")
    add("--buckets", default="1,4,16", help="numbers of equal buckets (default: 1,4,16)")
    add("--schemes", default=SCHEMES, help=f"with their settings (default: {SCHEMES})")
    add("--density", type=float, default=0.01, help="of the sparse schemes that do not set it (default: 0.01)")
    add("--join", default="4,0", help="megabytes up to which buckets are joined (default: 4,0)")
    add("--pairs", type=int, default=9, help="rounds in which every case is measured once (default: 9)")
    add("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace, buckets: int) -> list[BucketCase]:
    cases = [_case(options, buckets, OWN, None, None)]
    for choice in parse_schemes(options.schemes, options.density):
        # Nothing of dense is joined.
        for join_mb in [0.0] if choice.name == DENSE else map(float, options.join.split(",")):
            cases.append(_case(options, buckets, choice.label, choice.make(), join_mb))
    return cases


def _case(options: argparse.Namespace, buckets: int, name: str, scheme: Any, join_mb: float | None) -> BucketCase:
    cap_mb = options.elements // buckets * 4 / 2**20
    model = DistributedDataParallel(Flat(options.elements, buckets), bucket_cap_mb=cap_mb)
    handle = None if scheme is None else attach(model, scheme, options=Options(timeout_s=TIMEOUT_S, join_mb=join_mb))

    def run() -> None:
        model.zero_grad()
        model().backward()

    return BucketCase(name, buckets, run, handle, join_mb)


def _rows(
    cases: Sequence[BucketCase], options: argparse.Namespace, place: Place, emit: Emit
) -> list[dict[str, Any]]:  # Any: JSON
    sent = {id(case): [0, 0] for case in cases}  # payload bytes and reductions of the last step

    def once(case: BucketCase, number: int) -> float:
        seconds, _ = clocked(case.run, place)
        if case.handle is not None:
            reports = case.handle.take_reports()
            sent[id(case)] = [sum(report.cost.nbytes for report in reports), len(reports)]
        return seconds

    found = interleaved(cases, once, options.pairs, WARMUP, telling(emit, f"{cases[0].buckets} buckets"))
    own = found[0]
    dense = next((each for case, each in zip(cases, found, strict=True) if case.name == DENSE), own)
    rows = []
    for case, seconds in zip(cases, found, strict=True):
        nbytes, reductions = sent[id(case)]
        row = {
            "case": case.name,
            "buckets": case.buckets,
            "join_mb": case.join_mb,
            "seconds": statistics.median(seconds),
            "limit_s": nbytes * 8 / parse_rate(options.link),
            "ratio": statistics.median(a / b for a, b in zip(seconds, own, strict=True)),
            "to_dense": statistics.median(a / b for a, b in zip(seconds, dense, strict=True)),
            "payload_bytes": nbytes,
            "bits": nbytes * 8 / options.elements,
            "reductions": reductions,
        }
        rows.append(row | {name: getattr(options, name) for name in ("ranks", "link", "elements", "pairs")})
    return rows
