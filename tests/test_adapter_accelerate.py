"""A training by Accelerate: gradients accumulated, reduced by a scheme, saved and taken up again."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.adapter_training import DENSITY, MICRO, AdapterResult, as_torchrun, check, examples, network
from helpers.distributed import run
from sparsync import Options, attach, checkpoint
from sparsync.schemes import ExactMiCRO, TwoShot

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

pytestmark = pytest.mark.distributed
STEPS, ACCUMULATED = 6, 2


def trained(folder: Path, steps: range, save: bool = False, load: bool = False, scaled: bool = False) -> AdapterResult:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATED,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],  # buckets stay the same
    )
    if scaled:  # as for float16 on a GPU
        accelerator.scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, examples(STEPS * ACCUMULATED))
    scheme = None if load else ExactMiCRO(density=DENSITY)  # None: of the environment, the same one
    handle = attach(prepared, scheme, scaler=accelerator.scaler, options=Options(timeout_s=120))
    if load:
        accelerator.load_state(str(folder))
        checkpoint.load(handle, folder)
    for number, (x, y) in enumerate(loader):
        if number // ACCUMULATED not in steps:
            continue
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.mse_loss(prepared(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if save:
        accelerator.save_state(str(folder))
        checkpoint.save(handle, folder)
    assert (accelerator.scaler is not None) == scaled
    return AdapterResult.of(model, handle.reports())


def interrupted(folder: Path, scaled: bool) -> tuple[AdapterResult, AdapterResult]:
    as_torchrun()
    os.environ["SPARSYNC_SCHEME"] = MICRO
    whole = trained(folder, range(STEPS), scaled=scaled)
    trained(folder, range(3), save=True, scaled=scaled)
    return whole, trained(folder, range(3, STEPS), load=True, scaled=scaled)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_a_training_by_accelerate_sends_little_and_goes_on_to_the_same_bits(scaled: bool, tmp_path: Path) -> None:
    ranks = run(interrupted, 2, folder=tmp_path, scaled=scaled)
    check([whole for whole, _ in ranks], STEPS)
    for whole, resumed in ranks:
        assert resumed.same_weights(whole)
        assert {report.step for report in resumed.reports} == set(range(3, STEPS))
    assert {path.name for path in tmp_path.glob("sparsync*")} == {f"sparsync.step3.rank{rank}of2.pt" for rank in (0, 1)}


def with_torchs_hook() -> None:
    as_torchrun()
    keywords = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[keywords])
    with pytest.raises(RuntimeError, match="without comm_hook="):
        attach(accelerator.prepare(network()), ExactMiCRO(density=DENSITY))


def test_a_model_with_a_hook_of_torch_is_refused_and_the_option_named() -> None:
    run(with_torchs_hook, 2)


def two_models() -> None:
    as_torchrun()
    accelerator = Accelerator(cpu=True)
    models = [network(), network()]
    both = torch.optim.AdamW([each for model in models for each in model.parameters()])
    *prepared, both = accelerator.prepare(*models, both)
    handle = attach(prepared, TwoShot(density=1.0, values="sign"), optimizer=both)
    accelerator.backward(sum(model(torch.ones(1, 20)).sum() for model in prepared))
    both.step()
    assert handle.summary().steps == 1
    assert handle.summary().parameters == sum(each.numel() for model in models for each in model.parameters())


def test_two_models_are_attached_together() -> None:
    run(two_models, 2)
