"""What one reduction computes: the seconds of the thread that reduces, without those in which it waits, for each scheme.

    python -m studies bench reduces [--ranks 4 --elements 10000,1000000 --schemes dense,topk --rounds 60 --profile topk] [--json -]

Ranks are processes, joined by gloo over loopback; each has one thread for torch. A reduction is all that a step does with a bucket on the
thread of `attach`: announcing, the scheme, and the report. One JSON line a case: percentiles over rounds of rank 0's thread time, in
`comm_s` the median of its part inside the communicator, and the bytes sent. The cases of one number of elements are interleaved, in
changing order. `--profile` names a scheme, and prints on standard error where its reductions spend their time, under the profiler, which
slows small calls down most.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from sparsync.comm.announcement import Announcement
from sparsync.comm.channels import Waits
from sparsync.comm.group import GroupComm
from sparsync.comm.lane import Lane
from sparsync.core import Bucket, generator
from sparsync.runtime.connection import Connection, Reduction
from sparsync_lab.scheme_choice import parse_schemes
from studies.bench.interleave import interleaved
from studies.bench.output import destination, percentiles, write

SCHEMES = (
    "dense,topk,topk:values=int8,two_shot:density=0.05:values=int4,two_shot:density=1:values=int4,two_shot:density=1:values=sign,"
    "micro:density=0.05:values=int4,exdyna:density=0.05:values=int4,oktopk:density=0.05:values=int4"
)
WARMUP = 15  # rounds: connections, layouts, thresholds
GRADIENTS = 4  # that take turns
TIMEOUT_S = 120.0


class ClockedLane(Lane):
    """A lane that adds up the thread time inside it."""

    inside_s = 0.0
    _depth = 0  # of calls that call each other

    def settle(self) -> None:
        with self._clocked():
            super().settle()

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        with self._clocked():
            super().send_recv(out, to, into, source)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        with self._clocked():
            return super().all_gather(x, counts)

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        with self._clocked():
            return super().all_to_all(parts, counts)

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._clocked():
            return super().all_reduce(x)

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        began = time.thread_time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.inside_s += time.thread_time() - began


class ClockedComm(GroupComm):
    """A communicator that adds up the thread time inside it and its lanes."""

    lane_type = ClockedLane
    _announcing_s = 0.0
    _lanes: list[ClockedLane] | None = None

    def announce(self, announcement: Announcement, number: int = 0, waits: Waits = nullcontext) -> Lane:
        began = time.thread_time()
        lane = super().announce(announcement, number, waits)
        self._announcing_s += time.thread_time() - began
        assert isinstance(lane, ClockedLane)
        self._lanes = [*(self._lanes or []), lane]
        return lane

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds = self._announcing_s + sum(each.inside_s for each in self._lanes or [])
        self._announcing_s, self._lanes = 0.0, None
        return seconds


@dataclass
class ReduceCase:
    """One scheme and its bucket."""

    name: str
    scheme: Reduction
    comm: ClockedComm
    connection: Connection
    grads: Sequence[Tensor]
    nbytes: int = 0  # that the last reduction sent

    def measured(self, number: int) -> tuple[float, float]:
        """Return the seconds of this thread for one reduction, and those inside the communicator."""
        bucket = Bucket("bench", self.grads[number % GRADIENTS].clone(), number)
        dist.barrier()
        self.comm.take()
        began = time.thread_time()
        report = self.connection.reduce(bucket, self.scheme)
        seconds = time.thread_time() - began
        self.nbytes = (report.sent or report.cost).nbytes
        return seconds, self.comm.take()


def main(arguments: Sequence[str]) -> None:
    """Measure and write JSON lines."""
    options = _options(arguments)
    parse_schemes(options.schemes, options.density)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        spawn(_measure, (options, f"file://{folder}/store", result), options.ranks)
        write(json.loads(result.read_text()), options.json)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m studies bench reduces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--elements", default="10000,1000000", help="of the gradient, float32 (default: 10000,1000000)")
    add("--schemes", default=SCHEMES, help=f"with their settings (default: {SCHEMES})")
    add("--density", type=float, default=0.01, help="of the sparse schemes that do not set it (default: 0.01)")
    add("--rounds", type=int, default=60, help="in which every case is measured once (default: 60)")
    add("--profile", default="", metavar="SCHEME", help="also print where this one of the schemes spends its time")
    add("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    return parser.parse_args(arguments)


def _measure(rank: int, options: argparse.Namespace, store: str, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks)
    rows: list[dict[str, Any]] = []  # Any: JSON
    for elements in map(int, options.elements.split(",")):
        drawn = generator(0, "reduces", rank)
        grads = [torch.randn(elements, generator=drawn) for _ in range(GRADIENTS)]
        cases: list[ReduceCase] = []
        for choice in parse_schemes(options.schemes, options.density):
            scheme = choice.make()
            comm = ClockedComm.private(timeout_s=TIMEOUT_S)
            assert isinstance(comm, ClockedComm)
            cases.append(ReduceCase(choice.label, scheme, comm, Connection(scheme, comm), grads))
        found = interleaved(cases, lambda case, number: case.measured(number), options.rounds, WARMUP)
        for case, seconds in zip(cases, found, strict=True):
            measured = {
                **percentiles([whole for whole, _ in seconds]),
                "comm_s": statistics.median(inside for _, inside in seconds),
                "payload_bytes": case.nbytes,
            }
            rows.append({"case": case.name, "elements": elements, **measured, "ranks": options.ranks})
            if options.profile == case.name:
                _print_profile(case, options.rounds, WARMUP + options.rounds, rank)
            case.connection.shut()
    if rank == 0:
        result.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _print_profile(case: ReduceCase, rounds: int, first: int, rank: int) -> None:
    """Print what reductions call, on rank 0; the others make as many."""
    profile = cProfile.Profile(time.thread_time)
    for number in range(first, first + rounds):
        bucket = Bucket("bench", case.grads[number % GRADIENTS].clone(), number)
        dist.barrier()
        if rank == 0:
            profile.enable()
        case.connection.reduce(bucket, case.scheme)
        profile.disable()
    if rank == 0:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(60)
