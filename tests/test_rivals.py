"""Published schemes to compare with: what their papers promise, and what they refuse. Invariants are in tests/invariants."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run as run_processes
from invariants.world import COUNT, integers, layout, reals, run, same_bits
from sparsync import Bucket, schemes
from sparsync.comm import GroupComm, LocalWorld, MeteredComm
from sparsync.core import Report, Sparse
from sparsync.schemes.topk_allgather import TopK
from sparsync.wire import Elements, Raw
from sparsync_lab.rivals.gtopk import GTopK
from sparsync_lab.rivals.topk_dsa import TopKDSA
from sparsync_lab.rivals.tree_top_k import cut, rounds, tree_top_k

NAMES = ("gtopk", "topk_dsa")


@pytest.mark.parametrize(
    ("make", "config", "told"),
    [
        (TopKDSA, {"dense_from": 1.5}, r"dense_from must be in \[0, 1\], .*, got 1.5"),
        *[(schemes.get, {"name": name, "density": 0.0}, r"density must be in \(0, 1\]") for name in NAMES],
        *[(schemes.get, {"name": name, "values": "int5"}, "values must be one of .*, got 'int5'") for name in NAMES],
    ],
)
def test_a_bad_setting_names_the_value_and_what_is_allowed(make: Any, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(**config)


@pytest.mark.slow
@pytest.mark.distributed
def test_on_gloo_they_write_and_send_the_same_as_in_one_process() -> None:
    P = 3
    grads = reals(P, COUNT, 2)
    local = {name: run([schemes.get(name, density=0.1).start() for _ in range(P)], grads) for name in NAMES}
    for rank, found in enumerate(run_processes(reduced_on_gloo, P, grads=grads)):
        for name, (written, reports) in found.items():
            for step in range(2):
                # All but the sums of gloo's own all_reduce, which adds in another order.
                torch.testing.assert_close(written[step], local[name][step].written[rank])
                assert reports[step].sent == reports[step].cost == local[name][step].reports[rank].cost


def reduced_on_gloo(grads: list[list[Tensor]]) -> dict[str, tuple[list[Tensor], list[Report]]]:
    comm, found = MeteredComm(GroupComm()), {}
    for name in NAMES:
        scheme, written, reports = schemes.get(name, density=0.1).start(), [], []
        for step, ranks in enumerate(grads):
            bucket = Bucket("bucket0", ranks[comm.rank].clone(), step, layout(COUNT))
            report = scheme.reduce(bucket, comm)
            written.append(bucket.grad)
            reports.append(Report(**{**vars(report), "sent": comm.take()[0]}))
        found[name] = written, reports
    return found


# ---- TopkDSA


@pytest.mark.parametrize("dense_from", [None, 0.0, 1 / 3])
def test_dsa_writes_what_topk_writes(dense_from: float | None) -> None:
    P, grads = 4, integers(4, COUNT, 3)
    expected = run([TopK(0.1).start() for _ in range(P)], grads)
    for step, topk in zip(run([TopKDSA(0.1, dense_from).start() for _ in range(P)], grads), expected, strict=True):
        assert torch.equal(step.written[0], topk.written[0])
        assert all(map(same_bits, step.residuals, topk.residuals))
        assert step.reports[0].details["dense"] == (dense_from == 0 or bool(dense_from and step.reports[0].union > 32))


def test_dsa_turns_dense_where_that_is_shorter() -> None:
    dense = [
        run([TopKDSA(density).start()], reals(1, 1000, 1))[0].reports[0].details["dense"] for density in (0.5, 1.0)
    ]
    assert dense == [False, True]


def test_dsa_sends_less_than_topk_where_ranks_agree() -> None:
    P, n = 8, 4000
    same = [reals(1, n, 1)[0] * P]
    sent = [
        max(report.cost.nbytes for report in run([make(0.05).start() for _ in range(P)], same)[0].reports)
        for make in (TopK, TopKDSA)
    ]
    assert sent[1] < 0.5 * sent[0]


# ---- gTop-k


def test_gtopk_of_two_ranks_is_the_top_k_of_the_sum_of_their_selections() -> None:
    P, k = 2, 9
    grads = reals(P, COUNT, 1)
    step = run([GTopK(0.1).start() for _ in range(P)], grads)[0]
    total = torch.zeros(COUNT)
    for grad in grads[0]:
        own = grad.abs().topk(k).indices
        total[own] += grad[own]
    kept = total.abs().topk(k).indices
    expected = torch.zeros(COUNT).index_copy_(0, kept, total[kept] / P)
    assert torch.equal(step.written[0], expected)


def test_what_a_merge_drops_of_a_survivor_is_in_a_residual() -> None:
    """Ranks 2 and 3 drop position 0 when they merge, which ranks 0 and 1 keep."""
    grads = [torch.zeros(8) for _ in range(4)]
    grads[0][0], grads[1][1] = 100.0, 1.0
    grads[2][0], grads[3][2] = 4.0, 8.0
    step = run([GTopK(0.125).start() for _ in range(4)], [grads])[0]
    assert step.written[0].tolist() == [25.0, *[0.0] * 7]
    assert [residual[0].item() for residual in step.residuals] == [0.0, 0.0, 4.0, 0.0]
    assert step.residuals[3][2] == 8.0


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 7, 8, 16])
def test_gtopk_takes_logarithmically_many_rounds_and_writes_k_elements(P: int) -> None:
    n, k = 4096, 64
    for step in run([GTopK(k / n).start() for _ in range(P)], reals(P, n, 2)):
        assert step.reports[0].union == k
        assert {report.cost.steps for report in step.reports} == {2 * rounds(P)}


def test_a_rank_of_gtopk_sends_once_up_and_to_each_child() -> None:
    P, n, k = 8, 4096, 64

    def body(comm: Any) -> tuple[int, int]:  # Any: a LocalComm
        own = Sparse(torch.arange(k, dtype=torch.int32), torch.ones(k), n)
        metered = MeteredComm(comm)
        tree_top_k(own, metered, Raw())
        return metered.sent.messages, metered.sent.nbytes

    sent = LocalWorld(P).run(body)
    assert [messages for messages, _ in sent] == [3, 1, 2, 1, 3, 1, 2, 1]
    assert all(nbytes == messages * 8 * k for messages, nbytes in sent)


def test_cutting_keeps_the_largest_and_loses_none() -> None:
    elements = Sparse(torch.tensor([1, 4, 6, 9], dtype=torch.int32), torch.tensor([2.0, -3.0, 2.0, 1.0]), 10)
    kept, others = cut(elements, 2)
    assert (kept.index.tolist(), kept.value.tolist()) == ([1, 4], [2.0, -3.0])
    assert (others.index.tolist(), others.value.tolist()) == ([6, 9], [2.0, 1.0])
    assert [part.index.numel() for part in cut(elements, 5)] == [4, 0]


def test_every_codec_of_the_tree_has_a_length_that_is_known() -> None:
    """float16 values, whose packets differ in length from the values' own type."""
    P = 3

    def body(comm: Any) -> Tensor:  # Any: a LocalComm
        own = Sparse(torch.tensor([comm.rank, 5], dtype=torch.int32), torch.tensor([3.0, 6.0]), 10)
        return tree_top_k(own, comm, Elements("float16")).mean.value

    values = LocalWorld(P).run(body)
    assert all(torch.equal(value, values[0]) for value in values)
    assert 6.0 in values[0].tolist()
