"""InTurn: values worked out by hand, whose turn it is, what waits where, and the bytes, which are known beforehand."""

import pytest
import torch
from torch import Tensor

from helpers.reducing import reduced
from sparsync.core import generator, spans
from sparsync.schemes import InTurn, TwoShot
from sparsync.selection.turns import Turns
from sparsync.wire import Values

CPU = torch.device("cpu")


def integers(P: int, n: int, step: int = 0) -> list[Tensor]:
    drawn = [torch.randint(-8, 9, (n,), generator=generator(rank, "in-turn", step)) for rank in range(P)]
    return [P * each.double() for each in drawn]


def test_two_ranks_by_hand() -> None:
    """Elements 0, 6 are rank 0's and 1, 7 rank 1's in the first turn; 3, 4 and 2, 5 in the second."""
    schemes = [InTurn(every=2, values="sign", values_down="float32").start() for _ in range(2)]
    given = [torch.tensor([8.0, 4, 1, 1, 1, 1, 0, -12]), torch.tensor([2.0, 16, 1, 1, 1, 1, -6, 0])]
    mean, reports, residuals = reduced(schemes, given, 0)
    # To rank 1 as signs, 4 and -12 are 8 and -8; to rank 0, 2 and -6 are 4 and -4. Owners add their own as they are.
    assert mean.tolist() == [(8 + 4) / 2, (16 + 8) / 2, 0, 0, 0, 0, (0 - 4) / 2, (0 - 8) / 2]
    assert residuals[0].tolist() == [0, 4 - 8, 1, 1, 1, 1, 0, -12 + 8]
    assert residuals[1].tolist() == [2 - 4, 0, 1, 1, 1, 1, -6 + 4, 0]
    assert [(report.selected, report.union) for report in reports] == [(4, 4)] * 2
    # Now the others: what waited, and what comes in.
    mean, _, residuals = reduced(schemes, [torch.full((8,), 2.0), torch.zeros(8)], 1)
    assert mean.tolist() == [0, 0, 2, 2, 2, 2, 0, 0]
    assert residuals[0].tolist() == [2, -2, 0, 0, 0, 0, 2, -2]
    assert residuals[1].tolist() == [-2, 0, 0, 0, 0, 0, -2, 0]


SIZES = [
    *((1, 1, 4), (5, 4, 4), (97, 4, 3), (12345, 5, 7)),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 4, 4), (1000, 4, 16), (16401, 3, 16), (4096, 1, 4))),
]


@pytest.mark.parametrize(("n", "P", "every"), SIZES)
def test_each_element_has_one_turn_with_one_owner(n: int, P: int, every: int) -> None:
    turns, position = Turns(n, P, every), torch.arange(n)
    assert 1 <= turns.count <= every
    found = torch.full((n,), -1)
    for number in range(turns.count):
        turn = turns.at(number, CPU)
        taken = turn.of(position)
        assert 1 <= taken.numel() == turns.length(number)
        assert taken.unique().numel() == taken.numel()
        assert (found[taken] == -1).all()
        turn.put_(found, taken)
        for p, part in enumerate(spans(taken.numel(), P)):
            assert torch.isin(
                part.of(taken), turns.regions.positions(p, torch.arange(turns.regions.lengths()[p]))
            ).all()
    assert torch.equal(found, position)
    assert torch.equal(turns.at(turns.count, CPU).of(position), turns.at(0, CPU).of(position))


def test_turns_are_about_equal_and_take_elements_of_each_column() -> None:
    P, every = 4, 4
    columns, n = 32 * P * every, 32 * P * every * 256
    turns = [Turns(n, P, every).at(number, CPU).of(torch.arange(n)) for number in range(every)]
    lengths = [each.numel() for each in turns]
    assert max(lengths) - min(lengths) <= 32 * P
    for each in turns:
        assert (each % columns).unique().numel() == columns


@pytest.mark.parametrize("P", [1, 4])
def test_with_one_turn_it_is_two_shot_of_all_elements(P: int) -> None:
    given, equal = integers(P, 999), [torch.full((999,), 2.0 * rank) for rank in range(P)]
    cases: list[tuple[Values, Values, list[Tensor]]] = [("float32", "float32", given), ("sign", "int8", equal)]
    for values, values_down, grads in cases:
        schemes = [InTurn(1, values, values_down).start() for _ in range(P)]
        others = [TwoShot(1.0, values, values_down=values_down).start() for _ in range(P)]
        mean, reports, residuals = reduced(schemes, grads, 0)
        wanted, costs, errors = reduced(others, grads, 0)
        assert torch.equal(mean, wanted)
        assert torch.equal(torch.stack(residuals).sum(0), torch.stack(errors).sum(0))
        assert [report.cost for report in reports] == [report.cost for report in costs]
    assert not InTurn(1).leaves_out and InTurn(2).leaves_out


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("step", [2, 3])
def test_what_is_not_finite_shows_on_all_ranks_whoever_has_the_turn(step: int, number: float) -> None:
    schemes = [InTurn(2).start() for _ in range(4)]
    reduced(schemes, integers(4, 100), 0)
    *_, before = reduced(schemes, integers(4, 100, 1), 1)
    given = integers(4, 100, 2)
    given[3][7] = number
    mean, reports, residuals = reduced(schemes, given, step)
    assert mean.isnan().any()
    assert all(report.details["overflow"] for report in reports)
    assert all(torch.equal(*pair) for pair in zip(residuals, before, strict=True))


@pytest.mark.parametrize(("stride", "every"), [(2, 2), (2, 4), (4, 4), (3, 6), (16, 16)])
def test_a_bucket_that_is_reduced_in_every_nth_step_has_all_turns(stride: int, every: int) -> None:
    turns = Turns(4096, 2, every)
    seen = {turns.number(step) for step in range(0, 40 * stride * every, stride)}
    assert seen == set(range(turns.count)) and turns.count == every
