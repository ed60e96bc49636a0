"""The collectives by themselves: halves, edges and closed forms. Contributor sets are tested in tests/invariants/test_contributors.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync.collectives import skipping
from sparsync.collectives.skipping import SkipPlan, first_offsets, skip_count, skips
from sparsync.comm import LocalWorld, MeteredComm
from sparsync.core import spans

FORMS: tuple[skipping.Form, ...] = ("ring", "direct")


def ramp(rank: int, n: int) -> Tensor:
    """Integers that differ between ranks and between positions."""
    return torch.arange(n, dtype=torch.float32) * (rank + 1) + rank


def test_the_direct_form_adds_in_rank_order_and_the_ring_from_its_first_contributor_on() -> None:
    """Both orders are fixed, so replicas and runs agree; they differ from each other where additions round."""
    P, n = 4, 4
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for rank in range(P)]

    def reduced(form: skipping.Form) -> Tensor:
        def body(comm: MeteredComm) -> Tensor:
            x = parts[comm.rank].clone()
            skipping.all_reduce_(x, comm, SkipPlan(), form=form)
            return x

        return LocalWorld(P).run(lambda comm: body(MeteredComm(comm)))[0]

    def added(order: list[int]) -> Tensor:
        total = parts[order[0]].clone()
        for rank in order[1:]:
            total += parts[rank]
        return total

    assert torch.equal(reduced("direct"), added([0, 1, 2, 3]))
    by_slice = torch.stack([added([(c + i) % P for i in range(1, P + 1)])[c] for c in range(P)])
    assert torch.equal(reduced("ring"), by_slice)


def test_kept_gains_what_was_left_out_on_top_of_what_it_held() -> None:
    """What a narrow wire type rounded away is in `kept` already, and must survive."""
    P, n = 3, 6
    plan = SkipPlan(first_offsets(2), 1)
    for form in FORMS:

        def body(comm: MeteredComm, form: skipping.Form = form) -> Tensor:
            kept = torch.full((n,), 0.5)
            skipping.all_reduce_(ramp(comm.rank, n), comm, plan, kept, form=form)
            return kept

        for rank, kept in enumerate(LocalWorld(P).run(lambda comm: body(MeteredComm(comm)))):
            expected = torch.full((n,), 0.5)
            for span in plan.skipped(rank, n, P):
                span.of(expected).add_(span.of(ramp(rank, n)))
            assert torch.equal(kept, expected)


@given(P=st.integers(1, 40), shift=st.integers(0, 39), count=st.integers(0, 100), data=st.data())
def test_what_each_position_loses_is_what_the_contributor_sets_lack(
    P: int, shift: int, count: int, data: st.DataObject
) -> None:
    offsets = data.draw(st.sets(st.integers(1, max(1, P - 1)))) if P > 1 else set()
    plan = SkipPlan(tuple(sorted(offsets)), shift % P)
    slices = spans(count, P)
    for position in range(P):
        lacking = [slices[c] for c in range(P) if skips(position, c - plan.shift, P, plan)]
        key = lambda span: (span.start, span.stop)  # noqa: E731
        assert sorted(plan.skipped(position, count, P), key=key) == sorted(lacking, key=key)


@pytest.mark.parametrize(
    ("share", "P", "skip"),
    [
        (0.0, 8, 0),
        (0.5, 8, 4),
        (0.5, 5, 2),
        (0.5, 3, 1),
        (0.5, 2, 1),
        (0.25, 3, 0),
        (0.1, 10, 1),  # 0.1 * 10 is 1.0, though 0.1 is not a tenth
        (0.7, 10, 7),  # 0.7 * 10 is 7.000000000000001
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
        (0.999999, 4, 3),
        (0.9999999999, 4, 3),  # never all of them
    ],
)
def test_a_share_of_ranks_is_rounded_down(share: float, P: int, skip: int) -> None:
    assert skip_count(share, P) == skip


@pytest.mark.parametrize(("skip", "P"), [(4, 4), (5, 4), (-1, 4), (2, 2)])
def test_a_count_outside_the_world_names_what_is_allowed(skip: int, P: int) -> None:
    with pytest.raises(ValueError, match=rf"skip must be in \[0, {P - 1}\] for {P} ranks, got {skip}"):
        skip_count(skip, P)
    with pytest.raises(ValueError, match=rf"skip must be in \[0, {P - 1}\] for {P} nodes, got {skip}"):
        skip_count(skip, P, "nodes")
