"""The parts of a sparse all-reduce: who holds how much, the exchanges and their costs, and the shares of the regions."""

from dataclasses import astuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from helpers.reference import reference
from sparsync.collectives import sparse_allreduce
from sparsync.comm import Cost, LocalWorld, MeteredComm
from sparsync.core import FOUND_INF, NonFiniteError, Span, Sparse, generator
from sparsync.kernels import put_
from sparsync.wire import Elements, Raw
from sparsync_lab.predict import collectives
from sparsync_lab.predict.exchanges import Plan


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_moves_turn_what_is_held_into_what_is_wanted(held: list[int], random: object) -> None:
    wanted = list(reversed(held))
    after = list(held)
    for (giver, taker), count in sparse_allreduce.moves(held, wanted).items():
        assert count > 0
        after[giver] -= count
        after[taker] += count
    assert after == wanted
    assert len(sparse_allreduce.moves(held, wanted)) < 2 * len(held)


def test_at_least_selects_what_is_level_but_never_zeros() -> None:
    assert reference.select_ge(torch.tensor([0.0, -2.0, 1.0, float("nan")]), 2.0).index.tolist() == [1, 3]
    assert reference.select_ge(torch.tensor([0.0, -2.0, 1.0]), 0.0).index.tolist() == [1, 2]


@pytest.mark.parametrize("counts_first", [False, True])
@pytest.mark.parametrize("codec", [Raw(), Elements(), Elements("bfloat16")], ids=["raw", "float32", "bfloat16"])
def test_each_exchange_sends_what_its_form_says(codec: sparse_allreduce.ElementCodec, counts_first: bool) -> None:
    held, P = [7, 0, 3, 2], 4
    cut, lengths, wanted = [Span(0, 10), Span(10, 20), Span(20, 30), Span(30, 40)], [10] * P, [3] * P

    def body(comm: MeteredComm) -> list[Cost]:
        count, region, counted = held[comm.rank], torch.zeros(10), []
        index = torch.tensor([10 * r + j for r in range(P) for j in range(3)], dtype=torch.int32)
        even = Sparse(index, torch.ones(12), 40)
        sparse_allreduce.split_and_reduce_(torch.zeros(10), even, cut, comm, codec, counts_first=counts_first)
        counted.append(comm.take()[0])
        mine = Sparse(torch.arange(count, dtype=torch.int32) + 10 * comm.rank, torch.ones(count), 40)
        sparse_allreduce.split_and_reduce_(region, mine, cut, comm, codec, counts_first=counts_first)
        assert region.sum() == count
        moved, places = sparse_allreduce.balance(mine, held, wanted, cut, comm, codec)
        comm.take()
        assert moved.index.numel() == 3
        everything, read = sparse_allreduce.all_gather_elements(moved, wanted, places, comm, codec)
        counted.append(comm.take()[0])
        assert torch.equal(read, moved.value)
        assert everything.index.tolist() == [*range(7), 20, 21, 22, 30, 31]
        own = Sparse(mine.index - cut[comm.rank].start, mine.value, 10)
        note = torch.tensor([comm.rank], dtype=torch.int32)
        gathered = sparse_allreduce.gather_survivors(own, note, cut, 40, comm, codec)
        counted.append(comm.take()[0])
        assert torch.cat([part.index for part in gathered.parts]).tolist() == everything.index.tolist()
        assert gathered.notes == [*range(P)] and torch.equal(gathered.decoded, mine.value)
        return counted

    forms = [
        Plan(tuple(collectives.even_split_exchanges(9, 40, P, torch.float32, codec, counts_first))),
        Plan((collectives.gather_elements_exchange(wanted, [40] * P, torch.float32, codec),)),
        Plan((collectives.gather_survivors_exchange(held, lengths, torch.float32, codec),)),
    ]
    ranks = LocalWorld(P).run(lambda comm: body(MeteredComm(comm)))
    for form, counted in zip(forms, zip(*ranks, strict=True), strict=True):
        assert astuple(form.cost()) == tuple(map(max, zip(*map(astuple, counted), strict=True)))


def test_nan_on_one_rank_is_noted_by_all_with_the_survivors() -> None:
    def body(comm: MeteredComm) -> None:
        mine = Sparse(torch.tensor([1], dtype=torch.int32), torch.ones(1), 4)
        cut = [Span(4 * r, 4 * r + 4) for r in range(3)]
        note = torch.tensor([FOUND_INF if comm.rank == 1 else 7], dtype=torch.int32)
        with pytest.raises(NonFiniteError):
            sparse_allreduce.gather_survivors(mine, note, cut, 12, comm, Raw())

    LocalWorld(3).run(lambda comm: body(MeteredComm(comm)))


@pytest.mark.parametrize("counts", [[-1], [11], [3]])
def test_a_packet_whose_count_cannot_be_its_own_is_refused(counts: list[int]) -> None:
    """A packet of two elements, with another count at its head."""
    packet = Elements().encode(Sparse(torch.tensor([0, 9], dtype=torch.int32), torch.ones(2), 10))
    heads = sparse_allreduce.counts_as_bytes(counts, packet.device)
    (count,), (rest,) = sparse_allreduce.heads_and_packets([torch.cat([*heads, packet])])
    assert torch.equal(rest, packet)
    with pytest.raises(RuntimeError, match=r"packet"):
        Elements().decode(rest, int(count), 10, torch.float32)
    with pytest.raises(RuntimeError, match="a packet begins with 4 bytes"):
        sparse_allreduce.heads_and_packets([packet[:3]])


@pytest.mark.parametrize("P", [1, 3, 5])
def test_what_was_there_before_undoes_a_sum_to_the_bit(P: int) -> None:
    """Also where several ranks add to one position, with numbers that additions round."""
    n, k = 40, 25

    def body(comm: MeteredComm) -> None:
        cut = [Span(8 * r, 8 * r + 8 if r < P - 1 else n) for r in range(P)]
        draw = generator(comm.rank, "undo", 0)
        mine = torch.randperm(n, generator=draw)[:k].sort().values.to(torch.int32)
        region = torch.randn(len(cut[comm.rank]), generator=draw)
        before = region.clone()
        part = Sparse(mine, torch.randn(k, generator=draw), n)
        reduced = sparse_allreduce.split_and_reduce_(region, part, cut, comm, Raw(), undoable=True)
        assert reduced.before is not None
        assert not torch.equal(region, before)
        put_(region, reduced.before.index, reduced.before.value)
        assert torch.equal(region, before)

    LocalWorld(P).run(lambda comm: body(MeteredComm(comm)))
