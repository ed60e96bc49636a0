"""Error feedback: the residual by parameter, across layouts, ranks, files and worlds. Its balance is an invariant, tests/invariants."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import Bucket
from sparsync.base.scheme import Scheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import ParameterSpan, Sparse
from sparsync.feedback import ByParameter, Residuals, Vectors, redistributed
from sparsync.schemes import Span, TopK, TwoShot
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import ExactMiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.exdyna import ExDyna
from sparsync.schemes.micro import MiCRO
from sparsync.schemes.oktopk import OkTopk
from sparsync.schemes.per_parameter import PerParameter
from sparsync_lab.rivals.onebit_adam import OneBitAdam

SIZES = {"a": 3, "b": 0, "c": 1, "d": 5}


def bucket(*names: str, key: str = "bucket0", dtype: torch.dtype = torch.float32) -> Bucket:
    stops = [sum(SIZES[name] for name in names[: i + 1]) for i in range(len(names))]
    layout = tuple(ParameterSpan(name, Span(stop - SIZES[name], stop)) for name, stop in zip(names, stops, strict=True))
    return Bucket(key, torch.zeros(stops[-1] if stops else 0, dtype=dtype), 0, layout)


def values(feedback: ByParameter) -> dict[str, list[float]]:
    return {name: part.tolist() for name, part in feedback.by_name.items()}


orders = st.permutations(list(SIZES)).flatmap(
    lambda names: st.integers(0, len(names)).map(lambda cut: [part for part in (names[:cut], names[cut:]) if part])
)


@given(st.lists(orders, min_size=1, max_size=8))
def test_any_sequence_of_layouts_keeps_every_parameters_residual(plan: list[list[list[str]]]) -> None:
    """Each visit adds one to a parameter; whatever the layouts in between, it finds what it left."""
    feedback, expected = ByParameter(), dict.fromkeys(SIZES, 0.0)
    for buckets in plan:
        for names in buckets:
            found = bucket(*names)
            residual = feedback.of(found, torch.float32)
            for slot in found.layout:
                assert slot.span.of(residual).tolist() == [expected[slot.name]] * len(slot.span)
                expected[slot.name] += 1.0
            residual += 1.0
        assert values(feedback) == {name: [expected[name]] * size for name, size in SIZES.items()}


def test_a_parameter_that_changed_its_size_is_refused() -> None:
    feedback = ByParameter()
    feedback.of(bucket("a"), torch.float32)
    changed = Bucket("bucket0", torch.zeros(4), 0, (ParameterSpan("a", Span(0, 4)),))
    with pytest.raises(
        ValueError, match="the residual of 'a' has 3 elements, its gradient 4; load the state of the same model"
    ):
        feedback.of(changed, torch.float32)


def test_rescaling_reaches_the_named_parameters_in_the_residual_of_their_bucket() -> None:
    vectors = Vectors()
    feedback = vectors.by_kind("residual")
    residual = feedback.of(bucket("a", "c", "d"), torch.float32)
    residual.fill_(8.0)
    vectors.rescale({"a": 0.5, "c": 1.0, "unknown": 3.0})
    assert residual.tolist() == [4, 4, 4, 8, 8, 8, 8, 8, 8]
    assert values(feedback) == {"a": [4, 4, 4], "c": [8], "d": [8] * 5}


def test_rescaling_reaches_what_was_loaded_and_not_laid_out_yet() -> None:
    vectors = Vectors()
    vectors.load_state_dict({"residual": {"a": torch.full((3,), 8.0)}})
    vectors.rescale({"a": 0.25})
    assert vectors.by_kind("residual").of(bucket("c", "a"), torch.float32).tolist() == [0, 2, 2, 2]


def test_a_saved_state_is_a_copy_and_so_is_a_loaded_one_which_replaces_all() -> None:
    vectors, other = Vectors(), Vectors()
    residual = vectors.by_kind("residual").of(bucket("a"), torch.float32)
    saved = vectors.state_dict()
    residual.fill_(1.0)
    assert saved["residual"]["a"].tolist() == [0, 0, 0]
    other.by_kind("velocity").of(bucket("a", "c"), torch.float32).fill_(9.0)
    other.load_state_dict(saved)
    saved["residual"]["a"].fill_(5.0)
    other.by_kind("residual").of(bucket("a"), torch.float32).add_(2.0)
    assert list(other.state_dict()) == ["residual"]
    assert values(other.by_kind("residual")) == {"a": [2, 2, 2]}
    assert saved["residual"]["a"].tolist() == [5, 5, 5]


def total(states: list[dict[str, Tensor]], name: str) -> Tensor:
    there = [state[name] for state in states if name in state]
    return torch.stack(there).sum(dim=0, dtype=torch.float64)


@given(old=st.integers(1, 9), new=st.integers(1, 9))
def test_redistribution_keeps_every_parameters_mean(old: int, new: int) -> None:
    states = [
        {"a": old * (torch.arange(3.0) + 10 * rank), "c": torch.full((1,), old * 2.0**rank)} for rank in range(old)
    ]
    before = [{name: part.clone() for name, part in state.items()} for state in states]
    dealt = redistributed(states, new)
    assert len(dealt) == new
    for name in ("a", "c"):
        assert torch.equal(total(dealt, name) / new, total(states, name) / old)
    for rank, state in enumerate(dealt):
        assert list(state) == (["a", "c"] if rank < old else [])
        for part in state.values():
            part.fill_(-1.0)
    assert all(torch.equal(a["a"], b["a"]) and torch.equal(a["c"], b["c"]) for a, b in zip(states, before, strict=True))


def test_redistribution_joins_parameters_that_not_every_rank_has() -> None:
    states = [{"a": torch.ones(2)}, {"b": torch.ones(1)}, {}, {"a": torch.ones(2), "b": torch.ones(1)}]
    assert {name: part.tolist() for name, part in redistributed(states, 1)[0].items()} == {"a": [0.5, 0.5], "b": [0.5]}


@pytest.mark.parametrize("kind", [TopK, ExactMiCRO, ExactExDyna, ExactOkTopk, partial(TwoShot, values="float32")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residuals_in_16_bits_lose_nothing_that_16_bits_hold(kind: Callable[..., Scheme], dtype: torch.dtype) -> None:
    """Whole numbers of at most 8 bits all the way: residuals of either precision lead to the same bits."""

    def body(comm: LocalComm, residuals: str) -> list[Tensor]:
        state, seen = kind(density=0.1, residuals=residuals).start(), []
        for step in range(4):
            source = torch.Generator().manual_seed(10 * step + comm.rank)
            grad = 2.0 * torch.randint(-8, 9, (300,), generator=source)
            bucket = Bucket("w", grad.to(dtype), step)
            state.reduce(bucket, comm)
            kept = state.state_dict()["residual"]["w"]
            assert kept.dtype == getattr(torch, residuals)
            seen += [bucket.grad, kept.float()]
        return seen

    wide, narrow = (LocalWorld(2).run(partial(body, residuals=each)) for each in ("float32", "bfloat16"))
    assert all(torch.equal(a, b) for one, two in zip(wide, narrow, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_residual_that_is_carried_over_takes_the_precision_of_the_new_scheme(
    before: Residuals, after: Residuals
) -> None:
    state = TopK(residuals=before).start()
    state.residual(bucket("a", "c")).fill_(3.0)
    residual = state.followed_by(TopK(residuals=after)).residual(bucket("a", "c"))
    assert residual.dtype == getattr(torch, after)
    assert residual.tolist() == [3.0] * 4


@pytest.mark.parametrize("make", [TopK, MiCRO, ExactExDyna, ExDyna, ExactOkTopk, OkTopk])
def test_beginning_anew_keeps_residuals_and_nothing_that_ranks_must_agree_on(make: Callable[[], Scheme]) -> None:
    def body(comm: LocalComm) -> None:
        state = make().start()
        for step in range(2):
            state.reduce(Bucket("w", torch.randn(300, generator=torch.Generator().manual_seed(comm.rank)), step), comm)
        before = state.state_dict()
        state.reset_shared_state()
        after = state.state_dict()
        assert torch.equal(after["residual"]["w"], before["residual"]["w"])
        assert after.keys() <= {"residual", "own"}

    LocalWorld(2).run(body)


def test_on_a_device_nothing_is_read_for_the_next_selection() -> None:
    elsewhere = torch.zeros(4, device="meta")  # whose numbers cannot be read
    acc = TopK().start().accumulate(Bucket("w", elsewhere, 0))
    found = Sparse(torch.zeros(2, dtype=torch.int32, device="meta"), elsewhere[:2], 4)
    assert acc._noted(found) is found
    assert acc._hint() is None


def test_a_scheme_inside_that_counts_steps_whole_keeps_its_residual_where_others_are_weighed() -> None:
    scheme = PerParameter(TopK(density=0.1), {"a": OneBitAdam(warmup_steps=1)})

    def body(comm: LocalComm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        state, source = scheme.start(), torch.Generator().manual_seed(comm.rank)
        for step in range(3):
            state.vectors.hold()
            grad = torch.randn(8, generator=source)
            state.reduce(Bucket("bucket0", grad, step, bucket("a", "d").layout), comm)
        before = state.state_dict()["residual"]
        state.weigh({"a": 0.0, "d": 0.0})
        return before, state.state_dict()["residual"]

    for before, after in LocalWorld(2).run(body):
        assert before["a"].any() and torch.equal(after["a"], before["a"])
        assert not torch.equal(after["d"], before["d"])
