"""Published schemes to compare with: what their papers promise, and what they refuse. Invariants are in tests/invariants."""

from typing import Any

import pytest
import torch

from helpers.reducing import reduced
from sparsync.comm import LocalWorld, MeteredComm
from sparsync.core import Sparse
from sparsync.schemes.topk_allgather import TopK
from sparsync.testing.world import COUNT, integers, reals, run, same_bits, started
from sparsync.wire import Raw
from sparsync_lab.rivals.gtopk import GTopK, rounds, tree_top_k
from sparsync_lab.rivals.loco import LoCo
from sparsync_lab.rivals.topk_dsa import TopKDSA

# ---- TopkDSA


@pytest.mark.parametrize("dense_from", [None, 0.0, 1 / 3])
def test_dsa_writes_what_topk_writes(dense_from: float | None) -> None:
    P, grads = 4, integers(4, COUNT, 3)
    expected = run([TopK(0.1).start() for _ in range(P)], grads)
    for step, topk in zip(run([TopKDSA(0.1, dense_from).start() for _ in range(P)], grads), expected, strict=True):
        assert torch.equal(step.written[0], topk.written[0])
        assert all(map(same_bits, step.residuals, topk.residuals))
        assert step.reports[0].details["dense"] == (dense_from == 0 or bool(dense_from and step.reports[0].union > 32))


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
        assert step.counted == [report.cost for report in step.reports]


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


# ---- LoCo


def test_loco_sends_four_bits_of_a_gradient_corrected_by_the_average_of_its_errors() -> None:
    schemes = started(LoCo(values_down="float32", reset_every=3), 2)
    # Rank 0 owns the first two elements. Its share of the others has the scale 1, so that of 1 rounds to 0.
    first = [torch.tensor([0.0, 0.0, 14.0, 1.0]), torch.zeros(4)]

    found = [reduced(schemes, given, step) for step, given in enumerate((first, [torch.zeros(4)] * 2, first))]
    (mean, error), (second, fallen), (_, cleared) = ((mean.tolist(), errors[0].tolist()) for mean, _, errors in found)
    assert mean == [0.0, 0.0, 7.0, 0.0]
    assert error == pytest.approx([0.0, 0.0, 0.0, 0.2], rel=0.01)  # a fifth of 1, in 8 bits
    assert second == pytest.approx([0.0, 0.0, 0.0, 0.1], rel=0.02)  # the mean over ranks of what the error corrects
    assert fallen == pytest.approx([0.0, 0.0, 0.0, 0.16], rel=0.02)  # nearly nothing was rounded, and the average falls
    assert cleared == [0.0] * 4
