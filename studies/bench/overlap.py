"""Measure the fraction of the reduction that a scheme hides behind the backward pass over rate-limited links, and its upper bound.

    python -m studies bench overlap [--ranks 4 --link 100mbit --schemes dense,bf16,topk,skip_reduce,exact_micro --buckets 8]

Needs root or a user namespace, as `sparsync compare` does; times with --link none say nothing about a network. The model is a chain of
equal layers, one per bucket. Their backward passes sleep, because the ranks of one machine would compete for its cores; sleeping stands for
an accelerator that computes. Threads that reduce thus have the cores to themselves, as beside an accelerator, and unlike in training on a
CPU.

Each round measures, as means over ranks: `backward_s`, the backward pass without a reduction; `reduction_s`, the attached pass without
sleep; `step_s`, the attached pass with sleep. `hidden` is (backward_s + reduction_s - step_s) over the smaller of the first two; noise may
put it outside [0, 1]. The last bucket is complete when the backward pass ends, and before the first there is nothing to send. So with B
equal layers and buckets in sequence, a step takes at least `bound_s`, max(backward_s + reduction_s/B, reduction_s + backward_s/B), and 1 -
1/B of the smaller can be hidden, `hideable`. `limit_s` is the minimum time for rank 0's payload on the link, without framing; `bits` is
that payload per parameter per step.

The cases are interleaved, in changing order; p20, p50 and p80 over rounds. One JSON line per case, and a table on standard error.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync import Options, attach
from sparsync_lab.environment import machine, versions
from sparsync_lab.netlab import MAX_RANKS, network, parse_link, restart_with_rights
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, check_labels, parse_schemes, try_out
from sparsync_lab.workers.process import Emit, Place
from studies import parts
from studies.bench import frame
from studies.bench.frame import TIMEOUT_S, Row

WARMUP = 3  # rounds: thresholds settle, and connections find their window
BATCH = 4
OWN = "DDP's own"


@dataclass
class OverlapCase:
    """A model that reduces, and the bytes sent by this rank in its last backward pass."""

    name: str
    model: DistributedDataParallel
    payload_nbytes: Callable[[], float]


@dataclass(frozen=True)
class Round:
    """One measurement of a case: seconds as means over ranks."""

    backward_s: float
    reduction_s: float
    step_s: float
    payload_nbytes: float

    @property
    def hidden(self) -> float:
        """Hidden fraction of the shorter of the two; noise may put it outside [0, 1]."""
        return (self.backward_s + self.reduction_s - self.step_s) / min(self.backward_s, self.reduction_s)

    def bound_s(self, buckets: int) -> float:
        """Compute the minimum time of a step: nothing can be sent before the first bucket, and nothing hides the last one."""
        longer, shorter = max(self.backward_s, self.reduction_s), min(self.backward_s, self.reduction_s)
        return longer + shorter / buckets


def main(arguments: Sequence[str]) -> None:
    """Measure, write JSON lines, and print a table on standard error. Raises ValueError for a scheme that cannot run."""
    options = _options(arguments)
    choices = parse_schemes(options.schemes, options.density)
    rate = parse_link(options.link)
    check_labels(choices)
    for choice in choices:
        try_out(choice, options.ranks)
    if rate is not None:
        restart_with_rights("studies", ["bench", "overlap", *arguments])
    with network(options.ranks, rate) as links:
        rows = frame.of_ranks("studies.bench.overlap:measure", vars(options), links)
    print(_table(rows), file=sys.stderr)
    frame.write(rows)


def measure(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: the options
    """Measure all cases on this rank; the task of every worker."""
    options = argparse.Namespace(**spec)
    width = _width(options)
    cases = [_case(None, options), *(_case(each, options) for each in parse_schemes(options.schemes, options.density))]
    found = frame.interleaved(
        cases, lambda case, number: _round(case, number, width, options), options.rounds, WARMUP, frame.telling(emit)
    )
    for case, rounds in zip(cases, found, strict=True):
        emit({"kind": "row", "row": _row(case, rounds, options)})


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.options("overlap", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="data-parallel ranks (default: 4)")
    add("--link", default="100mbit", help="rate of each rank's link, both ways, or none (default: 100mbit)")
    add(
        "--schemes",
        default="dense,bf16,topk,skip_reduce,exact_micro,exact_exdyna,exact_oktopk",
        help="see `sparsync schemes`",
    )
    add("--density", type=float, default=0.01, help="of the sparse schemes (default: 0.01)")
    add("--mbytes", type=float, default=4.0, help="size of the gradient, float32 (default: 4)")
    add("--buckets", type=int, default=8, help="and layers, of equal size (default: 8)")
    add("--backward-s", type=float, default=0.4, help="that the layers' backward passes sleep, in total (default: 0.4)")
    add("--rounds", type=int, default=9, help="in which every case is measured once, 4 or more (default: 9)")
    options = parser.parse_args(arguments)
    if not 2 <= options.ranks <= MAX_RANKS:
        parser.error(f"--ranks must be in [2, {MAX_RANKS}], got {options.ranks}: a single rank has nothing to reduce")
    if options.buckets < 1 or options.rounds < 4 or options.backward_s <= 0 or _width(options) < 1:
        parser.error("--buckets must be at least 1, --rounds 4, --backward-s above 0, and a layer needs one element")
    return options


class _Slow(torch.autograd.Function):
    """The identity with a sleeping backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # Any: torch does not say
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class _Layer(nn.Module):
    """A linear layer whose weight gradient is ready `seconds` after its output's gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)  # preserves the norm of the activations
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x @ self.weight.T, self.seconds)  # pyright: ignore[reportReturnType]  # the stub returns None


def _width(options: argparse.Namespace) -> int:
    return round((max(0.0, options.mbytes) * 1e6 / 4 / options.buckets) ** 0.5)


def _case(choice: SchemeChoice | None, options: argparse.Namespace) -> OverlapCase:
    """Make a model with one bucket per layer, the last layer's first; None: without a scheme."""
    torch.manual_seed(0)
    width = _width(options)
    # DDP closes a bucket once it holds this much, so half a layer gives every layer its own bucket.
    layers = nn.Sequential(*(_Layer(width) for _ in range(options.buckets)))
    model = DistributedDataParallel(layers, bucket_cap_mb=width**2 * 4 / 2**20 / 2)
    model(torch.ones(1, width)).sum().backward()  # only after a first pass in one bucket does DDP respect bucket_cap_mb
    model.zero_grad()
    if choice is None:
        nbytes = 2 * (options.ranks - 1) / options.ranks * 4 * width**2 * options.buckets
        return OverlapCase(OWN, model, lambda: nbytes)
    handle = attach(model, choice.make(), options=Options(timeout_s=TIMEOUT_S, join_mb=0, dense_below=0))

    def sent() -> float:
        # Two of the three passes of a round reduce.
        return sum(each.sent.nbytes for each in handle.take_reports() if each.sent) / 2

    return OverlapCase(choice.label, model, sent)


def _round(case: OverlapCase, number: int, width: int, options: argparse.Namespace) -> Round:
    """Measure a case once: the three passes have the same input, and take turns in which comes first."""
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(number * options.ranks + dist.get_rank()))
    sleep = options.backward_s / options.buckets
    passes = {
        "backward_s": (sleep, case.model.no_sync()),
        "step_s": (sleep, nullcontext()),
        "reduction_s": (0.0, nullcontext()),
    }
    found = {name: _pass_s(case, x, *passes[name]) for name in (passes if number % 2 else reversed(passes))}
    return Round(**found, payload_nbytes=case.payload_nbytes())


def _pass_s(case: OverlapCase, x: Tensor, sleep: float, how: AbstractContextManager[None]) -> float:
    for layer in case.model.module.modules():
        if isinstance(layer, _Layer):
            layer.seconds = sleep
    case.model.zero_grad()
    with how:
        loss = case.model(x).square().mean()
        return frame.clocked(loss.backward)


def _row(case: OverlapCase, rounds: Sequence[Round], options: argparse.Namespace) -> Row:
    rate, payload = parse_link(options.link), rounds[-1].payload_nbytes
    measured = {
        name: frame.percentiles([getattr(each, name) for each in rounds])
        for name in ("backward_s", "reduction_s", "step_s", "hidden")
    }
    about = {name: getattr(options, name) for name in ("ranks", "link", "mbytes", "buckets", "density", "rounds")}
    return {
        "bench": "overlap",
        "case": case.name,
        **measured,
        "bound_s": frame.percentiles([each.bound_s(options.buckets) for each in rounds]),
        "hideable": 1 - 1 / options.buckets,
        "payload_bytes": payload,
        "bits": payload * 8 / (_width(options) ** 2 * options.buckets),
        "limit_s": None if rate is None else payload * 8 / rate,
        "slept_s": options.backward_s,
        **about,
        **versions(),
        "machine": machine(),
    }


def _table(rows: Sequence[Row]) -> str:
    """Format a table of the medians in milliseconds."""
    columns = ("backward_s", "reduction_s", "step_s", "bound_s")
    heads = ["case", *(f"{each.removesuffix('_s')}, ms" for each in columns), "hidden", "p20 to p80", "bits"]
    cells: list[list[str]] = []
    for row in rows:
        times, hidden = [f"{1e3 * row[name]['p50']:.0f}" for name in columns], row["hidden"]
        spread = f"{hidden['p20']:.2f} to {hidden['p80']:.2f}"
        cells.append([row["case"], *times, f"{hidden['p50']:.2f}", spread, significant(row["bits"])])
    unlimited = " Without a limited link this says nothing about a network." if rows[0]["limit_s"] is None else ""
    return f"{parts.table(heads, cells)}\n\nOf {rows[0]['buckets']} equal buckets {rows[0]['hideable']:.3f} can be hidden.{unlimited}"
