"""Parameters that move between buckets: their residuals move with them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.base.state import State
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket, laid_out
from sparsync.testing.checks import check_equal
from sparsync.testing.subject import SchemeUnderTest
from sparsync.testing.world import integer_sum, residual_of

SIZES = {"a": 5, "b": 1, "c": 12, "d": 0, "e": 7}  # parameters that lie in one bucket or another


def check_layouts(subject: SchemeUnderTest, plan: Sequence[Sequence[Sequence[str]]]) -> None:
    """Check that no parameter loses anything at any step, and that replicas agree; `plan[step]` lists the names by bucket."""
    P = subject.world(2)
    source = torch.Generator().manual_seed(1)
    states = subject.start(P)
    for step, buckets in enumerate(plan):
        before = residual_sums(states)
        grads: list[dict[str, Tensor]] = [{} for _ in range(P)]
        for grad in grads:
            for name, size in SIZES.items():
                grad[name] = P * torch.randint(-4, 5, (size,), generator=source).to(subject.exact)
        written = reduce_by_name(states, grads, buckets, step)
        after = residual_sums(states)
        for name in SIZES:
            where = f"P = {P}, parameter {name!r} in buckets {[list(names) for names in buckets]}, step {step}"
            came_in = subject.decay * before[name] + integer_sum([grad[name] for grad in grads])
            total = after[name] + P * written[0][name].double()
            kept, given = "residuals after the step + P x written", "residuals before it, decayed, + gradients"
            if subject.conserves:
                check_equal(where, kept, total, given, came_in, subject.tolerance)
            for rank, mine in enumerate(written):
                place = f"{where}, rank {rank}"
                check_equal(place, "what is written", mine[name], "rank 0 has written", written[0][name])


def reduce_by_name(
    states: Sequence[State], grads: Sequence[dict[str, Tensor]], buckets: Sequence[Sequence[str]], step: int
) -> list[dict[str, Tensor]]:
    """Reduce the parameters of SIZES in these buckets, and return the results by rank and name."""

    def body(comm: LocalComm) -> dict[str, Tensor]:
        written: dict[str, Tensor] = {}
        for number, names in enumerate(buckets):
            parameters = laid_out((name, SIZES[name]) for name in names)
            flat = torch.cat([grads[comm.rank][name] for name in names])
            bucket = Bucket(f"bucket{number}", flat, step, parameters)
            states[comm.rank].reduce(bucket, comm)
            written |= {entry.name: entry.span.of(bucket.grad) for entry in parameters}
        return written

    return LocalWorld(len(states)).run(body)


def residual_sums(states: Sequence[State]) -> dict[str, Tensor]:
    """Sum the residuals of the parameters of SIZES over ranks, float64."""
    by_rank = [state.state_dict()["residual"] for state in states]
    return {name: integer_sum([residual_of(kept, name, n) for kept in by_rank]) for name, n in SIZES.items()}
