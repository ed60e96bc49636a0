"""Layouts: a parameter's guarantees hold wherever its gradient lies, alone or among others, in any bucket."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from invariants.world import marks
from sparsync.schemes import AutoProtect, SkipReduce, State
from sparsync.schemes.skip_reduce import Form
from sparsync.testing.layouts import SIZES, reduce_by_name
from sparsync.testing.world import COUNT, NAMES, Step, integer_sum, layout, run, started


def contributors_of(steps: Sequence[Step], names: Sequence[str], P: int) -> list[set[int]]:
    """Count the ranks in the elements of these parameters at each step, for a scheme that divides by P."""
    counts = []
    for step in steps:
        total = (step.written[0].double() * P).round().long()
        there = torch.stack([(total & 2**rank) > 0 for rank in range(P)]).sum(dim=0)
        counts.append({int(c) for each in layout(COUNT) if each.name in names for c in each.span.of(there)})
    return counts


PROTECTIONS: dict[str, tuple[str | tuple[str, ...], tuple[str, ...]]] = {
    "one-name": (("block.bias",), ("block.bias",)),
    "two-names": (("embed.weight", "head.bias"), ("embed.weight", "head.bias")),
    "pattern": (("*.bias",), ("block.bias", "head.bias")),
    "name-and-pattern": (("head*", "block.bias"), ("head.weight", "head.bias", "block.bias")),
    "no-match": (("nothing",), ()),
    "everything": (("*",), NAMES),
}


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("form", ["ring", "direct"])
@pytest.mark.parametrize("node_size", [1, 2])
def test_protected_parameters_lose_no_rank_and_the_others_lose_s(form: Form, node_size: int, protection: str) -> None:
    P, skip = 4 * node_size, 2
    protect, safe = PROTECTIONS[protection]
    scheme = SkipReduce(skip, protect=protect, form=form, node_size=node_size, divide_by="ranks")
    steps = run(started(scheme, P), marks(P, COUNT, 4, 24))
    others = [name for name in NAMES if name not in safe]
    assert contributors_of(steps, safe, P) == [{P} if safe else set()] * 4
    assert contributors_of(steps, others, P) == [{P - skip * node_size} if others else set()] * 4
    covered = sum(len(each.span) for each in layout(COUNT) if each.name in safe)
    assert {report.details["protected"] for step in steps for report in step.reports} == {covered}


def test_protection_follows_the_parameter_into_other_buckets() -> None:
    P = 4
    schemes = started(SkipReduce(skip=3, protect=("c",), divide_by="ranks"), P)
    grads = [{name: torch.full((size,), float(2**rank)) for name, size in SIZES.items()} for rank in range(P)]
    everybody = float(2**P - 1) / P
    for step, buckets in enumerate([[list(SIZES)], [["c"], ["a", "b", "d", "e"]], [["e", "c", "a"], ["b", "d"]]]):
        written = reduce_by_name(schemes, grads, buckets, step)[0]
        assert torch.equal(written["c"], torch.full((SIZES["c"],), everybody))
        for name in ("a", "b", "e"):
            assert set((written[name] * P).tolist()) <= {1.0, 2.0, 4.0, 8.0}


def disagreeing(P: int, about: Sequence[str]) -> list[Tensor]:
    """Make gradients that differ between ranks only in these parameters."""
    grads = []
    for rank in range(P):
        grad = torch.ones(COUNT)
        for each in layout(COUNT):
            if each.name in about:
                each.span.of(grad).fill_(float(rank * (1 + about.index(each.name))))
        grads.append(grad)
    return grads


def chosen_by(states: Sequence[State]) -> set[tuple[str, ...]]:
    return {tuple(sorted(name for name, kept in each.common("protected").items() if kept)) for each in states}


def auto(P: int, share: float, form: Form = "ring") -> list[State]:
    return started(AutoProtect(SkipReduce(2, divide_by="ranks", form=form), share, observe_steps=2), P)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["ring", "direct"])
def test_auto_protects_what_ranks_disagree_about_most(form: Form, name: str) -> None:
    P = 4
    size = next(len(each.span) for each in layout(COUNT) if each.name == name)
    schemes = auto(P, (size + 0.5) / COUNT, form=form)
    run(schemes, [disagreeing(P, [name])] * 3)
    assert chosen_by(schemes) == {(name,)}


def test_auto_protects_in_the_order_of_disagreement_within_the_share() -> None:
    """The smaller of two wanted parameters fits where the larger one does not; agreed ones fill the remaining share."""
    P = 4
    sizes = {each.name: len(each.span) for each in layout(COUNT)}
    wanted = ["block.bias", "head.weight"]  # the second one most
    both = auto(P, (sizes["block.bias"] + sizes["head.weight"] + 0.5) / COUNT)
    run(both, [disagreeing(P, wanted)] * 3)
    assert chosen_by(both) == {tuple(sorted(wanted))}
    small = auto(P, (sizes["block.bias"] + 0.5) / COUNT)
    assert sizes["block.bias"] < sizes["head.weight"]
    run(small, [disagreeing(P, wanted)] * 3)
    assert chosen_by(small) == {("block.bias",)}


def test_auto_reduces_densely_while_it_observes_and_then_keeps_its_choice() -> None:
    P = 4
    schemes = auto(P, 0.2)
    assert chosen_by(schemes) == {()}
    observed = run(schemes, [disagreeing(P, ["block.bias"])] * 2)
    for step in observed:
        assert torch.equal(step.written[0].double(), integer_sum(step.grads) / P)
        assert {report.selected for report in step.reports} == {COUNT}
    later = run(schemes, [disagreeing(P, ["head.bias"])] * 4, first_step=2)
    (chosen,) = chosen_by(schemes)
    assert "block.bias" in chosen
    steps = run(schemes, marks(P, COUNT, 2, 24), first_step=6)
    assert chosen_by(schemes) == {chosen}
    assert contributors_of(steps, chosen, P) == [{P}] * 2
    assert all(report.selected < COUNT for step in later for report in step.reports)


def test_auto_chooses_among_the_parameters_of_all_buckets() -> None:
    """The buckets of a step come in sequence; the choice waits until all of them were observed."""
    P = 2
    schemes = started(AutoProtect(share=0.5, observe_steps=3), P)
    grads = [
        {name: torch.full((size,), float(rank if name == "c" else 1)) for name, size in SIZES.items()}
        for rank in range(P)
    ]
    for step in range(4):
        assert chosen_by(schemes) == {()}
        reduce_by_name(schemes, grads, [["a", "b"], ["d", "e"], ["c"]], step)
    (chosen,) = chosen_by(schemes)
    assert "c" in chosen
