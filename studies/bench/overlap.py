"""The fraction of the reduction that a scheme hides behind the backward pass over rate-limited links, beside the highest possible one.

    python -m studies bench overlap [--ranks 4 --link 100mbit --schemes dense,bf16,topk,skip_reduce,micro --buckets 8] [--json -]

Needs root or a user namespace, as `sparsync compare` does; not for --link none, whose times say nothing about a network. The model is a
chain of as many equal layers as there are buckets. Their backward passes sleep: the ranks of one machine would compete for its cores,
and sleeping stands for an accelerator that computes. So threads that reduce have the cores to themselves, as beside an accelerator, and
unlike in training on a CPU.

Each round measures, as means over ranks: `backward_s`, the backward pass alone; `reduction_s`, the reduction of its buckets, all
submitted at once when it has ended; `step_s`, the backward pass that reduces, as attached. `hidden` is (backward_s + reduction_s -
step_s) over the smaller of the first two, as it comes out: noise may put it beyond [0, 1]. `all_hidden_s`, the larger of the two, would
be the time if everything were hidden. It cannot be: the last bucket is complete when the backward pass ends, and before the first there
is nothing to send. With B equal layers and buckets, one after the other, that leaves max(backward_s + reduction_s/B, reduction_s +
backward_s/B), `bound_s`, and of the smaller 1 - 1/B hidden, `hideable`. `limit_s` is the least time that the link needs for rank 0's
payload, without framing; `bits` is that payload per parameter per step.

The cases are interleaved, in changing order; p20, p50 and p80 over rounds. One JSON line per case, and a table on standard error. A run
ends when replicas differ, when the two ways to reduce differ in any bit, or when a mean is wrong.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync import Bucket, GroupComm, Options, Report, attach
from sparsync.comm.metered import all_reduce_cost
from sparsync.core import laid_out
from sparsync.runtime.connection import Connection
from sparsync.runtime.step_in_flight import StepInFlight
from sparsync_lab.environment import machine, versions
from sparsync_lab.netlab import MAX_RANKS, parse_link, restart_with_rights
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, check_labels, parse_schemes, try_out
from sparsync_lab.terminal import Table, lines_of
from sparsync_lab.workers.process import Emit, Place
from studies.bench.interleave import interleaved
from studies.bench.output import destination, percentiles, write
from studies.bench.ranks import TIMEOUT_S, clocked, rows_of_ranks, telling

WARMUP = 3  # rounds: thresholds settle, connections find their window
BATCH = 4
OWN = "DDP's own"
TOLERANCES = {OWN: 1e-6, "dense": 1e-6, "bf16": 2.0**-7}  # of the mean, relative, in the 2-norm


@dataclass
class OverlapCase:
    """A model that reduces through its attached hook, and the same reduction by itself: `reduce` replaces the gradients of one step."""

    name: str
    model: DistributedDataParallel
    reduce: Callable[[Sequence[Tensor], int], None]
    payload_nbytes: Callable[[], int]  # that this rank has sent in the last backward pass


@dataclass(frozen=True)
class Round:
    """One measurement of a case: seconds as means over ranks."""

    backward_s: float
    reduction_s: float
    step_s: float
    payload_nbytes: int

    @property
    def hidden(self) -> float:
        """The hidden fraction of the shorter of the two; noise may put it beyond [0, 1]."""
        return (self.backward_s + self.reduction_s - self.step_s) / min(self.backward_s, self.reduction_s)

    @property
    def all_hidden_s(self) -> float:
        """The time of a step if everything were hidden."""
        return max(self.backward_s, self.reduction_s)

    def bound_s(self, buckets: int) -> float:
        """Return the least time of a step: nothing to send before the first bucket, nothing left to hide the last one behind."""
        return self.all_hidden_s + min(self.backward_s, self.reduction_s) / buckets


def main(arguments: Sequence[str]) -> None:
    """Measure, write JSON lines, and print a table on standard error. Raises ValueError for a scheme that cannot run."""
    options = _options(arguments)
    choices = parse_schemes(options.schemes, options.density)
    rate = parse_link(options.link)
    check_labels(choices)
    for choice in choices:
        try_out(choice, options.ranks)
    if rate is not None:
        restart_with_rights("sparsync_lab.cli", ["bench", "overlap", *arguments])
    rows = rows_of_ranks("studies.bench.overlap:measure", options)
    print(_table(rows), file=sys.stderr)
    write(rows, options.json)


def measure(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: the options
    """Measure all cases on this rank; the task of every worker."""
    options = argparse.Namespace(**spec)
    choices = parse_schemes(options.schemes, options.density)
    cases = [_own(options), *(_attached(choice, options) for choice in choices)]

    def once(case: OverlapCase, number: int) -> Round:
        return _round(case, number, _width(options), place)

    found = interleaved(cases, once, options.rounds, WARMUP, telling(emit, "backward passes"))
    if place.rank == 0:
        for case, rounds in zip(cases, found, strict=True):
            emit({"kind": "row", "row": _row(case, rounds, options)})


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m studies bench overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="data-parallel ranks (default: 4)")
    add("--link", default="100mbit", help="rate of each rank's link, both ways, or none (default: 100mbit)")
    add("--schemes", default="dense,bf16,topk,skip_reduce,micro,exdyna,oktopk", help="see `sparsync schemes`")
    add("--density", type=float, default=0.01, help="of the sparse schemes (default: 0.01)")
    add("--mbytes", type=float, default=4.0, help="size of the gradient, float32 (default: 4)")
    add("--buckets", type=int, default=8, help="and layers, of equal size (default: 8)")
    add("--backward-s", type=float, default=0.4, help="that the layers' backward passes sleep, in total (default: 0.4)")
    add("--rounds", type=int, default=9, help="in which every case is measured once, 4 or more (default: 9)")
    add("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    options = parser.parse_args(arguments)
    for name, least in (("buckets", 1), ("rounds", 4)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    if not 2 <= options.ranks <= MAX_RANKS:
        parser.error(f"--ranks must be in [2, {MAX_RANKS}], got {options.ranks}: a single rank has nothing to reduce")
    if options.backward_s <= 0 or _width(options) < 1:
        parser.error(
            f"--backward-s and --mbytes must be above 0, got {options.backward_s} and {options.mbytes}, "
            "and each layer needs one element"
        )
    return options


class _Slow(torch.autograd.Function):
    """The identity, whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # Any: torch does not say
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class _Layer(nn.Module):
    """A linear layer whose weight's gradient is ready `seconds` after the gradient of its output."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)  # keeps the norm of the activations
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x @ self.weight.T, self.seconds)  # pyright: ignore[reportReturnType]  # the stub returns None


def _width(options: argparse.Namespace) -> int:
    return round((max(0.0, options.mbytes) * 1e6 / 4 / options.buckets) ** 0.5)


def _model(options: argparse.Namespace) -> DistributedDataParallel:
    """Return a model with one bucket for each layer, the last layer's first; the same on every call."""
    torch.manual_seed(0)
    width = _width(options)
    layers = [_Layer(width, options.backward_s / options.buckets) for _ in range(options.buckets)]
    # DDP closes a bucket once it holds as much as this, so half a layer gives every layer its own bucket.
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=width**2 * 4 / 2**20 / 2)
    model(torch.ones(1, width)).sum().backward()  # DDP keeps to bucket_cap_mb after a first pass with a single bucket
    model.zero_grad()
    return model


def _own(options: argparse.Namespace) -> OverlapCase:
    """Return the case of DDP without a hook; its `reduce` makes the same all-reduces."""
    nbytes = all_reduce_cost(_width(options) ** 2, 4, options.ranks, dist.get_rank()).nbytes * options.buckets

    def reduce(grads: Sequence[Tensor], step: int) -> None:
        works = [dist.all_reduce(grad.mul_(1 / options.ranks), async_op=True) for grad in grads]
        for work in works:
            assert work is not None
            work.wait()

    return OverlapCase(OWN, _model(options), reduce, lambda: nbytes)


def _attached(choice: SchemeChoice, options: argparse.Namespace) -> OverlapCase:
    """Return the case of a model with the hook; its `reduce` gives the same buckets to an equal scheme on separate threads."""
    model = _model(options)
    handle = attach(model, choice.make(), options=Options(timeout_s=TIMEOUT_S, join_mb=0, dense_below=0))
    state, reports = choice.make().start(), list[Report]()
    flight = StepInFlight(Connection(state, GroupComm.private(timeout_s=TIMEOUT_S)), reports.append)
    names = [name for name, _ in reversed(list(model.module.named_parameters()))]

    def reduce(grads: Sequence[Tensor], step: int) -> None:
        buckets = [
            Bucket(f"bucket{at}", grad, step, laid_out([(name, grad.numel())]))
            for at, (name, grad) in enumerate(zip(names, grads, strict=True))
        ]
        for done in [flight.submit(bucket, state) for bucket in buckets]:
            done.wait()

    def payload_nbytes() -> int:
        reports = handle.take_reports()
        if len(reports) != options.buckets:
            raise RuntimeError(f"DDP has made {len(reports)} buckets, not {options.buckets}")
        return sum(report.sent.nbytes for report in reports if report.sent)

    return OverlapCase(choice.label, model, reduce, payload_nbytes)


def _round(case: OverlapCase, number: int, width: int, place: Place) -> Round:
    """Return one measurement of a case, all times with the same gradients and in changing order, after a check of both results."""
    drawn = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    x = torch.randn(BATCH, width, generator=drawn)
    if number % 2:
        step_s, attached = _attached_step(case, x, place)
        backward_s, reduction_s, alone = _one_after_the_other(case, x, number, place)
    else:
        backward_s, reduction_s, alone = _one_after_the_other(case, x, number, place)
        step_s, attached = _attached_step(case, x, place)
    _check_equal(case.name, attached, alone)
    return Round(backward_s, reduction_s, step_s, case.payload_nbytes())


def _attached_step(case: OverlapCase, x: Tensor, place: Place) -> tuple[float, list[Tensor]]:
    loss = case.model(x).square().mean()
    seconds, _ = clocked(loss.backward, place)
    return seconds, _taken(case.model)


def _one_after_the_other(case: OverlapCase, x: Tensor, number: int, place: Place) -> tuple[float, float, list[Tensor]]:
    with case.model.no_sync():
        loss = case.model(x).square().mean()
        backward_s, _ = clocked(loss.backward, place)
    grads = _taken(case.model)
    mean = _mean(grads) if number == 0 and case.name in TOLERANCES else None
    reduction_s, _ = clocked(lambda: case.reduce(grads, number), place)
    if mean is not None:
        error = float((torch.cat(grads) - mean).norm() / mean.norm())
        if error > TOLERANCES[case.name]:
            raise RuntimeError(f"{case.name} is off the mean by {error:.2g}, allowed are {TOLERANCES[case.name]:.2g}")
    return backward_s, reduction_s, grads


def _taken(model: DistributedDataParallel) -> list[Tensor]:
    """Take the gradients out of the model, in the order in which they were ready."""
    grads = [parameter.grad for parameter in reversed(list(model.parameters()))]
    model.zero_grad()
    return [grad.flatten() for grad in grads if grad is not None]


def _mean(grads: Sequence[Tensor]) -> Tensor:
    whole = torch.cat(list(grads)).double()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


def _check_equal(name: str, attached: Sequence[Tensor], alone: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless the result of the hook is that of the reduction by itself, and the same on all ranks."""
    if not all(torch.equal(one, other) for one, other in zip(attached, alone, strict=True)):
        raise RuntimeError(f"{name}: the backward pass that reduces and the reduction after it have different results")
    digest = hashlib.sha256(torch.cat(list(attached)).numpy().tobytes()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, mine)
    if not all(torch.equal(each, mine) for each in digests):
        raise RuntimeError(f"{name}: replicas differ")


def _row(case: OverlapCase, rounds: Sequence[Round], options: argparse.Namespace) -> dict[str, Any]:  # Any: JSON
    rate = parse_link(options.link)
    payload = percentiles([each.payload_nbytes for each in rounds])["p50"]
    measured = {
        name: percentiles([getattr(each, name) for each in rounds])
        for name in ("backward_s", "reduction_s", "step_s", "hidden", "all_hidden_s")
    }
    about = {name: getattr(options, name) for name in ("ranks", "link", "mbytes", "buckets", "density", "rounds")}
    return {
        "bench": "overlap",
        "case": case.name,
        **measured,
        "bound_s": percentiles([each.bound_s(options.buckets) for each in rounds]),
        "hideable": 1 - 1 / options.buckets,
        "payload_bytes": payload,
        "bits": payload * 8 / (_width(options) ** 2 * options.buckets),
        "limit_s": None if rate is None else payload * 8 / rate,
        "slept_s": options.backward_s,
        **about,
        **versions(),
        "machine": machine(),
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:  # Any: JSON
    """Return a table of the medians in milliseconds."""
    columns = ("backward_s", "reduction_s", "step_s", "bound_s", "all_hidden_s")
    heads = ("case", "backward", "reduction", "step", "bound", "all\nhidden", "hidden", "p20..p80", "bits")
    cells = [
        (
            row["case"],
            *(f"{1e3 * row[name]['p50']:.0f} ms" for name in columns),
            f"{row['hidden']['p50']:.2f}",
            f"{row['hidden']['p20']:.2f}..{row['hidden']['p80']:.2f}",
            significant(row["bits"]),
        )
        for row in rows
    ]
    first = rows[0]
    unlimited = " Without a limited link this says nothing about a network." if first["limit_s"] is None else ""
    below = (
        "bits: what a rank sends per parameter per step, as payload.",
        f"Of {first['buckets']} equal buckets {first['hideable']:.3f} can be hidden.{unlimited}",
    )
    return lines_of([Table("", heads, tuple(cells))], below=[(each, "") for each in below])
