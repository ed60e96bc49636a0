"""A loss scaler around attach: steps that it skips lose nothing, and residuals follow its scale. On the CPU, where torch has one, too."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.ddp_training import COUNT, NAMES, TIMEOUT_S, N, known
from helpers.distributed import case, run
from helpers.known_gradients import KnownGradients, Recorder, row
from sparsync.integrations.residual_scale import Terms
from sparsync.schemes.topk_allgather import TopK

pytestmark = pytest.mark.distributed

STEPS, POISONED, PARAMETERS = 9, 4, 4  # the step that meets an infinity on rank 1, and parameters in a bucket
# per-parameter deals a bucket out to several schemes, and those that met no infinity keep theirs: see test_skipped_steps
SCHEMES = ("topk-0.1", "micro-0.1", "exdyna-0.1", "oktopk-0.1", "skip-default-feedback")


def train(scheme: str) -> tuple[Tensor, Tensor, list[float], list[str]]:
    """What was applied in all steps [elements], what is kept back in terms of the loss, the scales, and the poisoned names."""
    rank, model = dist.get_rank(), KnownGradients(COUNT, N)
    ddp = DistributedDataParallel(model, bucket_cap_mb=PARAMETERS * N * 4 / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**6, growth_interval=3)
    recorder = Recorder(row(scheme).make())
    handle = sparsync.attach(ddp, recorder, scaler=scaler, timeout_s=TIMEOUT_S)
    applied, scales = torch.zeros(COUNT * N), []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = dict(model.inputs(rank, step))
        if step == POISONED and rank == 1:
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
    kept = torch.cat([residual.get(name, torch.zeros(N)) for name in NAMES])  # none of what is sent whole
    buckets = [[slot.name for slot in layout] for layout in recorder.steps[POISONED]]
    poisoned = next(names for names in buckets if NAMES[COUNT // 2] in names)
    return applied, kept / scales[-1], scales, poisoned


def scaled_training() -> list[tuple[str, Tensor, Tensor, list[float], list[str]]]:
    return [(scheme, *train(scheme)) for scheme in SCHEMES]


def test_a_step_that_a_loss_scaler_skips_loses_nothing_and_residuals_follow_the_scale() -> None:
    """Whole numbers and scales of two, so that all is exact: 2 * applied + kept is what came in, but for the bucket with the infinity."""
    first, second = run(scaled_training, 2)
    for (scheme, applied, kept, scales, poisoned), (_, other, more, _, _) in zip(first, second, strict=True):
        with case(scheme):
            assert torch.equal(applied, other)
            assert scales == [64, 64, 64, 128, 128, 64, 64, 64, 128]
            assert len(poisoned) < COUNT
            came = torch.stack(
                [
                    sum(known(rank, step, name) for step in range(STEPS) for rank in (0, 1))
                    if name not in poisoned
                    else sum(known(rank, step, name) for step in range(STEPS) if step != POISONED for rank in (0, 1))
                    for name in NAMES
                ]  # pyright: ignore[reportArgumentType]  # sums of at least one tensor
            )
            assert torch.equal(2 * applied + kept + more, came.flatten())


def test_a_scheme_under_another_handle_goes_on_in_the_terms_it_was_left_in() -> None:
    """A second trainer with a scaler of its own: what the scheme keeps is put in terms of the new scale."""
    scheme, names = TopK(0.1), {1: "weight"}
    first, second, other = (Terms(scaler=GradScaler("cpu", init_scale=scale)) for scale in (1024.0, 65536.0, 8.0))
    first.go_on(scheme)
    assert first.factors(names) == {}
    second.go_on(scheme)
    assert second.factors(names) == {"weight": 64.0}
    other.go_on(TopK(0.1))
    assert other.factors(names) == {}
    without = Terms()
    without.go_on(scheme)
    assert without.factors(names) == {"weight": 2.0**-16}
