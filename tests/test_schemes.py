"""Schemes one by one: their settings, what they refuse and how they say it, and what only they do. Invariants are in tests/invariants."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from invariants.world import marks
from sparsync import Bucket, Report, schemes
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan, matches
from sparsync.schemes import Dense, PerParameter, SkipReduce, Span, TopK
from sparsync.testing.checks import check_conservation
from sparsync.testing.world import COUNT, flat_residual, integer_sum, layout, run, same_bits, started

# ---- the registry


def test_every_name_is_described_in_a_line_and_has_its_settings() -> None:
    for name in schemes.names():
        assert schemes.describe(name) and "\n" not in schemes.describe(name)
    assert schemes.settings("topk") == {"density": 0.01, "values": "float32", "residuals": "float32"}
    assert "mode" in schemes.settings("skip_reduce")
    assert schemes.settings("ring_pruning") == {"skip": 0.5}


def test_settings_reach_the_scheme() -> None:
    assert schemes.get("topk", density=0.25) == TopK(0.25)
    assert schemes.get("skip_reduce", skip=3, form="direct") == SkipReduce(skip=3, form="direct")
    assert schemes.get("ring_pruning", skip=1) == SkipReduce.ring_pruning(1)
    assert schemes.get("bf16", form="ring") == Dense.bf16("ring")


# ---- SkipReduce


@pytest.mark.parametrize("feedback", [False, True])
def test_the_divisor_is_the_contributors_unless_what_was_left_out_still_comes(feedback: bool) -> None:
    P, grads = 4, marks(4, COUNT, 2, 24)
    plain = run([SkipReduce(feedback=feedback).start() for _ in range(P)], grads)
    named = [SkipReduce(feedback=feedback, divide_by="ranks" if feedback else "contributors").start() for _ in range(P)]
    for a, b in zip(plain, run(named, grads), strict=True):
        assert same_bits(a.written[0], b.written[0])


def test_poison_of_a_contribution_that_is_left_out_does_not_show() -> None:
    """With P - 1 ranks left out, a slice is one rank's; NaN of rank 0 shows there only."""
    P, n = 4, 8
    grads = [[torch.full((n,), math.nan if rank == 0 else 1.0) for rank in range(P)]]
    step = run(started(SkipReduce(P - 1, "naive"), P), grads)[0]
    assert int(step.written[0].isnan().sum()) == n // P
    assert int((step.written[0] == 1.0).sum()) == n - n // P


@pytest.mark.parametrize("form", ["ring", "direct"])
@pytest.mark.parametrize("protect", [(), ("*.bias",)], ids=["all", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_a_narrow_type_rounds_away_stays_in_the_residual(
    form: Any, protect: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Residuals are multiples of 2^-10, more bits than the type has; each sum is of one rank, or of one and zero, so no sum rounds."""
    P = 2
    schemes = [SkipReduce(1, form=form, feedback=True, protect=protect).start() for _ in range(P)]
    source = torch.Generator().manual_seed(0)
    for state in schemes:
        fine = {
            slot.name: torch.randint(-5000, 5000, (len(slot.span),), generator=source) / 1024 for slot in layout(COUNT)
        }
        if state is schemes[1]:
            fine |= {name: torch.zeros_like(part) for name, part in fine.items() if matches(name, protect)}
        state.load_state_dict(state.state_dict() | {"residual": fine})
    for number in range(4):
        before = integer_sum([flat_residual(state, layout(COUNT), torch.zeros(COUNT)) for state in schemes])
        grads = [torch.randint(-128, 128, (COUNT,), generator=source).to(dtype) for _ in range(P)]
        for slot in layout(COUNT):
            if matches(slot.name, protect):
                slot.span.of(grads[1]).zero_()
        step = run(schemes, [grads], first_step=number)[0]
        check_conservation([step], before)
        assert any((residual * 1024 % 1024).any() for residual in step.residuals)


def test_one_rank_delivers_what_a_larger_world_kept_back() -> None:
    scheme = SkipReduce(feedback=True).start()
    scheme.load_state_dict(
        scheme.state_dict() | {"residual": {slot.name: torch.full((len(slot.span),), 2.0) for slot in layout(COUNT)}}
    )
    step = run([scheme], [[torch.ones(COUNT)]])[0]
    assert torch.equal(step.written[0], torch.full((COUNT,), 3.0))
    assert not step.residuals[0].any()


# ---- Dense


def test_a_wider_wire_saves_a_narrow_gradient_from_overflow() -> None:
    """Three times 40000 is more than float16 holds, their mean is not."""
    grads = [[torch.full((COUNT,), 40000.0, dtype=torch.float16)] * 3]
    assert not run(started(Dense(), 3), grads)[0].written[0].isfinite().any()
    assert torch.equal(run(started(Dense("float32"), 3), grads)[0].written[0], grads[0][0])


def test_a_scheme_reduces_the_tensor_it_was_given() -> None:
    """In place: DistributedDataParallel reads its own buffer."""

    def body(comm: Any) -> list[bool]:  # Any: a LocalComm
        unchanged = []
        for name in schemes.names():
            grad = torch.randn(COUNT, generator=torch.Generator().manual_seed(comm.rank))
            bucket = Bucket("b", grad, 0)
            before = grad.data_ptr()
            schemes.get(name).start().reduce(bucket, comm)
            unchanged.append(bucket.grad is grad and grad.data_ptr() == before)
        return unchanged

    assert all(all(one) for one in LocalWorld(2).run(body))


def test_each_parameter_goes_to_the_first_scheme_whose_pattern_it_matches() -> None:
    slots = (
        ParameterSpan("embedding.weight", Span(0, 100)),
        ParameterSpan("norm.weight", Span(100, 110)),
        ParameterSpan("head.bias", Span(110, 120)),
    )

    def step(comm: LocalComm) -> Report:
        scheme = PerParameter(TopK(0.5), {"norm.*": Dense(), "*.weight": TopK(0.01)}).start()
        grad = torch.arange(1.0, 121.0) * (comm.rank + 1)
        report = scheme.reduce(bucket := Bucket("bucket0", grad, 0, slots), comm)
        assert bucket.grad[:100].count_nonzero() == 1  # one percent of the embedding
        assert torch.equal(bucket.grad[100:110], torch.arange(101.0, 111.0) * 1.5)
        assert bucket.grad[110:].count_nonzero() == 5  # half of the rest
        return report

    report = LocalWorld(2).run(step)[0]
    densities = {"norm.* density": 1.0, "*.weight density": 0.01, "default density": 0.5}
    assert report.details == densities | {"overflow": False}
    assert report.union == 16


def test_of_several_schemes_shares_of_16_bit_gradients_are_as_precise_as_the_residuals() -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        scheme = PerParameter(TopK(0.01), {"*.bias": Dense()}).start()
        for step in range(2):
            bucket = Bucket("b", torch.full((100,), 1.0 + 2.0**-7 * step, dtype=torch.bfloat16), step)
            scheme.reduce(bucket, comm)
        share = scheme.unsent(Bucket("b", torch.zeros(100, dtype=torch.bfloat16), 2), comm)
        assert share is not None
        return share, scheme.state_dict()["residual"]["b"]

    for share, residual in LocalWorld(2).run(body):
        assert torch.equal(share, residual)
        assert not torch.equal(residual, residual.bfloat16().float())


def test_what_is_fed_back_is_divided_by_all_ranks() -> None:
    with pytest.raises(ValueError, match='use divide_by="ranks"'):
        SkipReduce(divide_by="contributors", feedback=True)
