"""What reducing all elements costs its own process: processor time and memory of schemes in few bits, on gradients that are given.

    python -m studies bench reductions [--ranks 2,4 --n 4000000 --schemes quantized:values=int4,bf16,... --rounds 12] [--json -]
    python -m studies bench reductions --memory [--ranks 2]

Torch computes with one thread. One JSON line a case. "bf16 hook" is a hook of five lines: to bfloat16, an all-reduce, a copy back.

Time: ranks are threads of one process, of which one runs at a time, so the seconds of a thread, a mean over ranks, are all that a
reduction computes, and none that it waits or sends. `passes` is the median over rounds of a case's seconds to those of
torch.add(a, b, out=c) over as many float32 elements, 12 bytes each, in the same round. The cases are interleaved, in changing order. The
mean is compared with the exact one.

Memory: ranks are processes, joined by gloo. `settled` and `peak` are bytes per element of rank 0, as Linux counts them, after some steps
and at most, besides the gradient: `settled` has the residual. The C library is told to give back at once what is freed.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from sparsync import Bucket, GroupComm
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Comm, generator
from sparsync.kernels import backend
from sparsync_lab.environment import machine, versions
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from studies.bench.interleave import interleaved
from studies.bench.output import destination, write
from studies.bench.steps import resident

WARMUP = 3
HOOK = "bf16 hook"
SCHEMES = ",".join(
    [
        *(f"quantized:values={values}" for values in ("int8", "int4", "int3", "ternary", "sign")),
        "two_shot:density=1.0:values=int4",
        "bf16",
    ]
)
Seconds = list[tuple[float, float]]
TOLERANCE = 1.0  # of the mean, relative, in the 2-norm: a sign tells little of one step


@dataclass
class ReductionCase:
    """One way to reduce, on a gradient that is put back before each step."""

    name: str
    given: Tensor
    grad: Tensor
    other: Tensor  # read by the plain pass
    reduce: Callable[[Tensor, int], object]

    def measured(self, number: int) -> tuple[float, float]:
        """Return the seconds of a reduction and of the plain pass, of this thread."""
        self.grad.copy_(self.given)
        start = time.thread_time()
        self.reduce(self.grad, number)
        middle = time.thread_time()
        torch.add(self.given, self.other, out=self.grad)
        return middle - start, time.thread_time() - middle


def main(arguments: Sequence[str]) -> None:
    """Measure and write JSON lines."""
    options = _options(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []  # Any: JSON
    for ranks in map(int, options.ranks.split(",")):
        if options.memory:
            rows += _memory(options, ranks)
        else:
            rows += _rows(LocalWorld(ranks).run(lambda comm: _measured(comm, options)), options)
    about = {"backend": backend(), **versions(), "machine": machine()}
    write([row | about for row in rows], options.json)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m studies bench reductions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    add("--n", type=lambda text: int(float(text)), default=4_000_000, help="elements (default: 4e6)")
    add("--schemes", default=SCHEMES, help="by commas (default: formats of `quantized`, `two_shot`, `bf16`)")
    add("--rounds", type=int, default=12, help="in which every case is measured once (default: 12)")
    add("--memory", action="store_true", help="measure memory in place of time")
    add("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    return parser.parse_args(arguments)


def _choices(options: argparse.Namespace) -> list[SchemeChoice | None]:
    """Return the schemes, and None for the hook."""
    return [*parse_schemes(options.schemes, 1.0), None]


def _case(choice: SchemeChoice | None, given: Tensor, grad: Tensor, other: Tensor, comm: Comm) -> ReductionCase:
    if choice is None:

        def hook(grad: Tensor, number: int) -> None:
            narrow = grad.to(torch.bfloat16).div_(comm.size)
            grad.copy_(comm.all_reduce(narrow))

        return ReductionCase(HOOK, given, grad, other, hook)
    state = choice.make().start()
    return ReductionCase(
        choice.label, given, grad, other, lambda grad, number: state.reduce(Bucket("all", grad, number), comm)
    )


def _given(n: int, rank: int) -> Tensor:
    return torch.randn(n, generator=generator(0, "reductions", rank))


def _measured(comm: LocalComm, options: argparse.Namespace) -> dict[str, Seconds]:
    """Return the seconds of each case in each round, and those of the plain pass."""
    given, grad, other = _given(options.n, comm.rank), torch.empty(options.n), torch.ones(options.n)
    mean = sum((_given(options.n, rank) for rank in range(1, comm.size)), _given(options.n, 0)) / comm.size
    cases = [_case(choice, given, grad, other, comm) for choice in _choices(options)]
    for case in cases:
        grad.copy_(given)
        case.reduce(grad, 0)
        if float((grad - mean).norm() / mean.norm()) > TOLERANCE:
            raise RuntimeError(f"{case.name!r} gives another mean than the exact one of {comm.size} ranks")
    found = interleaved(cases, lambda case, number: case.measured(number + 1), options.rounds, WARMUP)
    return {case.name: seconds for case, seconds in zip(cases, found, strict=True)}


def _rows(ranks: Sequence[dict[str, Seconds]], options: argparse.Namespace) -> list[dict[str, Any]]:  # Any: JSON
    """Return a row for each case. A round's seconds are a mean over ranks, of which one adds up what an all-reduce of threads sends."""
    rows: list[dict[str, Any]] = []
    for name in ranks[0]:
        rounds = zip(*(each[name] for each in ranks), strict=True)
        seconds = [
            (statistics.mean(own), statistics.median(plain))
            for own, plain in (zip(*each, strict=True) for each in rounds)
        ]
        measured = {
            "reduce_s": statistics.median(own for own, _ in seconds),
            "passes": statistics.median(own / plain for own, plain in seconds),
        }
        rows.append({"case": name, "ranks": len(ranks), "n": options.n, **measured, "rounds": options.rounds})
    return rows


def _memory(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:  # Any: JSON
    """Measure the memory of each case in fresh processes."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read as a process starts
    rows: list[dict[str, Any]] = []
    for place, choice in enumerate(_choices(options)):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "bytes.json"
            spawn(_memory_of_rank, (ranks, place, options, f"file://{folder}/store", result), ranks)
            name = HOOK if choice is None else choice.label
            rows.append({"case": name, "ranks": ranks, "n": options.n, **json.loads(result.read_text())})
    return rows


def _memory_of_rank(rank: int, ranks: int, place: int, options: argparse.Namespace, store: str, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    choice, comm = _choices(options)[place], GroupComm()
    # A small one first, for the modules that it loads.
    _case(choice, torch.ones(1), torch.ones(1), torch.ones(1), comm).reduce(torch.ones(4096), 0)
    grad = _given(options.n, rank)
    gc.collect()
    without = resident("VmRSS")
    case = _case(choice, grad, grad, grad, comm)
    for number in range(WARMUP):
        case.reduce(grad, number)
    Path("/proc/self/clear_refs").write_text("5")  # the highest counts from here on
    for number in range(WARMUP):
        case.reduce(grad, WARMUP + number)
    settled, peak = resident("VmRSS") - without, resident("VmHWM") - without
    if rank == 0:
        result.write_text(json.dumps({"settled": settled / options.n, "peak": peak / options.n}))
    dist.barrier()
    dist.destroy_process_group()
