"""What a step costs its own process: processor time and memory of AdamWSteps beside torch's AdamW, on gradients that are given.

    python -m studies bench steps [--ranks 1,2,4 --width 128 --layers 5 --density 0.07 --values sign --profile] [--json -]

The parameters are those of a GPT; the defaults have 1 M. Ranks are threads of one process, of which one runs at a time, and torch computes
with one thread. So the seconds of rank 0's thread are all that a step computes, and none that it waits. The cases are interleaved, in
changing order; `ratio` is the median over rounds of a case's seconds to those of torch's fused AdamW in the same round. `backward_s` is
what forward and backward pass take longer than without the handle. `settled` and `peak` are bytes per parameter that torch has allocated
for a case, besides weights and gradients, after three steps and at most. One JSON line a case.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsync
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import generator
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
    add("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    return parser.parse_args(arguments)


def _measured(comm: LocalComm, options: argparse.Namespace) -> list[dict[str, Any]]:  # Any: JSON
    like = Decoder(65, 64, options.width, options.layers, 4)
    elements = sum(each.numel() for each in like.parameters())

    def made(name: str) -> StepCase:
        model = Given(like, comm.rank)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=name == FUSED)
        if name != OURS:
            return StepCase(name, model, adamw.step)
        scheme = sparsync.TwoShot(density=options.density, values=options.values)
        steps = {"keep": options.keep, "bucket_mb": options.bucket_mb}
        return StepCase(name, model, sparsync.AdamWSteps(model, adamw, scheme, comm=comm, **steps).step)

    memory = [_bytes(partial(made, name), comm) for name in (FUSED, DEFAULT, OURS)]
    cases = [made(name) for name in (FUSED, DEFAULT, OURS)]
    found = interleaved(cases, lambda case, number: case.measured(number), options.rounds, WARMUP)
    if options.profile:
        _print_profile(cases[-1], comm)
    rows: list[dict[str, Any]] = []
    for case, seconds, (settled, peak) in zip(cases, found, memory, strict=True):
        pairs = list(zip(seconds, found[0], strict=True))
        rows.append(
            {
                "case": case.name,
                "ranks": comm.size,
                "elements": elements,
                "step_s": statistics.median(step for _, step in seconds),
                "ratio": statistics.median(step / base for (_, step), (_, base) in pairs),
                "backward_s": statistics.median(passes - base for (passes, _), (base, _) in pairs),
                "settled": settled / elements,
                "peak": peak / elements,
                **{name: getattr(options, name) for name in ("density", "values", "keep", "bucket_mb", "rounds")},
            }
        )
    return rows


def _bytes(make: Callable[[], StepCase], comm: LocalComm) -> tuple[int, int]:
    """Return the bytes that this thread has allocated for a case after three steps, and at most, without model and gradients."""
    if comm.rank:  # torch watches one thread
        _three_steps(make)
        return 0, 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        case = _three_steps(make)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((each for each in events if each["name"] == "[memory]"), key=lambda each: each["ts"])
    held = list(accumulate(each["args"]["Bytes"] for each in changes))
    own = sum(each.nbytes for each in case.model.parameters()) * (2 + GRADIENTS)
    return held[-1] - own, max(held) - own


def _three_steps(make: Callable[[], StepCase]) -> StepCase:
    """Return a new case after three steps with the same gradients, which are still there."""
    case = make()
    case.model(0).backward()
    for _ in range(3):
        case.step()
    return case


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
