"""Schemes where only a device knows whether all is finite: the bits that they have where the host knows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor

from helpers.quick import one_in
from sparsync.base.error_feedback import ErrorFeedbackScheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket, generator
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import ExactMiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.micro import MiCRO
from sparsync.schemes.oktopk import OkTopk
from sparsync.schemes.topk_allgather import TopK
from sparsync.schemes.two_shot import TwoShot
from studies.gpu.counts import as_on_a_gpu

N, P = 300, 3
LARGE = 3  # a step whose gradients are finite, and P times their mean is not
SCHEMES: dict[str, Callable[[], ErrorFeedbackScheme]] = {
    "topk": lambda: TopK(0.1),
    "topk int4": lambda: TopK(0.1, values="int4", residuals="bfloat16"),
    "two_shot": lambda: TwoShot(0.1, "int4"),
    "two_shot contributors": lambda: TwoShot(0.1, "int4", divide_by="contributors"),
    "exact_micro": lambda: ExactMiCRO(0.1),
    "micro": lambda: MiCRO(0.1),
    "exact_exdyna": lambda: ExactExDyna(0.1, values="int8"),
    "exact_oktopk": lambda: ExactOkTopk(0.1),
    "exact_oktopk int8": lambda: ExactOkTopk(0.1, values="int8"),
    "oktopk": lambda: OkTopk(0.1, threshold_steps=2, region_steps=2),
}


def trained(
    make: Callable[[], ErrorFeedbackScheme], dtype: torch.dtype, world: Callable[[], AbstractContextManager[None]]
) -> list[list[tuple[bool, Tensor, Tensor]]]:
    """Return for each rank and step whether the report has "overflow", the gradient and the residual; step 1 has an infinity."""

    def of_rank(comm: LocalComm) -> list[tuple[bool, Tensor, Tensor]]:
        scheme, found = make().start(), []
        for step in range(LARGE + 1):
            grad = torch.randn(N, generator=generator(7, "flags", 10 * step + comm.rank))
            if step == LARGE:
                grad *= 2e38 if dtype == torch.float32 else 3e4
            grad[N // 2] = torch.inf if (step, comm.rank) == (1, 1) else 0.0
            bucket = Bucket("w", grad.to(dtype), step)
            report = scheme.reduce(bucket, comm)
            found.append((bool(report.details["overflow"]), bucket.grad, scheme.residual(bucket).clone()))
        return found

    with world():
        return LocalWorld(P).run(of_rank)


@pytest.mark.parametrize(
    ("name", "dtype"), one_in(3, (pytest.param(*each) for each in product(SCHEMES, (torch.float32, torch.float16))))
)
def test_a_flag_on_a_device_leaves_the_bits_that_one_on_the_host_does(name: str, dtype: torch.dtype) -> None:
    expected, found = (trained(SCHEMES[name], dtype, world) for world in (nullcontext, as_on_a_gpu))
    for here, there in zip(found, expected, strict=True):
        for (overflow, grad, residual), (known, written, kept) in zip(here, there, strict=True):
            assert overflow == known
            assert torch.equal(residual, kept)
            if known:
                assert bool(grad.isnan().any())
            else:
                assert torch.equal(grad, written)
    assert [overflow for overflow, _, _ in found[0]][:3] == [False, True, False]
