"""Measure processor time of schemes that reduce all elements in few bits, on given gradients.

    python -m studies bench reductions [--ranks 2,4 --n 4000000 --schemes quantized:values=int4,bf16,... --rounds 12]

Torch uses one thread. One JSON line per case. "bf16 hook" is a hook of five lines: to bfloat16, an all-reduce, a copy back.

Ranks are threads of one process that run one at a time, so a thread's seconds, averaged over ranks, are computing time without waits
and transfers. `passes` is the median over rounds of a case's seconds to those of torch.add(a, b, out=c) on as many float32 elements, 12
bytes each, in the same round. The cases are interleaved, in changing order. The mean is compared with the exact one.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsync import Bucket
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Comm, generator
from sparsync.kernels import backend
from sparsync_lab.environment import machine, versions
from sparsync_lab.scheme_choice import parse_schemes
from studies.bench import frame
from studies.bench.frame import Row

WARMUP = 3
HOOK = "bf16 hook"
FORMATS = ",".join(f"quantized:values={values}" for values in ("int8", "int4", "int3", "ternary", "sign"))
SCHEMES = f"{FORMATS},two_shot:density=1.0:values=int4,bf16"
TOLERANCE = 1.0  # of the mean, relative, in the 2-norm: signs carry little of a single step
Seconds = list[tuple[float, float]]  # of a reduction and the plain pass, by round
Reduce = Callable[[Tensor, int], object]


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for ranks in map(int, options.ranks.split(",")):
        found = _passes(LocalWorld(ranks).run(lambda comm: _measured(comm, options)))
        rows += [{"case": label, "ranks": ranks, "n": options.n, **each} for label, each in found.items()]
    about = {"rounds": options.rounds, "backend": backend(), **versions(), "machine": machine()}
    frame.write([row | about for row in rows])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.options("reductions", __doc__)
    add = parser.add_argument
    add("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    add("--n", type=lambda text: int(float(text)), default=4_000_000, help="elements (default: 4e6)")
    add("--schemes", default=SCHEMES, help="by commas (default: formats of `quantized`, `two_shot`, `bf16`)")
    add("--rounds", type=int, default=12, help="in which every case is measured once (default: 12)")
    return parser.parse_args(arguments)


def _labels(schemes: str) -> list[str]:
    return [*(choice.label for choice in parse_schemes(schemes, 1.0)), HOOK]


def _reduce(label: str, comm: Comm) -> Reduce:
    """Make a function that reduces a gradient in place, for the label of a scheme or the hook."""
    if label == HOOK:
        return lambda grad, _: grad.copy_(comm.all_reduce(grad.to(torch.bfloat16).div_(comm.size)))
    (choice,) = parse_schemes(label, 1.0)
    state = choice.make().start()
    return lambda grad, number: state.reduce(Bucket("all", grad, number), comm)


def _given(n: int, rank: int) -> Tensor:
    return torch.randn(n, generator=generator(0, "reductions", rank))


def _measured(comm: LocalComm, options: argparse.Namespace) -> dict[str, Seconds]:
    """Time each case and the plain pass in each round, in seconds of this thread."""
    given, grad, other = _given(options.n, comm.rank), torch.empty(options.n), torch.ones(options.n)
    mean = sum((_given(options.n, rank) for rank in range(1, comm.size)), _given(options.n, 0)) / comm.size
    cases = {label: _reduce(label, comm) for label in _labels(options.schemes)}

    def measured(label: str, number: int) -> tuple[float, float]:
        grad.copy_(given)
        start = time.thread_time()
        cases[label](grad, number)
        middle = time.thread_time()
        if number == 0 and float((grad - mean).norm() / mean.norm()) > TOLERANCE:
            raise RuntimeError(f"{label!r} gives another mean than the exact one of {comm.size} ranks")
        begun = time.thread_time()
        torch.add(given, other, out=grad)
        return middle - start, time.thread_time() - begun

    return dict(zip(cases, frame.interleaved(list(cases), measured, options.rounds, WARMUP), strict=True))


def _passes(ranks: Sequence[dict[str, Seconds]]) -> dict[str, Row]:
    """Compute the figures of each case. Seconds are averaged over ranks: in an all-reduce of threads, one rank sums what all send."""
    found: dict[str, Row] = {}
    for label in ranks[0]:
        rounds = [list(zip(*each, strict=True)) for each in zip(*(own[label] for own in ranks), strict=True)]
        seconds = [(statistics.mean(own), statistics.median(plain)) for own, plain in rounds]
        found[label] = {
            "reduce_s": statistics.median(own for own, _ in seconds),
            "passes": statistics.median(own / plain for own, plain in seconds),
        }
    return found
