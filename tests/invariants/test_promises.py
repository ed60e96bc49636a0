"""Further promises of our schemes: the ranks in each mean, the numbers in reports, how fast residuals are sent."""

import torch
from torch import Tensor

from invariants.table import FIRST_OF_FAMILIES, Row, cases, rows
from invariants.world import marked
from sparsync.testing.world import COUNT, integer_sum, integers, run


def contributors(row: Row, P: int) -> list[Tensor]:
    """Read from the sums' bits which ranks are in each element of each step's result: bool [P, n]."""
    found = []
    for step in marked(row.by_ranks or row.id, P):
        total = (step.written[0].double() * P).round().long()
        marks = torch.stack([grad.long() for grad in step.grads])  # [P, n]
        found.append((total & marks).bool())
    return found


@cases(lambda row: not row.has_residual)
def test_the_written_mean_is_the_sum_of_its_contributors_over_their_number(row: Row, P: int) -> None:
    for step, there in zip(marked(row.id, P), contributors(row, P), strict=True):
        total = integer_sum([grad * mine for grad, mine in zip(step.grads, there, strict=True)]).float()
        assert torch.equal(step.written[0], total / (P if row.by_ranks is None else there.sum(dim=0).clamp(min=1)))


@cases(lambda row: not row.has_residual and row.wire_bits >= 16)  # where every rank is marked at every step
def test_the_report_counts_exactly_the_elements_each_rank_put_in(row: Row, P: int) -> None:
    for step, there in zip(marked(row.id, P), contributors(row, P), strict=True):
        assert [report.selected for report in step.reports] == there.sum(dim=1).tolist()
        assert {report.union for report in step.reports} == {int(there.any(dim=0).sum())}
        assert {report.elements for report in step.reports} == {COUNT}


@rows(lambda row: row.has_residual and row.id.startswith("skip") and "naive" not in row.id)
def test_what_skipping_left_out_arrives_within_two_rounds(row: Row) -> None:
    """Random shifts reach every chunk within two rounds of P steps."""
    P, n = 4, 8
    schemes, nothing = row.subject.start(P), [torch.zeros(8)] * 4
    first = run(schemes, integers(P, n, row.observes + 1))
    rest = run(schemes, [nothing] * 2 * P, first_step=len(first))
    assert not any(residual.any() for residual in rest[-1].residuals)


@rows(lambda row: row.has_residual and row.id in FIRST_OF_FAMILIES)
def test_the_residual_has_at_least_single_precision(row: Row) -> None:
    single, double = torch.float32, torch.float64
    for dtype, precision in ((torch.bfloat16, single), (single, single), (double, double)):
        schemes = row.subject.start(row.subject.world(2))
        run(schemes, integers(len(schemes), COUNT, 1, dtype=dtype))
        assert {part.dtype for part in schemes[0].state_dict()["residual"].values()} == {precision}
