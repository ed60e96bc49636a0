"""The claims of the thesis on ring gradient pruning: no positions, no computing, any number of ranks, and a small loss."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsync import Bucket, Scheme
from sparsync.comm import LocalWorld
from sparsync.core import Comm, generator, laid_out
from sparsync.schemes import SkipReduce, TopK
from studies import parts
from studies.papers import Claim, Section, kept, skip_reduce

RANKS, COUNT = (2, 3, 5, 8, 16), 720_720  # divisible by all of RANKS
PAIRS = 15
P = skip_reduce.P


class Touched(TorchDispatchMode):
    """Count the elements that torch's operations write, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's signature
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.elements[func.overloadpacket.__name__] += result.numel()
        return result


def operations(scheme: Scheme) -> dict[str, float]:
    """Count the elements that rank 0 adds, and that it writes in all, per element of the gradient."""

    def reduce(comm: Comm, bucket: Bucket) -> dict[str, float]:
        with Touched() as touched:
            scheme.start().reduce(bucket, comm)
        names = {name.rstrip("_"): 0.0 for name in touched.elements}
        for name, count in touched.elements.items():
            names[name.rstrip("_")] += count / COUNT
        return names

    return in_world(reduce)[0]


def thread_times(schemes: Sequence[Scheme]) -> list[list[float]]:
    """Measure the processor time of a reduction on rank 0, each scheme in turn, many times: interleaved, because others use the machine."""

    def reduce(scheme: Scheme) -> Callable[[Comm, Bucket], float]:
        def timed(comm: Comm, bucket: Bucket) -> float:
            state, began = scheme.start(), time.thread_time()
            state.reduce(bucket, comm)
            return time.thread_time() - began

        return timed

    return [[in_world(reduce(scheme))[0] for scheme in schemes] for _ in range(PAIRS)]


def in_world(body: Callable[[Comm, Bucket], Any]) -> list[Any]:
    """Run `body` on each of P ranks with a gradient."""
    layout = laid_out([("weight", COUNT)])

    def program(comm: Comm) -> Any:
        gradient = torch.randn(COUNT, generator=generator(comm.rank, "gradient", 0))
        return body(comm, Bucket("bucket0", gradient, 0, layout))

    return LocalWorld(P).run(program)


def ratio(times: Sequence[Sequence[float]], scheme: int) -> str:
    """Format the median of a scheme's time over the first one's in the same turn, with the quartiles."""
    low, middle, high = quantiles([each[scheme] / each[0] for each in times], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def any_ranks_exact() -> bool:
    """Check `ring_pruning` at half of the ranks for every number of ranks: its rounds and bytes are the form's, and replicas are equal."""
    for P in RANKS:
        skip = P // 2
        sent = skip_reduce.counted(P, SkipReduce.ring_pruning(skip), COUNT)
        uneven = skip_reduce.counted(P, SkipReduce.ring_pruning(skip), COUNT + 1)
        if set(sent) != {(*skip_reduce.expected(P, skip, COUNT), True)} or not all(same for *_, same in uneven):
            return False
    return True


def section(folder: Path) -> Section:
    """Measure all, and format the claims with their tables."""
    torch.set_num_threads(1)
    schemes: dict[str, Scheme] = {
        "dense ring": SkipReduce(0),
        f"`ring_pruning`, s = {P // 2}": SkipReduce.ring_pruning(P // 2),
        f"`skip_reduce`, s = {P // 2}": SkipReduce(P // 2),
        "`topk`, density 0.01": TopK(density=0.01),
    }
    done = {shown: operations(scheme) for shown, scheme in schemes.items()}
    times = kept(folder, "thesis-times", lambda: thread_times(list(schemes.values())))
    found = {name: skip_reduce.trained(folder / f"skip_reduce-{name}", job) for name, job in skip_reduce.JOBS.items()}
    exact, words = any_ranks_exact(), [skip_reduce.expected(P, skip, COUNT)[1] / 4 / COUNT for skip in (P // 2, 0)]
    dense, pruning = list(schemes)[:2]
    # Compiled kernels select the largest elements; torch does not see what they write.
    seen = {shown: shown != list(schemes)[-1] for shown in schemes}
    rows = [
        [
            shown,
            f"{each.get('add', 0):.3f}" if seen[shown] else "-",
            f"{sum(each.values()):.2f}" if seen[shown] else "-",
            ratio(times, place) if place else "1",
        ]
        for place, (shown, each) in enumerate(done.items())
    ]
    lost = {
        kind: {name: skip_reduce.mean_gap(each, kind) for name, each in found.items()}
        for kind in ("`ring_pruning`", "random")
    }
    gaps = {kind: ", ".join(f"{gap:+.1f} % ({name})" for name, gap in each.items()) for kind, each in lost.items()}
    return Section(
        [
            Claim(
                "pruning without positions",
                f"{words[0]:.3f} words per element at {skip_reduce.MIDDLE} of {P}, a dense ring {words[1]:.3f}",
                "reproduced" if exact else "not reproduced",
            ),
            Claim(
                "no computing beside the all-reduce",
                f"{done[pruning]['add']:.3f} additions per element, a dense ring {done[dense]['add']:.3f}; processor "
                f"time {ratio(times, 1)} of dense's",
                "reproduced: a ring that adds less" if done[pruning]["add"] < done[dense]["add"] else "not reproduced",
            ),
            Claim(
                "any number of devices",
                f"P = {', '.join(map(str, RANKS))}: exact counts, and equal replicas also for lengths that P does not divide",
                "reproduced" if exact else "not reproduced",
            ),
            Claim(
                "converges with minimal loss",
                f"perplexity over dense in equal time, so with {skip_reduce.steps_in_time(f'skip={P // 2}')} steps for "
                f"{skip_reduce.STEPS}: {gaps['`ring_pruning`']}; the random form {gaps['random']}",
                "reproduced in equal time"
                if max(lost["`ring_pruning`"].values()) <= 1
                else "here the loss is not minimal",
            ),
        ],
        "\n\n".join(
            [
                f"{COUNT:,} elements, {P} ranks; additions and elements written, per element of the gradient, and a thread's time over "
                f"the dense ring's in the same turn (median and quartiles of {PAIRS}):",
                parts.table(["scheme", "additions", "elements written", "processor time"], rows),
            ]
        ),
    )
