"""PowerSGD beyond the invariants: what is factored, how well, and what it costs."""

import pytest
import torch
from torch import Tensor

from sparsync.comm.local import LocalWorld
from sparsync.comm.metered import all_reduce_cost
from sparsync.core import Bucket, laid_out
from sparsync.testing.world import run, started
from sparsync_lab.rivals.powersgd import Factors, PowerSGD

LAYOUT = laid_out([("conv", (8, 3, 3, 3)), ("conv.bias", (8,)), ("one", (20, 30)), ("two", (20, 30)), ("thin", (2, 5))])
N = LAYOUT[-1].span.stop


def low_rank(rank: int, generator: torch.Generator) -> Tensor:
    """Return a gradient, [N], whose matrices have rank `rank`."""
    flat = torch.randn(N, generator=generator)
    for entry in LAYOUT:
        if len(entry.shape) > 1 and entry.name != "thin":
            a, b = entry.shape[0], len(entry.span) // entry.shape[0]
            m = torch.randn(a, rank, generator=generator) @ torch.randn(rank, b, generator=generator)
            entry.span.of(flat).copy_(m.flatten())
    return flat


def test_a_mean_of_low_rank_is_found_in_one_step_and_nothing_is_left() -> None:
    source = torch.Generator().manual_seed(0)
    common = low_rank(2, source)
    schemes = [PowerSGD(rank=2).start() for _ in range(3)]
    grads = [common * weight for weight in (1.0, 2.0, 6.0)]
    (step,) = run(schemes, [grads], parameters=LAYOUT)
    torch.testing.assert_close(step.written[0], 3.0 * common, rtol=1e-4, atol=1e-4)
    assert all(residual.abs().max() < 1e-3 for residual in step.residuals)


@pytest.mark.parametrize("factors", ["float32", "int8", "int4"])
def test_two_exchanges_carry_both_factors_and_all_that_is_sent_whole(factors: Factors) -> None:
    P, r = 3, 2
    source = torch.Generator().manual_seed(0)
    schemes, grads = started(PowerSGD(r, factors), P), [low_rank(2, source) for _ in range(P)]
    (step,) = run(schemes, [grads], parameters=LAYOUT)
    assert step.reports[0].details == {"matrices": 3, "sent_whole": 8 + 10, "overflow": False}
    first, second = 8 + 10 + r * (8 + 20 + 20), r * (27 + 30 + 30)
    for rank, (report, counted) in enumerate(zip(step.reports, step.counted, strict=True)):
        assert report.cost == counted
        if factors == "float32":
            assert counted == all_reduce_cost(first, 4, P, rank) + all_reduce_cost(second, 4, P, rank)
    assert step.counted[0].steps == 4


def test_the_warm_start_brings_the_factors_nearer_to_the_best_ones() -> None:
    """With the same gradient again and again, the approximation of its residual approaches that of the best rank."""
    source = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(rows, 20, generator=source)).Q for rows in (20, 30))
    matrix = u @ torch.diag(0.8 ** torch.arange(20.0)) @ v.T
    layout = laid_out([("w", (20, 30))])
    best = matrix - u[:, :1] @ u[:, :1].T @ matrix
    scheme, errors = PowerSGD(rank=1).start(), []
    for step in range(12):
        scheme.vectors.load_state_dict({})  # no error feedback, only the warm start
        bucket = Bucket("bucket0", matrix.flatten().clone(), step, layout)
        LocalWorld(1).run(lambda comm, bucket=bucket: scheme.reduce(bucket, comm))
        errors.append(float((bucket.grad.view(20, 30) - matrix).norm() / best.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1.01 < errors[0]


def test_factors_move_with_their_parameter_to_another_bucket() -> None:
    source = torch.Generator().manual_seed(0)
    scheme = PowerSGD(rank=2).start()
    run([scheme], [[low_rank(3, source)]], parameters=LAYOUT)
    before = scheme.state_dict()["common"]["right"]
    assert set(before) == {"conv", "one", "two"}
    bucket = Bucket("other", torch.randn(600, generator=source), 1, laid_out([("two", (20, 30))]))
    LocalWorld(1).run(lambda comm: scheme.reduce(bucket, comm))
    after = scheme.state_dict()["common"]["right"]
    assert torch.equal(before["one"], after["one"])
    assert not torch.equal(before["two"], after["two"])
