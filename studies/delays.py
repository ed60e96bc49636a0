"""Count the one-way delays that a training step waits for: its time over links with a delay, divided by that delay. For docs/far_links.md.

    .venv/bin/python -m studies delays [--delay 25ms] [--only two_shot,topk] [--rounds 5] [--print]

A model that hardly computes, with one bucket of ELEMENTS or 8 such buckets that are not joined, is trained with each method as a user
attaches it. The methods take turns, in changing order: a few steps with exchange, then the same number without. `delays` is the median step
over the links, minus the median step without exchange, divided by the one-way delay. The scheme's processing is included: a millisecond is
0.04 delays of 25 ms. `model` is the count of `sparsync_lab.predict`. Needs root or a user namespace, and a C compiler. All methods at 25 ms
in 5 rounds take about 7 minutes, at 100 ms four times as long.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from sparsync import LocalSteps, Options, Scheme, Steps, attach
from sparsync.base.registry import nearest
from sparsync.core import ParameterSpan, Span
from sparsync_lab.netlab import Delay, network, parse_delay, parse_rate, restart_with_rights
from sparsync_lab.predict import plan
from sparsync_lab.predict.schemes import agreement
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.workers.process import Emit, Place
from studies import parts
from studies.bench import frame
from studies.bench.frame import TIMEOUT_S, Row
from studies.bench.steps import Given

PAGE, PART = "docs/far_links.md", "delays"
P, LINK = 4, "1gbit"
ELEMENTS = 20_000  # of a bucket, a multiple of ROWS
BUCKETS = 8  # in the cases of several buckets
ROWS = 100  # of the matrix in a bucket, which powersgd needs
WARMUP = 3  # rounds: with 4 steps each, more than AdamW's first 8 steps, which all measure the ratio
STEPS_AT_ONCE = 3  # per turn of a case, after one that does not count: ranks leave a barrier at different times
TWO_SHOT = "two_shot:density=0.05:values=int4"
# Cases and their schemes; schemes that reduce gradients are attached to a DistributedDataParallel.
GRADIENTS = {
    "dense": "dense",
    "bf16": "bf16",
    "topk": "topk",
    "two_shot": TWO_SHOT,
    "two_shot_all": "two_shot:density=1.0:values=int4",
    "exact_micro": "exact_micro:density=0.05:values=int4",
    "exact_exdyna": "exact_exdyna:density=0.05:values=int4",
    "exact_oktopk": "exact_oktopk:density=0.05:values=int4",
    "skip_reduce": "skip_reduce:skip=1",
    "powersgd": "powersgd",
}
OWN = {"all_reduce": "torch.distributed.all_reduce of the gradient", "ddp": "DistributedDataParallel"}
EXCHANGES = {
    "steps": "AdamW steps that do not measure their ratio",
    "steps_measured": "AdamW steps that measure their ratio",
    "local_steps": "LocalSteps(every=1)",
}
SEVERAL = {f"{name}_{BUCKETS}": name for name in ("ddp", "dense", "topk", "two_shot")}
CASES = (*OWN, *GRADIENTS, *EXCHANGES, *SEVERAL)


def _matrices(count: int) -> Given:
    """Make a model of matrices of equal size, one to a bucket."""
    return Given(nn.ParameterList(torch.zeros(ROWS, ELEMENTS // ROWS) for _ in range(count)), dist.get_rank())


@dataclass
class DelayCase:
    """One way to train: a step with its exchange, and the same without it."""

    name: str
    step: Callable[[], None]
    alone: Callable[[], None]


def main(argv: Sequence[str]) -> None:
    options = _options(argv)
    delay = Delay(parse_delay(options.delay))
    restart_with_rights("studies", ["delays", *argv])
    with network(P, parse_rate(LINK), delay=delay) as links:
        found = frame.of_ranks("studies.delays:measure", vars(options), links)
    parts.put(PAGE, PART, _table(found, options.rounds, options.delay, delay), options.print)


def measure(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: the options
    """Measure all cases on this rank; the task of every worker."""
    options, tell = argparse.Namespace(**spec), frame.telling(emit)
    cases: list[DelayCase] = []
    for number, name in enumerate(options.only):
        tell(number, len(options.only))
        cases.append(_case(name))

    def once(case: DelayCase, number: int) -> tuple[float, float]:
        return _seconds(case.step), _seconds(case.alone)

    for case, rounds in zip(cases, frame.interleaved(cases, once, options.rounds, WARMUP, tell), strict=True):
        step_s, compute_s = map(statistics.median, zip(*rounds, strict=True))
        emit({"kind": "row", "row": {"case": case.name, "step_s": step_s, "compute_s": compute_s}})


def predicted(name: str) -> float:
    """Count the one-way delays that the model predicts for a step: all our buckets wait concurrently."""
    buckets, name = (BUCKETS, SEVERAL[name]) if name in SEVERAL else (1, name)
    if name in OWN:
        # Gloo posts the receives of its ring at the start of a round, and has two threads for operations.
        return 2 * 2 * (P - 1) * max(1.0, buckets / 2)
    if name == "powersgd":
        return 4.0  # the means of two factors, two rounds each
    layout = (ParameterSpan("", Span(0, ELEMENTS), (ROWS, ELEMENTS // ROWS)),)
    scheme = _scheme(TWO_SHOT if name in EXCHANGES else GRADIENTS.get(name, "dense"))
    found = plan(scheme, ELEMENTS, P, layout=layout)
    if name == "local_steps":
        found = agreement(P) + found
    return sum(float(each.rounds) for each in found.exchanges)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = parts.options("delays", __doc__)
    add = parser.add_argument
    add("--delay", default="25ms", help="one way (default: 25ms)")
    add("--only", default=",".join(CASES), metavar="A,B", help=f"methods (default: {','.join(CASES)})")
    add("--rounds", type=int, default=5, help=f"turns of each method that count, of {STEPS_AT_ONCE} steps (default: 5)")
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    for name in options.only:
        if name not in CASES:
            parser.error(f"--only takes methods of {', '.join(CASES)}, got {name!r}{nearest(name, CASES)}")
    return options


def _table(rows: Sequence[Row], rounds: int, shown: str, delay: Delay) -> str:
    """Format the medians as Markdown: milliseconds per step, and its delays."""
    heads = ["method", "compute, ms", f"{shown}: step, ms", "delays", "model"]
    cells = [
        [
            f"`{row['case']}`",
            significant(1e3 * row["compute_s"], 2),
            significant(1e3 * row["step_s"]),
            f"{(row['step_s'] - row['compute_s']) / delay.one_way_s:.1f}",
            f"{predicted(row['case']):g}",
        ]
        for row in rows
    ]
    return f"{P} ranks, {ELEMENTS} elements a bucket, {LINK}, medians of {rounds}.\n\n{parts.table(heads, cells)}"


def _seconds(step: Callable[[], None]) -> float:
    """Time a step in seconds, averaged over several steps and over ranks."""
    dist.barrier()
    step()
    began = time.perf_counter()
    for _ in range(STEPS_AT_ONCE):
        step()
    seconds = torch.tensor([(time.perf_counter() - began) / STEPS_AT_ONCE], dtype=torch.float64)
    dist.all_reduce(seconds)
    return float(seconds) / dist.get_world_size()


def _scheme(text: str) -> Scheme:
    (choice,) = parse_schemes(text, 0.01)
    return choice.make()


def _case(name: str) -> DelayCase:
    if name == "all_reduce":
        gradient = torch.ones(ELEMENTS)
        return DelayCase(name, lambda: _summed(gradient), lambda: None)
    if name in EXCHANGES:
        return _exchanging(name)
    buckets, method = (BUCKETS, SEVERAL[name]) if name in SEVERAL else (1, name)
    # DDP closes a bucket once it holds this much.
    model = DistributedDataParallel(_matrices(buckets), bucket_cap_mb=ELEMENTS * 4 / 2**20)
    handle = None
    if method != "ddp":
        handle = attach(model, _scheme(GRADIENTS[method]), options=Options(timeout_s=TIMEOUT_S, join_mb=0))

    def backward(without: AbstractContextManager[object]) -> None:
        with without:
            model.zero_grad()
            model(0).backward()
        if handle is not None:
            handle.take_reports()

    return DelayCase(name, lambda: backward(nullcontext()), lambda: backward(model.no_sync()))


def _summed(gradient: Tensor) -> None:
    dist.all_reduce(gradient)
    gradient.mul_(1 / dist.get_world_size())


def _exchanging(name: str) -> DelayCase:
    """Make the case of a bare model that exchanges AdamW's steps, or its weights after every step."""

    def trained(model: Given, optimizer: AdamW) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            model(0).backward()
            optimizer.step()

        return step

    ways = {
        "steps": Steps(measure_every=1 << 30, check_weights_every=0),
        "steps_measured": Steps(measure_every=1, check_weights_every=0),
        "local_steps": LocalSteps(every=1, check_weights_every=0),
    }
    models = [_matrices(1) for _ in range(2)]
    (model, optimizer), alone = [(each, AdamW(each.parameters(), lr=1e-4)) for each in models]
    attach(model, _scheme(TWO_SHOT), optimizer=optimizer, exchange=ways[name], options=Options(timeout_s=TIMEOUT_S))
    return DelayCase(name, trained(model, optimizer), trained(*alone))
