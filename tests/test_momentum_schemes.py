"""1-bit Adam, Deep Gradient Compression and random-k beyond the invariants: what they are without compression, and what they keep."""

import math

import torch
from torch import Tensor

from helpers.reducing import reduced
from sparsync.core import Bucket
from sparsync_lab.rivals.dgc import DGC
from sparsync_lab.rivals.onebit_adam import OneBitAdam

N = 300


def numbers(*seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(hash(seed) % 2**31))


def test_after_the_warm_up_second_moments_stay_and_the_momentum_is_conserved() -> None:
    P, warmup = 4, 3
    schemes = [OneBitAdam(warmup_steps=warmup).start() for _ in range(P)]
    for step in range(10):
        before = schemes[0].state_dict()
        grads = [numbers(step, rank) for rank in range(P)]
        kept = sum(each.state_dict()["residual"].get("w", torch.zeros(N)) for each in schemes)
        written, (report, *_), _ = reduced(schemes, grads, step)
        after = schemes[0].state_dict()
        assert report.details["warmup"] == (step < warmup)
        if step >= warmup:
            assert torch.equal(before["common"]["second"]["w"], after["common"]["second"]["w"])
            assert report.cost.nbytes < 2 * N / 8 + 20 * P
            came_in = P * 0.9 * before["common"]["first"]["w"] + 0.1 * torch.stack(grads).sum(0) + kept
            left = sum(each.state_dict()["residual"]["w"] for each in schemes)
            torch.testing.assert_close(P * after["common"]["first"]["w"] + left, came_in, rtol=1e-4, atol=1e-4)
            v = after["common"]["second"]["w"] / (1 - 0.999**warmup)
            torch.testing.assert_close(
                written, after["common"]["first"]["w"] / (1 - 0.9 ** (step + 1)) / (v.sqrt() + 1e-8)
            )


def test_a_loaded_state_tells_other_ranks_what_one_that_was_not_tells_them() -> None:
    """Of a bucket that is new too: vectors are not compared, whether they are there or not."""
    old, new = OneBitAdam(warmup_steps=2).start(), OneBitAdam(warmup_steps=2).start()
    reduced([old], [numbers(0)])
    new.load_state_dict(old.state_dict())
    for key in ("w", "v"):
        bucket = Bucket(key, numbers(1), 1)
        assert new.shared_text(bucket) == old.shared_text(bucket)


def test_what_had_no_gradient_in_the_warm_up_is_not_divided_by_eps() -> None:
    scheme, grad = OneBitAdam(warmup_steps=1).start(), numbers(0)
    grad[:10] = 0
    reduced([scheme], [grad])
    written, *_ = reduced([scheme], [numbers(1)], 1)
    assert not written[:10].any()
    assert written[10:].all()


def test_masking_forgets_the_momentum_of_what_is_sent() -> None:
    scheme = DGC(0.1, warmup_steps=0).start()
    written, *_ = reduced([scheme], [numbers(0)])
    velocity = scheme.state_dict()["velocity"]["w"]
    assert torch.equal(velocity == 0, written != 0)
    assert torch.equal(velocity + written, numbers(0))


def test_the_density_of_the_warm_up_falls_from_a_quarter_to_its_own() -> None:
    scheme = DGC(density=0.01, warmup_steps=10)
    counts = [scheme.count(Bucket("w", torch.zeros(10_000), step)) for step in range(13)]
    assert counts[0] == 2500
    assert counts[5] == int(10_000 * math.sqrt(0.25 * 0.01))
    assert counts[10:] == [100, 100, 100]
    assert counts == sorted(counts, reverse=True)


def test_each_rank_clips_its_gradient_to_where_a_mean_of_unlike_ones_has_the_norm_asked_for() -> None:
    P = 4
    unlike = [torch.zeros(N).index_fill_(0, torch.tensor(rank), 100.0) for rank in range(P)]
    schemes = [DGC(1.0, clip=2.0).start() for _ in range(P)]
    written, *_ = reduced(schemes, unlike)
    assert float(written.norm()) == 2.0
    assert written[:P].tolist() == [1.0] * P
    small = numbers(0) / numbers(0).norm() * 3.5  # below 2 sqrt(4)
    schemes = [DGC(1.0, clip=2.0).start() for _ in range(P)]
    torch.testing.assert_close(reduced(schemes, [small] * P)[0], small)


def test_dgc_tells_of_a_mean_that_the_gradients_type_cannot_hold() -> None:
    schemes = [DGC(1.0, momentum=0.5, masking=False, warmup_steps=0).start() for _ in range(2)]
    for step, wanted in enumerate((False, True)):
        written, reports, _ = reduced(schemes, [torch.full((8,), 50_000.0, dtype=torch.float16)] * 2, step)
        assert [bool(report.details["overflow"]) for report in reports] == [wanted] * 2
        assert bool(written.isfinite().all()) != wanted
