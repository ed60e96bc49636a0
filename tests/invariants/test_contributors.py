"""Contributors: rank r sends 2^r in every element, so the bits of each sum show its ranks, which must be the plan's.

The same runs show each rank's traffic and its contribution to the residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from torch import Tensor

from sparsync import Bucket
from sparsync.collectives.skipping import SkipPlan, all_reduce_, first_offsets, hierarchical_all_reduce_
from sparsync.comm import Cost, LocalWorld, MeteredComm
from sparsync.core import Comm, SpanSet, generator, laid_out, spans
from sparsync.schemes import SkipReduce, Span
from sparsync.schemes.skip_reduce import Form
from sparsync_lab.predict.collectives import direct_exchanges, hierarchical_exchanges, ring_exchanges
from sparsync_lab.predict.exchanges import Exchange, Plan

SMALL_WORLDS = (1, 2, 3, 4, 5, 8)  # with every skip and shift
COUNTS = (97, 5)  # more and, from six ranks on, fewer elements than ranks
FLOAT_NBYTES = 4
FORMS: tuple[Form, ...] = ("ring", "direct")


@dataclass(frozen=True)
class Contributed:
    """The state of one rank after one skipping all-reduce."""

    total: Tensor
    left_out: Tensor  # for the residual
    sent: Cost


def reduce_marks(P: int, n: int, plans: Sequence[SkipPlan], form: Form, node_size: int = 1) -> list[list[Contributed]]:
    """Reduce with each plan, and return every rank's state, [plan][rank]."""

    def body(comm: MeteredComm) -> list[Contributed]:
        seen = []
        for plan in plans:
            total, left_out = torch.full((n,), float(2**comm.rank)), torch.zeros(n)
            if node_size == 1:
                all_reduce_(total, comm, plan, left_out, form=form)
            else:
                hierarchical_all_reduce_(total, comm, node_size, plan, left_out, form=form)
            seen.append(Contributed(total, left_out, comm.take()[0]))
        return seen

    per_rank = LocalWorld(P).run(lambda comm: body(MeteredComm(comm)))
    return [list(ranks) for ranks in zip(*per_rank, strict=True)]


def contributors(plan: SkipPlan, chunk: int, P: int) -> frozenset[int]:
    """Compute the P - s positions whose gradients are in the sum of this chunk."""
    owner = (chunk - plan.shift) % P
    return frozenset((owner + i) % P for i in range(P) if i not in plan.offsets)


def marks_of(ranks: frozenset[int]) -> float:
    return float(sum(2**rank for rank in ranks))


def planned(n: int, P: int, plan: SkipPlan) -> Tensor:
    """Compute the sums of the plan's contributor sets."""
    total = torch.empty(n)
    for number, span in enumerate(spans(n, P)):
        span.of(total).fill_(marks_of(contributors(plan, number, P)))
    return total


def assert_as_planned(seen: list[Contributed], n: int, P: int, plan: SkipPlan, form: Form) -> None:
    expected = planned(n, P, plan)
    for rank, one in enumerate(seen):
        assert torch.equal(one.total, expected)
        missing = (expected.long() & 2**rank) == 0
        assert torch.equal(one.left_out, torch.where(missing, float(2**rank), 0.0))
    if form == "ring":
        assert_sent_as_planned(seen, ring_exchanges(n, FLOAT_NBYTES, P, plan.skip))
    else:
        assert_sent_as_planned(seen, direct_exchanges(n, FLOAT_NBYTES, P, plan.skip))
    messages = 2 * (P - 1) - plan.skip
    assert sum(one.sent.nbytes for one in seen) == messages * n * FLOAT_NBYTES
    if n >= P:
        assert {one.sent.messages for one in seen} == {messages}


def assert_sent_as_planned(seen: list[Contributed], exchanges: Sequence[Exchange]) -> None:
    """Check the traffic: each exchange may have another busiest rank, whose bytes and messages the closed form adds up."""
    form = Plan(tuple(exchanges)).cost()
    for one in seen:
        assert one.sent.steps == form.steps and one.sent.messages <= form.messages and one.sent.nbytes <= form.nbytes


def ring_plans(P: int) -> list[SkipPlan]:
    return [SkipPlan(tuple(range(1, skip + 1)), shift) for skip in range(P) for shift in range(P)]


@pytest.mark.parametrize(
    ("P", "n"),
    [pytest.param(P, n, marks=pytest.mark.slow if P == 8 and n != 5 else ()) for P in SMALL_WORLDS for n in COUNTS],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_skip_and_shift_sums_the_planned_ranks(form: Form, P: int, n: int) -> None:
    for plan, seen in zip(ring_plans(P), reduce_marks(P, n, ring_plans(P), form), strict=True):
        assert_as_planned(seen, n, P, plan, form)


@pytest.mark.parametrize("P", [P for P in SMALL_WORLDS if P <= 5])
def test_the_direct_form_leaves_out_any_set_of_offsets(P: int) -> None:
    sets = [chosen for size in range(P) for chosen in combinations(range(1, P), size)]
    plans = [SkipPlan(chosen, shift) for chosen in sets for shift in range(P)]
    for plan, seen in zip(plans, reduce_marks(P, 97, plans, "direct"), strict=True):
        assert_as_planned(seen, 97, P, plan, "direct")


NODES = [(2, 1), (2, 2), (2, 3), (2, 8), (3, 3), (4, 2), (4, 4), (5, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("G", "N"), [pytest.param(G, N, id=f"{N}nodes-of-{G}") for G, N in NODES])
@pytest.mark.parametrize("form", FORMS)
def test_two_levels_leave_out_whole_nodes_of_each_shard(form: Form, G: int, N: int) -> None:
    P = G * N
    plans = ring_plans(N) if N < 8 else [SkipPlan(first_offsets(skip), (3 * skip) % N) for skip in range(N)]
    for n in COUNTS:
        for plan, seen in zip(plans, reduce_marks(P, n, plans, form, node_size=G), strict=True):
            for shard in spans(n, G):
                assert_nodes_as_planned(seen, shard, G, N, plan)
            assert_sent_as_planned(seen, hierarchical_exchanges(n, FLOAT_NBYTES, P, G, form, plan.skip))


def assert_nodes_as_planned(seen: list[Contributed], shard: Span, G: int, N: int, plan: SkipPlan) -> None:
    """Check that the shard holds the sums of contributing nodes, and that its rank alone has the rest for its residual."""
    for number, span in enumerate(spans(len(shard), N)):
        here = slice(shard.start + span.start, shard.start + span.stop)
        nodes = contributors(plan, number, N)
        there = frozenset(node * G + place for node in nodes for place in range(G))
        lost = frozenset(range(G * N)) - there
        for one in seen:
            assert torch.equal(one.total[here], torch.full((len(span),), marks_of(there)))
        left_out = torch.stack([one.left_out[here] for one in seen]).sum(dim=0)
        assert torch.equal(left_out, torch.full((len(span),), marks_of(lost)))


@pytest.mark.parametrize("node_size", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_protected_has_the_bits_that_a_reduction_of_its_own_gives(form: Form, node_size: int) -> None:
    """Check also that the rest, and what it leaves out, match a separate reduction; chunks do not divide the elements evenly."""
    P, skip = 4 * node_size, 2
    slots = laid_out([("a", 31), ("keep.a", 5), ("b", 1), ("keep.b", 22), ("c", 38)])
    keep = [entry.name.startswith("keep") for entry in slots]
    parts = [
        SpanSet.of(entry for entry, kept in zip(slots, keep, strict=True) if kept == wanted) for wanted in (True, False)
    ]
    n = slots[-1].span.stop

    def apart(comm: Comm, x: Tensor, left_out: Tensor, plan: SkipPlan) -> None:
        for where, its_plan in zip(parts, (SkipPlan(shift=plan.shift), plan), strict=True):
            mine, its_left_out = where.take(x), where.take(left_out)
            if node_size == 1:
                all_reduce_(mine, comm, its_plan, its_left_out, form=form)
            else:
                hierarchical_all_reduce_(mine, comm, node_size, its_plan, its_left_out, form=form)
            where.put_(x, mine / P)
            where.put_(left_out, its_left_out)

    def body(comm: Comm) -> None:
        scheme = SkipReduce(skip, protect=["keep*"], form=form, node_size=node_size, feedback=True)
        state, before = scheme.start(), torch.zeros(n)
        for step in range(5):
            grad = torch.randn(n, generator=generator(comm.rank, "reals", step))
            expected, left_out = grad + before, torch.zeros(n)
            bucket = Bucket("b", grad, step, slots)
            apart(comm, expected, left_out, scheme._skip_plan(bucket, comm.size))
            state.reduce(bucket, comm)
            before = state.residual(bucket).clone()
            assert torch.equal(bucket.grad, expected)
            assert torch.equal(before, left_out)

    LocalWorld(P).run(body)
