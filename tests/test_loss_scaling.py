"""A loss scaler around attach: steps that it skips lose nothing, and residuals follow its scale. On the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.ddp_training import COUNT, NAMES, TIMEOUT_S, N, known
from helpers.distributed import case, run
from helpers.known_gradients import KnownGradients, noted, row

pytestmark = pytest.mark.distributed

STEPS, OVERFLOWING, PARAMETERS = 9, 4, 4  # the step with an infinity on rank 1, and parameters in a bucket
# per-parameter divides a bucket among several schemes, and those without an infinity roll back: see test_skipped_steps
SCHEMES = ("topk-0.1", "exact_micro-0.1", "exact_exdyna-0.1", "exact_oktopk-0.1", "skip-default-feedback")


def train(scheme: str) -> tuple[Tensor, Tensor, list[float], list[str]]:
    """Return what was applied in all steps [elements], the residual without scale, the scales, and the names in the non-finite bucket."""
    rank, model = dist.get_rank(), KnownGradients(COUNT, N)
    ddp = DistributedDataParallel(model, bucket_cap_mb=PARAMETERS * N * 4 / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**6, growth_interval=3)
    handle = sparsync.attach(
        ddp, row(scheme).make(), scaler=scaler, options=sparsync.Options(timeout_s=TIMEOUT_S, join_mb=0, dense_below=0)
    )
    buckets_of = noted(handle.state)
    assert handle._connection.scaled
    applied, scales = torch.zeros(COUNT * N), []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = dict(model.inputs(rank, step))
        if step == OVERFLOWING and rank == 1:
            inputs[NAMES[COUNT // 2]] = torch.full((N,), torch.inf)
        scaler.scale(ddp(inputs)).backward()
        scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        found = model.gradients()
        if bool(found.isfinite().all()):
            applied += found
        scaler.step(optimizer)
        scaler.update()
    state = handle.state_dict()
    assert state["loss_scale"] == scales[-1]
    residual = state["scheme"]["residual"]
    residuals = torch.cat([residual.get(name, torch.zeros(N)) for name in NAMES])  # what is sent whole has none
    buckets = [[slot.name for slot in layout] for layout in buckets_of[OVERFLOWING]]
    non_finite = next(names for names in buckets if NAMES[COUNT // 2] in names)
    return applied, residuals / scales[-1], scales, non_finite


def scaled_training() -> list[tuple[str, Tensor, Tensor, list[float], list[str]]]:
    return [(scheme, *train(scheme)) for scheme in SCHEMES]


@pytest.mark.slow
def test_a_step_that_a_loss_scaler_skips_loses_nothing_and_residuals_follow_the_scale() -> None:
    """Whole numbers and scales of two, so that all is exact: 2 * applied + residuals is what came in, but for the non-finite bucket."""
    first, second = run(scaled_training, 2)
    for (scheme, applied, residual, scales, non_finite), (_, other, more, _, _) in zip(first, second, strict=True):
        with case(scheme):
            assert torch.equal(applied, other)
            assert scales == [64, 64, 64, 128, 128, 64, 64, 64, 128]
            assert len(non_finite) < COUNT
            came = torch.stack(
                [
                    sum(known(rank, step, name) for step in range(STEPS) for rank in (0, 1))
                    if name not in non_finite
                    else sum(known(rank, step, name) for step in range(STEPS) if step != OVERFLOWING for rank in (0, 1))
                    for name in NAMES
                ]  # pyright: ignore[reportArgumentType]  # sums of at least one tensor
            )
            assert torch.equal(2 * applied + residual + more, came.flatten())
