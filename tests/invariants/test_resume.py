"""Resume: a saved state continues as if nothing had happened; in a world of another size no mass is lost."""

import io
from typing import Any

import torch

from invariants.table import Row, rows
from invariants.world import COUNT, assert_mass, assert_replicas, integer_sum, integers, reals, run, same_bits, silence
from sparsync.base.scheme import Scheme
from sparsync.feedback import redistributed

UNIT = 240  # a multiple of every world's size below, so that dividing by it is exact


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:  # Any: as Scheme.state_dict
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(row: Row, schemes: list[Scheme]) -> list[Scheme]:
    """New schemes that were given what the old ones saved."""
    fresh = [row.make() for _ in schemes]
    for new, old in zip(fresh, schemes, strict=True):
        new.load_state_dict(through_a_file(old.state_dict()))
    return fresh


@rows()
def test_a_saved_state_continues_as_if_uninterrupted(row: Row) -> None:
    """Cut in the middle of observing, where a row observes, and after it."""
    P, steps = row.world(3), row.observes + 3
    grads = reals(P, COUNT, steps)
    whole = run([row.make() for _ in range(P)], grads)
    for cut in sorted({1, row.observes + 1}):
        schemes = [row.make() for _ in range(P)]
        run(schemes, grads[:cut])
        after = run(resumed(row, schemes), grads[cut:], first_step=cut)
        for expected, found in zip(whole[cut:], after, strict=True):
            assert all(same_bits(a, b) for a, b in zip(expected.written, found.written, strict=True))
            assert all(same_bits(a, b) for a, b in zip(expected.residuals, found.residuals, strict=True))
            assert expected.reports == found.reports


@rows()
def test_a_saved_state_does_not_change_with_the_scheme_it_came_from(row: Row) -> None:
    P = row.world(2)
    schemes = [row.make() for _ in range(P)]
    grads = integers(P, COUNT, row.observes + 2)
    run(schemes, grads)
    saved = schemes[0].state_dict()
    before = through_a_file(saved)
    run(schemes, grads, first_step=len(grads))
    assert flattened(saved) == flattened(before)


def flattened(state: object) -> object:
    """The state with each tensor as a list, so that == compares it."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    return {key: flattened(part) for key, part in state.items()} if isinstance(state, dict) else state


@rows(lambda row: row.has_residual)
def test_another_world_size_loses_no_mass(row: Row) -> None:
    old = 4
    grads = integers(old, COUNT, row.observes + 2, unit=UNIT)
    schemes = [row.make() for _ in range(old)]
    before = integer_sum(run(schemes, grads)[-1].residuals)
    states = [through_a_file(scheme.state_dict()) for scheme in schemes]
    for size in {1, row.world(2), row.world(3), row.world(5)}:
        dealt = redistributed([state["residual"] for state in states], size)
        fresh = [row.make() for _ in range(size)]
        for scheme, residual in zip(fresh, dealt, strict=True):
            scheme.load_state_dict({**states[0], "residual": residual})
        steps = run(fresh, integers(size, COUNT, 2, unit=UNIT), first_step=len(grads))
        assert_mass(steps, before)
        assert_replicas(steps)


@rows(lambda row: row.delivers)
def test_what_another_world_kept_back_arrives_in_a_world_of_one(row: Row) -> None:
    n = 8
    schemes = [row.make() for _ in range(4)]
    before = integer_sum(run(schemes, integers(4, n, row.observes + 1))[-1].residuals)
    alone = row.make()
    residual = redistributed([scheme.state_dict()["residual"] for scheme in schemes], 1)[0]
    alone.load_state_dict({**schemes[0].state_dict(), "residual": residual})
    steps = silence([alone], n, first_step=row.observes + 1, at_most=4 * n)
    assert torch.equal(integer_sum([step.written[0] for step in steps]), before)
