"""What hook, rings and sparse collectives cost over rate-limited links, beside DDP's own all-reduce and the link's limit.

    sparsync bench collectives [--ranks 4 --link 100mbit --mbytes 10 --pairs 7 --density 0.01] [--json -]

Needs root or a user namespace, as `sparsync compare` does. One JSON line per case. The cases take turns, in changing order; `ratio` is
the median over rounds of a case's seconds to those of `ratio_to` in the same round, and `bound` says where it must lie. `limit_s` is the
least time the link needs for the payload a rank sends, framing aside. A wrong result ends the run, a ratio out of bounds exits with 1.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsync import Bucket, Dense, ExDyna, GroupComm, MeteredComm, MiCRO, OkTopk, SkipReduce, TopK, attach
from sparsync.base.scheme import Scheme
from sparsync.comm.metered import all_reduce_cost
from sparsync.lab.bench.output import write
from sparsync.lab.bench.ranks import TIMEOUT_S, clocked, join, launch, leave, started_as_rank
from sparsync.lab.netlab import parse_rate

HOOK_BOUND = 1.05  # what the hook may cost beside DDP's own all-reduce
SKIP_TOLERANCE = 0.07  # how far a shortened ring may be from the share of steps that is left
WARMUP = 3  # rounds: DDP makes its buckets in the first, and connections find their window


@dataclass
class Case:
    """Something that takes turns with others. `prepare` comes before the clock starts; `finish` after it stops.

    `finish` checks the result and returns the payload bytes this rank has sent.
    """

    name: str
    prepare: Callable[[], None]
    run: Callable[[], None]
    finish: Callable[[], int]
    ratio_to: str
    bound: tuple[float, float] | None = None


@dataclass
class Turn:
    """One measurement: the mean over ranks of the seconds, and what left this rank, as we count it and as the interface does."""

    seconds: float
    payload_bytes: int
    interface_bytes: int


def main(arguments: Sequence[str]) -> None:
    """Measures, prints JSON lines and ends the process: 0, or 1 when a ratio is out of bounds."""
    options = _options(arguments)
    if started_as_rank():
        _work(options)
    launch("sparsync.lab.bench.collectives", arguments, options.ranks, parse_rate(options.link))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sparsync bench collectives", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="100mbit", help="rate of each rank's link, both ways")
    parser.add_argument("--mbytes", type=float, default=10.0, help="size of the gradient, float32")
    parser.add_argument("--density", type=float, default=0.01, help="of the sparse schemes")
    parser.add_argument("--pairs", type=int, default=7, help="rounds in which every case is measured once")
    parser.add_argument("--json", default="-", help="file for the JSON lines, - for standard output")
    return parser.parse_args(arguments)


def _work(options: argparse.Namespace) -> NoReturn:
    join(options.ranks)
    cases, same = _steps(options)
    rows = _measured(cases, options)
    same()
    rows += _measured(_reductions(options), options)
    if dist.get_rank() == 0:
        write(rows, options.json)
    leave(0 if all(row.get("within_bound", True) for row in rows) else 1)


def _steps(options: argparse.Namespace) -> tuple[list[Case], Callable[[], None]]:
    """One optimizer step of the same model, by DDP itself and with ours behind the hook; and the check that both came to the same."""
    own, hooked = _model(options), _model(options)
    handle = attach(hooked, Dense(), timeout_s=TIMEOUT_S)
    n = sum(parameter.numel() for parameter in own.parameters())
    sent = all_reduce_cost(n, 4, options.ranks, dist.get_rank()).nbytes  # by the ring of DDP's own all-reduce

    def same() -> None:
        for ours, theirs in zip(hooked.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)

    def counted() -> int:
        return sum(report.sent.nbytes for report in handle.take_reports() if report.sent)

    base = "step, DDP's own all-reduce"
    cases = [
        Case(base, _nothing, _stepper(own), lambda: sent, base),
        Case("step, attach(Dense())", _nothing, _stepper(hooked), counted, base, (0.0, HOOK_BOUND)),
    ]
    return cases, same


def _model(options: argparse.Namespace) -> DistributedDataParallel:
    """Ten equal layers with as many parameters as make up the gradient; the same on every call."""
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


def _reductions(options: argparse.Namespace) -> list[Case]:
    """One bucket reduced by each form."""
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
) -> Case:
    """The same on all ranks goes in, so the mean is what went in, whoever is left out."""
    whole = torch.arange(round(options.mbytes * 1e6 / 4)).remainder(97).float()  # exact in 16 bits, and times P
    bucket = Bucket("bucket", whole.clone(), step=0)

    def prepare() -> None:
        bucket.grad.copy_(whole)
        bucket.step += 1

    def run() -> None:
        scheme.reduce(bucket, comm)

    def finish() -> int:
        torch.testing.assert_close(bucket.grad, whole, rtol=2**-7 if "bf16" in name else 1e-6, atol=0)
        return comm.take()[0].nbytes

    return Case(name, prepare, run, finish, "ring", bound)


def _selection(scheme: Scheme, comm: MeteredComm, options: argparse.Namespace) -> Case:
    """The same on all ranks goes in, and what comes out is some of it."""
    n = round(options.mbytes * 1e6 / 4)
    whole = torch.randn(n, generator=torch.Generator().manual_seed(0))
    empty = scheme.state_dict()
    bucket = Bucket(scheme.name, whole.clone(), step=0)

    def prepare() -> None:
        scheme.load_state_dict(empty)  # so that nothing has been kept back
        bucket.grad.copy_(whole)
        bucket.step += 1

    def finish() -> int:
        found = bucket.grad.nonzero().view(-1)
        senders = bucket.grad[found] / whole[found] * options.ranks  # how many ranks are in each sum
        torch.testing.assert_close(senders, senders.round().clamp(1, options.ranks))
        assert found.numel() == int(options.density * n), f"{scheme.name} sent {found.numel()} elements"
        return comm.take()[0].nbytes

    return Case(
        f"{scheme.name}, density {options.density}",
        prepare,
        lambda: _ignore(scheme.reduce(bucket, comm)),
        finish,
        "ring",
    )


def _measured(cases: list[Case], options: argparse.Namespace) -> list[dict[str, object]]:
    turns: dict[str, list[Turn]] = {case.name: [] for case in cases}
    for round_number in range(WARMUP + options.pairs):
        for case in cases if round_number % 2 else reversed(cases):
            turn = _turn(case)
            if round_number >= WARMUP:
                turns[case.name].append(turn)
    return [_row(case, turns, options) for case in cases]


def _turn(case: Case) -> Turn:
    case.prepare()
    seconds, sent = clocked(case.run)
    return Turn(seconds, case.finish(), sent)


def _row(case: Case, turns: Mapping[str, list[Turn]], options: argparse.Namespace) -> dict[str, object]:
    mine = turns[case.name]
    ratios = [turn.seconds / base.seconds for turn, base in zip(mine, turns[case.ratio_to], strict=True)]
    seconds, ratio = statistics.median(turn.seconds for turn in mine), statistics.median(ratios)
    payload = statistics.median(turn.payload_bytes for turn in mine)
    limit_s = payload * 8 / parse_rate(options.link)
    row: dict[str, object] = {
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
        "interface_per_payload": statistics.median(turn.interface_bytes for turn in mine) / payload,
    }
    about = {name: getattr(options, name) for name in ("ranks", "link", "mbytes", "pairs", "density")}
    return {**row, **about, "torch": torch.__version__}


def _nothing() -> None:
    pass


def _ignore(report: object) -> None:
    pass


if __name__ == "__main__":
    main(sys.argv[1:])
