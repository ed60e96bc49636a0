"""Mass: everything that came in is written, kept back, or left out by a rank that the report counts."""

import torch
from torch import Tensor

from invariants.table import Row, cases, rows
from invariants.world import COUNT, assert_mass, exact_steps, integer_sum, integers, run, silence, trace


@cases(lambda row: row.has_residual)
def test_what_is_not_written_stays_in_the_residuals(row: Row, P: int) -> None:
    assert_mass(exact_steps(row, P), torch.zeros(COUNT, dtype=torch.float64))


def contributors(row: Row, P: int) -> list[Tensor]:
    """Who is in each element of the result of each step, read from the bits of the sum: bool [P, n]."""
    found = []
    for step in trace(row.by_ranks or row.id, P)[: row.observes + 2]:
        total = (step.written[0].double() * P).round().long()
        marked = torch.stack([grad.long() for grad in step.grads])  # [P, n]
        found.append((total & marked).bool())
    return found


@cases(lambda row: not row.has_residual)
def test_the_written_mean_is_the_sum_of_its_contributors_over_their_number(row: Row, P: int) -> None:
    for step, there in zip(exact_steps(row, P), contributors(row, P), strict=True):
        total = integer_sum([grad * mine for grad, mine in zip(step.grads, there, strict=True)]).float()
        assert torch.equal(step.written[0], total / (P if row.by_ranks is None else there.sum(dim=0).clamp(min=1)))


@cases(lambda row: not row.has_residual and row.wire_bits >= 16)  # where every rank is marked at every step
def test_the_report_counts_exactly_the_elements_each_rank_put_in(row: Row, P: int) -> None:
    for step, there in zip(exact_steps(row, P), contributors(row, P), strict=True):
        assert [report.selected for report in step.reports] == there.sum(dim=1).tolist()
        assert {report.union for report in step.reports} == {int(there.any(dim=0).sum())}
        assert {report.elements for report in step.reports} == {COUNT}


@rows(lambda row: row.delivers)
def test_what_was_kept_back_arrives_once_gradients_are_zero(row: Row) -> None:
    """Random shifts reach every slice within two rounds of P steps; the others send at least one more element at each step."""
    P, n = 4, 8
    schemes = [row.make() for _ in range(P)]
    first = run(schemes, integers(P, n, 1))[0]
    after = silence(schemes, n, first_step=1, at_most=2 * P if row.id.startswith("skip") else P * n)
    written = integer_sum([step.written[0] for step in [first, *after]])
    assert torch.equal(P * written, integer_sum(first.grads))
