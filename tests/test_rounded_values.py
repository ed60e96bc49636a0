"""Rounded values: the bytes of an element of the union, and a mean whose error is exactly the sum of all ranks' errors."""

from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from helpers.exclusive_invariants import run, whole_numbers
from helpers.quick import one_in
from sparsync.base.scheme import Scheme
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.comm.metered import MeteredComm
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import ExactMiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.skip_reduce import Form, SkipReduce
from sparsync.schemes.topk_allgather import TopK
from sparsync.schemes.two_shot import TwoShot
from sparsync.testing import world
from sparsync.wire import ValueCodec, Values
from sparsync_lab.predict.collectives import quantized_all_reduce_plan
from sparsync_lab.predict.exchanges import Plan

FORMATS: list[Values] = ["bfloat16", "float16", "int8", "int4"]


@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("K", one_in(3, [1000, 0, 3, 1]))
def test_all_ranks_get_the_same_mean_and_errors_make_up_for_what_it_lacks(values: Values, P: int, K: int) -> None:
    source = torch.Generator().manual_seed(K)
    given = [torch.randint(-100, 101, (K,), generator=source).float() for _ in range(P)]
    codec = ValueCodec(values)

    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        metered = MeteredComm(comm)
        error = given[comm.rank].clone()
        mean = quantized_all_reduce_(error, metered, codec).decoded()
        steps, messages, nbytes = astuple(metered.take()[0])
        form = Plan(tuple(quantized_all_reduce_plan(K, torch.float32, P, codec).exchanges)).cost()
        assert steps == form.steps and messages <= form.messages and nbytes <= form.nbytes
        return mean, error

    results = LocalWorld(P).run(body)
    total = torch.zeros(K, dtype=torch.float64)
    for mean, error in results:
        assert torch.equal(mean, results[0][0])
        total += error.double()
    assert torch.equal(P * results[0][0].double() + total, torch.stack(given).double().sum(0))


@pytest.mark.parametrize("kind", [TopK, ExactMiCRO, ExactExDyna, ExactOkTopk])
def test_signs_lose_no_mass(kind: type[TopK | ExactMiCRO | ExactExDyna | ExactOkTopk]) -> None:
    """P times the written mean plus the residuals is what came in, up to the rounding of a residual to float32."""
    P, n = 4, 400
    steps = [whole_numbers(n, P, seed) for seed in range(3)]
    ranks = run(lambda: kind(density=0.1, values="sign"), P, steps)
    before = torch.zeros(n, dtype=torch.float64)
    for t, grads in enumerate(steps):
        came = before + torch.stack(grads).double().sum(0)
        before = torch.stack([seen[t].residual for seen in ranks]).double().sum(0)
        assert all(torch.equal(seen[t].grad, ranks[0][t].grad) for seen in ranks)
        assert ranks[0][t].grad.any()
        torch.testing.assert_close(P * ranks[0][t].grad.double() + before, came, rtol=0, atol=1e-3)


@pytest.mark.parametrize("values", ["bfloat16", "float16", "int4", "int8", "int3", "ternary", "sign"])
@pytest.mark.parametrize("kind", [TopK, ExactMiCRO, ExactOkTopk, TwoShot])
def test_the_largest_numbers_leave_no_infinity_in_a_residual(kind: Callable[..., Scheme], values: Values) -> None:
    """Ranks whose largest numbers cancel: the mean is finite, where P times what is decoded of one of them is not."""
    P, n, largest = 2, 64, 3.4e38
    for sign in (1.0, -1.0):
        grads = [torch.ones(n), torch.ones(n)]
        grads[0][5], grads[1][5] = largest, sign * largest / 2
        for step in world.run(
            [kind(density=0.1, values=values).start() for _ in range(P)], [grads, [torch.ones(n)] * P]
        ):
            assert all(residual.isfinite().all() for residual in step.residuals)


@pytest.mark.parametrize("form", ["ring", "direct"])
def test_residual_and_gradient_beyond_float16_are_written_later(form: Form) -> None:
    """A rank that is always left out holds back 30 000 more a step; a sum of shares is beyond 65504 no sooner than the mean."""
    P, steps = 3, 4
    schemes = [SkipReduce(skip=2, mode="naive", feedback=True, form=form).start() for _ in range(P)]
    seen = world.run(schemes, [[torch.full((15,), 30_000.0, dtype=torch.float16)] * P] * steps)
    assert all(step.written[0].isfinite().all() for step in seen)
    written = P * torch.stack([step.written[0].double() for step in seen]).sum(0)
    kept = world.integer_sum(seen[-1].residuals)
    assert float(seen[-1].residuals[0].max()) > 65504
    assert torch.equal(written + kept, torch.full((15,), 30_000.0 * P * steps, dtype=torch.float64))
