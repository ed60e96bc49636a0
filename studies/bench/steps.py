"""What a step costs its own process: processor time and memory of AdamWSteps beside torch's AdamW, on gradients that are given.

    python -m studies bench steps [--ranks 1,2,4 --width 128 --layers 5 --density 0.07 --values sign --profile] [--json -]
    python -m studies bench steps --memory --width 512 [--ranks 1,4 --bucket-mb 25]

The parameters are those of a GPT; the defaults have 1 M, a width of 512 has 16 M. One JSON line a case. Torch computes with one thread.

Time: ranks are threads of one process, of which one runs at a time, so the seconds of rank 0's thread are all that a step computes, and
none that it waits. The cases are interleaved, in changing order; `ratio` is the median over rounds of a case's seconds to those of torch's
fused AdamW in the same round. `backward_s` is what forward and backward pass take longer than without the handle.

Memory: ranks are processes, joined by gloo. `settled` and `peak` are bytes per parameter of rank 0, as Linux counts them, after some steps
and at most, besides weights and gradients; the C library is told to give back at once what is freed. With few parameters they are noise.
"""

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import sparsync
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Comm, generator
from sparsync_lab.workloads.gpt import Decoder
from studies.bench.interleave import interleaved
from studies.bench.output import destination, write

WARMUP = 10  # rounds: the first 8 steps measure the ratio
GRADIENTS = 4  # that take turns
FUSED, DEFAULT, OURS = "torch's AdamW, fused", "torch's AdamW", "AdamWSteps"


class Given(nn.Module):
    """Parameters whose gradients are given numbers, at the cost of one product."""

    def __init__(self, like: nn.Module, rank: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(each.detach().clone()) for each in like.parameters())
        drawn = generator(0, "steps", rank)
        self.given = [[torch.randn(each.shape, generator=drawn) for each in self.parts] for _ in range(GRADIENTS)]

    def forward(self, number: int) -> Tensor:
        """Return a loss whose gradients are those of this number."""
        given = self.given[number % GRADIENTS]
        return torch.stack([(part * each).sum() for part, each in zip(self.parts, given, strict=True)]).sum()


@dataclass
class StepCase:
    """One optimizer of one copy of the model."""

    name: str
    model: Given
    step: Callable[[], object]

    def measured(self, number: int) -> tuple[float, float]:
        """Return the seconds of the forward and the backward pass, and those of the step, of this thread."""
        start = time.thread_time()
        self.model(number).backward()
        middle = time.thread_time()
        self.step()
        end = time.thread_time()
        self.model.zero_grad()
        return middle - start, end - middle


def main(arguments: Sequence[str]) -> None:
    """Measure and write JSON lines."""
    options = _options(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []  # Any: JSON
    for ranks in map(int, options.ranks.split(",")):
        if options.memory:
            rows += _memory(options, ranks)
        else:
            rows += LocalWorld(ranks).run(lambda comm: _measured(comm, options))[0]
    write(rows, options.json)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m studies bench steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", default="1,2,4", help="numbers of ranks (default: 1,2,4)")
    add("--width", type=int, default=128, help="of the GPT (default: 128)")
    add("--layers", type=int, default=5, help="of the GPT (default: 5)")
    add("--density", type=float, default=0.07, help="of TwoShot (default: 0.07)")
    add("--values", default="sign", help="of TwoShot (default: sign)")
    add("--keep", type=float, default=sparsync.Steps().keep)
    add("--bucket-mb", type=float, default=sparsync.Steps().bucket_mb)
    add("--rounds", type=int, default=24, help="in which every case is measured once (default: 24)")
    add("--profile", action="store_true", help="also print where a step of AdamWSteps spends its time")
    add("--memory", action="store_true", help="measure memory in place of time")
    add("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    return parser.parse_args(arguments)


def _measured(comm: LocalComm, options: argparse.Namespace) -> list[dict[str, Any]]:  # Any: JSON
    like = _gpt(options)
    cases = [_case(name, Given(like, comm.rank), options, comm) for name in (FUSED, DEFAULT, OURS)]
    found = interleaved(cases, lambda case, number: case.measured(number), options.rounds, WARMUP)
    if options.profile:
        _print_profile(cases[-1], comm)
    rows: list[dict[str, Any]] = []
    for case, seconds in zip(cases, found, strict=True):
        pairs = list(zip(seconds, found[0], strict=True))
        measured = {
            "step_s": statistics.median(step for _, step in seconds),
            "ratio": statistics.median(step / base for (_, step), (_, base) in pairs),
            "backward_s": statistics.median(passes - base for (passes, _), (base, _) in pairs),
        }
        rows.append(_row(case.name, comm.size, like, measured, options))
    return rows


def _gpt(options: argparse.Namespace) -> nn.Module:
    return Decoder(65, 64, options.width, options.layers, 4)


def _case(name: str, model: Given, options: argparse.Namespace, comm: Comm | None) -> StepCase:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=name == FUSED)
    if name != OURS:
        return StepCase(name, model, adamw.step)
    scheme = sparsync.TwoShot(density=options.density, values=options.values)
    steps = {"keep": options.keep, "bucket_mb": options.bucket_mb}
    return StepCase(name, model, sparsync.AdamWSteps(model, adamw, scheme, comm=comm, **steps).step)


def _row(
    name: str, ranks: int, like: nn.Module, measured: Mapping[str, float], options: argparse.Namespace
) -> dict[str, Any]:  # Any: JSON
    elements = sum(each.numel() for each in like.parameters())
    settings = {each: getattr(options, each) for each in ("density", "values", "keep", "bucket_mb", "rounds")}
    return {"case": name, "ranks": ranks, "elements": elements, **measured, **settings}


def _memory(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:  # Any: JSON
    """Measure the memory of each case in fresh processes."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read as a process starts
    rows: list[dict[str, Any]] = []
    for name in (FUSED, DEFAULT, OURS):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "bytes.json"
            arguments = (ranks, name, options, f"file://{folder}/store", result)
            spawn(_memory_of_rank, arguments, ranks)
            rows.append(_row(name, ranks, _gpt(options), json.loads(result.read_text()), options))
    return rows


def _memory_of_rank(rank: int, ranks: int, name: str, options: argparse.Namespace, store: str, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    # A small one first, for the modules that it loads.
    small = _case(name, Given(nn.Linear(64, 64), rank), options, None)
    small.model(0).backward()
    small.step()
    model = Given(_gpt(options), rank)
    model(0).backward()
    gc.collect()
    without = resident("VmRSS")
    case = _case(name, model, options, None)
    for _ in range(WARMUP):
        case.step()
    Path("/proc/self/clear_refs").write_text("5")  # the highest counts from here on
    for _ in range(WARMUP):
        case.step()
    settled, peak = resident("VmRSS") - without, resident("VmHWM") - without
    if rank == 0:
        elements = sum(each.numel() for each in model.parameters())
        result.write_text(json.dumps({"settled": settled / elements, "peak": peak / elements}))
    dist.barrier()
    dist.destroy_process_group()


def resident(key: str) -> int:
    """Return the bytes of this process that are in memory now, or were at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def _print_profile(case: StepCase, comm: LocalComm) -> None:
    """Print what a step calls, on rank 0; the others take as many steps."""
    profile = cProfile.Profile(time.thread_time)
    for number in range(30):
        case.model(number).backward()
        if comm.rank == 0:
            profile.enable()
        case.step()
        profile.disable()
        case.model.zero_grad()
    if comm.rank == 0:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(40)
