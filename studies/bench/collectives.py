"""The cost of the DDP hook, rings and sparse collectives over rate-limited links, beside DDP's own all-reduce and the link's limit.

    python -m studies bench collectives [--ranks 4 --link 100mbit --mbytes 10 --pairs 7 --density 0.01] [--json -]

Needs root or a user namespace, as `sparsync compare` does. One JSON line per case, and a table on standard error. The cases are
interleaved, in changing order; `ratio` is the median over rounds of a case's seconds to those of `ratio_to` in the same round, and
`bound` is where it must lie. `limit_s` is the least time that the link needs for the payload of a rank, without framing; `bits` is that
payload per parameter per step. A wrong result ends the run; a ratio out of bounds is an error, after everything has been written.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsync import Bucket, Dense, GroupComm, MeteredComm, MiCRO, OkTopk, Options, Scheme, SkipReduce, TopK, attach
from sparsync.comm.metered import all_reduce_cost
from sparsync.schemes import ExDyna
from sparsync_lab.netlab import parse_rate, restart_with_rights
from sparsync_lab.report.format import seconds_text, significant
from sparsync_lab.terminal import Table, lines_of
from sparsync_lab.workers.process import Emit, Place
from studies.bench.interleave import interleaved
from studies.bench.output import destination, write
from studies.bench.ranks import TIMEOUT_S, clocked, rows_of_ranks, telling

HOOK_BOUND = 1.05  # the highest cost of the hook, in times of DDP's own all-reduce
SKIP_TOLERANCE = 0.07  # how far the time of a shortened ring may be from the share of steps that it still takes
WARMUP = 3  # rounds: DDP makes its buckets in the first, and connections find their window


@dataclass
class CollectiveCase:
    """One thing to measure. `prepare` runs before the clock starts; `finish`, after it has stopped, checks the result.

    `finish` returns the payload bytes that this rank has sent.
    """

    name: str
    elements: int  # of the gradient
    prepare: Callable[[], None]
    run: Callable[[], object]
    finish: Callable[[], int]
    ratio_to: str
    bound: tuple[float, float] | None = None


@dataclass(frozen=True)
class Measurement:
    """Seconds as a mean over ranks, and the bytes sent by this rank, as we count them and as its interface does."""

    seconds: float
    payload_bytes: int
    interface_bytes: int


def main(arguments: Sequence[str]) -> None:
    """Measure and write JSON lines and a table. Raises RuntimeError, after that, when a ratio is out of bounds."""
    options = _options(arguments)
    parse_rate(options.link)
    restart_with_rights("sparsync_lab.cli", ["bench", "collectives", *arguments])
    rows = rows_of_ranks("studies.bench.collectives:measure", options)
    print(_table(rows), file=sys.stderr)
    write(rows, options.json)
    _check_bounds(rows)


def measure(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: the options
    """Measure all cases on this rank; the task of every worker."""
    options = argparse.Namespace(**spec)
    steps, check_steps = _steps(options)
    rows = _measured(steps, "steps", options, place, emit)
    check_steps()
    rows += _measured(_reductions(options), "reductions", options, place, emit)
    for row in rows:
        emit({"kind": "row", "row": row})


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m studies bench collectives", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--link", default="100mbit", help="rate of each rank's link, both ways (default: 100mbit)")
    add("--mbytes", type=float, default=10.0, help="size of the gradient, float32 (default: 10)")
    add("--density", type=float, default=0.01, help="of the sparse schemes (default: 0.01)")
    add("--pairs", type=int, default=7, help="rounds in which every case is measured once (default: 7)")
    add("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    return parser.parse_args(arguments)


def _steps(options: argparse.Namespace) -> tuple[list[CollectiveCase], Callable[[], None]]:
    """Return one optimizer step of the same model with DDP's own all-reduce and with our hook, and a check that both models agree."""
    own, hooked = _model(options), _model(options)
    handle = attach(hooked, Dense(), options=Options(timeout_s=TIMEOUT_S))
    n = sum(parameter.numel() for parameter in own.parameters())
    sent = all_reduce_cost(n, 4, options.ranks, dist.get_rank()).nbytes  # by the ring of DDP's own all-reduce

    def check() -> None:
        for ours, theirs in zip(hooked.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)

    def counted() -> int:
        return sum(report.sent.nbytes for report in handle.take_reports() if report.sent)

    base = "step, DDP's own all-reduce"
    cases = [
        CollectiveCase(base, n, _nothing, _stepper(own), lambda: sent, base),
        CollectiveCase("step, attach(Dense())", n, _nothing, _stepper(hooked), counted, base, (0.0, HOOK_BOUND)),
    ]
    return cases, check


def _model(options: argparse.Namespace) -> DistributedDataParallel:
    """Return a model of ten equal layers that together have the size of the gradient; the same on every call."""
    width = round((options.mbytes * 1e6 / 4 / 10) ** 0.5)
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(10)]))


def _stepper(model: DistributedDataParallel) -> Callable[[], None]:
    width = next(model.parameters()).shape[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _reductions(options: argparse.Namespace) -> list[CollectiveCase]:
    """Return one case for each way to reduce a bucket."""
    P = options.ranks
    comm = MeteredComm(GroupComm.private(timeout_s=TIMEOUT_S))
    cases = [_reduction("ring", SkipReduce(skip=0), comm, options)]
    for skip in range(1, P):
        left = (2 * (P - 1) - skip) / (2 * (P - 1))
        bound = left * (1 - SKIP_TOLERANCE), left * (1 + SKIP_TOLERANCE)
        cases.append(_reduction(f"ring, skip {skip}", SkipReduce(skip=skip), comm, options, bound))
    return [
        *cases,
        _reduction("native", Dense(), comm, options),
        _reduction("native, bf16", Dense.bf16(), comm, options),
        _reduction("direct", SkipReduce(skip=0, form="direct"), comm, options),
        _reduction("direct, skip 1", SkipReduce(skip=1, form="direct"), comm, options),
        *[_selection(kind(options.density), comm, options) for kind in (TopK, MiCRO, ExDyna, OkTopk)],
    ]


def _reduction(
    name: str,
    scheme: Scheme,
    comm: MeteredComm,
    options: argparse.Namespace,
    bound: tuple[float, float] | None = None,
) -> CollectiveCase:
    """Return a case in which all ranks have the same gradient, so the mean is that gradient, whichever ranks are skipped."""
    whole = torch.arange(round(options.mbytes * 1e6 / 4)).remainder(97).float()  # exact in 16 bits, and times P
    bucket = Bucket("bucket", whole.clone(), step=0)

    def prepare() -> None:
        bucket.grad.copy_(whole)
        bucket.step += 1

    def finish() -> int:
        torch.testing.assert_close(bucket.grad, whole, rtol=2**-7 if "bf16" in name else 1e-6, atol=0)
        return comm.take()[0].nbytes

    return CollectiveCase(name, whole.numel(), prepare, lambda: scheme.reduce(bucket, comm), finish, "ring", bound)


def _selection(scheme: Scheme, comm: MeteredComm, options: argparse.Namespace) -> CollectiveCase:
    """Return a case in which all ranks have the same gradient, and the result is some elements of it."""
    n = round(options.mbytes * 1e6 / 4)
    whole = torch.randn(n, generator=torch.Generator().manual_seed(0))
    empty = scheme.state_dict()
    bucket = Bucket(scheme.name, whole.clone(), step=0)

    def prepare() -> None:
        scheme.load_state_dict(empty)  # so that there is no residual
        bucket.grad.copy_(whole)
        bucket.step += 1

    def finish() -> int:
        found = bucket.grad.nonzero().view(-1)
        senders = bucket.grad[found] / whole[found] * options.ranks  # how many ranks are in each sum
        torch.testing.assert_close(senders, senders.round().clamp(1, options.ranks))
        assert found.numel() == int(options.density * n), f"{scheme.name} sent {found.numel()} elements"
        return comm.take()[0].nbytes

    name = f"{scheme.name}, density {options.density}"
    return CollectiveCase(name, n, prepare, lambda: scheme.reduce(bucket, comm), finish, "ring")


def _measured(
    cases: Sequence[CollectiveCase], what: str, options: argparse.Namespace, place: Place, emit: Emit
) -> list[dict[str, Any]]:  # Any: JSON
    def once(case: CollectiveCase, number: int) -> Measurement:
        case.prepare()
        seconds, sent = clocked(case.run, place)
        return Measurement(seconds, case.finish(), sent)

    found = interleaved(cases, once, options.pairs, WARMUP, telling(emit, what))
    by_name = {case.name: measurements for case, measurements in zip(cases, found, strict=True)}
    return [_row(case, by_name, options) for case in cases]


def _row(
    case: CollectiveCase, by_name: Mapping[str, Sequence[Measurement]], options: argparse.Namespace
) -> dict[str, Any]:
    own = by_name[case.name]
    ratios = [each.seconds / base.seconds for each, base in zip(own, by_name[case.ratio_to], strict=True)]
    seconds, ratio = statistics.median(each.seconds for each in own), statistics.median(ratios)
    payload = statistics.median(each.payload_bytes for each in own)
    limit_s = payload * 8 / parse_rate(options.link)
    row: dict[str, Any] = {
        "case": case.name,
        "seconds": seconds,
        "limit_s": limit_s,
        "share_of_link": limit_s / seconds,
        "ratio": ratio,
        "ratio_to": case.ratio_to,
    }
    if case.bound is not None:
        row |= {"bound": case.bound, "within_bound": case.bound[0] <= ratio <= case.bound[1]}
    row |= {
        "ratios": ratios,
        "payload_bytes": payload,
        "bits": payload * 8 / case.elements,
        "interface_per_payload": statistics.median(each.interface_bytes for each in own) / payload,
    }
    about = {name: getattr(options, name) for name in ("ranks", "link", "mbytes", "pairs", "density")}
    return {**row, **about, "torch": torch.__version__}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:  # Any: JSON
    """Return a table of the medians."""
    heads = ("case", "time", "of the\nlink", "bits", "ratio", "bound", "to")
    cells = [
        (
            row["case"],
            seconds_text(row["seconds"]),
            f"{row['share_of_link']:.3f}",
            significant(row["bits"]),
            f"{row['ratio']:.3f}",
            f"{row['bound'][0]:.3f}..{row['bound'][1]:.3f}" if "bound" in row else "",
            row["ratio_to"],
        )
        for row in rows
    ]
    below = (
        "of the link: the least time that it needs for the payload, over the time. ratio: of the times, to the case in to.",
        "bits: what a rank sends per parameter per step, as payload.",
    )
    return lines_of([Table("", heads, tuple(cells))], below=[(each, "") for each in below])


def _check_bounds(rows: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON
    """Raise RuntimeError that says by how much which ratio is out of its bounds."""
    outside = []
    for row in rows:
        if not row.get("within_bound", True):
            low, high = row["bound"]
            above = row["ratio"] > high
            off = abs(row["ratio"] / (high if above else low) - 1)
            outside.append(
                f"{row['case']!r} takes {row['ratio']:.3f} times as long as {row['ratio_to']!r}, {100 * off:.1f} % "
                f"{'more' if above else 'less'} than allowed ({low:.3f} to {high:.3f})"
            )
    if outside:
        raise RuntimeError(
            f"{'; '.join(outside)}. The bounds are for links that take most of the time, such as 100mbit: measure more --pairs, on a "
            "machine that does nothing else"
        )


def _nothing() -> None:
    pass
